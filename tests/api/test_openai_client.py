"""The official client, over real HTTP, against the scripted engine."""

import contextlib
import socket
import threading
import time
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import ClassVar

import anyio
import openai
import pytest
from openai.types.chat import ChatCompletionMessageParam

from tests.api.conftest import until
from tests.api.fakes import FakeGeneration, FakeServer
from toka.errors import DeadlinePassed, EngineFault, RequestError, Unavailable
from toka.request import Listener, Request

HI: list[ChatCompletionMessageParam] = [{"role": "user", "content": "Hi"}]


@pytest.fixture
def client(port: int) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture
async def async_client(port: int) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_chat(client: openai.OpenAI) -> None:
    """An answer, its usage and its request id."""
    answer = client.chat.completions.create(model="tiny", messages=HI)
    assert answer.choices[0].message.content == "Hello, world!"
    assert answer.choices[0].message.tool_calls is None
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 4
    assert answer._request_id is not None
    assert answer._request_id.startswith("req_")


def test_chat_stream(client: openai.OpenAI) -> None:
    """A stream that ends with the usage."""
    stream = client.chat.completions.create(
        model="tiny", messages=HI, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1]) == "Hello, world!"
    assert chunks[-2].choices[0].finish_reason == "stop"
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.total_tokens == 13


def test_completions_and_models(client: openai.OpenAI) -> None:
    """The other routes."""
    answer = client.completions.create(model="org/alias", prompt=["a", "b"], n=2, max_tokens=2)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert {choice.finish_reason for choice in answer.choices} == {"length"}
    assert [model.id for model in client.models.list()] == ["tiny", "org/alias"]
    assert client.models.retrieve("org/alias").id == "org/alias"


def test_errors(client: openai.OpenAI, server: FakeServer) -> None:
    """Each status is the exception that programs catch."""
    with pytest.raises(openai.BadRequestError) as bad:
        client.completions.create(model="tiny", prompt="x", max_tokens=10**6)
    assert bad.value.code == "context_length_exceeded"
    assert bad.value.param == "prompt"
    assert bad.value.request_id
    with pytest.raises(openai.NotFoundError) as unknown:
        client.completions.create(model="none", prompt="x")
    assert unknown.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError, match="top level"):
        client.completions.create(model="tiny", prompt="x", extra_body={"extra_body": {"top_k": 1}})
    server.refusal = EngineFault("broken")
    with pytest.raises(openai.InternalServerError, match="broken"):
        client.with_options(max_retries=2).completions.create(model="tiny", prompt="x")
    server.refusal = Unavailable("draining")
    with pytest.raises(openai.InternalServerError) as draining:
        client.completions.create(model="tiny", prompt="x", stream=True)
    assert draining.value.status_code == 503


def test_error_in_a_stream(client: openai.OpenAI, server: FakeServer) -> None:
    """An error after the first chunk is raised where the chunks are read."""
    server.failure, server.break_at = EngineFault("the worker is gone"), 2
    stream = client.completions.create(model="tiny", prompt="x", stream=True)
    texts: list[str] = []
    with pytest.raises(openai.APIError, match="the worker is gone"):
        texts.extend(chunk.choices[0].text for chunk in stream)
    assert texts == ["Hello", ", "]


def test_extra_body(client: openai.OpenAI, server: FakeServer) -> None:
    """Extensions come at the top level."""
    client.completions.create(model="tiny", prompt="x", extra_body={"top_k": 7, "ignore_eos": True})
    assert server.requests[0].sampling.top_k == 7
    assert server.requests[0].ignore_eos


def test_leaving_a_stream(client: openai.OpenAI, server: FakeServer) -> None:
    """Closing a stream early frees the engine."""
    server.script = lambda request, index: ["word "] * 100_000
    server.pause = 0.001
    with client.completions.create(model="tiny", prompt="x", stream=True, max_tokens=1000) as stream:
        next(iter(stream))
    until(lambda: len(server.cancelled) == 1, 2.0)


