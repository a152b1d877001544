"""The lean pretend device: where sequences end, and what a step is said to have done."""

import numpy as np

from toka.sim.cost import Work
from toka.sim.device import FIRST_ID, NO_END, STOP_ID, Device, Sampled
from toka.wire import NO_TOKEN, Admit, Group, Plan, pack, unpack


def device(*ends: int) -> Device:
    return Device(4, 16, np.array(ends, dtype=np.int64), np.zeros(len(ends), dtype=np.int64))


def admit(slot: int, sequence: int, tokens: int, prompt: int | None = None) -> Admit:
    return Admit(slot=slot, ids=pack([0] * tokens), blocks=b"", seed=sequence, prompt_len=prompt or tokens)


def ids(sampled: Sampled) -> list[int]:
    return unpack(sampled.ids)


def test_a_sequence_stops_where_the_workload_says() -> None:
    """Its own id until then, the stop id at that token, nothing afterwards."""
    fake = device(3)
    first = fake.run(Plan(epoch=0, step=0, admits=[admit(2, 0, 5)], chunks=pack([2, 0, 5]), decode=b""))
    rest = [fake.run(Plan(epoch=0, step=step, decode=pack([2]) if step == 1 else None)) for step in (1, 2, 3)]
    assert [ids(one) for one in (first, *rest)] == [[FIRST_ID], [FIRST_ID], [STOP_ID], [NO_TOKEN]]
    assert [one.sequences.tolist() for one in (first, *rest)] == [[0], [0], [0], []]


def test_a_sequence_without_an_end_never_stops() -> None:
    """Its limit ends it."""
    fake = device(NO_END)
    fake.run(Plan(epoch=0, step=0, admits=[admit(0, 0, 1)], chunks=pack([0, 0, 1]), decode=b""))
    assert all(ids(fake.run(Plan(epoch=0, step=step, decode=pack([0])))) == [FIRST_ID] for step in range(1, 2000))


def test_a_chunk_that_does_not_end_the_prompt_samples_nothing() -> None:
    """Its tokens and pairs are work all the same; those from the prefix cache are attended to, not run."""
    fake = device(9)
    part = fake.run(Plan(epoch=0, step=0, admits=[admit(0, 0, 10)], chunks=pack([0, 4, 3]), decode=b""))
    last = fake.run(Plan(epoch=0, step=1, chunks=pack([0, 7, 3])))
    assert ids(part) == []
    assert part.work == Work(0, 0, 3, 5 + 6 + 7)
    assert ids(last) == [FIRST_ID]
    assert last.work == Work(0, 0, 3, 8 + 9 + 10)


def test_a_decoding_sequence_reads_all_that_it_has() -> None:
    """Its prompt and one token more each step; a dead row moves no further."""
    fake = device(2)
    fake.run(Plan(epoch=0, step=0, admits=[admit(0, 0, 10)], chunks=pack([0, 0, 10]), decode=b""))
    kv = [fake.run(Plan(epoch=0, step=step, decode=pack([0]))).work.kv_tokens for step in (1, 2, 3)]
    assert kv == [11, 12, 12]


def test_what_a_group_shares_is_read_once() -> None:
    """Each level for all of its members; a member that has left, or whose group is no more, reads it for itself."""
    fake = device(99, 99, 99)
    admits = [admit(slot, slot, 100) for slot in range(3)]
    chunks = pack([0, 0, 100, 1, 0, 100, 2, 0, 100])
    fake.run(Plan(epoch=0, step=0, admits=admits, chunks=chunks, decode=b""))
    family, branch = Group(id=7, blocks=pack([0, 1])), Group(id=2, blocks=pack([2]), parent=7)
    rows = pack([0, 1, 2])
    members = pack([0, 7, 1, 2, 2, 2])
    both = fake.run(Plan(epoch=0, step=1, decode=rows, groups=[family, branch], members=members))
    assert both.work.kv_tokens == 32 + 16 + (101 - 32) + 2 * (101 - 48)
    left = fake.run(Plan(epoch=0, step=2, members=pack([0, -1])))
    assert left.work.kv_tokens == 32 + 16 + 102 + 2 * (102 - 48)
    gone = [Group(id=7, blocks=b""), Group(id=2, blocks=b"")]
    none = fake.run(Plan(epoch=0, step=3, groups=gone, members=pack([1, -1, 2, -1])))
    assert none.work.kv_tokens == 3 * 103


def test_what_is_prefilled_again_is_counted() -> None:
    """After a preemption: the part of prompt and generated tokens that had been computed, and is not cached."""
    fake = device(20)
    fake.run(Plan(epoch=0, step=0, admits=[admit(0, 0, 10)], chunks=pack([0, 0, 10]), decode=b""))
    fake.run(Plan(epoch=0, step=1, decode=pack([0])))
    fake.run(Plan(epoch=0, step=2))
    # Three tokens came; the third one's own keys and values were never computed. Four tokens are still cached.
    again = fake.run(
        Plan(epoch=0, step=3, releases=pack([0]), admits=[admit(1, 0, 13, 10)], chunks=pack([1, 4, 9]), decode=b"")
    )
    assert again.recomputed == 8
    assert ids(again) == [FIRST_ID]
    after = [ids(fake.run(Plan(epoch=0, step=step, decode=pack([1]))))[0] for step in range(4, 20)]
    assert after.index(STOP_ID) == 15, "it ends at its twentieth token, the four before included"
