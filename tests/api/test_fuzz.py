"""No body whatever makes the server fail: 10,000 of them, on every endpoint that takes one."""

import asyncio
import json
from collections.abc import Iterable, Sequence
from random import Random
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.api.conftest import CREATED
from tests.api.fakes import FakeServer, FakeTemplate, call
from tests.api.mutate import mutate
from toka.api.app import App, create_app
from toka.api.fields import IGNORED, UNSERVED_CHAT
from toka.api.schemas import ChatBody, CompletionBody
from toka.config import Config


class Letters:
    """A tokenizer without files: ids are code points, in a vocabulary of 300."""

    vocab_size = 300
    bos_id: int | None = None

    special_ids: frozenset[int] = frozenset()
    settings: dict[str, object] = {}  # noqa: RUF012 - a fake's constant

    spaces_names = False

    @property
    def spelled(self) -> "Letters":
        return self

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(map(chr, ids))

    def bytes_of(self, id: int, first: bool = False) -> bytes:
        return chr(id).encode()

    def token_of(self, id: int) -> str:
        return chr(id)

    def fewest(self, text: str) -> int:
        return len(text)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [min(ord(letter), 299) for letter in text]


numbers = st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.integers(-3, 300)
scalars = st.none() | st.booleans() | numbers | st.text(max_size=8)
values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
)
roles = st.sampled_from(["user", "assistant", "system", "tool", "developer", "function"]) | values
parts = st.fixed_dictionaries({}, optional={"type": st.sampled_from(["text", "refusal", "file"]), "text": values})
message = st.fixed_dictionaries(
    {"role": roles},
    optional={"content": values | st.lists(parts, max_size=3), "name": values, "tool_calls": values, "x": values},
)
fields: dict[str, st.SearchStrategy[Any]] = {
    "max_tokens": numbers | values,
    "n": st.integers(-1, 5) | values,
    "stop": st.text(max_size=3) | st.lists(st.text(max_size=3), max_size=3) | values,
    "stream": st.booleans(),
    "stream_options": st.dictionaries(st.sampled_from(["include_usage", "continuous_usage_stats", "z"]), scalars),
    "temperature": st.floats(-1, 3) | values,
    "model": st.sampled_from(["tiny", "x"]),
}
for name in {*ChatBody.__struct_fields__, *CompletionBody.__struct_fields__, *IGNORED, *UNSERVED_CHAT} - {
    *("messages", "prompt", *fields)
}:
    fields[name] = values
few = st.lists(st.sampled_from(sorted(fields)), max_size=4).map(lambda names: {name: fields[name] for name in names})
"""Of the optional fields: with all of them, the first wrong one hides the others."""
chats = few.flatmap(lambda some: st.fixed_dictionaries({"messages": st.lists(message, max_size=3) | values} | some))
ids = st.lists(st.integers(-1, 301), max_size=3)
prompts = st.text(max_size=9) | st.lists(st.text(max_size=3), max_size=3) | ids | st.lists(ids, max_size=3) | values
texts = few.flatmap(lambda some: st.fixed_dictionaries({"prompt": prompts} | some))


