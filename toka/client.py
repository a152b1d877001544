"""A small client of a running server, for `toka ping`."""

from collections.abc import Iterator
from http.client import HTTPConnection, HTTPException, HTTPResponse

import msgspec
from msgspec import Struct

from toka.errors import StartError

PATIENCE = 600.0
"""Seconds without a byte from the server after which to give up."""


class Model(Struct, frozen=True):
    """One entry of /v1/models."""

    id: str


class Models(Struct, frozen=True):
    """What /v1/models answers."""

    data: list[Model]


class Problem(Struct, frozen=True):
    """OpenAI's error object."""

    message: str


class Failure(Struct, frozen=True):
    """An answer that is an error."""

    error: Problem


class Piece(Struct, frozen=True):
    """`delta` of a chat chunk."""

    content: str | None = None


class Choice(Struct, frozen=True):
    """One choice of a chunk, of either endpoint."""

    text: str = ""
    delta: Piece = Piece()


class Chunk(Struct, frozen=True):
    """One event of a stream: text, or an error after the headers had gone out."""

    choices: list[Choice] = []
    error: Problem | None = None


def complete(
    host: str, port: int, prompt: str, *, max_tokens: int, temperature: float, chat: bool, key: str | None = None
) -> Iterator[str]:
    """The answer to a prompt, piece by piece as it comes. `key`: what the server wants to be sent, if anything.

    Raises StartError, one line for a person, if no server answers, or if it answers with an error.
    """
    address = f"http://{host}:{port}"
    connection = HTTPConnection(host, port, timeout=PATIENCE)
    body: dict[str, object] = {"max_tokens": max_tokens, "temperature": temperature, "stream": True}
    body |= {"messages": [{"role": "user", "content": prompt}]} if chat else {"prompt": prompt}
    try:
        models = msgspec.json.decode(_ask(connection, key, "GET", "/v1/models").read(), type=Models)
        body["model"] = models.data[0].id
        answer = _ask(connection, key, "POST", "/v1/chat/completions" if chat else "/v1/completions", body)
        yield from _texts(answer)
    except (OSError, HTTPException) as error:
        raise StartError(
            f"no server answers at {address} ({error}); start one with `toka serve`, or say where it is: host=… port=…"
        ) from None
    except (msgspec.DecodeError, LookupError):
        raise StartError(f"{address} is not a toka server; say where it is: host=… port=…") from None
    finally:
        connection.close()


def _ask(connection: HTTPConnection, key: str | None, method: str, path: str, body: object = None) -> HTTPResponse:
    """Send a request; raises StartError with the server's own words if it refuses."""
    data = None if body is None else msgspec.json.encode(body)
    headers = {"content-type": "application/json"} if data else {}
    if key is not None:
        headers["authorization"] = f"Bearer {key}"
    connection.request(method, path, data, headers)
    response = connection.getresponse()
    if response.status != 200:
        raise StartError(msgspec.json.decode(response.read(), type=Failure).error.message)
    return response


def _texts(response: HTTPResponse) -> Iterator[str]:
    """The text of each server-sent event. Raises StartError if one is an error."""
    for line in response:
        if not line.startswith(b"data: ") or line.startswith(b"data: [DONE]"):
            continue
        chunk = msgspec.json.decode(line.removeprefix(b"data: "), type=Chunk)
        if chunk.error:
            raise StartError(chunk.error.message)
        for choice in chunk.choices:
            yield choice.text or choice.delta.content or ""
