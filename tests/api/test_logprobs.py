"""W-LP: log-probabilities in both shapes, and echo."""

from collections.abc import Callable
from typing import Any

import pytest

from tests.api.fakes import Answer, FakeServer, arrays, post
from toka.api.app import App
from toka.api.relay import joined
from toka.request import Delta, Score
from toka.text.tokenizer import Tokenizer

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}], "logprobs": True}
WORD = ["a", "é", ""]


async def chat(app: App, **fields: object) -> Answer:
    return await post(app, "chat/completions", CHAT | fields)


async def complete(app: App, prompt: object, **fields: object) -> Answer:
    return await post(app, "completions", {"prompt": prompt, **fields})


@pytest.fixture(autouse=True)
def letters(server: FakeServer) -> None:
    """An answer of three tokens: a letter, half a character, and the end."""
    server.script = lambda request, index: WORD


async def test_w_lp_1_chat(app: App, server: FakeServer) -> None:
    """An entry for each sampled token; W-LP-3: true bytes; W-LP-4: no infinity; the end has no text."""
    logprobs = (await chat(app, top_logprobs=3)).json["choices"][0]["logprobs"]
    assert server.requests[0].sampling.logprobs == 3
    assert logprobs["refusal"] is None
    first, half, end = logprobs["content"]
    assert (first["token"], first["bytes"], first["logprob"]) == ("a", [97], -0.5)
    assert first["top_logprobs"] == [
        {"token": "a", "logprob": -0.5, "bytes": [97]},
        {"token": "`", "logprob": -1.25, "bytes": [96]},
        {"token": "B", "logprob": -9999.0, "bytes": [66]},
    ]
    assert (half["token"], half["bytes"]) == ("bytes:\\xc3", [0xC3])
    assert (end["token"], end["bytes"]) == ("", [])
    assert end["top_logprobs"][1] == {"token": "<|im_start|>", "logprob": -1.25, "bytes": None}


async def test_w_lp_1_none_beside(app: App) -> None:
    """Without top_logprobs there are none, whatever the engine brings."""
    for fields in ({}, {"top_logprobs": 0}):
        content = (await chat(app, **fields)).json["choices"][0]["logprobs"]["content"]
        assert [one["top_logprobs"] for one in content] == [[], [], []]


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"logprobs": False, "top_logprobs": 2}, "invalid_value"),
        ({"logprobs": None, "top_logprobs": 2}, "invalid_value"),
        ({"top_logprobs": 21}, "integer_above_max_value"),
        ({"top_logprobs": -1}, "integer_below_min_value"),
    ],
)
async def test_w_lp_2_top_logprobs(app: App, fields: dict[str, Any], code: str) -> None:
    """0 to 20, and only with logprobs."""
    error = (await chat(app, **fields)).error
    assert (error["param"], error["code"]) == ("top_logprobs", code)


async def test_w_lp_5_completions(app: App) -> None:
    """Four lists of one length; the sampled token is among the best."""
    logprobs = (await complete(app, "Hi", logprobs=1)).json["choices"][0]["logprobs"]
    assert logprobs["tokens"] == ["a", "bytes:\\xc3", ""]
    assert logprobs["token_logprobs"] == [-0.5] * 3
    assert logprobs["top_logprobs"] == [{"a": -0.5}, {"bytes:\\xc3": -0.5}, {"": -0.5}]
    assert logprobs["text_offset"] == [0, 1, 1]


async def test_w_lp_5_sampled_outside(app: App, server: FakeServer) -> None:
    """k entries, and one more for a sampled token that is not of them; 0 gives the sampled one."""
    server.score = lambda id: Score(-7.0, [(98, -0.125), (99, -0.25)])
    tops = (await complete(app, "Hi", logprobs=2)).json["choices"][0]["logprobs"]["top_logprobs"]
    assert tops[0] == {"b": -0.125, "c": -0.25, "a": -7.0}
    tops = (await complete(app, "Hi", logprobs=0)).json["choices"][0]["logprobs"]["top_logprobs"]
    assert tops[0] == {"a": -7.0}


