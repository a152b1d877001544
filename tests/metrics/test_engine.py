"""A scripted run of requests through the engine, with a clock and a worker that a test moves by hand: every value is
known beforehand."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.api.fakes import Heard
from tests.fakes import write_tiny_model
from toka.config import Config
from toka.engine import Engine
from toka.errors import StartError
from toka.metrics.histogram import Histogram
from toka.metrics.page import Page
from toka.metrics.record import Metrics
from toka.metrics.report import Report
from toka.model import ModelFolder
from toka.request import Request
from toka.sim.loopback import Loopback
from toka.text.tokenizer import Tokenizer
from toka.wire import Loading

PROMPT = list(range(40, 80))


class ByHand(Loopback):
    """Its worker answers when it is told to."""

    def __init__(self, **options: int) -> None:
        super().__init__(**options)  # type: ignore[arg-type]
        self.hold()

    def land(self, busy: float = 0.0, gap: float = 0.0) -> None:
        """The results of the oldest plan in flight."""
        assert self._peer is not None
        self._peer.heard(msgspec.structs.replace(self._answers.popleft(), busy=busy, gap=gap))
        self._peer.drained()

    @property
    def waiting(self) -> int:
        """Plans without an answer."""
        return len(self._answers)


class Stand:
    """An engine, its worker and its clock."""

    def __init__(self, folder: Path, config: Config, blocks: int = 64) -> None:
        self.now = 100.0
        self.metrics = Metrics(config, "tiny", lambda: self.now)
        self.link = ByHand(num_blocks=blocks)
        self.engine = Engine(config, ModelFolder.load(folder), Tokenizer.load(folder), self.link, metrics=self.metrics)

    async def turn(self, now: float) -> None:
        """It is `now`, and whatever the engine had put off is done."""
        self.now = now
        for _ in range(3):
            await asyncio.sleep(0)

    def land(self, now: float, busy: float = 0.0, gap: float = 0.0) -> None:
        """A step's results come."""
        self.now = now
        self.link.land(busy, gap)

    def samples(self) -> dict[str, float]:
        """What /metrics says, as `name{label values but for model and engine}`; no buckets."""
        found = {}
        for family in text_string_to_metric_families(Page(self.metrics).take().render().decode()):
            for sample in family.samples:
                if "le" not in sample.labels:
                    own = [sample.labels[name] for name in sample.labels if name not in ("model_name", "engine")]
                    found[sample.name + ("{" + ",".join(own) + "}" if own else "")] = sample.value
        return found


@contextlib.asynccontextmanager
async def standing(folder: Path, blocks: int = 64, **options: object) -> AsyncIterator[Stand]:
    stand = Stand(folder, Config(**options), blocks)  # type: ignore[arg-type]
    running = asyncio.create_task(stand.engine.run())
    await stand.engine.wait_ready()
    try:
        yield stand
    finally:
        stand.engine.stop()
        with contextlib.suppress(StartError):
            await running


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny"), weights=False)


def asking(**changes: object) -> Request:
    fields: dict[str, object] = {"id": "r", "prompts": [PROMPT], "max_tokens": 3, "seed": 5, "ignore_eos": True}
    return Request(**fields | changes)  # type: ignore[arg-type]


def observed(histogram: Histogram) -> tuple[int, float]:
    return histogram.count, histogram.sum


