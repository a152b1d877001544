"""W-CHAT: chat completions, from messages to the request and from deltas to the answer."""

import re
import time
from typing import Any

import pytest

from tests.api.fakes import Answer, FakeServer, FakeTemplate, post
from tests.fakes import CHATML
from toka.api.app import App, create_app
from toka.config import Config
from toka.errors import BadRequest
from toka.request import Sampling
from toka.text.template import ChatTemplate
from toka.text.tokenizer import Tokenizer

USER = {"role": "user", "content": "Hi"}


async def chat(app: App, messages: list[Any] | None = None, **fields: object) -> Answer:
    """POST /v1/chat/completions."""
    return await post(app, "chat/completions", {"messages": messages or [USER], **fields})


async def test_w_chat_1_whole(app: App, server: FakeServer) -> None:
    """Every field of an answer."""
    server.cached_tokens = 3
    body = (await chat(app, model="org/alias")).json
    assert re.fullmatch(r"chatcmpl-[0-9a-f]+", body.pop("id"))
    assert abs(body.pop("created") - time.time()) < 5
    assert body.pop("system_fingerprint").startswith("fp_")
    # W-CHAT-2: no tool_calls. W-CHAT-3: logprobs is there.
    assert body == {
        "object": "chat.completion",
        "model": "org/alias",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "Hello, world!", "refusal": None},
                "logprobs": None,
                "finish_reason": "stop",
                "stop_reason": None,
            }
        ],
        "usage": {
            **{"prompt_tokens": 9, "completion_tokens": 4, "total_tokens": 13},
            "prompt_tokens_details": {"cached_tokens": 3},
        },
    }


async def test_w_chat_1_choices_by_index(app: App, server: FakeServer) -> None:
    """Choices are in order of their index, not of their end."""
    server.script = lambda request, index: ["x"] * (5 - index)
    body = (await chat(app, n=5)).json
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2, 3, 4]
    assert [len(choice["message"]["content"]) for choice in body["choices"]] == [5, 4, 3, 2, 1]
    # W-CHAT-7: the prompt once, the choices all.
    assert body["usage"]["prompt_tokens"] == 9
    assert body["usage"]["completion_tokens"] == 15


async def test_w_chat_4_finish_reasons(app: App, server: FakeServer) -> None:
    """`length` at the cap; `stop` otherwise, with the stop string that ended it."""
    assert (await chat(app, max_tokens=2)).json["choices"][0]["finish_reason"] == "length"
    server.stop_reason = "END"
    choice = (await chat(app, stop="END")).json["choices"][0]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", "END")
    assert server.requests[-1].stop == ("END",)


async def test_w_chat_8_n(app: App, server: FakeServer) -> None:
    """n is the engine's business, in one request."""
    assert len((await chat(app, n=128)).json["choices"]) == 128
    assert server.requests[0].n == 128


@pytest.mark.parametrize(
    ("fields", "limit"),
    [
        ({}, None),
        ({"max_tokens": 5}, 5),
        ({"max_completion_tokens": 6}, 6),
        ({"max_tokens": 5, "max_completion_tokens": 6}, 6),
    ],
)
async def test_w_chat_9_max_tokens(app: App, server: FakeServer, fields: dict[str, Any], limit: int | None) -> None:
    """Either name, the newer one wins, neither means the rest of the context."""
    assert (await chat(app, **fields)).status == 200
    assert server.requests[0].max_tokens == limit


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
async def test_w_chat_9_zero(app: App, name: str) -> None:
    """A chat of no tokens is refused."""
    zero: dict[str, Any] = {name: 0}
    error = (await chat(app, **zero)).error
    assert (error["param"], error["code"]) == (name, "integer_below_min_value")


async def test_w_chat_10_sampling_defaults(app: App, server: FakeServer) -> None:
    """OpenAI's, unless the server has others; what the client says always wins."""
    await chat(app)
    assert server.requests[0].sampling == Sampling(temperature=1.0, top_p=1.0, top_k=0)
    assert server.requests[0].seed is None
    await chat(app, temperature=0.5, top_p=0.9, top_k=40, seed=7)
    assert server.requests[1].sampling == Sampling(temperature=0.5, top_p=0.9, top_k=40)
    assert server.requests[1].seed == 7
    service = app._router.routes[0].endpoint.service  # type: ignore[attr-defined]
    defaults = Sampling(temperature=0.6, top_k=20)
    other = create_app(Config(), server, service.tokenizer, service.template, ["tiny"], 0, defaults)
    await chat(other, top_p=0.5)
    assert server.requests[2].sampling == Sampling(temperature=0.6, top_p=0.5, top_k=20)
    await chat(other, temperature=0, top_k=0)
    assert server.requests[3].sampling == Sampling(temperature=0.0, top_k=0)


