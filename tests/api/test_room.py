"""A queue that is full: who is refused, when, and what they are told."""

import asyncio
import math
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.api.conftest import serving
from tests.api.fakes import FakeServer, call, post
from tests.api.visits import Visit, until
from tests.fakes import TINY_VOCAB, write_tiny_model
from tests.test_engine import Client, request, served
from toka.api.app import App, create_app
from toka.api.service import Tokenizer as AnyTokenizer
from toka.config import Config
from toka.engine import Engine
from toka.errors import RateLimited, Unavailable
from toka.request import MAX_PRIORITY
from toka.text.template import ChatTemplate
from toka.text.tokenizer import Tokenizer

ONE_SLOT = Config(max_seqs_per_forward=1, max_waiting_requests=2)
BODY = {"prompt": "Tell me.", "max_tokens": 50}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny"), weights=False)


def app_of(engine: Engine, folder: Path, config: Config, tokenizer: AnyTokenizer | None = None) -> App:
    return create_app(config, engine, tokenizer or Tokenizer.load(folder), ChatTemplate.load(folder), ["tiny"], 0)


class Untouched:
    """A tokenizer that must not be asked to do anything."""

    special_ids: frozenset[int] = frozenset()
    vocab_size = 256

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"{name} was asked for")


async def test_w_err_2_queue_full(folder: Path) -> None:
    """One runs, two wait, the fourth is a 429 with `retry-after`; nothing of it was tokenized; the others are
    answered, and then there is room again."""
    config = ONE_SLOT
    async with served(folder, config) as (engine, link):
        app = app_of(engine, folder, config)
        link.hold()
        visits = [Visit(app, "/v1/completions", BODY, {}) for _ in range(3)]
        await until(lambda: engine.info()["sequences_waiting"] == 2)
        late = app_of(engine, folder, config, Untouched())
        for path, body in (
            ("completions", BODY),
            ("completions", BODY | {"stream": True}),
            ("chat/completions", {"messages": [{"role": "user", "content": "Hi"}]}),
            ("chat/completions/batch", [{"messages": [{"role": "user", "content": "Hi"}]}]),
        ):
            answer = await post(late, path, body)
            assert answer.status == 429
            assert int(answer.headers["retry-after"]) >= 1
            assert answer.headers["x-should-retry"] == "true"
            error = answer.error
            assert (error["type"], error["param"]) == ("rate_limit_error", None)
            assert error["code"] == "rate_limit_exceeded"
        link.release()
        assert [(await visit.ended()).status for visit in visits] == [200] * 3
        assert (await post(app, "completions", BODY)).status == 200


async def test_w_http_3_retry_after_is_what_the_queue_takes(folder: Path) -> None:
    """It is the scheduler's own estimate, rounded up: the steps of those before it at the pace of the steps so far."""
    config = ONE_SLOT
    async with served(folder, config) as (engine, link):
        scheduler = engine._scheduler
        assert scheduler is not None
        link.hold()
        clients = [Client() for _ in range(3)]
        generations = [engine.submit(request(max_tokens=1000), client) for client in clients]
        await until(lambda: scheduler.running == 1)
        scheduler.depth.pace = 0.1
        with pytest.raises(RateLimited) as caught:
            engine.check_room("")
        assert caught.value.retry_after == math.ceil(scheduler.until_start(21, 1))
        assert 250 < caught.value.retry_after < 350  # three answers of a thousand tokens, 0.1 s a token
        assert f"about {caught.value.retry_after} seconds" in caught.value.message
        for generation in generations:
            generation.cancel()
        engine.check_room("")
        link.release()


