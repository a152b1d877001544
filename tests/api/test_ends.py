"""How answers end, through the whole engine with a pretend worker: the same on both endpoints, streamed or not."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.api.fakes import post
from tests.fakes import IM_END, IM_START, SPECIAL, TINY_VOCAB, write_tiny_model
from toka.api.app import App, create_app
from toka.config import Config
from toka.engine import Engine
from toka.model import ModelFolder
from toka.sim.loopback import Loopback
from toka.sim.worker import pretend_tokens
from toka.text.template import ChatTemplate
from toka.text.tokenizer import Tokenizer

SEED = 5
NAMES = {id: name for name, id in SPECIAL.items()}
BODIES: dict[str, dict[str, Any]] = {
    "completions": {"prompt": "Tell me about rivers.", "logprobs": 0},
    "chat/completions": {"messages": [{"role": "user", "content": "Tell me about rivers."}], "logprobs": True},
}
EVERY_WAY = [(path, stream) for path in BODIES for stream in (False, True)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny"), weights=False)


@contextlib.asynccontextmanager
async def serving(folder: Path, **options: Any) -> AsyncIterator[tuple[App, Loopback]]:
    """The API before an engine whose worker makes its tokens up: any id of the vocabulary, special ones too."""
    link = Loopback(vocab_size=TINY_VOCAB)
    tokenizer, config = Tokenizer.load(folder), Config(**options)
    engine = Engine(config, ModelFolder.load(folder), tokenizer, link)
    running = asyncio.create_task(engine.run())
    await engine.wait_ready()
    try:
        yield create_app(config, engine, tokenizer, ChatTemplate.load(folder), ["tiny"], 0), link
    finally:
        engine.stop()
        await running


@dataclass
class Choice:
    """One answer, however it came."""

    texts: list[str] = field(default_factory=list)
    """Its pieces."""
    ids: list[int] = field(default_factory=list)
    entries: list[tuple[str, list[int] | None]] = field(default_factory=list)
    """Each token's name, and its bytes where the endpoint tells them."""
    finish: str | None = None
    stop: str | int | None = None

    @property
    def text(self) -> str:
        return "".join(self.texts)

    def take(self, sent: dict[str, Any]) -> None:
        message = sent.get("message") or sent.get("delta")
        text = sent["text"] if message is None else message.get("content")
        assert self.finish is None, "nothing follows the end"
        if text:
            self.texts.append(text)
        self.ids += sent.get("token_ids", [])
        if logprobs := sent["logprobs"]:
            self.entries += [(one["token"], one["bytes"]) for one in logprobs.get("content", [])]
            self.entries += [(token, None) for token in logprobs.get("tokens", [])]
        self.finish, self.stop = sent["finish_reason"], sent.get("stop_reason")


async def ask(app: App, path: str, stream: bool, **fields: Any) -> tuple[list[Choice], dict[str, Any]]:
    """The choices and the usage of a request with a seed, token ids and log-probabilities."""
    body = BODIES[path] | {"seed": SEED, "return_token_ids": True} | fields
    if stream:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    answer = await post(app, path, body)
    assert answer.status == 200, answer.content
    choices: dict[int, Choice] = {}
    sent = answer.events if stream else [answer.json]
    for part in sent:
        for one in part["choices"]:
            choices.setdefault(one["index"], Choice()).take(one)
    return [choices[index] for index in sorted(choices)], sent[-1]["usage"]


def made_up(prompt: int, count: int, choice: int = 0) -> list[int]:
    """What the worker samples after a prompt of so many tokens."""
    ids: list[int] = pretend_tokens(
        np.full(count, SEED), np.full(count, choice), prompt + np.arange(count), TINY_VOCAB
    ).tolist()
    return ids


def spelling(ids: list[int], special: bool = False) -> str:
    """The text of ids."""
    pieces = (bytes([id]) if id < 256 else NAMES[id].encode() * special for id in ids)
    return b"".join(pieces).decode("utf-8", "replace")


def pairs(ids: list[int]) -> Iterator[int]:
    """Where two printed letters stand together that stand nowhere before."""
    for at in range(20, len(ids)):
        pair = ids[at : at + 2]
        if all(32 < id < 127 for id in pair) and spelling(pair) not in spelling(ids[: at + 1]):
            yield at