@pytest.mark.parametrize("temperature", [0, 1e-30, 9e-6])
async def test_w_chat_10_tiny_temperatures_are_greedy(app: App, server: FakeServer, temperature: float) -> None:
    """Below 1e-5 a temperature is 0."""
    await chat(app, temperature=temperature)
    assert server.requests[0].sampling.temperature == 0.0


@pytest.mark.parametrize(("asked", "top_k"), [(-1, 0), (0, 0), (1, 1), (2**63, 2**31 - 1)])
async def test_w_chat_11_top_k(app: App, server: FakeServer, asked: int, top_k: int) -> None:
    """-1 and 0 are off; more than any vocabulary stays in 32 bits."""
    await chat(app, top_k=asked)
    assert server.requests[0].sampling.top_k == top_k


@pytest.mark.parametrize("seed", [0, -1, 2**63 - 1, -(2**63)])
async def test_w_chat_12_seed(app: App, server: FakeServer, seed: int) -> None:
    """Any int64."""
    assert (await chat(app, seed=seed)).status == 200
    assert server.requests[0].seed == seed


@pytest.mark.parametrize(
    ("stop", "strings"), [("a", ("a",)), (["a", "b"], ("a", "b")), ([], ()), (["x"] * 16, ("x",) * 16)]
)
async def test_w_chat_14_stop(app: App, server: FakeServer, stop: object, strings: tuple[str, ...]) -> None:
    """A string or a list of up to 16."""
    assert (await chat(app, stop=stop)).status == 200
    assert server.requests[0].stop == strings


async def test_w_chat_15_ignore_eos(app: App, server: FakeServer) -> None:
    """It reaches the engine."""
    await chat(app, ignore_eos=True)
    await chat(app)
    assert [request.ignore_eos for request in server.requests] == [True, False]


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


async def test_w_chat_19_template_errors(app: App, template: FakeTemplate) -> None:
    """What the template says is wrong, the client is told; templates that give up do not break the server."""
    template.error = BadRequest("roles must alternate", param="messages")
    answer = await chat(app)
    assert (answer.status, answer.error["message"]) == (400, "roles must alternate")
    template.error = RecursionError()
    assert (await chat(app)).status == 400


async def test_w_chat_20_no_second_bos(app: App, server: FakeServer) -> None:
    """The rendered template is encoded as it is; special tokens in it are special."""
    await chat(app, [{"role": "user", "content": "<|im_end|>"}])
    assert server.requests[0].prompts == [[*b"user: ", 258, *b"\n"]]


async def test_w_chat_20_a_real_template(server: FakeServer, tokenizer: Tokenizer) -> None:
    """Rendered by a real template and tokenized as it is."""
    template = ChatTemplate(CHATML, {})
    app = create_app(Config(), server, tokenizer, template, ["tiny"], 0)
    assert (await chat(app, chat_template_kwargs={"self_": 1})).status == 200
    assert server.requests[0].prompts == [[257, *b"user\nHi", 258, *b"\n", 257, *b"assistant\n"]]


async def test_w_chat_21_template_kwargs(app: App, template: FakeTemplate) -> None:
    """They reach the template, but for names that have a field of their own."""
    assert (await chat(app, chat_template_kwargs={"enable_thinking": False})).status == 200
    assert template.kwargs["enable_thinking"] is False
    for name in ("self", "messages", "add_generation_prompt", "tools"):
        assert (await chat(app, chat_template_kwargs={name: 1})).error["param"] == "chat_template_kwargs"


async def test_w_chat_22_continue_final_message(app: App, template: FakeTemplate) -> None:
    """The last message goes on, if it is the assistant's and no new one is asked for."""
    assistant = {"role": "assistant", "content": "The capital"}
    assert (await chat(app)).status == 200
    assert (template.kwargs["add_generation_prompt"], template.kwargs["continue_final_message"]) == (True, False)
    assert (await chat(app, [USER, assistant], continue_final_message=True)).status == 200
    assert (template.kwargs["add_generation_prompt"], template.kwargs["continue_final_message"]) == (False, True)
    both = await chat(app, [USER, assistant], continue_final_message=True, add_generation_prompt=True)
    assert both.error["param"] == "add_generation_prompt"
    assert (await chat(app, continue_final_message=True)).error["param"] == "continue_final_message"


async def test_failure_while_generating(app: App, server: FakeServer) -> None:
    """A request that is not streamed gets the engine's error as its status."""
    server.failure, server.break_at = BadRequest("the worker is gone"), 2
    answer = await chat(app)
    assert answer.status == 400
    assert answer.error["message"] == "the worker is gone"
