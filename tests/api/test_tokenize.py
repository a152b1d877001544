"""W-TOK: the tokenizer over HTTP; and /load."""

import pytest

from tests.api.fakes import FakeServer, FakeTemplate, call
from toka.api.app import App


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
    assert template.kwargs == {"add_generation_prompt": False, "continue_final_message": False, "x": 1}


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
