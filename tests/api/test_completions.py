"""W-CMP: completions, from prompts to the request and from deltas to the answer."""

import asyncio
import re
import threading
from typing import Any

import pytest

from tests.api.fakes import FakeServer, complete, post
from toka.api.app import App
from toka.text.tokenizer import Tokenizer


async def test_w_cmp_1_whole(app: App) -> None:
    """Every field of an answer."""
    body = (await complete(app, "Hi")).json
    assert re.fullmatch(r"cmpl-[0-9a-f]+", body.pop("id"))
    assert isinstance(body.pop("created"), int)
    assert body.pop("system_fingerprint")
    assert body == {
        "object": "text_completion",
        "model": "tiny",
        "choices": [
            {"index": 0, "text": "Hello, world!", "logprobs": None, "finish_reason": "stop", "stop_reason": None}
        ],
        "usage": {
            **{"prompt_tokens": 2, "completion_tokens": 4, "total_tokens": 6},
            "prompt_tokens_details": {"cached_tokens": 0},
        },
    }


async def test_w_cmp_1_ids_are_new(app: App, server: FakeServer) -> None:
    """No two requests share an id, not even when a client repeats its x-request-id; the engine knows them by it."""
    ids = [
        (await post(app, "completions", {"prompt": "x"}, headers={"x-request-id": "a"})).json["id"] for _ in range(3)
    ]
    assert len(set(ids)) == 3
    assert [request.id for request in server.requests] == ids


@pytest.mark.parametrize(("fields", "limit"), [({}, 16), ({"max_tokens": None}, 16), ({"max_tokens": 3}, 3)])
async def test_w_cmp_2_max_tokens(app: App, server: FakeServer, fields: dict[str, Any], limit: int) -> None:
    """16 unless said."""
    await complete(app, "Hi", **fields)
    assert server.requests[0].max_tokens == limit


async def test_w_cmp_2_default_yields_to_the_context(app: App, server: FakeServer) -> None:
    """Nobody asked for 16: a prompt with room for 5 gets 5, and one beside it 16."""
    assert (await complete(app, [[1] * 2043, [1]])).status == 200
    assert (server.requests[0].max_tokens, server.requests[0].clamp) == (16, True)


@pytest.mark.parametrize("prompt", ["Hi", [[1] * 2048, [2]]])
async def test_w_cmp_2_zero(app: App, server: FakeServer, prompt: object) -> None:
    """No tokens asked for: an empty text, without the engine."""
    body = (await complete(app, prompt, max_tokens=0, n=2)).json
    assert all(choice["text"] == "" and choice["finish_reason"] == "length" for choice in body["choices"])
    assert body["usage"]["completion_tokens"] == 0
    assert body["usage"]["prompt_tokens"] > 0
    assert server.requests == []


async def test_w_cmp_2_zero_streamed(app: App) -> None:
    """The same as a stream."""
    events = (await complete(app, ["a", "b"], max_tokens=0, stream=True)).events
    assert [event["choices"][0]["finish_reason"] for event in events] == ["length", "length"]


@pytest.mark.parametrize(
    ("prompt", "ids"),
    [
        ("ab", [[97, 98]]),
        (["a", "b"], [[97], [98]]),
        ([5, 6, 7], [[5, 6, 7]]),
        ([[5], [6, 7]], [[5], [6, 7]]),
        ("é", [[0xC3, 0xA9]]),
        ("", [[257]]),
        (["", "a"], [[257], [97]]),
    ],
)
async def test_w_cmp_3_prompts(app: App, server: FakeServer, prompt: object, ids: list[list[int]]) -> None:
    """A text, texts, ids, lists of ids (W-CMP-4: as they are); an empty text starts from BOS."""
    assert (await complete(app, prompt)).status == 200
    assert server.requests[0].prompts == ids


async def test_w_cmp_3_empty_without_bos(app: App, monkeypatch: pytest.MonkeyPatch, tokenizer: Tokenizer) -> None:
    """Without a BOS there is nothing to start from."""
    monkeypatch.setattr(tokenizer, "bos_id", None)
    answer = await complete(app, "")
    assert answer.status == 400
    assert answer.error["param"] == "prompt"


async def test_w_cmp_3_indexes(app: App, server: FakeServer) -> None:
    """Choice p·n + i is sample i of prompt p; all prompts are counted, each once."""
    server.script = lambda request, index: [f"prompt {index // request.n} sample {index % request.n}"]
    body = (await complete(app, [[1, 2], [3, 4, 5]], n=2)).json
    assert [choice["text"] for choice in body["choices"]] == [f"prompt {p} sample {i}" for p in (0, 1) for i in (0, 1)]
    assert body["usage"]["prompt_tokens"] == 5


