"""W-CHAT-19 to 22 and 24: the chat template, through the API."""

from collections.abc import Callable
from typing import Any

import pytest

from tests.api.fakes import USER, FakeServer, FakeTemplate, chat, complete
from tests.fakes import CHATML
from toka.api.app import App, create_app
from toka.config import Config
from toka.errors import BadRequest
from toka.text.template import ChatTemplate
from toka.text.tokenizer import Tokenizer

Served = Callable[..., App]


@pytest.fixture
def served(server: FakeServer, tokenizer: Tokenizer) -> Served:
    """An application with a real template."""

    def served(source: str, **options: Any) -> App:
        return create_app(Config(**options), server, tokenizer, ChatTemplate(source, {}), ["tiny"], 0)

    return served


def prompt(server: FakeServer) -> str:
    """What the last request was rendered to."""
    [ids] = server.requests[-1].prompts
    return bytes(ids).decode()


async def test_w_chat_19_template_errors(app: App, template: FakeTemplate) -> None:
    """What the template says is wrong, the client is told; templates that give up do not break the server."""
    template.error = BadRequest("roles must alternate", param="messages")
    answer = await chat(app)
    assert (answer.status, answer.error["message"]) == (400, "roles must alternate")
    template.error = RecursionError()
    assert (await chat(app)).status == 400


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("{{ raise_exception('Conversation roles must alternate') }}", "Conversation roles must alternate"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ messages[7].content.x }}", "no element 7"),
    ],
)
async def test_w_chat_19_a_real_template(served: Served, server: FakeServer, source: str, says: str) -> None:
    """Its own words, or what it trips over in the sandbox, are a 400 of the messages."""
    answer = await chat(served(source))
    assert (answer.status, answer.error["param"]) == (400, "messages")
    assert says in answer.error["message"]
    assert server.requests == []


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


async def test_w_chat_22_no_new_header(served: Served, server: FakeServer) -> None:
    """The prompt ends right behind the text that goes on."""
    plain = CHATML.replace("<|im_start|>", "[").replace("<|im_end|>", "]")
    messages = [USER, {"role": "assistant", "content": "The capital"}]
    assert (await chat(served(plain), messages, continue_final_message=True)).status == 200
    assert prompt(server) == "[user\nHi]\n[assistant\nThe capital"
    assert (await chat(served(plain), messages, add_generation_prompt=False)).status == 200
    assert prompt(server) == "[user\nHi]\n[assistant\nThe capital]\n"


async def test_w_chat_21_unknown_kwargs_are_harmless(served: Served, server: FakeServer) -> None:
    """A template takes what it knows."""
    assert (await chat(served("{{ style }}:"), chat_template_kwargs={"style": "x", "other": [1]})).status == 200
    assert prompt(server) == "x:"


SWITCH = "{% if enable_thinking is defined %}{{ 'on' if enable_thinking else 'off' }}{% endif %}:"
DEGREES = (
    "{% if reasoning_effort is not defined %}{% set reasoning_effort = 'medium' %}{% endif %}{{ reasoning_effort }}:"
)
BOTH = "{{ reasoning_effort | default('medium') }} {{ thinking | default(true) }}:"


@pytest.mark.parametrize(
    ("source", "effort", "rendered"),
    [
        *((SWITCH, None, ":"), (SWITCH, "none", "off:"), (SWITCH, "minimal", "on:"), (SWITCH, "high", "on:")),
        *((DEGREES, None, "medium:"), (DEGREES, "low", "low:"), (DEGREES, "none", "none:")),
        *((BOTH, "none", "none False:"), (BOTH, "xhigh", "xhigh True:")),
    ],
)
async def test_w_chat_21_reasoning_effort(
    served: Served, server: FakeServer, source: str, effort: str | None, rendered: str
) -> None:
    """A degree for templates that know degrees, on or off for those that know a switch."""
    assert (await chat(served(source), reasoning_effort=effort)).status == 200
    assert prompt(server) == rendered


async def test_w_chat_21_kwargs_go_first(served: Served, server: FakeServer) -> None:
    """What is said in the template's own words is what counts."""
    fields: dict[str, Any] = {"reasoning_effort": "none", "chat_template_kwargs": {"enable_thinking": True}}
    assert (await chat(served(SWITCH), **fields)).status == 200
    assert prompt(server) == "on:"


async def test_w_chat_21_models_that_do_not_reason(served: Served, server: FakeServer) -> None:
    """An effort that would change nothing is refused, as by OpenAI; so is an unknown one, and a completion's."""
    for effort in ("none", "low"):
        error = (await chat(served(CHATML), reasoning_effort=effort)).error
        assert (error["param"], error["code"]) == ("reasoning_effort", "unsupported_parameter")
        assert "`tiny`" in error["message"]
    error = (await chat(served(SWITCH), reasoning_effort="much")).error
    assert (error["param"], error["code"]) == ("reasoning_effort", "invalid_value")
    error = (await complete(served(SWITCH), "x", reasoning_effort="low")).error
    assert (error["param"], error["code"]) == ("reasoning_effort", "unknown_parameter")
    assert server.requests == []


async def test_w_chat_24_template_of_a_request(served: Served, server: FakeServer) -> None:
    """It is code: refused, unless the server was told to trust requests with it."""
    fields = {"chat_template": "mine: {{ messages[0].content }}"}
    error = (await chat(served(CHATML), **fields)).error
    assert (error["param"], error["code"]) == ("chat_template", "unsupported_parameter")
    assert "trust_request_chat_template=T" in error["message"]
    assert server.requests == []
    trusting = served(CHATML, trust_request_chat_template=True)
    assert (await chat(trusting, **fields)).status == 200
    assert prompt(server) == "mine: Hi"
    assert (await chat(trusting, chat_template=SWITCH, reasoning_effort="none")).status == 200
    assert prompt(server) == "off:"
    broken = (await chat(trusting, chat_template="{% for %}")).error
    assert (broken["param"], broken["code"]) == ("chat_template", "invalid_value")