@pytest.mark.parametrize("stream", [False, True])
async def test_w_lp_5_bound(make: Callable[..., App], stream: bool) -> None:
    """No more than max_logprobs: 20, unless the server says otherwise."""
    for app, most in ((make(), 20), (make(max_logprobs=5), 5)):
        assert (await complete(app, "Hi", logprobs=most, stream=stream)).status == 200
        error = (await complete(app, "Hi", logprobs=most + 1, stream=stream)).error
        assert (error["param"], error["code"]) == ("logprobs", "integer_above_max_value")
        assert (await chat(app, top_logprobs=most, stream=stream)).status == 200
        assert (await chat(app, top_logprobs=most + 1, stream=stream)).error["param"] == "top_logprobs"


async def test_w_lp_6_echo(app: App, server: FakeServer) -> None:
    """The prompt first, its first token without a log-probability; offsets are those of the text."""
    choice = (await complete(app, "<|im_start|>éb", echo=True, logprobs=1)).json["choices"][0]
    assert choice["text"] == "<|im_start|>ébaé"
    logprobs = choice["logprobs"]
    assert logprobs["tokens"] == ["<|im_start|>", "bytes:\\xc3", "bytes:\\xa9", "b", "a", "bytes:\\xc3", ""]
    assert logprobs["text_offset"] == [0, 12, 12, 13, 14, 15, 15]
    assert logprobs["token_logprobs"] == [None] + [-0.5] * 6
    assert logprobs["top_logprobs"][0] is None
    assert server.requests[0].sampling.prompt_logprobs == 1


async def test_w_cmp_6_echo_of_ids(app: App, server: FakeServer) -> None:
    """Ids are decoded; without logprobs nothing is scored."""
    choice = (await complete(app, [257, 104, 105], echo=True)).json["choices"][0]
    assert choice["text"] == "hiaé"
    assert choice["logprobs"] is None
    assert server.requests[0].sampling.prompt_logprobs == -1


async def test_w_lp_7_prompt_only(app: App, server: FakeServer) -> None:
    """echo with max_tokens 0: the prompt, scored if asked for, and no completion."""
    for fields in ({}, {"logprobs": 1}):
        body = (await complete(app, ["ab", "c"], echo=True, max_tokens=0, n=2, **fields)).json
        assert [choice["text"] for choice in body["choices"]] == ["ab", "ab", "c", "c"]
        assert {choice["finish_reason"] for choice in body["choices"]} == {"length"}
        assert body["usage"]["completion_tokens"] == 0
    assert body["choices"][0]["logprobs"]["token_logprobs"] == [None, -0.5]
    assert len(server.requests) == 1


async def test_w_lp_8_lm_eval(app: App) -> None:
    """The body of its loglikelihood: the sampled and the best are the same float."""
    prompts = [[72, 105, 97], [72, 98]]
    body = await complete(app, prompts, temperature=0, max_tokens=1, logprobs=1, seed=1234, echo=True)
    assert [choice["index"] for choice in body.json["choices"]] == [0, 1]
    for choice, prompt in zip(body.json["choices"], prompts, strict=True):
        logprobs = choice["logprobs"]
        assert len(logprobs["token_logprobs"]) == len(prompt) + 1
        assert all(
            own == max(top.values())
            for own, top in zip(logprobs["token_logprobs"][1:-1], logprobs["top_logprobs"][1:-1], strict=True)
        )


async def test_w_lp_9_colliding_names(app: App, server: FakeServer, tokenizer: Tokenizer) -> None:
    """Tokens of the same text keep an entry each."""
    server.score = lambda id: Score(-0.5, [(id, -0.5), (id, -0.6), (256, -1.0), (1000, -2.0)])
    same = (await complete(app, "Hi", logprobs=4)).json["choices"][0]["logprobs"]["top_logprobs"][0]
    assert same == {"a": -0.5, "<|endoftext|>": -1.0, "token_id:1000": -2.0}
    ids = (await complete(app, "Hi", logprobs=4, return_tokens_as_token_ids=True)).json["choices"][0]["logprobs"]
    assert ids["tokens"][0] == "token_id:97"
    assert set(ids["top_logprobs"][0]) == {"token_id:97", "token_id:256", "token_id:1000"}
    assert tokenizer.bytes_of(1000) == b""


