"""truncate_prompt_tokens: long prompts are cut only where the client says so, and where."""

from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, processors
from transformers import AutoTokenizer

from tests.api.fakes import USER, FakeServer, FakeTemplate, chat, complete
from tests.fakes import IM_START, write_byte_tokenizer
from toka.api.app import App, create_app
from toka.config import Config
from toka.text.tokenizer import Tokenizer as Ours


@pytest.mark.parametrize(
    ("prompt", "kept"),
    [
        ("abcde", [[*b"cde"]]),
        ("ab", [[*b"ab"]]),
        ([1, 2, 3, 4, 5], [[3, 4, 5]]),
        ([[1, 2, 3, 4], [5]], [[2, 3, 4], [5]]),
        (["abcd", "e"], [[*b"bcd"], [*b"e"]]),
    ],
)
async def test_the_last_tokens_are_kept(app: App, server: FakeServer, prompt: object, kept: list[list[int]]) -> None:
    """Of each prompt by itself; usage counts what is left."""
    body = (await complete(app, prompt, truncate_prompt_tokens=3)).json
    assert server.requests[0].prompts == kept
    assert body["usage"]["prompt_tokens"] == sum(map(len, kept))


async def test_chats_too(app: App, server: FakeServer) -> None:
    """The rendered conversation, from its front."""
    assert (await chat(app, truncate_prompt_tokens=4)).status == 200
    assert bytes(server.requests[0].prompts[0]) == b" Hi\n"


async def test_what_the_tokenizer_puts_in_front_stays(tmp_path: Path, server: FakeServer) -> None:
    """BOS, as transformers keeps it when it cuts from the left."""
    folder = write_byte_tokenizer(tmp_path)
    backend = Tokenizer.from_file(str(folder / "tokenizer.json"))
    backend.post_processor = processors.TemplateProcessing(
        single="<|im_start|> $A", special_tokens=[("<|im_start|>", IM_START)]
    )
    backend.add_special_tokens([AddedToken("<|im_start|>", special=True)])
    backend.save(str(folder / "tokenizer.json"))
    app = create_app(Config(), server, Ours.load(folder), FakeTemplate(), ["tiny"], 0)
    reference: Any = AutoTokenizer.from_pretrained(folder, truncation_side="left")
    for count in (2, 4, 6, 7):
        assert (await complete(app, "abcde", truncate_prompt_tokens=count)).status == 200
        assert server.requests[-1].prompts == [reference("abcde", truncation=True, max_length=count).input_ids]


@pytest.mark.parametrize(("fields", "kept"), [({}, 2032), ({"max_tokens": 48}, 2000), ({"max_tokens": 0}, 2047)])
async def test_minus_one_leaves_room_for_the_answer(
    app: App, server: FakeServer, fields: dict[str, int], kept: int
) -> None:
    """As many tokens as the context holds beside the tokens asked for."""
    body = (await complete(app, "a" * 5000, truncate_prompt_tokens=-1, **fields)).json
    assert body["usage"]["prompt_tokens"] == kept


async def test_minus_one_of_a_chat(app: App, server: FakeServer) -> None:
    """Without a limit of its own, room for one token."""
    long = [USER, {"role": "user", "content": "a" * 5000}]
    assert (await chat(app, long, truncate_prompt_tokens=-1)).json["usage"]["prompt_tokens"] == 2047
    assert (await chat(app, long, truncate_prompt_tokens=-1, max_tokens=100)).json["usage"]["prompt_tokens"] == 1948


@pytest.mark.parametrize(
    ("value", "code"),
    [
        (0, "invalid_value"),
        (-2, "integer_below_min_value"),
        (2033, "integer_above_max_value"),
        (2**70, "integer_above_max_value"),
        ("5", "invalid_type"),
        (True, "invalid_type"),
        (1.5, "invalid_type"),
    ],
)
async def test_values_that_cannot_be(app: App, server: FakeServer, value: object, code: str) -> None:
    """400, with what is wrong."""
    answer = await complete(app, "Hi", truncate_prompt_tokens=value)
    assert (answer.status, answer.error["param"], answer.error["code"]) == (400, "truncate_prompt_tokens", code)
    assert server.requests == []


async def test_an_answer_that_fills_the_context(app: App) -> None:
    """The prompt is not to blame, and cutting it to nothing is no help."""
    error = (await complete(app, "abc", truncate_prompt_tokens=-1, max_tokens=2048)).error
    assert error["code"] == "context_length_exceeded"


async def test_while_the_model_loads(app: App, server: FakeServer) -> None:
    """Nobody knows the context yet."""
    server.max_model_len = 0
    assert (await complete(app, "Hi", truncate_prompt_tokens=5)).status == 503


async def test_nothing_is_cut_unless_asked_for(app: App, server: FakeServer) -> None:
    """Too long is an error."""
    assert (await complete(app, "a" * 5000)).error["code"] == "context_length_exceeded"
    assert (await complete(app, "a" * 2000, truncate_prompt_tokens=None)).status == 200
    assert len(server.requests[0].prompts[0]) == 2000


@pytest.mark.parametrize("stream", [False, True])
async def test_echo_shows_what_is_left(app: App, server: FakeServer, stream: bool) -> None:
    """The text, its tokens and their offsets are those of the prompt that ran."""
    server.script = lambda request, index: ["!", ""]
    answer = await complete(app, "abcde", truncate_prompt_tokens=3, echo=True, logprobs=0, stream=stream)
    choices = [event["choices"][0] for event in answer.events] if stream else answer.json["choices"]
    assert "".join(choice["text"] for choice in choices) == "cde!"
    assert [token for choice in choices for token in choice["logprobs"]["tokens"]] == ["c", "d", "e", "!", ""]
    assert [offset for choice in choices for offset in choice["logprobs"]["text_offset"]] == [0, 1, 2, 3, 4]
