"""What a plan becomes: the tensors of one step."""

from typing import NamedTuple

import pytest
import torch

from tests.workers.arithmetic import admit
from toka.wire import Plan, pack
from workers.batch import Batch, Work, assemble, build
from workers.slots import BadPlan, Slots, unpack

SPARE = 16


@pytest.fixture
def slots() -> Slots:
    """Slot 0 has 7 tokens in the cache, slot 1 has 4; 9 tokens wait for slot 2 and 3 for slot 3. Blocks hold 4."""
    slots = Slots(max_slots=4, max_blocks=6, num_blocks=SPARE, page_size=4, device=torch.device("cpu"), vocab_size=97)
    admits = [admit(0, range(7), [5, 6]), admit(1, range(4), [7, 8])]
    admits += [admit(2, range(20, 29), [3, 1, 2]), admit(3, [90, 91, 92], [9])]
    slots.apply(Plan(epoch=0, step=0, admits=admits, chunks=pack([0, 0, 7, 1, 0, 4])))
    assemble(build(Plan(epoch=0, step=0, chunks=pack([0, 0, 7, 1, 0, 4])), slots), slots)
    assert slots.lengths.tolist() == [7, 4, 0, 0, 0]
    slots.last[:2] = torch.tensor([70, 71])
    return slots


class Built(NamedTuple):
    work: Work
    batch: Batch

    def tables(self) -> list[list[int]]:
        """The blocks of each row, as far as they are its own."""
        return [[block for block in row if block != SPARE] for row in self.batch.tables[self.batch.rows].tolist()]


def step(slots: Slots, chunks: list[int], decode: list[int] | None = None) -> Built:
    plan = Plan(epoch=0, step=1, chunks=pack(chunks), decode=None if decode is None else pack(decode))
    slots.apply(plan)
    work = build(plan, slots)
    return Built(work, assemble(work, slots))


def test_decodes_take_their_last_token_from_the_device(slots: Slots) -> None:
    """A decode row is one token, the one sampled last, behind all that is in the cache."""
    built = step(slots, [], [1, 0])
    batch = built.batch
    assert batch.tokens.tolist() == [71, 70]
    assert batch.positions.tolist() == [4, 7]
    assert batch.writes.tolist() == [8 * 4, 6 * 4 + 3]
    assert batch.lengths.tolist() == [5, 8]
    assert built.tables() == [[7, 8], [5, 6]]
    assert batch.samples.tolist() == [0, 1]
    assert batch.prefilled == len(batch.sizes) == len(batch.ends) == 0
    assert batch.bounds is not None
    assert batch.bounds.tolist() == [5, 8]
    assert batch.rows.tolist() == built.work.roster.slots.tolist() == [1, 0]
    assert slots.lengths[:2].tolist() == [8, 5]


def test_chunks_come_before_decodes(slots: Slots) -> None:
    """Only a chunk that ends its prompt is sampled, and those come first in the roster too."""
    built = step(slots, [2, 4, 3, 3, 0, 3], [0])
    batch = built.batch
    assert batch.tokens.tolist() == [24, 25, 26, 90, 91, 92, 70]
    assert batch.positions.tolist() == [4, 5, 6, 0, 1, 2, 7]
    assert batch.writes.tolist() == [4, 5, 6, 36, 37, 38, 27]
    assert batch.lengths.tolist() == [7, 3, 8]
    assert built.tables() == [[3, 1, 2], [9], [5, 6]]
    assert batch.samples.tolist() == [5, 6]
    assert (batch.sizes.tolist(), batch.ends.tolist(), batch.prefilled) == ([3, 3], [7, 3], 6)
    assert batch.bounds is not None
    assert batch.bounds.tolist() == [8]
    assert batch.rows.tolist() == [2, 3, 0]
    assert slots.lengths.tolist() == [8, 4, 7, 3, 0]
    assert built.work.roster.slots.tolist() == [3, 0]


