"""API.md 2.12: the bodies that popular clients send, served unchanged by a real model, with what each client reads."""

import asyncio
import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai
import pytest
from openai.types.chat import ChatCompletionMessageParam

from bench.server import Server

Json = dict[str, Any]

USER = [{"role": "user", "content": "Hi"}]
PARTS = [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}]
USAGE: Json = {"stream": True, "stream_options": {"include_usage": True}}


@dataclass(frozen=True)
class Http:
    """A server, as those see it who do not use OpenAI's client."""

    url: str

    def get(self, path: str) -> Any:
        with urllib.request.urlopen(self.url + path, timeout=30) as answer:
            return json.load(answer)

    def post(self, path: str, body: Json) -> Any:
        """The answer; of a stream the list of its events, which must end well."""
        headers = {"content-type": "application/json", "authorization": "Bearer x", "x-request-id": "bench-1"}
        request = urllib.request.Request(self.url + path, json.dumps(body).encode(), headers)
        with urllib.request.urlopen(request, timeout=30) as answer:
            assert answer.headers["x-request-id"] == "bench-1"
            data = answer.read().decode()
        if not body.get("stream"):
            return json.loads(data)
        events = data.split("\n\n")
        assert events[-2:] == ["data: [DONE]", ""]
        return [json.loads(event.removeprefix("data: ")) for event in events[:-2]]

    def text(self, **body: object) -> Any:
        return self.post("/v1/completions", {"model": "tiny"} | body)

    def chat(self, **body: object) -> Any:
        return self.post("/v1/chat/completions", {"model": "tiny", "messages": USER} | body)


@pytest.fixture(scope="module")
def http(tiny: Path) -> Iterator[Http]:
    """A tiny model with a worker process of its own, for all of this module."""
    with Server(f"model={tiny}", "kv_cache_num_tokens=8192") as server:
        yield Http(server.url)


def texts(events: list[Json]) -> str:
    """The pieces of the one choice of a stream, of either endpoint."""
    choices = [choice for event in events for choice in event["choices"]]
    return "".join(choice["text"] if "text" in choice else choice["delta"].get("content", "") for choice in choices)


def test_vllm_bench_serve(http: Http) -> None:
    """Reads the text of each chunk and `usage.completion_tokens`, which ignore_eos makes max_tokens."""
    body: Json = {"prompt": "Hi", "temperature": 0.0, "repetition_penalty": 1.0, "max_tokens": 8, "logprobs": None}
    events = http.text(**body, ignore_eos=True, **USAGE)
    assert events[-1]["choices"] == []
    assert events[-1]["usage"]["completion_tokens"] == 8
    assert events[-1]["usage"]["prompt_tokens"] == 2
    whole = http.text(**body, ignore_eos=True)
    assert texts(events) == whole["choices"][0]["text"]
    assert events[-1]["usage"]["total_tokens"] == whole["usage"]["total_tokens"]


def test_vllm_bench_serve_chat(http: Http) -> None:
    """Sends content as parts; reads `delta.content` and the usage."""
    body: Json = {"temperature": 0.0, "max_completion_tokens": 8, "ignore_eos": True}
    events = http.chat(messages=PARTS, **body, **USAGE)
    assert events[-1]["usage"]["completion_tokens"] == 8
    assert texts(events) == http.chat(**body)["choices"][0]["message"]["content"]


