"""The pretend worker that audits: what it lets pass, and what it does not."""

import numpy as np
import pytest

from toka.sim.worker import PretendWorker, pretend_tokens
from toka.wire import NO_TOKEN, Admit, Plan, pack, unpack

VOCAB = 64


def worker(audit: bool = True) -> PretendWorker:
    """Slot 1 has a prompt of six tokens in blocks 3 and 5, and has sampled its first."""
    fake = PretendWorker(max_slots=4, num_blocks=8, page_size=4, vocab_size=VOCAB, audit=audit)
    fake.run(Plan(epoch=0, step=0, admits=[admit(1, 6, 3, 5)], chunks=pack([1, 0, 6]), decode=b""))
    return fake


def admit(slot: int, tokens: int, *blocks: int, stops: bytes = b"") -> Admit:
    return Admit(slot=slot, ids=pack(range(tokens)), blocks=pack(blocks), seed=9, prompt_len=tokens, stops=stops)


BROKEN = {
    "a step left out": Plan(epoch=0, step=2, decode=pack([1])),
    "a free slot released": Plan(epoch=0, step=1, releases=pack([2]), decode=pack([1])),
    "a taken slot given": Plan(epoch=0, step=1, admits=[admit(1, 4, 0)], decode=pack([1])),
    "a block for a free slot": Plan(epoch=0, step=1, appends=pack([2, 0]), decode=pack([1])),
    "a block that is none": Plan(epoch=0, step=1, appends=pack([1, 8]), decode=pack([1])),
    "a free slot decodes": Plan(epoch=0, step=1, decode=pack([2])),
    "a slot twice": Plan(epoch=0, step=1, decode=pack([1, 1])),
    "a chunk for a free slot": Plan(epoch=0, step=1, chunks=pack([2, 0, 1])),
    "an empty chunk": Plan(epoch=0, step=1, admits=[admit(2, 4, 0)], chunks=pack([2, 0, 0])),
    "a chunk that begins too late": Plan(epoch=0, step=1, admits=[admit(2, 4, 0)], chunks=pack([2, 1, 3])),
    "a chunk longer than the ids": Plan(epoch=0, step=1, admits=[admit(2, 4, 0, 1)], chunks=pack([2, 0, 5])),
    "a chunk without blocks": Plan(epoch=0, step=1, admits=[admit(2, 5, 0)], chunks=pack([2, 0, 5])),
    "nothing to run": Plan(epoch=0, step=1),
}


@pytest.mark.parametrize("plan", BROKEN.values(), ids=BROKEN.keys())
@pytest.mark.parametrize("audit", [True, False])
def test_a_plan_that_breaks_the_protocol_is_caught(plan: Plan, audit: bool) -> None:
    """With the audit and without it."""
    with pytest.raises(AssertionError):
        worker(audit).run(plan)


def test_tokens_depend_on_seed_choice_and_position_alone() -> None:
    """The audit changes nothing; nor does where the sequence sits."""
    expected = pretend_tokens(np.full(3, 9), np.zeros(3, dtype=np.int64), np.arange(6, 9), VOCAB).tolist()
    for audit in (True, False):
        fake = PretendWorker(max_slots=4, num_blocks=8, page_size=4, vocab_size=VOCAB, audit=audit)
        plans = [
            Plan(epoch=0, step=0, admits=[admit(3, 6, 7, 2)], chunks=pack([3, 0, 6]), decode=b""),
            Plan(epoch=0, step=1, decode=pack([3])),
            Plan(epoch=0, step=2),
        ]
        assert [unpack(fake.run(plan).ids) for plan in plans] == [[token] for token in expected]


def test_a_stopped_row_answers_nothing() -> None:
    """From the step after its stop id on."""
    first, second = pretend_tokens(np.full(2, 9), np.zeros(2, dtype=np.int64), np.arange(4, 6), VOCAB).tolist()
    fake = PretendWorker(max_slots=1, num_blocks=2, page_size=4, vocab_size=VOCAB)
    stops = pack([second])
    fake.run(Plan(epoch=0, step=0, admits=[admit(0, 4, 0, 1, stops=stops)], chunks=pack([0, 0, 4]), decode=b""))
    answers = [unpack(fake.run(Plan(epoch=0, step=step, decode=pack([0]))).ids) for step in (1, 2)]
    assert first != second
    assert answers == [[second], [NO_TOKEN]]


def test_the_audit_sees_a_cache_that_holds_another_text() -> None:
    """A prefix said to be cached in a block that was never written."""
    plan = Plan(epoch=0, step=1, admits=[admit(2, 6, 0, 1)], chunks=pack([2, 4, 2]), decode=b"")
    with pytest.raises(AssertionError, match="reads what another sequence wrote"):
        worker().run(plan)
    shared = Plan(epoch=0, step=1, admits=[admit(2, 6, 3, 1)], chunks=pack([2, 4, 2]), decode=b"")
    worker().run(shared)
