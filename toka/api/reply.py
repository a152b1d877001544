"""Who listens to the engine for one request, and what it heard."""

from abc import ABC, abstractmethod
from asyncio import Future, get_running_loop

from toka.api.relay import joined
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


class Whole(Reply):
    """Collects the answer of a request that is not streamed."""

    def __init__(self, tally: Tally) -> None:
        super().__init__(tally)
        self._deltas: list[list[Delta]] = [[] for _ in range(tally.open)]

    def deliver(self, deltas: list[Delta]) -> None:
        """Keep them until every choice has ended."""
        for delta in deltas:
            self.tally.count(delta)
            self._deltas[delta.index].append(delta)
        if self.tally.open == 0:
            self.finish()

    def choices(self) -> list[Delta]:
        """All of each choice as one delta, by index."""
        return [joined(deltas) for deltas in self._deltas]
