"""The engine's shell: from a request to text, against a pretend worker on the same event loop."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.fakes import IM_END, write_tiny_model
from toka.config import Config
from toka.core.scheduler import Scheduler
from toka.engine import Engine
from toka.errors import BadRequest, ConfigError, ContextLengthExceeded, RequestError, StartError, Unavailable
from toka.generation import Choice
from toka.model import ModelFolder
from toka.request import Delta, Request, Sampling
from toka.sim.loopback import Loopback
from toka.sim.worker import pretend_tokens
from toka.text.tokenizer import Tokenizer
from toka.wire import Failed, Hello, Loading, Tokens

PROMPT = list(b"Tell me about rivers.")


class Client:
    """A listener that waits."""

    def __init__(self) -> None:
        self.deltas: list[Delta] = []
        self.errors: list[RequestError] = []
        self.calls = 0
        self.woken = asyncio.Event()

    def deliver(self, deltas: list[Delta]) -> None:
        self.calls += 1
        self.deltas += deltas
        self.woken.set()

    def fail(self, error: RequestError) -> None:
        self.errors.append(error)
        self.woken.set()

    def text(self, index: int = 0) -> str:
        return "".join(delta.text for delta in self.deltas if delta.index == index)

    def last(self, index: int = 0) -> Delta:
        return [delta for delta in self.deltas if delta.index == index][-1]

    async def ended(self, choices: int = 1) -> None:
        async with asyncio.timeout(5):
            while not self.errors and sum(1 for delta in self.deltas if delta.finish_reason) < choices:
                self.woken.clear()
                await self.woken.wait()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny"), weights=False)


@contextlib.asynccontextmanager
async def served(
    folder: Path, config: Config | None = None, **loopback: float
) -> AsyncIterator[tuple[Engine, Loopback]]:
    link = Loopback(**loopback)  # type: ignore[arg-type]
    engine = Engine(config or Config(), ModelFolder.load(folder), Tokenizer.load(folder), link)
    running = asyncio.create_task(engine.run())
    await engine.wait_ready()
    try:
        yield engine, link
        if engine.ready and not engine.info()["requests_open"]:
            async with asyncio.timeout(5):
                while engine.info()["blocks_free"] != link.num_blocks:  # noqa: ASYNC110 - steps in flight must land
                    await asyncio.sleep(0)
    finally:
        engine.stop()
        with contextlib.suppress(StartError):
            await running
        assert link.stopped


def request(**changes: object) -> Request:
    base = Request(id="r", prompts=[PROMPT], max_tokens=20, seed=5, ignore_eos=True)
    return replace(base, **changes)  # type: ignore[arg-type]


def tokens(count: int, choice: int = 0, seed: int = 5, prompt: int = len(PROMPT)) -> list[int]:
    positions = prompt + np.arange(count)
    ids: list[int] = pretend_tokens(np.full(count, seed), np.full(count, choice), positions, 256).tolist()
    return ids


def text(ids: list[int]) -> str:
    return bytes(ids).decode("utf-8", "replace")


async def test_an_answer(folder: Path) -> None:
    """Not streamed: one delta with everything."""
    async with served(folder) as (engine, _):
        client = Client()
        engine.submit(request(), client)
        await client.ended()
        assert client.deltas == [Delta(0, text(tokens(20)), 20, "length", None, tokens(20))]


async def test_a_stream_says_the_same(folder: Path) -> None:
    """The pieces of a stream join to the text of the same request without a stream."""
    async with served(folder) as (engine, _):
        client = Client()
        engine.submit(request(stream=True), client)
        await client.ended()
        assert client.text() == text(tokens(20))
        assert [token for delta in client.deltas for token in delta.ids] == tokens(20)
        assert client.last().finish_reason == "length"
        assert client.calls > 5
        assert client.calls == len(client.deltas)


async def test_choices_are_numbered_by_prompt_and_sample(folder: Path) -> None:
    """Choice p · n + i is sample i of prompt p, each with noise of its own, all in as few calls as steps."""
    async with served(folder) as (engine, _):
        client = Client()
        engine.submit(request(prompts=[PROMPT, PROMPT[:5]], n=2), client)
        await client.ended(4)
        assert [client.text(choice) for choice in range(4)] == [
            text(tokens(20, 0)),
            text(tokens(20, 1)),
            text(tokens(20, 2, prompt=5)),
            text(tokens(20, 3, prompt=5)),
        ]


async def test_without_a_seed_answers_differ(folder: Path) -> None:
    """The engine draws one for each request."""
    async with served(folder) as (engine, _):
        clients = [Client(), Client()]
        for client in clients:
            engine.submit(request(seed=None), client)
        for client in clients:
            await client.ended()
        assert clients[0].text() != clients[1].text()


async def test_an_eos_id_ends_an_answer(folder: Path) -> None:
    """It counts as a token and has no text."""
    async with served(folder, vocab_size=IM_END + 1) as (engine, _):
        client = Client()
        engine.submit(request(ignore_eos=False, max_tokens=2000), client)
        await client.ended()
        ids = pretend_tokens(np.full(2000, 5), np.zeros(2000, dtype=int), len(PROMPT) + np.arange(2000), IM_END + 1)
        eos = engine._folder.eos_ids
        count = int(np.flatnonzero(np.isin(ids, eos))[0]) + 1
        assert client.last().tokens == count
        assert client.last().finish_reason == "stop"
        assert client.last().stop_reason is None


@pytest.mark.parametrize("stream", [False, True])
async def test_a_stop_string_ends_an_answer(folder: Path, stream: bool) -> None:
    """It is not part of the text, the token that completes it is the last one counted, and nothing runs on."""
    async with served(folder) as (engine, link):
        whole = tokens(400)
        ascii_pair = next(i for i in range(20, 400) if all(32 < token < 127 for token in whole[i : i + 2]))
        stop = text(whole[ascii_pair : ascii_pair + 2])
        first = text(whole).find(stop)
        client = Client()
        engine.submit(request(stream=stream, stop=(stop,), max_tokens=1000), client)
        await client.ended()
        assert client.text() == text(whole)[:first]
        assert client.last().finish_reason == "stop"
        assert client.last().stop_reason == stop
        assert len(link.plans) < 500


async def test_cancelling_gives_everything_back(folder: Path) -> None:
    """No call of the listener follows, and its blocks are free."""
    async with served(folder) as (engine, _):
        client = Client()
        generation = engine.submit(request(stream=True, n=3, max_tokens=1000), client)
        await client.woken.wait()
        generation.cancel()
        calls = client.calls
        other = Client()
        engine.submit(request(), other)
        await other.ended()
        assert client.calls == calls
        assert engine.info()["requests_open"] == 0
        generation.cancel()


@pytest.mark.parametrize(("weights", "before"), [(None, (10, 30)), ("few:4", (3, 14))], ids=["equal", "few:4"])
async def test_a_tenants_few_requests_do_not_wait_behind_anothers_many(
    folder: Path, weights: str | None, before: tuple[int, int]
) -> None:
    """They end after about as many of the other's as the weights say, not after all 400."""
    async with served(folder, Config(max_seqs_per_forward=2, tenant_weights=weights)) as (engine, _):
        many, few = Client(), Client()
        engine.submit(request(n=400, max_tokens=4, tenant="many"), many)
        engine.submit(request(n=20, max_tokens=4, tenant="few"), few)
        await few.ended(20)
        done = len(many.deltas)
        await many.ended(400)
    assert before[0] <= done <= before[1]