async def test_a_request_from_end_to_end(folder: Path) -> None:
    """Two samples of 40 tokens, of which the second finds 32 in the cache: they arrive at 100, start at 101, and their
    tokens come at 103, 104 and 106."""
    async with standing(folder) as stand:
        stand.engine.submit(asking(n=2), Heard())
        before = stand.samples()
        assert before["toka_num_requests_waiting{online}"] == 2
        assert before["toka_num_requests_running"] == 0
        await stand.turn(101.0)
        during = stand.samples()
        assert during["toka_num_requests_running"] == during["vllm:num_requests_running"] == 2
        assert during["toka_kv_cache_blocks{used}"] == 4
        assert during["toka_kv_cache_blocks{free}"] == 60
        assert during["toka_kv_cache_usage_ratio"] == during["vllm:kv_cache_usage_perc"] == 4 / 64
        stand.land(103.0, busy=0.02)
        stand.land(104.0, busy=0.01, gap=0.001)
        stand.land(106.0, busy=0.01, gap=0.002)
        after = stand.samples()

    def sums(name: str) -> tuple[float, float]:
        return after[f"{name}_count"], after[f"{name}_sum"]

    expected = {
        "time_to_first_token_seconds": (2, 2 * 3.0),
        "inter_token_latency_seconds": (4, 2 * 1.0 + 2 * 2.0),
        "request_time_per_output_token_seconds": (2, 2 * 1.5),
        "e2e_request_latency_seconds": (2, 2 * 6.0),
        "request_queue_time_seconds": (2, 2 * 1.0),
        "request_prefill_time_seconds": (2, 2 * 2.0),
        "request_decode_time_seconds": (2, 2 * 3.0),
        "request_inference_time_seconds": (2, 2 * 5.0),
        "request_prompt_tokens": (2, 80),
        "request_generation_tokens": (2, 6),
        "request_max_num_generation_tokens": (1, 3),
        "request_params_n": (1, 2),
        "request_params_max_tokens": (2, 6),
    }
    for name, value in expected.items():
        assert sums(f"toka_{name}") == pytest.approx(value), name
        assert sums(f"vllm:{name}") == pytest.approx(value), name
    assert sums("toka_step_tokens") == sums("vllm:iteration_tokens_total") == (3, 48 + 2 + 2)
    assert sums("toka_step_gap_seconds") == pytest.approx((3, 0.003))
    assert after["toka_step_duration_seconds_count{prefill}"] == 1
    assert after["toka_step_duration_seconds_sum{prefill}"] == pytest.approx(0.02)
    assert after["toka_step_duration_seconds_count{decode}"] == 2
    assert after["toka_step_duration_seconds_sum{decode}"] == pytest.approx(0.02)
    assert after["toka_step_duration_seconds_count{mixed}"] == 0
    assert after["toka_scheduler_seconds_count"] == 3
    assert {
        "toka_prompt_tokens_total{computed}": 48,
        "toka_prompt_tokens_total{cached}": 32,
        "vllm:prompt_tokens_total": 80,
        "toka_generation_tokens_total": 6,
        "vllm:generation_tokens_total": 6,
        "toka_prefix_cache_queries_total": 80,
        "toka_prefix_cache_hits_total": 32,
        "vllm:prefix_cache_hits_total": 32,
        "toka_request_success_total{length}": 2,
        "vllm:request_success_total{length}": 2,
        "toka_request_success_total{abort}": 0,
        "toka_num_preemptions_total": 0,
        "toka_recomputed_tokens_total": 0,
        "toka_num_requests_running": 0,
        "toka_kv_cache_blocks{used}": 0,
        "toka_kv_cache_blocks{cached}": 2,
        "toka_worker_up{0}": 1,
        "toka_worker_restarts_total": 0,
    }.items() <= after.items()


async def test_streams_that_prefill_beside_others(folder: Path) -> None:
    """A step that does both is mixed, and who decodes in it waited no longer than since the step before."""
    async with standing(folder) as stand:
        stand.engine.submit(asking(stream=True, max_tokens=40), Heard())
        await stand.turn(101.0)
        stand.land(102.0)
        stand.land(102.5)
        stand.engine.submit(asking(stream=True, prompts=[[1, 2, 3]], max_tokens=2), Heard())
        await stand.turn(103.0)
        metrics, landed = stand.metrics, 0
        while stand.link.waiting:
            landed += 1
            stand.land(103.0 + landed, busy=0.5)
        assert metrics.step_duration["mixed"].count == 1
        assert metrics.counts.generated == 42
        assert metrics.inter_token.count == 42 - 2
        assert metrics.inter_token.sum == pytest.approx(metrics.decode.sum)
        assert metrics.finished["length"] == 2


async def test_w_cxl_1_who_hangs_up_is_counted(folder: Path) -> None:
    """What is cancelled ends with `abort`, each sample once: before it starts, or in its middle."""
    async with standing(folder) as stand:
        waiting = stand.engine.submit(asking(n=3), Heard())
        waiting.cancel()
        running = stand.engine.submit(asking(n=2, max_tokens=50), Heard())
        await stand.turn(101.0)
        stand.land(102.0)
        running.cancel()
        running.cancel()
        while stand.link.waiting:
            stand.land(103.0)
        metrics = stand.metrics
        assert metrics.finished == {"stop": 0, "length": 0, "abort": 5, "error": 0}
        assert metrics.counts.generated == 2
        assert observed(metrics.first_token) == (2, 4.0)
        assert metrics.e2e.count == metrics.generation_tokens.count == metrics.longest_generation.count == 0


async def test_a_stop_string_ends_with_stop(folder: Path) -> None:
    """The engine's own ends are counted like the worker's, with the tokens that are told."""
    async with standing(folder) as stand:
        plain = Heard()
        stand.engine.submit(asking(max_tokens=30), plain)
        await stand.turn(101.0)
        while stand.link.waiting:
            stand.land(102.0)
        text = plain.deltas[0].text
        place = next(i for i in range(5, len(text)) if text[i] != "\ufffd" and text.index(text[i]) == i)
        stopped = Heard()
        stand.engine.submit(asking(max_tokens=30, stop=(text[place],)), stopped)
        await stand.turn(101.0)
        while stand.link.waiting:
            stand.land(102.0)
        assert stopped.deltas[-1].finish_reason == "stop"
        assert stand.metrics.finished == {"stop": 1, "length": 1, "abort": 0, "error": 0}
        assert observed(stand.metrics.generation_tokens) == (2, 30 + stopped.deltas[-1].tokens)


