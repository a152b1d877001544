"""A whole worker of kernels, step by step, against the plain one: what a GPU runs, but for the recording."""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import cast

import pytest
import torch
from torch import Tensor

from tests.workers import oracle, paged
from tests.workers.driver import Ask, Driver
from toka.wire import Group, Plan, Sampling, pack
from workers import graphs, mixed
from workers.attention.base import Attention
from workers.attention.hydragen import HydragenDecode
from workers.attention.paged import Paged
from workers.attention.paged_torch import PagedTorch
from workers.attention.triton_prefill import TritonPrefill
from workers.batch import assemble_decode
from workers.graphs import Graphs
from workers.head import DeviceHead, TorchHead
from workers.kernels.advance import advance
from workers.kernels.ops import TritonOps
from workers.kernels.sample import Sampler
from workers.kvcache import KVCache
from workers.mixed import Laid, Mixed
from workers.models import decoder
from workers.recording import Recorder
from workers.slots import Slots
from workers.step import Step

SLOTS, BLOCKS, PAGE = 12, 200, 4


class Again(Recorder):
    """Instead of replaying what was recorded, runs it again: what is no part of the recording is not there then."""

    def __init__(self, device: torch.device) -> None:
        self.replayed: set[str] = set()

    def record(self, run: Callable[[], None]) -> torch.cuda.CUDAGraph:
        assert isinstance(run, partial)

        def replay() -> None:
            self.replayed.add(run.func.__name__)
            run()

        return cast(torch.cuda.CUDAGraph, SimpleNamespace(replay=replay))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("qwen3")
    oracle.save("qwen3", folder)
    return folder


def plain(folder: Path) -> tuple[Slots, Step]:
    """In torch, on the CPU."""
    model = paged.load(folder)
    slots = Slots(SLOTS, 40, BLOCKS, PAGE, paged.CPU, model.vocab_size)
    cache = KVCache(model.config, BLOCKS, PAGE, torch.float32, paged.CPU)
    return slots, Step(model, PagedTorch(cache), slots, TorchHead(model, slots))


def fused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Slots, Step]:
    """In kernels, on a device that may be the CPU."""
    monkeypatch.setattr(decoder, "ops_for", TritonOps)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = paged.load(folder, device=device)
    slots = Slots(SLOTS, 40, BLOCKS, PAGE, device, model.vocab_size)
    slots._advance = advance
    cache = KVCache(model.config, BLOCKS, PAGE, torch.float32, device)
    heads = model.config.num_heads
    tiled = TritonPrefill(cache, heads)
    attention: Attention = Paged(cache, tiled, HydragenDecode(cache, heads, 64), tiled)
    assert attention.tiles is not None
    slots.share(attention.tiles)
    return slots, Step(model, attention, slots, DeviceHead(model, slots, Sampler(SLOTS, model.vocab_size, device)))


def asks(kinds: Sequence[Sampling], count: int) -> list[Ask]:
    random = Random(3)
    return [
        Ask(
            prompt=[random.randrange(131) for _ in range(random.randint(1, 20))],
            count=random.randint(1, 4),
            sampling=kinds[index % len(kinds)],
            seed=random.getrandbits(60),
        )
        for index in range(count)
    ]