@pytest.mark.parametrize("echo", [False, True])
async def test_w_lp_11_streamed(app: App, echo: bool) -> None:
    """The chunks' lists joined are those of the whole answer."""
    fields = {"logprobs": 2, "n": 2, "echo": echo}
    whole = (await complete(app, ["xy", "z"], **fields)).json["choices"]
    events = (await complete(app, ["xy", "z"], stream=True, **fields)).events
    for choice in whole:
        chunks = [e["choices"][0] for e in events if e["choices"][0]["index"] == choice["index"]]
        assert "".join(chunk["text"] for chunk in chunks) == choice["text"]
        for name, values in choice["logprobs"].items():
            assert [v for chunk in chunks if chunk["logprobs"] for v in chunk["logprobs"][name]] == values


async def test_w_lp_11_chat_streamed(app: App) -> None:
    """The same for chat; the end's entry comes with the end."""
    whole = (await chat(app, top_logprobs=2)).json["choices"][0]["logprobs"]["content"]
    choices = [e["choices"][0] for e in (await chat(app, top_logprobs=2, stream=True)).events]
    streamed = [entry for c in choices if c["logprobs"] for entry in c["logprobs"]["content"]]
    assert streamed == whole
    assert choices[-1]["logprobs"]["content"][0]["token"] == ""


def test_w_lp_11_held_deltas_keep_everything() -> None:
    """What a slow client has not been sent is joined without loss."""
    a, b = Score(-1.0, [(1, -1.0)], 1), Score(-2.0, [(9, -0.5)], 2)
    first = Delta(0, "x", 1, ids=[1], scores=arrays([a]), prompt_scores=arrays([b]))
    one = joined([first, Delta(0, "y", 2, ids=[2], scores=arrays([b])), Delta(0, "z", 2, "stop", 5)])
    assert one == Delta(0, "xyz", 2, "stop", 5, [1, 2], arrays([a, b]), arrays([b]))


async def test_prompt_logprobs(app: App, server: FakeServer) -> None:
    """vLLM's shape: by id, with rank and text; the first token has none."""
    text = (await complete(app, "ab", prompt_logprobs=2)).json["choices"][0]["prompt_logprobs"]
    assert text == [
        None,
        {
            "98": {"logprob": -0.5, "rank": 1, "decoded_token": "b"},
            "99": {"logprob": -1.25, "rank": 2, "decoded_token": "c"},
        },
    ]
    whole = (await chat(app, prompt_logprobs=0, logprobs=False)).json
    assert len(whole["prompt_logprobs"]) == len(server.requests[1].prompts[0])
    server.score = lambda id: Score(-0.5, [(7, -0.25)], 31)
    assert whole["prompt_logprobs"][1] == {"115": {"logprob": -0.5, "rank": 1, "decoded_token": "s"}}
    far = (await complete(app, "ab", prompt_logprobs=0)).json["choices"][0]["prompt_logprobs"][1]
    assert far == {"98": {"logprob": -0.5, "rank": 31, "decoded_token": "b"}}
    assert (await complete(app, "ab", prompt_logprobs=2, stream=True)).error["param"] == "prompt_logprobs"


async def test_w_cmp_6_best_of_ranks(app: App, server: FakeServer) -> None:
    """The n best of best_of by mean log-probability; usage counts all of them."""
    server.script = lambda request, index: ["bcad"[index]]
    server.score = lambda id: Score(-float(id), [])
    body = (await complete(app, "x", n=2, best_of=4)).json
    assert [(c["index"], c["text"], c["logprobs"]) for c in body["choices"]] == [(0, "a", None), (1, "b", None)]
    assert body["usage"]["completion_tokens"] == 4
    assert (await complete(app, "x", n=1, best_of=129)).error["param"] == "best_of"