async def test_async_chat(async_client: openai.AsyncOpenAI) -> None:
    """The asynchronous client, whole and streamed."""
    answer = await async_client.chat.completions.create(model="tiny", messages=HI, n=2)
    assert [choice.message.content for choice in answer.choices] == ["Hello, world!"] * 2
    stream = await async_client.chat.completions.create(model="tiny", messages=HI, stream=True)
    assert "".join([chunk.choices[0].delta.content or "" async for chunk in stream]) == "Hello, world!"
    with pytest.raises(openai.BadRequestError):
        await async_client.chat.completions.create(model="tiny", messages=[])


class Overloaded(RequestError):
    """A refusal that is worth another try."""

    status = 429
    type = "rate_limit_error"
    default_code = "rate_limit_exceeded"
    headers: ClassVar[dict[str, str]] = {"retry-after": "3"}


class Broken(RequestError):
    """A 500 that says nothing of another try."""


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """What the client would have slept between its tries, in seconds."""
    slept: list[float] = []
    monkeypatch.setattr("openai._base_client.time", SimpleNamespace(**vars(time) | {"sleep": slept.append}))
    return slept


@pytest.fixture
def refusals(server: FakeServer, monkeypatch: pytest.MonkeyPatch) -> list[RequestError]:
    """What the engine answers first, one a try; then it serves."""
    waiting: list[RequestError] = []
    submit = server.submit

    def refuse(request: Request, listener: Listener) -> FakeGeneration:
        if waiting:
            raise waiting.pop(0)
        return submit(request, listener)

    monkeypatch.setattr(server, "submit", refuse)
    return waiting


@pytest.mark.parametrize("stream", [False, True])
def test_w_http_3_overload_is_retried_when_the_server_says(
    client: openai.OpenAI, refusals: list[RequestError], pauses: list[float], stream: bool
) -> None:
    """A 429 and a 503 are tried again after their `retry-after`, also where a stream was asked for."""
    refusals += [Overloaded("The queue is full."), Unavailable("The model is loading.")]
    patient = client.with_options(max_retries=2)
    if stream:
        chunks = list(patient.completions.create(model="tiny", prompt="x", stream=True))
        text = "".join(chunk.choices[0].text for chunk in chunks)
    else:
        text = patient.completions.create(model="tiny", prompt="x").choices[0].text
    assert text == "Hello, world!"
    assert pauses == [3.0, 1.0]


def test_w_http_3_overload_that_lasts_is_an_error(
    client: openai.OpenAI, refusals: list[RequestError], pauses: list[float]
) -> None:
    """The exception that programs catch, with its code, when the tries are spent."""
    refusals += [Overloaded("The queue is full.")] * 3
    with pytest.raises(openai.RateLimitError) as caught:
        client.with_options(max_retries=2).completions.create(model="tiny", prompt="x")
    assert (caught.value.code, caught.value.type) == ("rate_limit_exceeded", "rate_limit_error")
    assert (refusals, len(pauses)) == ([], 2)


def test_w_http_3_a_500_of_unknown_cause_is_retried(
    client: openai.OpenAI, refusals: list[RequestError], pauses: list[float]
) -> None:
    """With the client's own pause, and its count of tries does no harm."""
    refusals.append(Broken("?"))
    assert client.with_options(max_retries=1).completions.create(model="tiny", prompt="x").choices
    assert len(pauses) == 1


@pytest.mark.parametrize("error", [EngineFault("broken"), DeadlinePassed("too late")], ids=lambda error: error.status)
def test_w_http_3_what_would_fail_again_is_not_retried(
    client: openai.OpenAI, refusals: list[RequestError], pauses: list[float], error: RequestError
) -> None:
    """500 and 408 that carry `x-should-retry: false`, though clients repeat these by themselves."""
    refusals += [error, error]
    with pytest.raises(openai.APIStatusError) as caught:
        client.with_options(max_retries=2).completions.create(model="tiny", prompt="x")
    assert caught.value.status_code == error.status
    assert (len(refusals), pauses) == (1, [])


