"""No body whatever makes the server fail."""

import asyncio
import json
from collections.abc import Sequence
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.api.conftest import CREATED
from tests.api.fakes import FakeServer, FakeTemplate, post
from toka.api.app import create_app
from toka.api.fields import IGNORED, UNSERVED_CHAT
from toka.api.schemas import ChatBody, CompletionBody
from toka.config import Config


class Letters:
    """A tokenizer without files: ids are code points, in a vocabulary of 300."""

    vocab_size = 300
    bos_id: int | None = None

    special_ids: frozenset[int] = frozenset()
    settings: dict[str, object] = {}  # noqa: RUF012 - a fake's constant

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
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
chats = st.fixed_dictionaries({"messages": st.lists(message, max_size=3) | values}, optional=fields)
ids = st.lists(st.integers(-1, 301), max_size=3)
prompts = st.text(max_size=9) | st.lists(st.text(max_size=3), max_size=3) | ids | st.lists(ids, max_size=3) | values
texts = st.fixed_dictionaries({"prompt": prompts}, optional=fields)


def sparse(body: dict[str, Any], seed: int) -> dict[str, Any]:
    """Few of the optional fields: with all of them, the first wrong one hides the others."""
    kept = {"messages", "prompt", *sorted(fields)[seed % len(fields) :][: seed % 5]}
    return {name: value for name, value in body.items() if name in kept}


async def check(path: str, body: object) -> None:
    """2xx or 4xx, and an answer in the right shape."""
    server = FakeServer()
    app = create_app(Config(), server, Letters(), FakeTemplate(), ["tiny"], CREATED)
    answer = await asyncio.wait_for(post(app, path, body), 10)
    assert 200 <= answer.status < 500, answer.content
    if answer.status >= 400:
        assert answer.error["message"]
        assert "\n" not in answer.error["message"]
        assert server.requests == []
    elif answer.headers["content-type"].startswith("text/event-stream"):
        assert answer.events
    else:
        assert answer.json["choices"]
    for request in server.requests:
        assert all(0 <= id < 300 for prompt in request.prompts for id in prompt)
        assert all(request.prompts)
    assert server.running == {}


@settings(max_examples=150, deadline=None)
@given(
    st.sampled_from(["chat/completions", "completions"]).flatmap(
        lambda path: st.tuples(st.just(path), chats if path.startswith("chat") else texts)
    ),
    st.integers(0, 10**6),
)
def test_any_json_object(case: tuple[str, dict[str, Any]], seed: int) -> None:
    """Objects with the right names and any values."""
    path, body = case
    raw = json.dumps(sparse(body, seed)).encode()
    asyncio.run(check(path, raw))


@settings(max_examples=150, deadline=None)
@given(
    st.sampled_from(["chat/completions", "completions"]),
    st.binary(max_size=60) | values.map(lambda v: json.dumps(v).encode()),
)
def test_any_bytes(path: str, body: bytes) -> None:
    """Bytes, and JSON of any kind."""
    asyncio.run(check(path, body))
