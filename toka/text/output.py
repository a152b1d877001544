"""The text of one choice: ids in, text out that no stop string can take back."""

from collections.abc import Sequence
from typing import NamedTuple

from toka.text.detokenize import Detokenizer
from toka.text.stop import StopMatcher
from toka.text.tokenizer import Tokenizer


class Piece(NamedTuple):
    """What some ids brought."""

    text: str
    """Text since the last piece. Never ends inside a character, nor in what may become a stop string."""
    stop: str | None
    """The stop string that ended the text. It is not part of it."""
    used: int
    """Ids up to and including the one that completed the stop string; all of them if none did."""


class TextOutput:
    """Turns the ids of one growing sequence into text, and ends it at a stop string.

    An end-of-sequence id has no text; push it or not.
    """

    __slots__ = ("_detokenizer", "_matcher", "produced", "released")

    def __init__(self, tokenizer: Tokenizer, stops: tuple[str, ...] = ()) -> None:
        self._detokenizer = Detokenizer(tokenizer)
        self._matcher = StopMatcher(stops) if stops else None
        self.produced = 0
        """Characters that all ids have made certain."""
        self.released = 0
        """Characters of them that are out; the others may still become a stop string."""

    def arm(self, stops: tuple[str, ...]) -> None:
        """Look for stop strings from here on; no id before had any."""
        assert self._matcher is None
        self._matcher = StopMatcher(stops)

    @property
    def withheld(self) -> bool:
        """Whether some id has text that is not out."""
        return self.released < self.produced or self._detokenizer.unfinished

    @property
    def mark(self) -> int:
        """What `released` must reach for the text of the last id to be out."""
        return self.produced + self._detokenizer.unfinished

    @property
    def stop(self) -> str | None:
        """The stop string that ended the text so far. `finish` may find one too, in text that was withheld."""
        return self._matcher.stop if self._matcher is not None else None

    def push(self, ids: Sequence[int]) -> Piece:
        """The text that `ids` make certain. Once a stop string has ended the text, nothing more."""
        if self._matcher is None:
            text = self._detokenizer.push(ids)
            self.produced += len(text)
            self.released += len(text)
            return Piece(text, None, len(ids))
        if self._matcher.stop is not None:
            return Piece("", self._matcher.stop, 0)
        pieces = []
        for used, id in enumerate(ids, 1):
            text = self._detokenizer.push((id,))
            self.produced += len(text)
            out, stop = self._matcher.push(text)
            self.released += len(out)
            pieces.append(out)
            if stop is not None:
                return Piece("".join(pieces), stop, used)
        return Piece("".join(pieces), None, len(ids))

    def finish(self) -> str:
        """The text that was withheld, for no ids follow."""
        text = self._detokenizer.finish()
        if self._matcher is None:
            return text
        released, stop = self._matcher.push(text)
        return released if stop is not None else released + self._matcher.finish()
