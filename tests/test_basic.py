"""The shortest test of all: `MODEL=DIR pytest tests/test_basic.py::test_basic` asks a model one question."""

import os

import pytest
from openai import OpenAI
from openai.types.chat import ChatCompletionUserMessageParam

from bench.server import Server
from toka.config import Config

DEFAULT = Config().model


@pytest.mark.model
def test_basic() -> None:
    """The capital of France by chat, streamed and not: the same text both ways, and the default model says Paris."""
    model = os.environ.get("MODEL", DEFAULT)
    question: ChatCompletionUserMessageParam = {"role": "user", "content": "What is the capital of France?"}
    with (
        Server(f"model={model}", "kv_cache_num_tokens=4096") as server,
        OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client,
    ):
        whole = client.chat.completions.create(model=server.model, messages=[question], max_tokens=32, temperature=0)
        with client.chat.completions.create(
            model=server.model, messages=[question], max_tokens=32, temperature=0, stream=True
        ) as stream:
            pieces = [chunk.choices[0].delta.content or "" for chunk in stream]
    answer = whole.choices[0].message.content
    assert answer
    assert "".join(pieces) == answer
    assert len(pieces) > 1
    if model == DEFAULT:
        assert "Paris" in answer
