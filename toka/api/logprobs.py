"""Log-probabilities as clients see them: tokens get names, bytes and places in the text."""

import codecs
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from toka.api.schemas import (
    ChatLogprobs,
    PromptLogprob,
    PromptLogprobs,
    TextLogprobs,
    TokenLogprob,
    TopLogprob,
)
from toka.api.service import Tokenizer
from toka.request import Score

Lists = ChatLogprobs | TextLogprobs
"""The usual shapes."""


class Entry(NamedTuple):
    """One token of an answer, or of an echoed prompt."""

    token: str
    bytes: bytes
    logprob: float | None
    """None: the first token of a prompt."""
    top: list[TopLogprob]
    offset: int
    """Characters of the text that come before it."""


@dataclass(frozen=True, slots=True)
class Names:
    """What tokens are called."""

    tokenizer: Tokenizer
    as_ids: bool = False
    """`token_id:N`, whatever their text."""

    def sampled(self, id: int, data: bytes) -> str:
        """A token that adds `data` to a text. One that adds nothing has no name: the names join to the text."""
        if self.as_ids:
            return f"token_id:{id}"
        return spelled(data)

    def possible(self, id: int) -> TopLogprob:
        """A token that was not sampled, its log-probability still to come."""
        data = self.tokenizer.bytes_of(id)
        if data:
            return TopLogprob(self.sampled(id, data), 0.0, list(data))
        name = f"token_id:{id}" if self.as_ids else self.tokenizer.token_of(id) or f"token_id:{id}"
        return TopLogprob(name, 0.0, None)


class Scribe:
    """Writes the entries of one text, from its first token on."""

    def __init__(self, names: Names) -> None:
        self.names = names
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self.offset = 0
        """Characters of the text so far."""
        self.first = True
        """No token has had text."""

    def restart(self, offset: int) -> None:
        """The prompt is over after `offset` characters; here the answer begins."""
        self._decoder.reset()
        self.offset = offset
        self.first = True

    def take(self, ids: Sequence[int], scores: Sequence[Score | None], ended: bool = False) -> list[Entry]:
        """Entries of the next tokens. `ended`: the last one is an id that ended the text, and has none of its own."""
        last = len(ids) - 1 if ended else -1
        return [
            self.write(id, score, b"" if index == last else self.names.tokenizer.bytes_of(id, self.first))
            for index, (id, score) in enumerate(zip(ids, scores, strict=True))
        ]

    def write(self, id: int, score: Score | None, data: bytes) -> Entry:
        """The entry of one token that adds `data` to the text."""
        token = self.names.sampled(id, data)
        entry = Entry(
            token,
            data,
            None if score is None else score.logprob,
            [] if score is None else self._top(id, token, data, score),
            self.offset,
        )
        self.offset += len(self._decoder.decode(data))
        self.first = self.first and not data
        return entry

    def _top(self, id: int, token: str, data: bytes, score: Score) -> list[TopLogprob]:
        """The most probable tokens; the sampled one is called there as it is called in its entry. No two names are
        the same, so that nothing is lost where they become keys."""
        used = {token}
        top = []
        seen: list[int] | None
        for other, logprob in score.top:
            if other == id:
                name, seen = token, list(data)
            else:
                possible = self.names.possible(other)
                name, seen = possible.token, possible.bytes
                if name in used:
                    name = f"bytes:{escaped(bytes(seen))}" if seen else f"token_id:{other}"
                if name in used:
                    name = f"token_id:{other}"
                used.add(name)
            top.append(TopLogprob(name, logprob, seen))
        return top


def chat_logprobs(entries: Iterable[Entry]) -> ChatLogprobs:
    """The shape of chat completions."""
    content = []
    for one in entries:
        assert one.logprob is not None, "a chat shows no prompt"
        content.append(TokenLogprob(one.token, one.logprob, list(one.bytes), one.top))
    return ChatLogprobs(content)


def text_logprobs(entries: Sequence[Entry]) -> TextLogprobs:
    """The shape of completions: the sampled token is among the most probable ones, as one more if need be."""
    tops: list[dict[str, float] | None] = []
    for one in entries:
        if one.logprob is None:
            tops.append(None)
        else:
            tops.append({top.token: top.logprob for top in one.top} | {one.token: one.logprob})
    return TextLogprobs(
        tokens=[one.token for one in entries],
        token_logprobs=[one.logprob for one in entries],
        top_logprobs=tops,
        text_offset=[one.offset for one in entries],
    )


def echoed(scribe: Scribe, prompt: Sequence[int], text: str, scores: Sequence[Score]) -> list[Entry]:
    """Entries of a prompt whose text is `text`. A special token has a name where the text spells it out."""
    tokenizer = scribe.names.tokenizer
    entries: list[Entry] = []
    for id, score in zip(prompt, (None, *scores), strict=True):
        if id in tokenizer.special_ids:
            name = tokenizer.token_of(id)
            data = name.encode() if text.startswith(name, scribe.offset) else b""
        else:
            data = tokenizer.bytes_of(id, scribe.first)
        entries.append(scribe.write(id, score, data))
    scribe.restart(len(text))
    return entries


def prompt_logprobs(names: Names, prompt: Sequence[int], scores: Sequence[Score]) -> PromptLogprobs:
    """vLLM's shape: a dictionary by token id for each prompt token but the first."""
    found: PromptLogprobs = [None]
    for id, score in zip(prompt[1:], scores, strict=True):
        own = {
            str(other): PromptLogprob(logprob, rank, names.possible(other).token)
            for rank, (other, logprob) in enumerate(score.top, 1)
        }
        own.setdefault(str(id), PromptLogprob(score.logprob, score.rank, names.possible(id).token))
        found.append(own)
    return found


def spelled(data: bytes) -> str:
    """Bytes as text; those that are a part of a character as OpenAI writes them, `bytes:\\xe2`."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return f"bytes:{escaped(data)}"


def escaped(data: bytes) -> str:
    """`\\xNN` for each byte."""
    return "".join(f"\\x{byte:02x}" for byte in data)
