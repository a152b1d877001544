"""A request in flight: its choices, and how their tokens become text."""

from collections.abc import Callable
from typing import Protocol

from toka.core.blocks import Ints
from toka.core.sequence import End, Sequence
from toka.errors import RequestError
from toka.request import Delta, Listener
from toka.text.output import TextOutput


class Decoder(Protocol):
    """What turns a whole answer into text."""

    def decode(self, ids: list[int]) -> str: ...


class Choice:
    """One answer of a request. The owner of a sequence."""

    __slots__ = ("_ids", "_output", "_text", "generation", "index", "over", "sequence", "streams", "tokens")

    def __init__(
        self, generation: "Generation", index: int, sequence: Sequence, output: TextOutput | None, streams: bool
    ) -> None:
        """`output` makes text token by token, for answers that stream or may meet a stop string. Without `streams` the
        text is withheld until the end."""
        self.generation = generation
        self.index = index
        self.sequence = sequence
        self.streams = streams
        self.tokens = 0
        self.over = False
        self._output = output
        self._text: list[str] = []
        self._ids: list[int] = []

    def token(self, token: int, end: End | None) -> tuple[Delta | None, bool]:
        """One more token. Returns the news, if there is any to tell, and whether a stop string has ended the choice
        while its sequence still runs."""
        assert self._output is not None
        self.tokens += 1
        self._ids.append(token)
        stop = None
        if end is not End.STOP:  # the text of an id that ends an answer is not part of it
            text, stop, _ = self._output.push((token,))
            if text:
                self._text.append(text)
        if stop is None and end is not None:
            self._text.append(self._output.finish())
            stop = self._output.stop
        self.over = stop is not None or end is not None
        if self.over:
            reason = End.STOP.value if stop is not None or end is None else end.value
            return self._delta(reason, stop), end is None
        return (self._delta() if self.streams and self._text else None), False

    def _delta(self, reason: str | None = None, stop: str | None = None) -> Delta:
        """All that has gathered since the last one."""
        text, self._text = "".join(self._text), []
        ids, self._ids = self._ids, []
        return Delta(self.index, text, self.tokens, reason, stop, ids)

    def whole(self, tokens: Ints, end: End, decoder: Decoder) -> Delta:
        """All of an answer at once."""
        self.over = True
        self.tokens = len(tokens)
        ids = tokens.tolist()
        text = decoder.decode(ids[:-1] if end is End.STOP else ids)
        return Delta(self.index, text, self.tokens, end.value, None, ids)


class Generation:
    """A request in flight. Deltas gather in `fresh` until `deliver`, at most once a step."""

    __slots__ = ("_cancel", "choices", "fresh", "listener", "open")

    def __init__(self, listener: Listener, cancel: "Callable[[Generation], None]") -> None:
        self.listener = listener
        self.choices: list[Choice] = []
        self.fresh: list[Delta] = []
        self.open = 0
        """Choices that are not over."""
        self._cancel = cancel

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that the prefix cache held, each prompt counted once, as its first sample found it."""
        first = {choice.sequence.prompt: choice.sequence.cached for choice in reversed(self.choices)}
        return sum(first.values())

    def add(self, choice: Choice) -> None:
        """One more choice, before anything runs."""
        self.choices.append(choice)
        self.open += 1

    def tell(self, delta: Delta) -> None:
        """Put news by for the next `deliver`."""
        self.fresh.append(delta)
        if delta.finish_reason:
            self.open -= 1

    def deliver(self) -> None:
        """Tell the listener all that is new."""
        deltas, self.fresh = self.fresh, []
        self.listener.deliver(deltas)

    def fail(self, error: RequestError) -> None:
        """The rest of the answer will not come."""
        for choice in self.choices:
            choice.over = True
        self.listener.fail(error)

    def cancel(self) -> None:
        """Nobody waits any more."""
        self._cancel(self)
