"""What an answer says besides its text: log-probabilities, token ids, and the prompt before it."""

from collections.abc import Sequence
from dataclasses import dataclass

from msgspec import Struct

from toka.api.logprobs import Entry, Names, Scribe, echoed, prompt_logprobs
from toka.api.schemas import PromptLogprobs
from toka.request import Delta


@dataclass(frozen=True, slots=True)
class Asked:
    """What the client wants to know."""

    logprobs: int = -1
    """Most probable tokens in each entry; -1: no log-probabilities."""
    prompt_logprobs: int = -1
    """The same, for vLLM's field of this name."""
    token_ids: bool = False
    echo: bool = False


class Shown(Struct, frozen=True):
    """One delta, as the client sees it."""

    text: str
    entries: list[Entry] | None = None
    """None: no log-probabilities were asked for."""
    ids: Sequence[int] | None = None
    """None: no token ids were asked for."""
    prompt_ids: list[int] | None = None
    """With the first delta of a choice, if token ids were asked for."""
    prompt: PromptLogprobs | None = None
    """With the first delta of a choice, if they were asked for."""


class Details:
    """Turns the deltas of all choices of one request into what is shown of them. Deltas of a choice come in order."""

    def __init__(self, asked: Asked, names: Names, prompts: list[list[int]], texts: list[str], samples: int) -> None:
        """`texts` are those of the prompts, needed for `echo` only. Choice i is of prompt `i // samples`."""
        self._asked = asked
        self._names = names
        self._prompts = prompts
        self._texts = texts
        self._samples = samples
        self._scribes: dict[int, Scribe] = {}

    def take(self, delta: Delta) -> Shown:
        """What is shown of the next delta of a choice."""
        asked, names = self._asked, self._names
        number = delta.index // self._samples
        scribe = self._scribes.get(delta.index)
        first = scribe is None
        if scribe is None:
            scribe = self._scribes[delta.index] = Scribe(names, asked.logprobs)
        text = delta.text
        entries: list[Entry] = []
        if first and asked.echo:
            text = self._texts[number] + text
            if asked.logprobs >= 0:
                entries = echoed(scribe, self._prompts[number], self._texts[number], delta.prompt_scores)
        if asked.logprobs >= 0:
            ended = delta.finish_reason == "stop" and not isinstance(delta.stop_reason, str)
            entries += scribe.take(delta.ids, delta.scores, ended)
        told = first and asked.token_ids
        return Shown(
            text,
            entries if asked.logprobs >= 0 else None,
            delta.ids if asked.token_ids else None,
            self._prompts[number] if told else None,
            prompt_logprobs(names, self._prompts[number], delta.prompt_scores, asked.prompt_logprobs)
            if first and asked.prompt_logprobs >= 0
            else None,
        )