HI: list[dict[str, Any]] = [{"role": "user", "content": "Hi"}]
CHAT: dict[str, Any] = {
    "model": "tiny",
    "messages": [
        {"role": "system", "content": [{"type": "text", "text": "Be brief."}]},
        *HI,
        {"role": "assistant", "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": "{}"}}]},
        {"role": "tool", "content": "4", "tool_call_id": "1"},
    ],
    "max_completion_tokens": 4,
    "temperature": 0.5,
    "stop": ["x", "y"],
    "logit_bias": {"5": -100},
    "stream": True,
    "stream_options": {"include_usage": True},
    "logprobs": True,
    "top_logprobs": 2,
    "n": 2,
}
SCORE = {"prompt": [[72, 105], [72]], "max_tokens": 0, "echo": True, "logprobs": 1, "temperature": 0}
VALID: list[tuple[str, Any]] = [
    ("/v1/chat/completions", CHAT),
    ("/v1/chat/completions", {"messages": HI, "return_token_ids": True, "stop_token_ids": [7], "seed": 1}),
    ("/v1/completions", {"prompt": ["Hi", "you"], "max_tokens": 3, "n": 2, "stream": True, "logprobs": 0}),
    ("/v1/completions", {"prompt": [72, 105], "best_of": 2, "presence_penalty": 1, "prompt_logprobs": 1}),
    ("/v1/completions", SCORE),
    ("/v1/chat/completions/batch", {"requests": [{"messages": HI, "n": 2}, {"messages": HI, "max_tokens": 1}]}),
    ("/custom/synchronous-batch-completions", [{"messages": HI}, {"messages": HI, "logprobs": True}]),
    ("/tokenize", {"prompt": "Hi", "return_token_strs": True, "add_special_tokens": False}),
    ("/tokenize", {"messages": HI, "add_generation_prompt": True, "chat_template_kwargs": {"a": 1}}),
    ("/detokenize", {"tokens": [72, 105], "model": "tiny"}),
]
"""A path and what it serves."""
PATHS = sorted({path for path, _ in VALID})
FITTING: dict[str, Sequence[Any]] = {
    **dict.fromkeys([*fields, "messages", "prompt", "requests", "tokens", "role", "content", "type", "extra_body"], ()),
    **dict.fromkeys(("stream", "echo", "ignore_eos", "return_token_ids", "continue_final_message"), (True,)),
    **dict.fromkeys(
        ("return_tokens_as_token_ids", "include_stop_str_in_output", "add_generation_prompt"), (True, False)
    ),
    **dict.fromkeys(("max_tokens", "max_completion_tokens", "min_tokens"), (0, 1, 2, 3.0, 16, 2000, 10**9)),
    **dict.fromkeys(("presence_penalty", "frequency_penalty"), (-2, 0.5, 2)),
    **dict.fromkeys(("logprobs", "top_logprobs", "prompt_logprobs"), (True, 0, 2, 20)),
    **dict.fromkeys(("n", "best_of"), (1, 2, 3, 128)),
    "temperature": [0, 1e-6, 0.5, 2],
    "top_p": [1e-9, 1],
    "top_k": [-1, 0, 1, 10**12],
    "min_p": [0, 1],
    "repetition_penalty": [1e-6, 1e6],
    "seed": [0, -1, 2**63 - 1],
    "stop": ["l", ["lo", "\n"], ["🦀"], [], "H" * 1024],
    "stop_token_ids": [[], [0, 299]],
    "allowed_token_ids": [[5], [5, 5, 299]],
    "logit_bias": [{}, {"5": 100, "299": -100}],
    "stream_options": [{}, {"include_usage": True}, {"continuous_usage_stats": True, "include_usage": None}],
    "logprobs_format": ["packed", "lists"],
    "cache_salt": ["a", "\ud83e"],
    "priority": [-(2**31), 5],
    "timeout_s": [1e-9, 1e300],
    "chat_template_kwargs": [{"a": [1]}],
    "tool_choice": ["none", "auto"],
    "tools": [[], [{"type": "function", "function": {"name": "f"}}]],
    "response_format": [{"type": "text"}],
    "skip_special_tokens": [True, False],
}
"""Fields of any body, with values that mean something."""
AT_ONCE = 25
"""Bodies of one example: to draw one costs Hypothesis more than to answer ten."""


async def check(app: App, server: FakeServer, path: str, body: bytes) -> None:
    """2xx or 4xx, and an answer in the right shape that is complete."""
    answer = await asyncio.wait_for(call(app, "POST", path, body), 30)
    told = (path, body[:2000], answer.status, answer.content[:2000])
    assert 200 <= answer.status < 300 or 400 <= answer.status < 500, told
    assert "x-request-id" in answer.headers, told
    if answer.status >= 400:
        assert answer.error["message"], told
        assert answer.error["message"].isprintable(), told
        assert answer.status == 408 or server.requests == [], told
    elif answer.headers["content-type"].startswith("text/event-stream"):
        ends(answer.events, told)
    else:
        assert json.loads(answer.content.decode(), parse_constant=no_json) is not None, told
    for request in server.requests:
        assert all(0 <= id < 300 for prompt in request.prompts for id in prompt), told
        assert all(request.prompts), told
    assert server.running == {}, told
    server.requests.clear()


def no_json(constant: str) -> None:
    """What Python's reader lets pass."""
    raise AssertionError(f"{constant} is no JSON")


def ends(events: list[Any], told: object) -> None:
    """Every choice that began ends once, or the stream says why not."""
    assert events, told
    if "error" in events[-1]:
        return
    choices = [choice for event in events for choice in event["choices"]]
    ended = [choice["index"] for choice in choices if choice["finish_reason"] is not None]
    assert sorted(ended) == sorted({choice["index"] for choice in choices}), told


def answered(cases: Iterable[tuple[str, bytes]]) -> None:
    """Check them all, on one loop."""

    async def run() -> None:
        server = FakeServer()
        app = create_app(Config(), server, Letters(), FakeTemplate(), ["tiny"], CREATED)
        for path, body in cases:
            await check(app, server, path, body)

    asyncio.run(run())


@settings(max_examples=360)
@given(st.integers(0, 2**64 - 1))
def test_nearly_valid_bodies(seed: int) -> None:
    """9,000 valid bodies with a few faults each."""
    random = Random(seed)
    cases = [random.choice(VALID) for _ in range(AT_ONCE)]
    answered((path, mutate(body, FITTING, random)) for path, body in cases)


@settings(max_examples=300)
@given(chats | texts)
def test_any_json_object(body: dict[str, Any]) -> None:
    """300 objects with the right names and any values; a chat goes to three endpoints."""
    raw = json.dumps(body).encode()
    if "messages" in body:
        bulk = "/v1/chat/completions/batch"
        answered([("/v1/chat/completions", raw), (bulk, b"[%b]" % raw), (bulk, b'{"requests": [%b]}' % raw)])
    else:
        answered([("/v1/completions", raw)])


@settings(max_examples=120)
@given(st.binary(max_size=60) | values.map(lambda value: json.dumps(value).encode()))
def test_any_bytes(body: bytes) -> None:
    """120 times bytes, and JSON of any kind, on all six."""
    answered((path, body) for path in PATHS)