def test_a_chunk_alone_samples_nothing(slots: Slots) -> None:
    """A prompt in the midst of its prefill has no next token yet."""
    built = step(slots, [2, 0, 4])
    assert built.batch.samples.tolist() == []
    assert built.work.roster.host.tolist() == []
    assert built.batch.tokens.tolist() == [20, 21, 22, 23]


def test_a_prompt_may_begin_behind_a_shared_prefix(slots: Slots) -> None:
    """What another sequence has put into the cache is not run again, only read."""
    built = step(slots, [2, 8, 1])
    assert built.batch.tokens.tolist() == [28]
    assert built.batch.lengths.tolist() == [9]
    assert built.tables() == [[3, 1, 2]]
    assert built.batch.samples.tolist() == [0]


def test_a_dead_row_writes_to_the_spare_block_and_stays(slots: Slots) -> None:
    """The host does not know yet that a sequence has stopped, so its row still runs."""
    slots.dead[0] = True
    built = step(slots, [], [0, 1])
    assert built.batch.writes.tolist() == [SPARE * 4, 8 * 4]
    assert slots.lengths[:2].tolist() == [7, 5]


def test_the_bound_runs_ahead_of_a_dead_row(slots: Slots) -> None:
    """It is known without asking the device, so it grows though the sequence does not."""
    slots.dead[0] = True
    slots.apply(Plan(epoch=0, step=1, appends=pack([0, 10])))
    first = step(slots, [], [0]).batch
    second = step(slots, []).batch
    assert first.bounds is not None
    assert second.bounds is not None
    assert (first.bounds.tolist(), second.bounds.tolist()) == ([8], [9])
    assert second.lengths.tolist() == [8]


def test_a_step_without_rows_is_a_step(slots: Slots) -> None:
    """It has nothing to run and nothing to sample."""
    batch = step(slots, [], []).batch
    assert len(batch.rows) == len(batch.tokens) == len(batch.samples) == 0


@pytest.mark.parametrize(
    ("chunks", "words"),
    [
        ([2, 0, 10], "does not have"),
        ([2, -1, 2], "does not have"),
        ([2, 0, 0], "does not have"),
        ([2, 0, 2, 2, 2, 2], "two chunks of one slot"),
        ([0, 0, 1], "nothing to prefill"),
        ([4, 0, 1], "slot outside 0 … 3"),
        ([4, 0], "no rows of 3 int32"),
    ],
)
def test_chunks_that_make_no_sense_are_refused(slots: Slots, chunks: list[int], words: str) -> None:
    """A chunk names tokens that its slot still has to prefill."""
    with pytest.raises(BadPlan, match=words):
        step(slots, chunks, [])


def test_a_free_slot_is_not_prefilled(slots: Slots) -> None:
    """What was given up has no ids left."""
    slots.apply(Plan(epoch=0, step=1, releases=pack([2])))
    with pytest.raises(BadPlan, match="nothing to prefill"):
        step(slots, [2, 0, 1], [])


def test_no_sequence_outgrows_its_blocks(slots: Slots) -> None:
    """A token without a place would be lost silently: by a chunk, or by a decode whose block did not come."""
    slots.apply(Plan(epoch=0, step=1, releases=pack([3]), admits=[admit(3, range(5), [9])]))
    with pytest.raises(BadPlan, match="beyond its blocks"):
        step(slots, [3, 0, 5], [])
    step(slots, [], [0])
    with pytest.raises(BadPlan, match="beyond its blocks"):
        step(slots, [])


def test_ids_are_kept_only_until_they_are_prefilled(slots: Slots) -> None:
    """Long prompts do not stay in the host's memory."""
    step(slots, [2, 0, 4])
    assert slots.ids[2] is not None
    step(slots, [2, 4, 5])
    assert slots.ids[2] is None
    assert slots.ready[unpack(pack([0, 1, 2]))].all()
