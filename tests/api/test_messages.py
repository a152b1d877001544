"""W-CHAT-17 and 18: the messages of a conversation, as the template gets them."""

import pytest

from tests.api.fakes import USER, FakeServer, FakeTemplate, chat, post
from toka.api.app import App


async def test_w_chat_17_roles(app: App, template: FakeTemplate) -> None:
    """system, user, assistant and tool as they are, developer as system, function not at all."""
    messages = [
        {"role": "developer", "content": "Be brief."},
        {"role": "system", "content": "Be kind."},
        USER | {"name": "Ann", "refusal": None},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}],
        },
        {"role": "tool", "tool_call_id": "1", "content": "42"},
    ]
    assert (await chat(app, messages)).status == 200
    seen = template.messages
    assert [message["role"] for message in seen] == ["system", "system", "user", "assistant", "tool"]
    assert seen[2] == USER | {"name": "Ann"}
    assert seen[3]["content"] == ""
    assert seen[3]["tool_calls"][0]["function"] == {"name": "f", "arguments": {"a": 1}}
    template.source = "{% if message.role == 'developer' %}"
    assert (await chat(app, messages[:1])).status == 200
    assert template.messages[0]["role"] == "developer", "a template that knows the role gets it"
    error = (await chat(app, [{"role": "function", "name": "f", "content": "x"}])).error
    assert (error["param"], error["code"]) == ("messages[0].role", "invalid_value")


async def test_w_chat_17_no_messages(app: App, server: FakeServer) -> None:
    """There must be one."""
    answer = await post(app, "chat/completions", {"messages": []})
    assert (answer.status, answer.error["param"], answer.error["code"]) == (400, "messages", "empty_array")
    assert server.requests == []


@pytest.mark.parametrize(("sent", "seen"), [("{oops", "{oops"), ("[1]", "[1]"), ("", {}), ({"a": 1}, {"a": 1})])
async def test_w_chat_17_arguments(app: App, template: FakeTemplate, sent: object, seen: object) -> None:
    """Arguments that are no JSON object stay text."""
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": sent}}
    assert (await chat(app, [{"role": "assistant", "tool_calls": [call]}])).status == 200
    assert template.messages[0]["tool_calls"][0]["function"]["arguments"] == seen


async def test_w_chat_17_assistant_needs_something(app: App) -> None:
    """An assistant's message without content and calls is refused; one of an SDK, full of nulls, is not."""
    assert (await chat(app, [{"role": "assistant", "content": None}])).status == 400
    sdk = {"role": "assistant", "content": "Yes.", **dict.fromkeys(("audio", "function_call", "tool_calls", "refusal"))}
    assert (await chat(app, [USER, sdk | {"annotations": []}, USER])).status == 200


PARTS = [{"type": "text", "text": "One."}, {"type": "refusal", "refusal": "Two."}]


async def test_w_chat_18_parts_are_joined(app: App, template: FakeTemplate) -> None:
    """Text parts become lines for a template that wants a string."""
    assert (await chat(app, [{"role": "user", "content": PARTS}])).status == 200
    assert template.messages[0]["content"] == "One.\nTwo."


async def test_w_chat_18_parts_are_passed(app: App, template: FakeTemplate) -> None:
    """A template that iterates over parts gets them."""
    template.takes_parts = True
    assert (await chat(app, [{"role": "user", "content": PARTS}])).status == 200
    assert template.messages[0]["content"] == [{"type": "text", "text": "One."}, {"type": "text", "text": "Two."}]


@pytest.mark.parametrize("kind", ["image_url", "input_audio", "file"])
async def test_w_chat_18_other_parts(app: App, kind: str) -> None:
    """What is no text is refused, with the name of the model that cannot take it."""
    error = (await chat(app, [{"role": "user", "content": [PARTS[0], {"type": kind, kind: {}}]}])).error
    assert error["code"] == "unsupported_content_part"
    assert error["param"] == "messages[0].content[1]"
    assert "`tiny`" in error["message"]