def test_sglang_bench_serving(http: Http) -> None:
    """Asks for the models first, sends `best_of`, and takes it that a chunk of text is a token or more."""
    assert http.get("/v1/models")["data"][0]["id"] == "tiny"
    assert http.get("/server_info")["version"]
    with pytest.raises(urllib.error.HTTPError, match="404") as missing:
        http.get("/flush_cache")
    missing.value.close()
    events = http.text(prompt="Hi", temperature=0.0, best_of=1, max_tokens=8, stream=True, ignore_eos=True)
    assert all("usage" not in event for event in events)
    assert events[-1]["choices"][0]["finish_reason"] == "length"
    chats = http.chat(temperature=0.0, max_completion_tokens=8, stream=True, ignore_eos=True)
    assert chats[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert texts(chats)


def test_genai_perf(http: Http) -> None:
    """`--extra-inputs ignore_eos:true,min_tokens:N`: the answer is as long as the bench says, no token more or less."""
    events = http.chat(max_completion_tokens=7, ignore_eos=True, min_tokens=7, **USAGE)
    assert events[-1]["usage"]["completion_tokens"] == 7
    short = http.text(prompt="Hi", max_tokens=7, min_tokens=5)
    assert 5 <= short["usage"]["completion_tokens"] <= 7


def test_lm_eval_loglikelihood(http: Http) -> None:
    """Slices `token_logprobs[ctxlen:-1]`, and calls a token greedy where it equals the best one as a float."""
    prompts = [[72, 105, 97, 98], [72, 98]]
    answer = http.text(prompt=prompts, temperature=0, max_tokens=1, logprobs=1, seed=1234, echo=True)
    assert [choice["index"] for choice in answer["choices"]] == [0, 1]
    for choice, prompt in zip(answer["choices"], prompts, strict=True):
        told = choice["logprobs"]
        lengths = {len(told[name]) for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset")}
        assert lengths == {len(prompt) + 1}
        assert (told["token_logprobs"][0], told["top_logprobs"][0], told["text_offset"][0]) == (None, None, 0)
        for own, top in zip(told["token_logprobs"][1:], told["top_logprobs"][1:], strict=True):
            assert own <= 0
            assert own in top.values()
            assert len(top) <= 2
        assert told["token_logprobs"][-1] == max(told["top_logprobs"][-1].values())


def test_lm_eval_generate(http: Http) -> None:
    """More stop strings than OpenAI takes, and a tokenizer over HTTP."""
    plain = http.text(prompt=[[72, 105]], max_tokens=24, temperature=0, seed=1234, ignore_eos=True)
    text = plain["choices"][0]["text"]
    stop = ["\n\n\n\n", "Q:", "</s>", "<|im_end|>", "Question:", text[9:11]]
    cut = http.text(prompt=[[72, 105]], max_tokens=24, temperature=0, seed=1234, ignore_eos=True, stop=stop)
    assert (cut["choices"][0]["text"], cut["choices"][0]["finish_reason"]) == (text[: text.index(stop[-1])], "stop")
    assert http.get("/tokenizer_info")["eos_token"] == "<|im_end|>"
    assert http.post("/tokenize", {"prompt": "Hi", "add_special_tokens": False})["tokens"] == [72, 105]


def test_lm_eval_chat(http: Http) -> None:
    """Four stop strings and a seed; the same seed says the same."""
    body: Json = {"max_tokens": 8, "temperature": 1, "stop": ["a", "b", "c", "d"], "seed": 1234}
    first, second = (http.chat(**body)["choices"][0]["message"]["content"] for _ in range(2))
    assert first == second


def test_langchain(http: Http) -> None:
    """Nulls, `parallel_tool_calls`, and a usage in the stream's last chunk."""
    body: Json = {"n": 1, "parallel_tool_calls": True, "stop": None, "user": "u", "max_tokens": 8, "temperature": None}
    events = http.chat(**body, **USAGE)
    assert {event["id"] for event in events} == {events[0]["id"]}
    assert events[-2]["choices"][0]["finish_reason"] in ("stop", "length")
    assert set(events[-1]["usage"]) >= {"prompt_tokens", "completion_tokens", "total_tokens"}


def test_litellm(http: Http) -> None:
    """Builds its own object out of every field of OpenAI's, and maps errors by status and `code`."""
    answer = http.chat(max_tokens=8, temperature=0.2, top_p=0.9, user="u")
    assert answer["id"].startswith("chatcmpl-")
    assert (answer["object"], answer["model"]) == ("chat.completion", "tiny")
    assert answer["created"] > 1_700_000_000
    choice = answer["choices"][0]
    assert choice["message"]["role"] == "assistant"
    assert choice["finish_reason"] in ("stop", "length")
    with pytest.raises(urllib.error.HTTPError) as refused:
        http.chat(model="gpt-4o")
    with refused.value as error:
        assert (error.code, json.load(error)["error"]["code"]) == (404, "model_not_found")


def test_inspect_ai(http: Http) -> None:
    """Reads an entry for each token, with as many alternatives as it asked for."""
    body: Json = {"logprobs": True, "top_logprobs": 5, "seed": 1, "tools": [], "parallel_tool_calls": None}
    answer = http.chat(**body, max_tokens=8, ignore_eos=True)
    entries = answer["choices"][0]["logprobs"]["content"]
    assert len(entries) == answer["usage"]["completion_tokens"] == 8
    assert all(len(entry["top_logprobs"]) == 5 for entry in entries)
    joined = bytes(byte for entry in entries for byte in entry["bytes"])
    assert joined.decode(errors="replace") == answer["choices"][0]["message"]["content"]


def test_rollouts_of_trl_and_verl(http: Http) -> None:
    """Ids in, ids and their log-probabilities out, for many different samples."""
    body: Json = {"n": 8, "logprobs": 0, "return_token_ids": True, "max_tokens": 8, "temperature": 1.0}
    answer = http.text(prompt=[72, 105], **body, stop_token_ids=[65], skip_special_tokens=False)
    for index, choice in enumerate(answer["choices"]):
        assert choice["index"] == index
        assert choice["prompt_token_ids"] == [72, 105]
        assert len(choice["token_ids"]) == len(choice["logprobs"]["token_logprobs"])
        assert all(own <= 0 for own in choice["logprobs"]["token_logprobs"])
    assert len({tuple(choice["token_ids"]) for choice in answer["choices"]}) > 1
    assert answer["usage"]["completion_tokens"] == sum(len(choice["token_ids"]) for choice in answer["choices"])
    assert answer["usage"]["prompt_tokens"] == 2


def test_distilabel(http: Http) -> None:
    """Several choices, and a response format that asks for nothing."""
    answer = http.chat(n=3, response_format={"type": "text"}, max_tokens=4)
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]


def test_openai_client(http: Http) -> None:
    """Whole and streamed say the same, with logprobs and ids that its types know."""
    hi: list[ChatCompletionMessageParam] = [{"role": "user", "content": "Hi"}]
    with openai.OpenAI(base_url=f"{http.url}/v1", api_key="none", max_retries=0) as client:
        whole = client.chat.completions.create(
            model="tiny", messages=hi, max_tokens=12, temperature=0, logprobs=True, top_logprobs=2
        )
        chunks = list(
            client.chat.completions.create(
                model="tiny",
                messages=hi,
                max_tokens=12,
                temperature=0,
                logprobs=True,
                top_logprobs=2,
                stream=True,
                stream_options={"include_usage": True},
            )
        )
        models = [model.id for model in client.models.list()]
    choices = [choice for chunk in chunks for choice in chunk.choices]
    told = [entry for choice in choices if choice.logprobs for entry in choice.logprobs.content or []]
    assert whole.choices[0].logprobs
    assert whole.choices[0].logprobs.content == told
    assert "".join(choice.delta.content or "" for choice in choices) == whole.choices[0].message.content
    assert whole.usage
    assert whole.usage == chunks[-1].usage
    assert len(told) == whole.usage.completion_tokens
    assert {chunk.id for chunk in chunks} == {chunks[0].id}
    assert (whole._request_id or "").startswith("req_")
    assert models == ["tiny"]


async def test_openai_client_asynchronous(http: Http) -> None:
    """Many at once; each is answered, and the same prompt at temperature 0 in the same way."""
    async with openai.AsyncOpenAI(base_url=f"{http.url}/v1", api_key="none", max_retries=0) as client:
        asked = [client.completions.create(model="tiny", prompt="Hi", max_tokens=8, temperature=0) for _ in range(8)]
        answers = await asyncio.gather(*asked)
        stream = await client.completions.create(model="tiny", prompt="Hi", max_tokens=8, temperature=0, stream=True)
        text = "".join([chunk.choices[0].text async for chunk in stream])
    assert {answer.choices[0].text for answer in answers} == {text}
    assert len({answer.id for answer in answers}) == 8
