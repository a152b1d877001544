"""What a plan becomes: the tensors of one step."""

import pytest
import torch

from tests.workers.arithmetic import admit
from toka.wire import Plan, pack
from workers.batch import Work, build
from workers.slots import BadPlan, Slots, unpack

SPARE = 16


@pytest.fixture
def slots() -> Slots:
    """Slot 0 has 7 tokens in the cache, slot 1 has 4; 9 tokens wait for slot 2 and 3 for slot 3. Blocks hold 4."""
    slots = Slots(max_slots=4, max_blocks=6, num_blocks=SPARE, page_size=4, device=torch.device("cpu"), vocab_size=97)
    admits = [admit(0, range(7), [5, 6]), admit(1, range(4), [7, 8])]
    admits += [admit(2, range(20, 29), [3, 1, 2]), admit(3, [90, 91, 92], [9])]
    slots.apply(Plan(epoch=0, step=0, admits=admits, chunks=pack([0, 0, 7, 1, 0, 4])))
    build(Plan(epoch=0, step=0, chunks=pack([0, 0, 7, 1, 0, 4])), slots)
    slots.lengths[:2] = torch.tensor([7, 4])
    slots.last[:2] = torch.tensor([70, 71])
    return slots


def step(slots: Slots, chunks: list[int], decode: list[int] | None = None) -> Work:
    plan = Plan(epoch=0, step=1, chunks=pack(chunks), decode=None if decode is None else pack(decode))
    slots.apply(plan)
    return build(plan, slots)


def test_decodes_take_their_last_token_from_the_device(slots: Slots) -> None:
    """A decode row is one token, the one sampled last, behind all that is in the cache."""
    work = step(slots, [], [1, 0])
    batch = work.batch
    assert batch.tokens.tolist() == [71, 70]
    assert batch.positions.tolist() == [4, 7]
    assert batch.writes.tolist() == [8 * 4, 6 * 4 + 3]
    assert batch.starts.tolist() == [0, 1, 2]
    assert batch.lengths.tolist() == [5, 8]
    assert batch.tables.tolist() == [[7, 8], [5, 6]]
    assert batch.samples.tolist() == [0, 1]
    assert (batch.num_prefill_rows, batch.max_length) == (0, 8)
    assert work.rows.tolist() == work.roster.slots.tolist() == [1, 0]
    assert work.after.tolist() == [5, 8]


def test_chunks_come_before_decodes(slots: Slots) -> None:
    """Only a chunk that ends its prompt is sampled, and those come first in the roster too."""
    work = step(slots, [2, 4, 3, 3, 0, 3], [0])
    batch = work.batch
    assert batch.tokens.tolist() == [24, 25, 26, 90, 91, 92, 70]
    assert batch.positions.tolist() == [4, 5, 6, 0, 1, 2, 7]
    assert batch.writes.tolist() == [4, 5, 6, 36, 37, 38, 27]
    assert batch.starts.tolist() == [0, 3, 6, 7]
    assert batch.lengths.tolist() == [7, 3, 8]
    assert batch.tables.tolist() == [[3, 1], [9, SPARE], [5, 6]]
    assert batch.samples.tolist() == [5, 6]
    assert (batch.num_prefill_rows, batch.max_length) == (2, 8)
    assert work.rows.tolist() == [2, 3, 0]
    assert work.after.tolist() == [7, 3, 8]
    assert work.roster.slots.tolist() == [3, 0]


def test_a_chunk_alone_samples_nothing(slots: Slots) -> None:
    """A prompt in the midst of its prefill has no next token yet."""
    work = step(slots, [2, 0, 4])
    assert work.batch.samples.tolist() == []
    assert work.roster.host.tolist() == []
    assert work.batch.tokens.tolist() == [20, 21, 22, 23]


def test_a_prompt_may_begin_behind_a_shared_prefix(slots: Slots) -> None:
    """What another sequence has put into the cache is not run again, only read."""
    work = step(slots, [2, 8, 1])
    assert work.batch.tokens.tolist() == [28]
    assert work.batch.lengths.tolist() == [9]
    assert work.batch.tables.tolist() == [[3, 1, 2]]
    assert work.batch.samples.tolist() == [0]


def test_a_dead_row_writes_to_the_spare_block_and_stays(slots: Slots) -> None:
    """The host does not know yet that a sequence has stopped, so its row still runs."""
    slots.dead[0] = True
    work = step(slots, [], [0, 1])
    assert work.batch.writes.tolist() == [SPARE * 4, 8 * 4]
    assert work.after.tolist() == [7, 5]


def test_the_bound_runs_ahead_of_a_dead_row(slots: Slots) -> None:
    """`max_length` is a bound known without asking the device, so it grows though the sequence does not."""
    slots.dead[0] = True
    slots.apply(Plan(epoch=0, step=1, appends=pack([0, 10])))
    first = step(slots, [], [0]).batch
    second = step(slots, []).batch
    assert (first.max_length, second.max_length) == (8, 9)
    assert second.lengths.tolist() == [8]
    assert second.tables.tolist() == [[5, 6, 10]]


def test_a_step_without_rows_is_a_step(slots: Slots) -> None:
    """It has nothing to run and nothing to sample."""
    work = step(slots, [], [])
    assert len(work.rows) == len(work.batch.tokens) == len(work.batch.samples) == work.batch.max_length == 0


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