async def test_a_lost_worker(folder: Path) -> None:
    """What it ran ends with `error`; the gauges fall to nothing, and the counters stay."""
    async with standing(folder) as stand:
        client = Heard()
        stand.engine.submit(asking(n=2), client)
        await stand.turn(101.0)
        stand.land(102.0)
        stand.link.break_off("gone")
        assert client.errors
        samples = stand.samples()
        assert samples["toka_request_success_total{error}"] == 2
        assert samples["toka_worker_up{0}"] == samples["toka_num_requests_running"] == 0
        assert samples["toka_generation_tokens_total"] == 2


async def test_a_preempted_sequence_waited_for_its_next_token(folder: Path) -> None:
    """Each token but a sequence's first has a latency, also the one that comes after a preemption; a sequence starts
    and begins once, however often it is preempted."""
    async with standing(folder, blocks=12, look_ahead=False, max_tokens_per_forward=256) as stand:
        stand.engine.submit(asking(prompts=[[1] * 8, [2] * 8, [3] * 8], max_tokens=90), Heard())
        now = 101.0
        await stand.turn(now)
        while stand.link.waiting:
            now += 1
            stand.land(now)
        metrics = stand.metrics
        assert metrics.counts.preemptions > 0
        assert metrics.counts.recomputed > 0
        assert metrics.counts.generated == 270
        assert metrics.finished["length"] == 3
        assert metrics.queue.count == metrics.prefill.count == metrics.first_token.count == 3
        assert metrics.inter_token.count == 270 - 3
        # From its first token to its last a sequence has waited exactly for the tokens between.
        assert metrics.inter_token.sum == pytest.approx(metrics.decode.sum)
        assert metrics.counts.computed + metrics.counts.cached == 24


async def test_hydragen_is_counted(folder: Path) -> None:
    """Groups as they are, and the tokens that their steps need not read again."""
    options = {"use_hydragen": True, "hydragen_min_group_size": 2, "hydragen_min_prefix_len": 16}
    async with standing(folder, **options) as stand:
        stand.engine.submit(asking(n=4, max_tokens=3), Heard())
        await stand.turn(101.0)
        assert stand.samples()["toka_hydragen_groups"] == 1
        while stand.link.waiting:
            stand.land(102.0)
        samples = stand.samples()
        # Two steps decode, in which three of four members do not read two blocks.
        assert samples["toka_hydragen_shared_tokens_total"] == 2 * 3 * 32
        assert samples["toka_hydragen_groups"] <= 1


async def test_lanes(folder: Path) -> None:
    """Who waits is told by lane; vLLM's name has both."""
    async with standing(folder) as stand:
        stand.engine.submit(asking(n=2), Heard())
        stand.engine.submit(asking(n=3, priority=1 << 20), Heard())
        samples = stand.samples()
        assert samples["toka_num_requests_waiting{online}"] == 2
        assert samples["toka_num_requests_waiting{batch}"] == 3
        assert samples["vllm:num_requests_waiting"] == 5


def test_startup_has_its_phases() -> None:
    """Each phase lasts until the next begins, whatever is told of it; a worker that joins anew starts anew."""
    times = iter((10.0, 12.0, 13.0, 15.0, 16.0, 20.0, 20.5, 30.0))
    metrics = Metrics(Config(), "tiny", lambda: next(times))
    metrics.phase("launch")
    metrics.joined()
    for phase in ("weights", "weights", "graphs", "warm-up", None):
        metrics.phase(phase)
    assert metrics.startup == {"launch": 2.0, "join": 1.0, "weights": 3.0, "graphs": 4.0, "warm-up": 0.5}
    assert metrics.restarts == 0
    metrics.joined()
    assert metrics.restarts == 1
    assert metrics.startup == {}


async def test_the_engine_tells_of_phases(folder: Path) -> None:
    """What a worker says of its start is a phase until it is ready."""
    stand = Stand(folder, Config())
    stand.engine.heard(Loading(epoch=1, rank=0, phase="weights", done=0, total=1))
    stand.now = 107.0
    stand.engine.heard(Loading(epoch=1, rank=0, phase="graphs", done=0, total=1))
    assert stand.samples()["toka_startup_seconds{weights}"] == 7.0


async def test_the_line_in_the_log(folder: Path) -> None:
    """Rates since the last line, and silence when nothing runs."""
    async with standing(folder) as stand:
        report = Report(stand.metrics)
        assert report.line() is None
        stand.engine.submit(asking(n=2, max_tokens=40), Heard())
        await stand.turn(104.0)
        stand.land(104.0, busy=1.0)
        assert report.line() == (
            "2 running, 0 waiting; 20 tokens/s in, 0 out; KV cache 6% used, 40% of prompts cached, 0 preempted"
        )
        while stand.link.waiting:
            stand.land(106.0)
        assert report.line() == "0 running, 0 waiting; 0 tokens/s in, 39 out; KV cache 0% used, 0 preempted"
        stand.now = 110.0
        assert report.line() is None