def test_w_http_3_a_bad_request_is_not_retried(client: openai.OpenAI, server: FakeServer, pauses: list[float]) -> None:
    """400 and 404 neither."""
    patient = client.with_options(max_retries=2)
    with pytest.raises(openai.BadRequestError):
        patient.completions.create(model="tiny", prompt="x", n=1000)
    with pytest.raises(openai.NotFoundError):
        patient.completions.create(model="other", prompt="x")
    assert pauses == []


class Cable:
    """Between a client and a server, both ways; may be cut once."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._door = socket.create_server(("127.0.0.1", 0))
        self._ends: list[socket.socket] = []
        self.connections = 0
        self.url = f"http://127.0.0.1:{self._door.getsockname()[1]}/v1"
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self) -> None:
        """Hang up on both sides; those who come later are served."""
        for end in self._ends:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        self._ends.clear()

    def close(self) -> None:
        self.cut()
        self._door.shutdown(socket.SHUT_RDWR)
        self._door.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near = self._door.accept()[0]
                far = socket.create_connection(("127.0.0.1", self._port))
                self.connections += 1
                self._ends += [near, far]
                for one, other in ((near, far), (far, near)):
                    threading.Thread(target=self._carry, args=(one, other), daemon=True).start()

    @staticmethod
    def _carry(one: socket.socket, other: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := one.recv(65536):
                other.sendall(data)
        with contextlib.suppress(OSError):
            other.shutdown(socket.SHUT_WR)
        one.close()


@pytest.fixture
def cable(port: int) -> Iterator[Cable]:
    cable = Cable(port)
    yield cable
    cable.close()


def test_w_http_3_a_connection_cut_before_the_answer_is_made_anew(
    cable: Cable, server: FakeServer, pauses: list[float]
) -> None:
    """The client asks again and is served; what it asked first is given up."""
    server.held = True
    with openai.OpenAI(base_url=cable.url, api_key="none", max_retries=2) as client, ThreadPoolExecutor(1) as thread:
        answer = thread.submit(client.completions.create, model="tiny", prompt="x")
        until(lambda: len(server.requests) == 1)
        server.held = False
        cable.cut()
        assert answer.result(10).choices[0].text == "Hello, world!"
    until(lambda: server.cancelled == [server.requests[0].id])
    assert len(server.requests) == 2
    assert pauses


def test_w_http_3_a_stream_cut_midway_raises(cable: Cable, server: FakeServer) -> None:
    """It does not look like an end, nobody asks again behind the program's back, and the server stops working."""
    server.script = lambda request, index: ["word "] * 100_000
    server.pause = 0.001
    with openai.OpenAI(base_url=cable.url, api_key="none", max_retries=2) as client:
        stream = client.completions.create(model="tiny", prompt="x", stream=True, max_tokens=1000)
        next(iter(stream))
        cable.cut()
        with pytest.raises(Exception, match=r"(?i)incomplete|closed|connection"):
            list(stream)
    until(lambda: len(server.cancelled) == 1, 2.0)
    assert len(server.requests) == 1


async def test_w_http_3_the_asynchronous_client_retries_too(
    async_client: openai.AsyncOpenAI, refusals: list[RequestError], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the other does."""
    pauses: list[float] = []

    async def pause(seconds: float) -> None:
        pauses.append(seconds)

    monkeypatch.setattr("openai._base_client.anyio", SimpleNamespace(**vars(anyio) | {"sleep": pause}))
    refusals.append(Overloaded("The queue is full."))
    answer = await async_client.with_options(max_retries=1).completions.create(model="tiny", prompt="x")
    assert answer.choices[0].text == "Hello, world!"
    assert pauses == [3.0]