async def test_cached_tokens_are_counted_once_a_prompt(folder: Path) -> None:
    """What the second request finds of the first."""
    async with served(folder) as (engine, _):
        first, second = Client(), Client()
        one = engine.submit(request(n=4), first)
        await first.ended(4)
        two = engine.submit(request(n=4), second)
        await second.ended(4)
        assert one.cached_tokens == 0
        assert two.cached_tokens == 16


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"prompts": [[1] * 3000]}, ContextLengthExceeded),
        ({"prompts": [[1] * 2048], "max_tokens": None}, ContextLengthExceeded),
        ({"max_tokens": 2048}, ContextLengthExceeded),
        ({"prompts": [[]]}, BadRequest),
        ({"prompts": [[256]]}, BadRequest),
        ({"prompts": [[-1]]}, BadRequest),
    ],
)
async def test_what_cannot_be_served_is_refused_at_the_door(
    folder: Path, changes: dict[str, object], error: type[Exception]
) -> None:
    """Before any work is done, and nothing is left behind."""
    async with served(folder) as (engine, link):
        with pytest.raises(error):
            engine.submit(request(**changes), Client())
        await asyncio.sleep(0.01)
        assert not link.plans
        assert engine.info()["requests_open"] == 0


async def test_w_err_5_clamp_takes_what_is_left_after_each_prompt(folder: Path) -> None:
    """Prompts of one request have answers of different lengths: the room of each, and never more than asked for."""
    prompts = [[1] * 2040, PROMPT, [2] * 2030]
    async with served(folder) as (engine, _):
        client = Client()
        engine.submit(request(prompts=prompts, max_tokens=12, clamp=True), client)
        await client.ended(3)
        assert [client.last(index).tokens for index in range(3)] == [8, 12, 12]
        assert {client.last(index).finish_reason for index in range(3)} == {"length"}
        with pytest.raises(ContextLengthExceeded):
            engine.submit(request(prompts=[PROMPT, [1] * 2048], max_tokens=12, clamp=True), client)


