"""What is known and not served: refused by name, unless it asks for nothing. W-TOOL-0 and W-RF-3 so far."""

from typing import Any

import pytest

from tests.api.fakes import FakeServer, chat, complete, post
from toka.api.app import App

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}]}
TEXT: dict[str, Any] = {"prompt": "Hi"}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {}}}


@pytest.mark.parametrize("choice", [None, "auto", "required", {"type": "function", "function": {"name": "f"}}], ids=str)
async def test_w_tool_0_tools(app: App, server: FakeServer, choice: object) -> None:
    """Tools that the model may call are never ignored."""
    error = (await chat(app, tools=[TOOL], tool_choice=choice)).error
    assert (error["param"], error["code"]) == ("tools", "unsupported_parameter")
    assert server.requests == []


async def test_w_tool_0_no_tools(app: App) -> None:
    """An empty list is absent; with tool_choice none the model cannot call, so there is nothing to refuse."""
    absent: list[dict[str, Any]] = [{"tools": []}, {"tools": None}, {"tool_choice": "auto"}]
    for fields in (*absent, {"tools": [TOOL], "tool_choice": "none"}):
        answer = await chat(app, **fields)
        assert answer.status == 200
        assert "tool_calls" not in answer.json["choices"][0]["message"]


async def test_w_tool_0_a_call_is_required(app: App) -> None:
    """It cannot come about."""
    error = (await chat(app, tool_choice="required")).error
    assert (error["param"], error["code"]) == ("tool_choice", "unsupported_parameter")


SCHEMA = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}, "strict": True}}


@pytest.mark.parametrize("wanted", [SCHEMA, {"type": "json_object"}, {"type": "structural_tag"}], ids=str)
async def test_w_rf_3_structured_output(app: App, server: FakeServer, wanted: object) -> None:
    """Never silently unconstrained, on either endpoint."""
    for answer in (await chat(app, response_format=wanted), await complete(app, "x", response_format=wanted)):
        assert (answer.status, answer.error["param"]) == (400, "response_format")
        assert answer.error["code"] == "unsupported_parameter"
    assert server.requests == []


async def test_w_rf_3_text(app: App) -> None:
    """That is what there is."""
    assert (await chat(app, response_format={"type": "text"})).status == 200
    assert (await chat(app, response_format=None)).status == 200


UNSERVED = {
    **{"guided_json": {}, "guided_regex": "x", "structured_outputs": {"json": {}}, "regex": "x", "ebnf": "x"},
    **{"bad_words": ["x"], "use_beam_search": True, "length_penalty": 2, "detokenize": False, "lora_path": "x"},
    "add_special_tokens": "x",
}


@pytest.mark.parametrize("field", list(UNSERVED))
async def test_known_and_not_served(app: App, server: FakeServer, field: str) -> None:
    """Refused by name on both endpoints, and absent if null."""
    for path, body in (("chat/completions", CHAT), ("completions", TEXT)):
        error = (await post(app, path, body | {field: UNSERVED[field]})).error
        assert (error["param"], error["code"]) == (field, "unsupported_parameter")
        assert f"'{field}'" in error["message"]
        assert server.requests == []
    assert (await chat(app, **{field: None})).status == 200


@pytest.mark.parametrize(("field", "value"), [("best_of", 2), ("echo", True)])
async def test_known_and_not_served_of_chats(app: App, field: str, value: object) -> None:
    """Fields that only completions have."""
    error = (await chat(app, **{field: value})).error
    assert (error["param"], error["code"]) == (field, "unsupported_parameter")


NEUTRAL_CHAT = {
    **{"logprobs": False, "top_logprobs": 0, "logit_bias": {}, "presence_penalty": 0, "frequency_penalty": 0.0},
    **{"repetition_penalty": 1.0, "min_p": 0, "min_tokens": 0, "stop_token_ids": [], "best_of": 1, "n": 1},
    **{"skip_special_tokens": True, "spaces_between_special_tokens": True, "echo": False, "user": "u"},
}
NEUTRAL_TEXT = {
    **{"best_of": 1, "suffix": "", "echo": False, "repetition_penalty": 1.0, "logprobs": None, "user": "u"},
    **{"spaces_between_special_tokens": False, "add_special_tokens": True},
}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        *(("chat/completions", CHAT | {field: value}) for field, value in NEUTRAL_CHAT.items()),
        *(("completions", TEXT | {field: value}) for field, value in NEUTRAL_TEXT.items()),
        ("chat/completions", CHAT | NEUTRAL_CHAT),
        ("completions", TEXT | NEUTRAL_TEXT),
    ],
    ids=str,
)
async def test_neutral_values(app: App, path: str, body: object) -> None:
    """A field that asks for nothing is accepted."""
    assert (await post(app, path, body)).status == 200
