"""W-TOK: the tokenizer over HTTP; and /load."""

from pathlib import Path

import pytest
import tokenizers
from tokenizers import processors

from tests.api.fakes import FakeServer, FakeTemplate, call
from tests.fakes import IM_START, write_byte_tokenizer
from toka.api.app import App, create_app
from toka.config import Config
from toka.text.tokenizer import Tokenizer


async def test_w_tok_1_prompt(app: App) -> None:
    """Ids, how many, and the names that the vocabulary gives them if wanted."""
    body = (await call(app, "POST", "/tokenize", {"prompt": "hi<|im_end|>", "model": "tiny"})).json
    assert body == {"count": 3, "max_model_len": 2048, "tokens": [104, 105, 258], "token_strs": None}
    body = (await call(app, "POST", "/tokenize", {"prompt": " a", "return_token_strs": True})).json
    assert body["token_strs"] == ["Ġ", "a"]
    assert (await call(app, "POST", "/tokenize", {"prompt": ""})).json["count"] == 0


async def test_w_tok_1_messages(app: App, template: FakeTemplate) -> None:
    """Messages go through the chat template, as in a chat."""
    message = {"role": "user", "content": "Hi"}
    body = {"messages": [message], "add_generation_prompt": False, "chat_template_kwargs": {"x": 1}}
    answer = await call(app, "POST", "/tokenize", body)
    assert bytes(answer.json["tokens"]) == b"user: Hi\n"
    assert template.kwargs == {
        **{"add_generation_prompt": False, "continue_final_message": False, "x": 1},
        "tools": None,
    }


async def test_w_tok_1_tools_and_open_messages(app: App, server: FakeServer, template: FakeTemplate) -> None:
    """All that shapes a prompt of messages reaches the template; an empty list of tools is none."""
    tool = {"type": "function", "function": {"name": "f"}}
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "The"}]
    body = {"messages": messages, "tools": [tool], "continue_final_message": True}
    assert (await call(app, "POST", "/tokenize", body)).status == 200
    assert template.kwargs == {"tools": [tool], "add_generation_prompt": False, "continue_final_message": True}
    assert (await call(app, "POST", "/tokenize", {"messages": messages[:1], "tools": []})).status == 200
    assert template.kwargs == {"tools": None, "add_generation_prompt": True, "continue_final_message": False}
    assert server.requests == []


async def test_w_tok_1_as_in_a_chat(app: App, server: FakeServer) -> None:
    """The ids are those that a chat of the same messages runs with."""
    body = {"messages": [{"role": "user", "content": "Hi<|im_end|>"}]}
    tokens = (await call(app, "POST", "/tokenize", body)).json["tokens"]
    assert (await call(app, "POST", "/v1/chat/completions", body)).status == 200
    assert server.requests[0].prompts == [tokens]


async def test_w_tok_1_special_tokens(server: FakeServer, template: FakeTemplate, tmp_path: Path) -> None:
    """add_special_tokens says whether a prompt gets those that the tokenizer adds; it does unless said."""
    folder = write_byte_tokenizer(tmp_path)
    backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    backend.post_processor = processors.TemplateProcessing(
        single="<|im_start|> $A", special_tokens=[("<|im_start|>", IM_START)]
    )
    backend.save(str(folder / "tokenizer.json"))
    app = create_app(Config(), server, Tokenizer.load(folder), template, ["tiny"], 0)
    for more, tokens in (({}, [IM_START, 97]), ({"add_special_tokens": False}, [97])):
        assert (await call(app, "POST", "/tokenize", {"prompt": "a", **more})).json["tokens"] == tokens


async def test_w_tok_1_long(app: App) -> None:
    """A long text, longer than the context too."""
    assert (await call(app, "POST", "/tokenize", {"prompt": "a" * 20_000})).json["count"] == 20_000


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": 5}, "prompt"),
        ("/tokenize", {"prompt": "x", "messages": [{"role": "user", "content": "x"}]}, "messages"),
        ("/tokenize", {"messages": [{"role": "wizard", "content": "x"}]}, "messages[0].role"),
        ("/tokenize", {"prompt": "x", "wings": 2}, "wings"),
        ("/tokenize", [], None),
        ("/tokenize", b"{", None),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": [5, 10**9]}, "tokens[1]"),
        ("/detokenize", {"tokens": [-1]}, "tokens[0]"),
        ("/detokenize", {"tokens": "x"}, "tokens"),
    ],
)
async def test_w_tok_1_refusals(app: App, path: str, body: object, param: str | None) -> None:
    """400, and what is wrong."""
    answer = await call(app, "POST", path, body)
    assert (answer.status, answer.error["param"]) == (400, param)


async def test_w_tok_1_detokenize(app: App) -> None:
    """The inverse, special tokens included."""
    answer = await call(app, "POST", "/detokenize", {"tokens": [104, 0xC3, 0xA9, 258]})
    assert answer.json == {"prompt": "hé<|im_end|>"}


async def test_w_tok_1_unknown_model(app: App) -> None:
    """404, as everywhere."""
    for path, body in (("/tokenize", {"prompt": "x"}), ("/detokenize", {"tokens": []})):
        assert (await call(app, "POST", path, body | {"model": "gpt-5"})).status == 404


async def test_w_tok_2_tokenizer_info(app: App, template: FakeTemplate) -> None:
    """tokenizer_config.json, and the chat template."""
    info = (await call(app, "GET", "/tokenizer_info")).json
    assert info["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert info["eos_token"] == "<|im_end|>"
    assert info["chat_template"] == template.source


async def test_load(app: App, server: FakeServer) -> None:
    """How many requests are open."""
    assert (await call(app, "GET", "/load")).json == {"server_load": len(server.running)}


@pytest.mark.parametrize(
    "field",
    [
        {"tools": [{}]},
        {"add_generation_prompt": True},
        {"continue_final_message": True},
        {"chat_template_kwargs": {"a": 1}},
    ],
)
async def test_a_text_is_no_chat(app: App, field: dict[str, object]) -> None:
    """Fields that only messages have are refused beside a prompt, not ignored."""
    [name] = field
    answer = await call(app, "POST", "/tokenize", {"prompt": "a"} | field)
    assert (answer.status, answer.error["param"], answer.error["code"]) == (400, name, "invalid_value")


@pytest.mark.parametrize("path", ["/tokenize", "/detokenize"])
async def test_w_err_8_small_bodies_are_read_like_all_others(app: App, path: str) -> None:
    """3.0 is an integer, null is absent, and an unknown field is unknown whatever its value is."""
    body = {"prompt": "a"} if path == "/tokenize" else {"tokens": [72.0, 105]}
    assert (await call(app, "POST", path, body | {"model": None})).status == 200
    assert (await call(app, "POST", path, body | {"modle": None})).error["code"] == "unknown_parameter"
