"""Who listens to the engine for one request, and what it heard."""

from abc import ABC, abstractmethod
from asyncio import Future, get_running_loop
from dataclasses import dataclass

from toka.api.schemas import PromptTokensDetails, Usage
from toka.errors import RequestError
from toka.request import Delta, Generation


class Tally:
    """The tokens of one request, and how many of its choices are still open."""

    def __init__(self, choices: int, prompt_tokens: int) -> None:
        self.open = choices
        self.generation: Generation | None = None
        """None before it is submitted, and for a request that needs no engine."""
        self._prompt_tokens = prompt_tokens
        self._tokens = [0] * choices

    def __repr__(self) -> str:
        return f"<Tally {self._prompt_tokens} + {sum(self._tokens)} tokens, {self.open} choices open>"

    def count(self, delta: Delta) -> None:
        """Take a delta into the books."""
        self._tokens[delta.index] = delta.tokens
        if delta.finish_reason is not None:
            self.open -= 1

    def usage(self) -> Usage:
        """Of all choices, so far."""
        completion = sum(self._tokens)
        cached = self.generation.cached_tokens if self.generation is not None else 0
        return Usage(
            prompt_tokens=self._prompt_tokens,
            completion_tokens=completion,
            total_tokens=self._prompt_tokens + completion,
            prompt_tokens_details=PromptTokensDetails(cached_tokens=cached),
        )


class Reply(ABC):
    """A Listener. `finished` resolves when nothing is left to wait for: whole, failed, or the client has gone."""

    def __init__(self, tally: Tally) -> None:
        self.tally = tally
        self.finished: Future[None] = get_running_loop().create_future()
        self.failure: RequestError | None = None
        """To be answered as a plain HTTP status, since nothing has been sent."""
        self.gone = False

    @abstractmethod
    def deliver(self, deltas: list[Delta]) -> None:
        """What a step brought: see Listener."""

    def fail(self, error: RequestError) -> None:
        """The engine cannot go on: see Listener."""
        self.failure = error
        self.finish()

    def hang_up(self) -> None:
        """The client has gone. Of no importance once everything is written."""
        if not self.finished.done():
            self.gone = True
            self.finish()

    def close(self) -> None:
        """Let go of everything. If choices are open, nobody waits for them: the engine gets them back."""
        self.finish()
        if self.tally.open and self.tally.generation is not None:
            self.tally.generation.cancel()

    def finish(self) -> None:
        """Resolve `finished`. Harmless the second time."""
        if not self.finished.done():
            self.finished.set_result(None)


@dataclass(frozen=True, slots=True)
class Choice:
    """A whole choice."""

    index: int
    text: str
    finish_reason: str
    stop_reason: str | None


class Whole(Reply):
    """Collects the answer of a request that is not streamed."""

    def __init__(self, tally: Tally) -> None:
        super().__init__(tally)
        self._texts: list[list[str]] = [[] for _ in range(tally.open)]
        self._choices: list[Choice] = []

    def deliver(self, deltas: list[Delta]) -> None:
        """Keep the text until every choice has ended."""
        for delta in deltas:
            self.tally.count(delta)
            texts = self._texts[delta.index]
            texts.append(delta.text)
            if delta.finish_reason is not None:
                self._choices.append(Choice(delta.index, "".join(texts), delta.finish_reason, delta.stop_reason))
        if self.tally.open == 0:
            self.finish()

    def choices(self) -> list[Choice]:
        """Those that have ended, by index."""
        return sorted(self._choices, key=lambda choice: choice.index)
