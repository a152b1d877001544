"""What an answer says besides its text: log-probabilities, token ids, and the prompt before it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from msgspec import Struct

from toka.api.logprobs import Entry, Lists, Names, Scribe, echoed, prompt_logprobs
from toka.api.packing import packed_logprobs
from toka.api.schemas import PackedLogprobs, PromptLogprobs
from toka.request import Delta, Scores, joined_scores

Logprobs = Lists | PackedLogprobs
Shape = Callable[[Sequence[Entry]], Lists]


@dataclass(frozen=True, slots=True)
class Asked:
    """What the client wants to know."""

    logprobs: int = -1
    """Most probable tokens in each entry; -1: no log-probabilities."""
    prompt_logprobs: int = -1
    """The same, for vLLM's field of this name."""
    token_ids: bool = False
    echo: bool = False
    packed: bool = False
    """Log-probabilities come as arrays."""

    @property
    def anything(self) -> bool:
        """There is something to tell besides the text of the answer."""
        return self.logprobs >= 0 or self.prompt_logprobs >= 0 or self.token_ids or self.echo


class Shown(Struct, frozen=True):
    """One delta, as the client sees it."""

    text: str
    logprobs: Logprobs | None = None
    """None: none were asked for."""
    scored: bool = False
    """There is at least one token in `logprobs`."""
    ids: Sequence[int] | None = None
    """None: no token ids were asked for."""
    prompt_ids: list[int] | None = None
    """With the first delta of a choice, if token ids were asked for."""
    prompt: PromptLogprobs | PackedLogprobs | None = None
    """With the first delta of a choice, if they were asked for."""


class Details:
    """Turns the deltas of all choices of one request into what is shown of them. Deltas of a choice come in order."""

    def __init__(
        self, asked: Asked, names: Names, prompts: list[list[int]], texts: list[str], samples: int, shape: Shape
    ) -> None:
        """`texts` are those of the prompts, needed for `echo` only. Choice i is of prompt `i // samples`. `shape` makes
        the endpoint's lists of log-probabilities."""
        self._asked = asked
        self._names = names
        self._prompts = prompts
        self._texts = texts
        self._samples = samples
        self._shape = shape
        self._scribes: dict[int, Scribe] = {}

    def afresh(self) -> "Details":
        """For another who hears the same from the start."""
        return Details(self._asked, self._names, self._prompts, self._texts, self._samples, self._shape)

    def take(self, delta: Delta) -> Shown:
        """What is shown of the next delta of a choice."""
        asked = self._asked
        number = delta.index // self._samples
        first = delta.index not in self._scribes
        if first:
            self._scribes[delta.index] = Scribe(self._names)
        shows_prompt = first and asked.echo
        scored = asked.logprobs >= 0 and bool(delta.ids or shows_prompt)
        return Shown(
            self._texts[number] + delta.text if shows_prompt else delta.text,
            None if asked.logprobs < 0 else self._logprobs(delta, number if shows_prompt else None),
            scored,
            delta.ids if asked.token_ids else None,
            self._prompts[number] if first and asked.token_ids else None,
            self._prompt_logprobs(delta, number) if first and asked.prompt_logprobs >= 0 else None,
        )

    def _logprobs(self, delta: Delta, prompt: int | None) -> Logprobs:
        """Of the tokens of an answer, and before them, unless it is None, of the prompt with this number."""
        asked = self._asked
        own = _rows(delta.scores, asked.logprobs)
        before = Scores(asked.logprobs) if prompt is None else _rows(delta.prompt_scores, asked.logprobs)
        if asked.packed:
            ids = delta.ids if prompt is None else [*self._prompts[prompt], *delta.ids]
            return packed_logprobs(ids, joined_scores([before or None, own or None]) or own)
        scribe = self._scribes[delta.index]
        entries: list[Entry] = []
        if prompt is not None:
            entries = echoed(scribe, self._prompts[prompt], self._texts[prompt], before.tolist())
        ended = delta.finish_reason == "stop" and not isinstance(delta.stop_reason, str)
        return self._shape(entries + scribe.take(delta.ids, own.tolist(), ended))

    def _prompt_logprobs(self, delta: Delta, number: int) -> PromptLogprobs | PackedLogprobs:
        asked, prompt = self._asked, self._prompts[number]
        scores = _rows(delta.prompt_scores, asked.prompt_logprobs)
        if asked.packed:
            return packed_logprobs(prompt, scores, ranks=True)
        return prompt_logprobs(self._names, prompt, scores.tolist())


def _rows(scores: Scores | None, width: int) -> Scores:
    """At most `width` most probable tokens in each row. The engine may bring more, for another field's sake."""
    return Scores(width) if scores is None else scores.narrowed(width)
