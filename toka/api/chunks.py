"""How deltas become server-sent events. All that a stream's chunks have in common is encoded once."""

from abc import ABC, abstractmethod

import msgspec

from toka.api.reply import Tally
from toka.errors import RequestError
from toka.request import Delta

DONE = b"data: [DONE]\n\n"

_encode = msgspec.json.Encoder().encode


def encode_text(text: str) -> bytes:
    """A JSON string that stays on one line, also for clients that split lines where Unicode does."""
    data = _encode(text)
    if not text.isascii():
        data = data.replace(b"\xe2\x80\xa8", b"\\u2028").replace(b"\xe2\x80\xa9", b"\\u2029")
        data = data.replace(b"\xc2\x85", b"\\u0085")
    return data


class Chunks(ABC):
    """Encodes one stream. `head` and `tail` stand around the one choice of a chunk."""

    object: str

    def __init__(
        self, tally: Tally, *, id: str, created: int, model: str, fingerprint: str, include_usage: bool, running: bool
    ) -> None:
        """`include_usage`: chunks say `"usage":null`, the last one what `tally` says. `running`: they all say it."""
        fields = {
            "id": id,
            "object": self.object,
            "created": created,
            "model": model,
            "system_fingerprint": fingerprint,
        }
        self._head = b"data: " + _encode(fields)[:-1] + b',"choices":['
        self._plain_tail = b'],"usage":null}\n\n' if include_usage else b"]}\n\n"
        self._include_usage = include_usage
        self._running = running
        self._tally = tally
        self._openings: dict[int, bytes] = {}

    def end(self) -> bytes:
        """What follows the last choice's end: the usage, if wanted, without choices; and `[DONE]`."""
        return self._head + self._usage_tail() + DONE if self._include_usage else DONE

    @staticmethod
    def failure(error: RequestError) -> bytes:
        """What ends a stream that has begun and cannot go on."""
        return b"data: " + _encode(error.body()) + b"\n\n" + DONE

    @abstractmethod
    def add(self, out: list[bytes], delta: Delta) -> None:
        """Append the events of a delta, if it has any."""

    def _tail(self) -> bytes:
        return self._usage_tail() if self._running else self._plain_tail

    def _usage_tail(self) -> bytes:
        return b'],"usage":' + _encode(self._tally.usage()) + b"}\n\n"

    def _opening(self, index: int, field: bytes) -> bytes:
        """Everything before a choice's text; encoded once a choice."""
        self._openings[index] = opening = b'%b{"index":%d,%b' % (self._head, index, field)
        return opening


class ChatChunks(Chunks):
    """First the role, then content, then the end with an empty delta."""

    object = "chat.completion.chunk"

    def add(self, out: list[bytes], delta: Delta) -> None:
        opening = self._openings.get(delta.index)
        tail = self._tail()
        if opening is None:
            opening = self._opening(delta.index, b'"delta":{"content":')
            role = b'"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}'
            out.append(b'%b{"index":%d,%b%b' % (self._head, delta.index, role, tail))
        if delta.text:
            out += (opening, encode_text(delta.text), b'},"logprobs":null,"finish_reason":null}', tail)
        if delta.finish_reason is not None:
            end = b'"delta":{},"logprobs":null,"finish_reason":%b,"stop_reason":%b}' % _end(delta)
            out.append(b'%b{"index":%d,%b%b' % (self._head, delta.index, end, tail))


class TextChunks(Chunks):
    """No role; the last text and the end may share a chunk."""

    object = "text_completion"

    def add(self, out: list[bytes], delta: Delta) -> None:
        opening = self._openings.get(delta.index) or self._opening(delta.index, b'"text":')
        if delta.finish_reason is not None:
            end = b',"logprobs":null,"finish_reason":%b,"stop_reason":%b}' % _end(delta)
            out += (opening, encode_text(delta.text), end, self._tail())
        elif delta.text:
            out += (opening, encode_text(delta.text), b',"logprobs":null,"finish_reason":null}', self._tail())


def _end(delta: Delta) -> tuple[bytes, bytes]:
    return _encode(delta.finish_reason), _encode(delta.stop_reason)