@pytest.mark.parametrize(
    ("prompt", "param"),
    [
        ([10**9], "prompt[0]"),
        ([5, -1], "prompt[1]"),
        ([259], "prompt[0]"),
        ([2**40], "prompt[0]"),
        ([2**70], "prompt[0]"),
        ([[5, 6], [5, 10**9]], "prompt[1][1]"),
    ],
)
async def test_w_cmp_4_ids_in_range(app: App, server: FakeServer, prompt: object, param: str) -> None:
    """Ids are from 0 to below the size of the vocabulary."""
    answer = await complete(app, prompt)
    assert answer.status == 400
    assert answer.error["param"] == param
    assert server.requests == []


async def test_w_cmp_5_special_tokens(app: App, monkeypatch: pytest.MonkeyPatch, tokenizer: Tokenizer) -> None:
    """A text prompt is encoded like tokenizer(prompt): with the special tokens that it adds."""
    asked = []

    def encode(self: Tokenizer, text: str, add_special_tokens: bool = True) -> list[int]:
        asked.append(add_special_tokens)
        return [1]

    monkeypatch.setattr(Tokenizer, "encode", encode)
    await complete(app, "Hi")
    assert asked == [True]


@pytest.mark.parametrize(
    ("prompt", "param"),
    [
        ([[5, 6], [5, 10**9]], "prompt[1][1]"),
        ([[5], []], "prompt[1]"),
        ([[5], [6] * 3000], "prompt"),
        (["a", 5], "prompt[1]"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_w_cmp_7_one_bad_prompt(app: App, server: FakeServer, prompt: object, param: str, stream: bool) -> None:
    """It fails them all, before any runs."""
    answer = await complete(app, prompt, stream=stream)
    assert (answer.status, answer.error["param"]) == (400, param)
    assert server.requests == []


@pytest.mark.parametrize("body", [{}, {"prompt": None}, {"prompt": []}, {"prompt": [[]]}])
async def test_w_cmp_3_nothing(app: App, server: FakeServer, body: dict[str, object]) -> None:
    """A prompt that is missing, null or empty is refused; it does not stand for the start of any text."""
    answer = await post(app, "completions", body)
    assert (answer.status, server.requests) == (400, [])
    assert answer.error["param"].startswith("prompt")


async def test_w_cmp_6_suffix(app: App, server: FakeServer) -> None:
    """Not served unless it is empty."""
    assert (await complete(app, "x", suffix="")).status == 200
    error = (await complete(app, "x", suffix="y")).error
    assert (error["param"], error["code"]) == ("suffix", "unsupported_parameter")


async def test_w_cmp_6_echo(app: App, server: FakeServer) -> None:
    """The text that was sent, not what its ids would give, streamed or not."""
    server.script = lambda request, index: ["!"]
    [choice] = (await complete(app, "a<|im_end|>", echo=True)).json["choices"]
    assert choice["text"] == "a<|im_end|>!"
    events = (await complete(app, "a<|im_end|>", echo=True, stream=True)).events
    assert "".join(event["choices"][0]["text"] for event in events) == "a<|im_end|>!"


async def test_w_cmp_6_best_of(app: App) -> None:
    """Equal to n it means nothing, above it is not streamed, below it is wrong."""
    assert (await complete(app, "x", best_of=2, n=2)).status == 200
    assert (await complete(app, "x", best_of=3, n=2, stream=True)).error["code"] == "unsupported_parameter"
    assert (await complete(app, "x", best_of=1, n=2)).error["code"] == "invalid_value"


async def test_long_texts_are_tokenized_in_a_thread(
    app: App, monkeypatch: pytest.MonkeyPatch, server: FakeServer
) -> None:
    """One very long word does not stop everybody else's answers."""
    server.max_model_len = 10**6
    release = threading.Event()
    encode = Tokenizer.encode

    def slow(self: Tokenizer, text: str, add_special_tokens: bool = True) -> list[int]:
        if len(text) > 8192:
            release.wait(10)
        return encode(self, text, add_special_tokens)

    monkeypatch.setattr(Tokenizer, "encode", slow)
    long = asyncio.create_task(complete(app, "a" * 10_000, max_tokens=1))
    short = await complete(app, "a")
    assert not long.done()
    release.set()
    assert short.status == (await long).status == 200
    assert len(server.requests[-1].prompts[0]) == 10_000
