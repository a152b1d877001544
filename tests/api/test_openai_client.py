"""The official client, over real HTTP, against the scripted engine."""

from collections.abc import AsyncIterator, Iterator

import openai
import pytest
from openai.types.chat import ChatCompletionMessageParam

from tests.api.conftest import until
from tests.api.fakes import FakeServer
from toka.errors import EngineFault, Unavailable

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