async def test_the_estimate_is_made_once_a_second_at_most(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A flood of refused requests costs next to nothing each."""
    config = ONE_SLOT
    async with served(folder, config) as (engine, link):
        scheduler = engine._scheduler
        assert scheduler is not None
        asked: list[int] = []

        def until_start(prompt: int, limit: int, tenant: str) -> float:
            asked.append(prompt)
            return 7.5

        monkeypatch.setattr(scheduler, "until_start", until_start)
        link.hold()
        generations = [engine.submit(request(), Client()) for _ in range(3)]
        for _ in range(100):
            with pytest.raises(RateLimited):
                engine.check_room("")
        assert len(asked) == 1
        for generation in generations:
            generation.cancel()
        link.release()


async def test_who_comes_with_others_is_not_refused_while_there_are_slots(folder: Path) -> None:
    """Requests of one moment have not started yet, though they could: they are, before anybody is refused."""
    config = Config(max_waiting_requests=1)
    async with served(folder, config) as (engine, _):
        clients = [Client() for _ in range(2)]
        for client in clients:
            engine.check_room("")
            engine.submit(request(), client)
        for client in clients:
            await client.ended()


async def test_tokens_fill_a_queue_too(folder: Path) -> None:
    """max_waiting_tokens counts the prompts of all choices that wait."""
    config = Config(max_seqs_per_forward=1, max_waiting_tokens=40)
    async with served(folder, config) as (engine, link):
        link.hold()
        generations = [engine.submit(request(), Client())]
        await until(lambda: engine.info()["sequences_running"] == 1)
        generations.append(engine.submit(request(), Client()))
        engine.check_room("")  # 21 tokens wait
        generations.append(engine.submit(request(), Client()))
        with pytest.raises(RateLimited, match="2 requests of yours with 42 prompt tokens"):
            engine.check_room("")
        for generation in generations:
            generation.cancel()
        link.release()


async def test_choices_are_one_request_and_a_body_is_taken_whole(folder: Path) -> None:
    """A request of many choices, and a body of many requests, are taken while there is room when they come: they could
    never come in otherwise."""
    config = ONE_SLOT
    async with served(folder, config, vocab_size=TINY_VOCAB) as (engine, _):
        app = app_of(engine, folder, config)
        answer = await post(app, "completions", BODY | {"n": 8})
        assert (answer.status, len(answer.json["choices"])) == (200, 8)
        chats = [{"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3}] * 6
        answer = await post(app, "chat/completions/batch", chats)
        assert (answer.status, len(answer.json)) == (200, 6)


async def test_the_batch_lane_does_not_fill_the_queue(folder: Path) -> None:
    """Work in the background gives way, and refuses nobody."""
    config = ONE_SLOT
    async with served(folder, config) as (engine, link):
        link.hold()
        generations = [engine.submit(request(priority=MAX_PRIORITY + 1), Client()) for _ in range(6)]
        engine.check_room("")
        for generation in generations:
            generation.cancel()
        link.release()


async def test_one_key_does_not_fill_the_queue_of_another(folder: Path) -> None:
    """Each has as much room, and is told its own time."""
    config = ONE_SLOT
    async with served(folder, config) as (engine, link):
        link.hold()
        generations = [engine.submit(request(tenant="key-1"), Client()) for _ in range(3)]
        await asyncio.sleep(0.01)
        with pytest.raises(RateLimited):
            engine.check_room("key-1")
        engine.check_room("key-2")
        for generation in generations:
            generation.cancel()
        link.release()


async def test_without_limits_any_number_waits(folder: Path) -> None:
    """Thousands of samples at once are what this engine is for."""
    async with served(folder, Config(max_seqs_per_forward=1)) as (engine, link):
        link.hold()
        generations = [engine.submit(request(), Client()) for _ in range(500)]
        engine.check_room("")
        for generation in generations:
            generation.cancel()
        link.release()


async def test_w_err_2_draining(folder: Path) -> None:
    """After SIGTERM: 503, `draining` and `retry-after`, on /health too, before anything is tokenized."""
    async with served(folder) as (engine, link):
        link.hold()
        client = Client()
        engine.submit(request(), client)
        await asyncio.sleep(0.01)
        drained = asyncio.create_task(engine.drain())
        await asyncio.sleep(0)
        app = app_of(engine, folder, Config(), Untouched())
        for answer in (await post(app, "completions", BODY), await call(app, "GET", "/health")):
            assert answer.status == 503
            assert int(answer.headers["retry-after"]) >= 1
            error = answer.error
            assert (error["type"], error["param"], error["code"]) == ("server_error", None, "draining")
        link.release()
        await client.ended()
        await drained


async def test_a_full_queue_is_found_again_after_a_long_text(app: App, server: FakeServer) -> None:
    """Who was let in while there was room, and has tokenized since, is refused if there is none any more."""
    asked = 0

    def check_room(tenant: str) -> None:
        nonlocal asked
        asked += 1
        if asked == 2:
            raise RateLimited("full", retry_after=3)

    server.check_room = check_room  # type: ignore[method-assign]
    answer = await post(app, "completions", {"prompt": "word " * 5000, "truncate_prompt_tokens": 5})
    assert (answer.status, answer.headers["retry-after"]) == (429, "3")
    assert server.requests == []


def test_w_http_3_the_client_comes_back(app: App, server: FakeServer) -> None:
    """OpenAI's client waits as long as it is told, and succeeds."""
    refusals = [RateLimited("full", retry_after=1), Unavailable("loading")]

    def check_room(tenant: str) -> None:
        if refusals:
            raise refusals.pop()

    server.check_room = check_room  # type: ignore[method-assign]
    with serving(app) as port, openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none") as client:
        assert client.completions.create(model="tiny", prompt="x").choices[0].text
    assert refusals == []