@pytest.mark.parametrize(("path", "stream"), EVERY_WAY)
async def test_w_chat_4_eos(folder: Path, path: str, stream: bool) -> None:
    """It ends an answer with `stop` and no stop_reason. It is counted (W-CHAT-7) and has an entry, of no text."""
    async with serving(folder) as (app, _):
        [choice], usage = await ask(app, path, stream, max_tokens=2000)
        ids = made_up(usage["prompt_tokens"], 2000)
        ids = ids[: ids.index(IM_END) + 1]
        assert (choice.finish, choice.stop) == ("stop", None)
        assert choice.ids == ids
        assert choice.text == spelling(ids[:-1])
        assert usage["completion_tokens"] == len(choice.entries) == len(ids)
        assert usage["total_tokens"] == usage["prompt_tokens"] + len(ids)
        assert choice.entries[-1][0] == ""
        assert choice.entries[-1][1] in ([], None)


@pytest.mark.parametrize(("path", "stream"), EVERY_WAY)
async def test_w_chat_4_stop_string(folder: Path, path: str, stream: bool) -> None:
    """Tokens, entries and usage end with the token that completes it; the text ends before it."""
    async with serving(folder) as (app, _):
        _, usage = await ask(app, path, stream, max_tokens=1)
        whole = made_up(usage["prompt_tokens"], 400)
        at = next(pairs(whole))
        stop = spelling(whole[at : at + 2])
        [choice], usage = await ask(app, path, stream, max_tokens=1000, ignore_eos=True, stop=stop)
        assert (choice.finish, choice.stop) == ("stop", stop)
        assert choice.text == spelling(whole[:at])
        assert choice.ids == whole[: at + 2]
        assert usage["completion_tokens"] == len(choice.entries) == at + 2


@pytest.mark.parametrize(("path", "stream"), EVERY_WAY)
async def test_w_chat_15_stop_token_ids(folder: Path, path: str, stream: bool) -> None:
    """The id that ends an answer is the stop_reason; it is counted, and has an entry but no text."""
    async with serving(folder) as (app, _):
        _, usage = await ask(app, path, stream, max_tokens=1)
        whole = made_up(usage["prompt_tokens"], 400)
        stop = next(id for at, id in enumerate(whole) if at > 10 and 32 < id < 127 and id not in whole[:at])
        ids = whole[: whole.index(stop) + 1]
        [choice], usage = await ask(app, path, stream, max_tokens=1000, ignore_eos=True, stop_token_ids=[stop])
        assert (choice.finish, choice.stop) == ("stop", stop)
        assert choice.text == spelling(ids[:-1])
        assert choice.ids == ids
        assert usage["completion_tokens"] == len(choice.entries) == len(ids)
        assert choice.entries[-1][0] == ""
        assert choice.entries[-1][1] in ([], None)


@pytest.mark.parametrize(("path", "stream"), EVERY_WAY)
async def test_w_chat_4_length(folder: Path, path: str, stream: bool) -> None:
    """The last chunk carries what was withheld: the start of a stop string, and U+FFFD for part of a character."""
    async with serving(folder) as (app, _):
        _, usage = await ask(app, path, stream, max_tokens=1)
        whole = made_up(usage["prompt_tokens"], 400)
        at = next(pairs(whole))
        stop = spelling(whole[at : at + 2]) + "\x00\x00"
        [choice], usage = await ask(app, path, stream, max_tokens=at + 2, ignore_eos=True, stop=stop)
        assert (choice.finish, choice.stop) == ("length", None)
        assert choice.text == spelling(whole[: at + 2])
        assert choice.texts[-1].endswith(stop[:2])
        assert usage["completion_tokens"] == len(choice.entries) == len(choice.ids) == at + 2
        part = next(at for at, id in enumerate(whole) if 0xC2 <= id < 0xF5 and whole[at + 1] < 0x80)
        [choice], _ = await ask(app, path, stream, max_tokens=part + 1, ignore_eos=True)
        assert choice.text == spelling(whole[: part + 1])
        assert choice.texts[-1].endswith("\ufffd")


@pytest.mark.parametrize("stream", [False, True])
async def test_w_chat_4_context_end(folder: Path, stream: bool) -> None:
    """Without max_tokens a chat goes on to the end of the context, and that is `length`."""
    async with serving(folder, max_model_len=128) as (app, _):
        [choice], usage = await ask(app, "chat/completions", stream, ignore_eos=True)
        assert choice.finish == "length"
        assert usage["total_tokens"] == 128
        assert len(choice.ids) == usage["completion_tokens"]