async def test_the_worker_is_told_how_to_score(folder: Path) -> None:
    """`logprobs_mode` is part of the terms that a worker joins on."""
    for config in (Config(), Config(logprobs_mode="processed")):
        engine = Engine(config, ModelFolder.load(folder), Tokenizer.load(folder), Loopback())
        assert engine.welcome(Hello(version=1), 1, 0, "r", "p").logprobs_mode == config.logprobs_mode


async def test_a_context_is_never_more_than_the_cache_holds(folder: Path) -> None:
    """So a request that is taken always fits."""
    async with served(folder, Config(kv_cache_num_tokens=512)) as (engine, _):
        assert engine.max_model_len == 512
        client = Client()
        engine.submit(request(max_tokens=None), client)
        await client.ended()
        assert client.last().tokens == 512 - len(PROMPT)


async def test_requests_before_the_worker_is_ready_are_told_so(folder: Path) -> None:
    """503, to try again."""
    engine = Engine(Config(), ModelFolder.load(folder), Tokenizer.load(folder), Loopback())
    with pytest.raises(Unavailable):
        engine.submit(request(), Client())
    assert not engine.ready


async def test_draining_ends_what_runs_and_takes_nothing_new(folder: Path) -> None:
    """SIGTERM: the running ones end, then the engine stops."""
    link = Loopback()
    engine = Engine(Config(), ModelFolder.load(folder), Tokenizer.load(folder), link)
    running = asyncio.create_task(engine.run())
    await engine.wait_ready()
    client = Client()
    engine.submit(request(), client)
    draining = asyncio.create_task(engine.drain())
    await asyncio.sleep(0)
    with pytest.raises(Unavailable) as refused:
        engine.submit(request(), Client())
    assert refused.value.code == "draining"
    await client.ended()
    await draining
    await running
    assert client.text() == text(tokens(20))


async def test_a_lost_worker_is_told_to_everybody(folder: Path) -> None:
    """503 to all that wait, and the engine ends with the reason."""
    link = Loopback()
    engine = Engine(Config(), ModelFolder.load(folder), Tokenizer.load(folder), link)
    running = asyncio.create_task(engine.run())
    await engine.wait_ready()
    link.hold()
    client = Client()
    engine.submit(request(), client)
    await asyncio.sleep(0.01)
    link.break_off("the cable was cut")
    with pytest.raises(StartError, match="the cable was cut"):
        await running
    assert client.errors[0].status == 503
    assert not engine.ready


async def test_results_that_do_not_fit_end_the_engine(folder: Path) -> None:
    """A worker that answers for a step that nobody planned cannot be trusted."""
    async with served(folder) as (engine, _):
        engine.heard(Tokens(epoch=1, step=9, ids=b""))
        assert not engine.ready


async def test_a_worker_that_fails_says_why(folder: Path) -> None:
    """Its reason is the engine's."""
    link = Loopback()
    engine = Engine(Config(), ModelFolder.load(folder), Tokenizer.load(folder), link)
    running = asyncio.create_task(engine.run())
    await engine.wait_ready()
    engine.heard(Failed(epoch=1, rank=0, reason="model.safetensors is cut short"))
    with pytest.raises(StartError, match=r"model\.safetensors is cut short"):
        await running