@pytest.mark.usefixtures("device")
def test_tokens_of_the_plain_worker(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Greedy and sampled in every way, with chunks beside decodes."""
    kinds = (
        Sampling(temperature=0.0),
        Sampling(temperature=1.0),
        Sampling(temperature=0.8, top_k=9, top_p=0.9, min_p=0.02),
        Sampling(temperature=1.0, repetition_penalty=1.4, presence_penalty=0.5),
        Sampling(temperature=0.0, logprobs=3),
    )
    want = Driver(*plain(folder), tokens=24).run(asks(kinds, 6))
    assert Driver(*fused(folder, monkeypatch), tokens=24).run(asks(kinds, 6)) == want


@pytest.mark.usefixtures("device")
def test_tokens_of_recorded_steps(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps that find all they need in static buffers, decodes and mixed ones, small ones and one of too many tokens,
    with padding behind: nothing of a step before shows."""
    kinds = (Sampling(temperature=0.0), Sampling(temperature=1.0))
    want = Driver(*plain(folder), tokens=24).run(asks(kinds, 8))
    monkeypatch.setattr(mixed, "MOST_CHUNKS", 3)
    slots, step = fused(folder, monkeypatch)
    recorded, again = record(slots, step, monkeypatch)
    assert Driver(slots, recorded, tokens=24).run(asks(kinds, 8)) == want
    assert again.replayed == {"run", "run_forward", "run_sample"}


def record(slots: Slots, step: Step, monkeypatch: pytest.MonkeyPatch) -> tuple[Step, Again]:
    """The same step, recorded: decodes of any number of slots, in few sizes; mixed steps of at most 20 tokens."""
    monkeypatch.setattr(graphs, "sizes", lambda most: [1, 4, 8, most])
    model, attention, head = step._model, step._attention, step._head
    assert isinstance(attention, Paged)
    assert isinstance(head, DeviceHead)
    size, again = 64, Again(slots.device)

    def laid(step: Laid) -> Tensor:
        attention.plan_laid(step)
        return model.forward(step.tokens, step.positions, attention)

    steps = Mixed(slots, size, torch.float32, attention.queries, attention.list_tiles, most=20)
    steps.record(again, laid, lambda done, total: None)
    decodes = Graphs(slots, size, torch.float32, SLOTS, attention.tiles)
    decodes.record(
        again,
        forward=lambda rows, shared: step.forward(assemble_decode(rows, slots, None, shared)),
        sample=head.choose,
        replan=lambda rows, bounds: attention.replan(rows, slots.tables, bounds),
        progress=lambda done, total: None,
    )
    sampler = Sampler(SLOTS, model.vocab_size, slots.device)
    return Step(model, attention, slots, DeviceHead(model, slots, sampler, decodes), decodes, steps), again


HOT = Sampling(temperature=1.0)
SHARED = list(range(8))
"""The blocks that `alike` fills."""


def alike(slots: Slots, step: Step, random: Random) -> None:
    """Fill ten slots: all share six blocks, and the first eight of them two more."""
    common = [random.randrange(131) for _ in range(len(SHARED) * PAGE)]
    driver = Driver(slots, step)
    first = driver._admit(0, Ask([*common, 1, 2], 9, HOT), [*SHARED, 8, 9])
    run(slots, step, admits=[first], chunks=pack([0, 0, len(common) + 2]))
    others, chunks = [], []
    for slot in range(1, 10):
        kept = 8 if slot < 8 else 6
        prompt = [*common[: kept * PAGE], *(random.randrange(131) for _ in range(random.randint(1, 9)))]
        own = [10 * slot + place for place in range(10)]
        others.append(driver._admit(slot, Ask(prompt, 9, HOT, seed=slot), [*SHARED[:kept], *own]))
        chunks += [slot, kept * PAGE, len(prompt) - kept * PAGE]
    run(slots, step, admits=others, chunks=pack(chunks))


GROUPS = [Group(id=0, blocks=pack(SHARED[:6])), Group(id=1, blocks=pack(SHARED[6:]), parent=0)]
MEMBERS = pack([number for slot in range(10) for number in (slot, int(slot < 8))])


@pytest.mark.usefixtures("device")
def test_what_is_shared_is_read_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten rows share six blocks, eight of them two more: their tokens are those of rows that share nothing."""
    random = Random(5)
    slots, step = fused(folder, monkeypatch)
    with torch.inference_mode():
        alike(slots, step, random)
        state = slots.lengths.clone(), slots.last.clone()
        rows = list(range(10))
        random.shuffle(rows)
        want = [run(slots, step, decode=pack(rows)) for _ in range(2)]
        assert slots.layout is None
        slots.lengths.copy_(state[0])
        slots.last.copy_(state[1])
        slots.bound[:10] -= 2
        slots.apply(Plan(epoch=0, step=0, groups=GROUPS, members=MEMBERS))
        assert slots.layout is not None
        assert sorted(set(slots.layout.firsts.tolist())) == [6 * PAGE, 8 * PAGE]
        assert [run(slots, step) for _ in range(2)] == want


@pytest.mark.usefixtures("device")
def test_recorded_steps_follow_the_groups(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Groups that change under the same rows, rows that leave, pause and come back: what a step before left in buffers
    does not show, neither as padding nor as what is shared."""
    story: list[dict[str, object]] = [
        {"decode": pack(range(10))},
        {"groups": GROUPS, "members": MEMBERS},
        {},
        {"groups": [Group(id=1, blocks=b"")], "members": pack([n for slot in range(8) for n in (slot, 0)])},
        {"decode": pack([9, 8, 7, 5, 4, 3, 2, 1]), "releases": pack([6])},
        {"decode": pack([9, 8, 7, 5, 4]), "releases": pack([1])},
        {"decode": pack([0, 9, 8, 7, 5, 4, 3, 2])},
    ]
    answers: list[list[list[int]]] = []
    for grouped in (False, True):
        slots, step = fused(folder, monkeypatch)
        tried = record(slots, step, monkeypatch)[0] if grouped else step
        left_out = () if grouped else ("groups", "members")
        shared = []
        with torch.inference_mode():
            alike(slots, step, Random(5))
            answers.append([])
            for fields in story:
                kept = {name: value for name, value in fields.items() if name not in left_out}
                answers[-1].append(run(slots, tried, **kept))
                shared.append(slots.layout is not None)
        assert shared == ([False, True, True, True, True, False, True] if grouped else [False] * 7)
    assert answers[0] == answers[1]


def run(slots: Slots, step: Step, **fields: object) -> list[int]:
    from workers.batch import build

    plan = Plan(epoch=0, step=0, **fields)  # type: ignore[arg-type]  # fields of a plan
    slots.apply(plan)
    ids: list[int] = step.run(build(plan, slots)).ids.tolist()
    return ids