@pytest.mark.parametrize(("path", "stream"), EVERY_WAY)
async def test_w_chat_8_greedy_choices_run_once(folder: Path, path: str, stream: bool) -> None:
    """The worker samples one answer at temperature 0, and n are told and counted. The prompt is counted once."""
    async with serving(folder) as (app, link):
        choices, usage = await ask(app, path, stream, n=3, temperature=0, max_tokens=30, ignore_eos=True)
        assert sum(len(plan.admits) for plan in link.plans) == 1
        assert len(choices) == 3
        assert all(choice == choices[0] for choice in choices)
        assert choices[0].ids == made_up(usage["prompt_tokens"], 30)
        assert usage["completion_tokens"] == 90
        [_], once = await ask(app, path, stream, max_tokens=1)
        assert usage["prompt_tokens"] == once["prompt_tokens"]


@pytest.mark.parametrize(("path", "stream"), EVERY_WAY)
async def test_w_chat_8_choices_are_independent(folder: Path, path: str, stream: bool) -> None:
    """Above temperature 0 choice i draws from a stream of its own, that of (seed, i)."""
    async with serving(folder) as (app, _):
        choices, usage = await ask(app, path, stream, n=3, max_tokens=30, ignore_eos=True)
        assert [choice.ids for choice in choices] == [made_up(usage["prompt_tokens"], 30, index) for index in range(3)]
        assert usage["completion_tokens"] == 90


@pytest.mark.parametrize(("path", "stream"), EVERY_WAY)
async def test_skip_special_tokens_off(folder: Path, path: str, stream: bool) -> None:
    """Special tokens are spelled, in the text and in the entries; the one that ends the answer is not."""
    async with serving(folder) as (app, _):
        _, usage = await ask(app, path, stream, max_tokens=1)
        ids = made_up(usage["prompt_tokens"], 1000)
        shown, _ = await ask(app, path, stream, max_tokens=1000, ignore_eos=True, skip_special_tokens=False)
        hidden, _ = await ask(app, path, stream, max_tokens=1000, ignore_eos=True)
        assert shown[0].text == spelling(ids, special=True)
        assert hidden[0].text == spelling(ids)
        assert [shown[0].entries[at][0] for at, id in enumerate(ids) if id in NAMES] == [
            NAMES[id] for id in ids if id in NAMES
        ]
        assert all(hidden[0].entries[at][0] == "" for at, id in enumerate(ids) if id in NAMES)
        ended, _ = await ask(app, path, stream, max_tokens=1000, skip_special_tokens=False)
        assert ended[0].text == spelling(ids[: ids.index(IM_END)], special=True)


@pytest.mark.parametrize(("path", "stream"), EVERY_WAY)
async def test_skip_special_tokens_off_for_answers_that_are_only_text(folder: Path, path: str, stream: bool) -> None:
    """The same where nothing looks at the tokens before the answer is whole."""
    async with serving(folder) as (app, _):
        fields = {"logprobs": None, "return_token_ids": False, "max_tokens": 1000, "ignore_eos": True}
        [choice], usage = await ask(app, path, stream, skip_special_tokens=False, **fields)
        assert choice.text == spelling(made_up(usage["prompt_tokens"], 1000), special=True)


@pytest.mark.parametrize(("path", "stream"), EVERY_WAY)
async def test_w_chat_14_stop_strings_may_match_special_tokens(folder: Path, path: str, stream: bool) -> None:
    """If they are spelled; what is not in the text cannot be found in it."""
    stop = NAMES[IM_START]
    async with serving(folder) as (app, _):
        _, usage = await ask(app, path, stream, max_tokens=1)
        ids = made_up(usage["prompt_tokens"], 2000)
        ids = ids[: ids.index(IM_START) + 1]
        fields: dict[str, Any] = {"max_tokens": 2000, "ignore_eos": True, "stop": stop}
        [choice], usage = await ask(app, path, stream, skip_special_tokens=False, **fields)
        assert (choice.finish, choice.stop) == ("stop", stop)
        assert choice.text == spelling(ids[:-1], special=True)
        assert usage["completion_tokens"] == len(ids)
        [choice], _ = await ask(app, path, stream, **fields)
        assert choice.finish == "length"
