"""API.md 2.12: the bodies that popular clients send are served unchanged."""

from typing import Any

import pytest

from tests.api.fakes import FakeServer, post
from toka.api.app import App

USER = [{"role": "user", "content": "Hi"}]
PARTS = [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}]
STREAM: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}}

BODIES: dict[str, tuple[str, dict[str, Any]]] = {
    "vllm bench serve": (
        "completions",
        {"model": "tiny", "prompt": "Hi", "temperature": 0.0, "repetition_penalty": 1.0, "max_tokens": 4}
        | {"logprobs": None, "ignore_eos": True, **STREAM},
    ),
    "vllm bench serve, chat": (
        "chat/completions",
        {"model": "tiny", "messages": PARTS, "temperature": 0.0, "max_completion_tokens": 4, **STREAM},
    ),
    "sglang.bench_serving": (
        "completions",
        {"model": "tiny", "prompt": "Hi", "temperature": 0.0, "best_of": 1, "max_tokens": 4}
        | {"stream": True, "ignore_eos": True},
    ),
    "sglang.bench_serving, chat": (
        "chat/completions",
        {"model": "tiny", "messages": USER, "temperature": 0.0, "max_completion_tokens": 4, "stream": True}
        | {"ignore_eos": True},
    ),
    "genai-perf": (
        "chat/completions",
        {"model": "tiny", "messages": USER, "max_completion_tokens": 4, "ignore_eos": True, "min_tokens": 4, **STREAM},
    ),
    "lm-eval, loglikelihood": (
        "completions",
        {"model": "tiny", "prompt": [[72, 105, 97], [72, 98]], "temperature": 0, "max_tokens": 1, "logprobs": 1}
        | {"seed": 1234, "echo": True},
    ),
    "lm-eval, generate": (
        "completions",
        {"model": "tiny", "prompt": [[72, 105]], "max_tokens": 4, "temperature": 0, "seed": 1234}
        | {"stop": ["\n\n", "Q:", "</s>", "<|im_end|>", "Question:", "."]},
    ),
    "lm-eval, chat": (
        "chat/completions",
        {"model": "tiny", "messages": USER, "max_tokens": 4, "temperature": 0, "stop": ["a", "b"], "seed": 1234},
    ),
    "LangChain": (
        "chat/completions",
        {"model": "tiny", "messages": USER, "n": 1, "parallel_tool_calls": True, "stop": None, "user": "u", **STREAM},
    ),
    "LiteLLM": (
        "chat/completions",
        {"model": "tiny", "messages": USER, "max_tokens": 4, "temperature": 0.2, "top_p": 0.9, "user": "u"},
    ),
    "inspect_ai": (
        "chat/completions",
        {"model": "tiny", "messages": USER, "logprobs": True, "top_logprobs": 5, "seed": 1, "tools": []}
        | {"parallel_tool_calls": None},
    ),
    "rollouts": (
        "completions",
        {"model": "tiny", "prompt": [72, 105], "n": 8, "logprobs": 0, "return_token_ids": True, "max_tokens": 4}
        | {"stop_token_ids": [258], "temperature": 1.0},
    ),
    "distilabel": (
        "chat/completions",
        {"model": "tiny", "messages": USER, "n": 3, "response_format": {"type": "text"}},
    ),
}


@pytest.mark.parametrize("client", list(BODIES))
async def test_what_clients_send(app: App, server: FakeServer, client: str) -> None:
    """200, with the choices and, where a client asks for it, the usage."""
    server.script = lambda request, index: ["a", "b", "c", "d"]
    path, body = BODIES[client]
    answer = await post(app, path, body, headers={"x-request-id": "bench-1", "authorization": "Bearer x"})
    assert answer.status == 200, answer.content
    assert answer.headers["x-request-id"] == "bench-1"
    if body.get("stream_options"):
        assert answer.events[-1]["usage"]["completion_tokens"] == 4
    elif body.get("stream"):
        assert answer.events
    else:
        assert len(answer.json["choices"]) == body.get("n", 1) * len(server.requests[0].prompts)
        assert answer.json["usage"]["completion_tokens"] > 0
