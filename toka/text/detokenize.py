"""Ids to text as they come. What is certain is given out at once, never a part of a character."""

import codecs
from collections.abc import Sequence

from toka.text.tokenizer import Tokenizer


class Detokenizer:
    """The text of one growing sequence: all that `push` returned, then `finish`, is `tokenizer.decode` of all ids."""

    __slots__ = ("_rest", "_table", "_window")

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._table = tokenizer.token_bytes
        self._rest = b""
        """The bytes of an unfinished character."""
        self._window = _Window(tokenizer) if tokenizer.token_bytes is None else None

    def push(self, ids: Sequence[int]) -> str:
        """The text that `ids` make certain."""
        if self._table is None:
            assert self._window is not None
            return self._window.push(ids)
        try:
            data = self._rest + b"".join([self._table[id] for id in ids])
        except IndexError:  # the model's vocabulary is larger than the tokenizer's
            data = self._rest + b"".join([self._table[id] for id in ids if id < len(self._table)])
        text, used = codecs.utf_8_decode(data, "replace", False)
        self._rest = data[used:]
        return text

    @property
    def unfinished(self) -> bool:
        """Whether some id has text that is not certain yet."""
        return bool(self._rest) if self._window is None else self._window.unfinished

    def finish(self) -> str:
        """What was withheld: U+FFFD for an unfinished character. No ids may follow."""
        if self._window is not None:
            return self._window.finish()
        text, self._rest = self._rest.decode(errors="replace"), b""
        return text


class _Window:
    """For tokenizers whose text is not the concatenation of their tokens' bytes.

    Such decoders treat the first token apart (they strip its space, or put one before every other), and a run of byte
    tokens as a whole (characters if all of it is UTF-8, else U+FFFD for each). What else they do is local to a token.
    So a text goes on as `decode(context + new)` goes on from `decode(context)`, if the context has text of its own,
    and `new` is not followed by a byte token while it ends in one.
    """

    __slots__ = ("_context", "_new", "_shown", "_tokenizer")

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._context: list[int] = []
        """Tokens whose text is out: the fewest last ones that have text, or all while there is none."""
        self._new: list[int] = []
        """Tokens behind the context whose text is not out."""
        self._shown = ""
        """The text of the context."""

    def push(self, ids: Sequence[int]) -> str:
        silent, size = self._tokenizer.silent_ids, self._tokenizer.vocab_size
        self._new += [id for id in ids if id not in silent and id < size]
        return self._take(self._certain())

    @property
    def unfinished(self) -> bool:
        return bool(self._new)

    def finish(self) -> str:
        return self._take(len(self._new))

    def _certain(self) -> int:
        """How many of the new tokens are in front of the run of byte tokens at the end."""
        fallback, new = self._tokenizer.fallback_ids, self._new
        count = len(new)
        while count and new[count - 1] in fallback:
            count -= 1
        return count

    def _take(self, count: int) -> str:
        if not count:
            return ""
        self._context += self._new[:count]
        del self._new[:count]
        whole = self._tokenizer.decode(self._context)
        text = whole[len(self._shown) :]
        for start in range(len(self._context) - 1, -1, -1):
            shown = self._tokenizer.decode(self._context[start:])
            if shown:
                self._context, self._shown = self._context[start:], shown
                break
        return text
