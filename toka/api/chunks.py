"""How deltas become server-sent events. All that a stream's chunks have in common is encoded once."""

from abc import ABC, abstractmethod

import msgspec

from toka.api.details import Details
from toka.api.reply import Tally
from toka.errors import RequestError
from toka.request import Delta

DONE = b"data: [DONE]\n\n"

_encode = msgspec.json.Encoder().encode


def encode_text(text: str) -> bytes:
    """A JSON string that stays on one line, also for clients that split lines where Unicode does."""
    return encode_line(text)


def encode_line(value: object) -> bytes:
    """The same for any value."""
    data = _encode(value)
    if not data.isascii():
        data = data.replace(b"\xe2\x80\xa8", b"\\u2028").replace(b"\xe2\x80\xa9", b"\\u2029")
        data = data.replace(b"\xc2\x85", b"\\u0085")
    return data


class Chunks(ABC):
    """Encodes one stream. `head` and `tail` stand around the one choice of a chunk."""

    object: str

    def __init__(
        self,
        tally: Tally,
        *,
        id: str,
        created: int,
        model: str,
        fingerprint: str,
        include_usage: bool,
        running: bool,
        details: Details | None = None,
    ) -> None:
        """`details` is None if nothing but text is wanted. `include_usage`: chunks say `"usage":null`, the last one
        what `tally` says. `running`: they all say it."""
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
        self._details = details
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
        logprobs, more = b"null", b""
        first = tail
        if self._details is not None:
            shown = self._details.take(delta)
            if shown.scored:
                logprobs = encode_line(shown.logprobs)
            if shown.ids is not None:
                more = b',"token_ids":' + _encode(shown.ids)
            if shown.prompt_ids is not None:
                first = b'],"prompt_token_ids":%b%b' % (_encode(shown.prompt_ids), tail[1:])
        if opening is None:
            opening = self._opening(delta.index, b'"delta":{"content":')
            role = b'"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}'
            out.append(b'%b{"index":%d,%b%b' % (self._head, delta.index, role, first))
        if delta.text:
            end = b'},"logprobs":%b,"finish_reason":null%b}' % (logprobs, more)
            out += (opening, encode_text(delta.text), end, tail)
            logprobs, more = b"null", b',"token_ids":[]' if more else b""
        if delta.finish_reason is not None:
            reason, stop = _end(delta)
            end = b'"delta":{},"logprobs":%b,"finish_reason":%b,"stop_reason":%b%b}' % (logprobs, reason, stop, more)
            out.append(b'%b{"index":%d,%b%b' % (self._head, delta.index, end, tail))


class TextChunks(Chunks):
    """No role; the last text and the end may share a chunk."""

    object = "text_completion"

    def add(self, out: list[bytes], delta: Delta) -> None:
        opening = self._openings.get(delta.index) or self._opening(delta.index, b'"text":')
        text, logprobs, more = delta.text, b"null", b""
        if self._details is not None:
            shown = self._details.take(delta)
            text = shown.text
            if shown.scored:
                logprobs = encode_line(shown.logprobs)
            if shown.ids is not None:
                more = b',"token_ids":' + _encode(shown.ids)
            if shown.prompt_ids is not None:
                more += b',"prompt_token_ids":' + _encode(shown.prompt_ids)
        if delta.finish_reason is not None:
            reason, stop = _end(delta)
            end = b',"logprobs":%b,"finish_reason":%b,"stop_reason":%b%b}' % (logprobs, reason, stop, more)
            out += (opening, encode_text(text), end, self._tail())
        elif text or more or logprobs != b"null":
            end = b',"logprobs":%b,"finish_reason":null%b}' % (logprobs, more)
            out += (opening, encode_text(text), end, self._tail())


def _end(delta: Delta) -> tuple[bytes, bytes]:
    return _encode(delta.finish_reason), _encode(delta.stop_reason)