@pytest.mark.parametrize(("owner", "method"), [(Scheduler, "plan"), (Scheduler, "apply"), (Choice, "whole")])
async def test_an_error_of_its_own_ends_the_engine(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, owner: type, method: str
) -> None:
    """Its callbacks have nobody to raise to: whoever waits must hear of it, and the process must end."""
    engine = Engine(Config(), ModelFolder.load(folder), Tokenizer.load(folder), Loopback())
    running = asyncio.create_task(engine.run())
    await engine.wait_ready()

    def fail(*arguments: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(owner, method, fail)
    client = Client()
    engine.submit(request(), client)
    with pytest.raises(StartError, match="ZeroDivisionError"):
        await asyncio.wait_for(running, 5)
    assert client.errors[0].status == 503
    assert "Traceback" in caplog.text


async def test_loading_is_passed_on(folder: Path) -> None:
    """For a progress bar."""
    heard: list[tuple[str, int, int]] = []
    engine = Engine(
        Config(),
        ModelFolder.load(folder),
        Tokenizer.load(folder),
        Loopback(),
        on_loading=lambda phase, done, total: heard.append((phase, done, total)),
    )
    engine.heard(Loading(epoch=1, rank=0, phase="weights", done=3, total=9))
    assert heard == [("weights", 3, 9)]


def test_a_context_longer_than_the_models_is_refused(folder: Path) -> None:
    """The model would answer nonsense beyond it."""
    with pytest.raises(ConfigError, match="2048 tokens"):
        Engine(Config(max_model_len=4096), ModelFolder.load(folder), Tokenizer.load(folder), Loopback())


async def test_a_context_longer_than_the_cache_is_refused_when_asked_for(folder: Path) -> None:
    """Asked for and impossible is an error; by default the context is what fits."""
    config = Config(max_model_len=1024, kv_cache_num_tokens=512)
    engine = Engine(config, ModelFolder.load(folder), Tokenizer.load(folder), Loopback())
    with pytest.raises(StartError, match="max_model_len=1024"):
        await engine.run()


async def test_many_requests_under_memory_pressure(folder: Path) -> None:
    """Oversubscribed and preempted, each request gets the answer it would get alone."""
    async with served(folder, Config(kv_cache_num_tokens=640, max_seqs_per_forward=16, look_ahead=False)) as (
        engine,
        _,
    ):
        clients = []
        for index in range(40):
            client = Client()
            engine.submit(request(seed=index, max_tokens=100 + index, stream=index % 2 == 0), client)
            clients.append(client)
        for index, client in enumerate(clients):
            await client.ended()
            assert client.text() == text(tokens(100 + index, seed=index))
        assert int(str(engine.info()["preemptions_total"])) > 0


async def test_a_stop_id_ends_an_answer_and_is_named(folder: Path) -> None:
    """Its text is not part of the answer; `stop_reason` says which it was."""
    whole = tokens(20)
    for stream in (False, True):
        async with served(folder) as (engine, _):
            client = Client()
            engine.submit(request(stop_ids=(whole[6],), stream=stream), client)
            await client.ended()
            count = whole.index(whole[6]) + 1
            assert client.text() == text(whole[: count - 1])
            assert (client.last().finish_reason, client.last().stop_reason) == ("stop", whole[6])
            assert client.last().tokens == count


async def test_more_stop_ids_than_the_device_knows(folder: Path) -> None:
    """The engine judges every end."""
    async with served(folder) as (engine, _):
        client = Client()
        engine.submit(request(stop_ids=tuple(range(20, 256)), max_tokens=500), client)
        await client.ended()
        first = next(index for index, token in enumerate(tokens(500)) if token >= 20)
        assert client.last().tokens == first + 1
        assert client.last().stop_reason == tokens(500)[first]


async def test_a_stop_string_may_be_left_in(folder: Path) -> None:
    """And before min_tokens it ends nothing."""
    whole = tokens(400)
    pair = next(i for i in range(20, 400) if all(32 < token < 127 for token in whole[i : i + 2]))
    stop = text(whole[pair : pair + 2])
    first = text(whole).find(stop)
    async with served(folder) as (engine, _):
        client = Client()
        engine.submit(request(stop=(stop,), include_stop=True, max_tokens=400), client)
        await client.ended()
        assert client.text() == text(whole)[:first] + stop
        late = Client()
        engine.submit(request(stop=(stop,), max_tokens=pair + 4, sampling=Sampling(min_tokens=pair + 3)), late)
        await late.ended()
        assert late.last().finish_reason == "length"


@pytest.mark.parametrize("stream", [False, True])
async def test_scores_come_with_the_tokens_they_are_of(folder: Path, stream: bool) -> None:
    """One for each token, and one for each token of the prompt but the first; preemption doubles none."""
    sampling = Sampling(logprobs=2, prompt_logprobs=1)
    config = Config(kv_cache_num_tokens=512, max_tokens_per_forward=16, look_ahead=False)
    async with served(folder, config) as (engine, _):
        clients = [Client() for _ in range(6)]
        for client in clients:
            engine.submit(request(stream=stream, sampling=sampling, max_tokens=200), client)
        for client in clients:
            await client.ended()
            ids = [id for delta in client.deltas for id in delta.ids]
            scores = [score for delta in client.deltas if delta.scores for score in delta.scores.tolist()]
            prompt = [score for delta in client.deltas if delta.prompt_scores for score in delta.prompt_scores.tolist()]
            assert ids == tokens(200)
            assert [score.logprob for score in scores] == [-id / 256 for id in ids]
            assert [score.top for score in scores] == [[(id, -id / 256), (id + 1, -(id + 1) / 256)] for id in ids]
            assert [score.logprob for score in prompt] == [-id / 256 for id in PROMPT[1:]]
            assert [score.rank for score in prompt] == [1] * (len(PROMPT) - 1)
            assert all(len(delta.ids) == len(delta.scores or ()) for delta in client.deltas)
        assert int(str(engine.info()["preemptions_total"])) > 0


async def test_an_answer_of_one_token_has_its_prompts_scores(folder: Path) -> None:
    """It ends with the very step that fills the prompt, and with the scores that this step brings."""
    async with served(folder) as (engine, _):
        client = Client()
        engine.submit(request(max_tokens=1, sampling=Sampling(logprobs=0, prompt_logprobs=0)), client)
        await client.ended()
        prompt, own = client.last().prompt_scores, client.last().scores
        assert prompt is not None
        assert [score.logprob for score in prompt.tolist()] == [-id / 256 for id in PROMPT[1:]]
        assert own is not None
        assert len(own) == 1


async def test_tokens_wait_for_their_text(folder: Path) -> None:
    """A delta brings the tokens whose text it releases, and not those whose text may still become a stop string."""
    whole = tokens(60)
    start = next(i for i in range(5, 60) if all(32 < token < 127 for token in whole[i : i + 2]))
    never = chr(whole[start]) + chr(whole[start + 1]) + "\x00\x00"
    async with served(folder) as (engine, _):
        client = Client()
        engine.submit(request(stop=(never,), stream=True, max_tokens=60), client)
        await client.ended()
        seen = 0
        for delta in client.deltas[:-1]:
            seen += len(delta.ids)
            assert not text(whole[:seen]).endswith((never[:1], never[:2]))
        assert [id for delta in client.deltas for id in delta.ids] == whole


async def test_salts_share_no_prefix(folder: Path) -> None:
    """What one tenant asked is not found by another."""
    async with served(folder) as (engine, _):
        found = []
        for salt in ("a", "a", "b"):
            client = Client()
            generation = engine.submit(request(cache_salt=salt), client)
            await client.ended()
            found.append(generation.cached_tokens)
        assert found == [0, 16, 0]


async def test_b80_two_requests_may_have_one_id(folder: Path) -> None:
    """Each gets its own answer, also when one of them is cancelled; the engine knows requests by themselves."""
    async with served(folder) as (engine, _):
        clients = [Client() for _ in range(4)]
        for number, client in enumerate(clients[:3]):
            generation = engine.submit(request(id="x", seed=number, stream=number == 1), client)
        generation.cancel()
        engine.submit(request(id="x", seed=3), clients[3])
        for number in (0, 1, 3):
            await clients[number].ended()
            assert clients[number].text() == text(tokens(20, seed=number))
        assert not clients[2].deltas


@pytest.mark.parametrize("clamp", [False, True])
async def test_b78_what_can_never_fit_the_cache_blocks_nobody(folder: Path, clamp: bool) -> None:
    """A prompt, or a prompt and its answer, beyond the cache is refused or cut at once; those behind it are served."""
    async with served(folder, Config(kv_cache_num_tokens=512)) as (engine, _):
        client, outgrown = Client(), Client()
        with pytest.raises(ContextLengthExceeded):
            engine.submit(request(prompts=[[1] * 1000], clamp=clamp), Client())
        if clamp:
            engine.submit(request(prompts=[[2] * 400], max_tokens=400, clamp=True), outgrown)
        else:
            with pytest.raises(ContextLengthExceeded):
                engine.submit(request(prompts=[[2] * 400], max_tokens=400), outgrown)
        engine.submit(request(), client)
        await client.ended()
        assert client.text() == text(tokens(20))
        if clamp:
            await outgrown.ended()
            assert (outgrown.last().finish_reason, outgrown.last().tokens) == ("length", 112)
