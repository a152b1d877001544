"""What a worker holds between plans, after each kind of delta."""

import pytest
import torch

from tests.workers.arithmetic import admit
from toka.wire import Admit, Plan, Sampling, pack
from workers.slots import BadPlan, Slots, unpack

SPARE = 16


@pytest.fixture
def slots() -> Slots:
    return Slots(max_slots=4, max_blocks=6, num_blocks=SPARE, page_size=4, device=torch.device("cpu"), vocab_size=97)


def apply(slots: Slots, **fields: object) -> None:
    slots.apply(Plan(epoch=0, step=0, **fields))  # type: ignore[arg-type]  # each test gives fields of a plan


def row(slots: Slots, slot: int) -> list[int]:
    return [int(block) for block in slots.tables[slot]]


def test_an_admit_fills_the_row_of_its_slot(slots: Slots) -> None:
    """Blocks, stop ids and sampling parameters go to the device, padded with the spare block and with -1."""
    apply(
        slots,
        admits=[
            Admit(
                slot=2,
                ids=pack([5, 6, 7]),
                blocks=pack([9, 3]),
                stops=pack([1, 2]),
                seed=-(2**63),
                choice=11,
                sampling=Sampling(temperature=0.5, top_k=40, top_p=0.9),
            ),
            admit(0, [1], []),
        ],
    )
    assert row(slots, 2) == [9, 3] + [SPARE] * 4
    assert row(slots, 0) == [SPARE] * 6
    assert slots.stops[2].tolist() == [1, 2] + [-1] * 7
    assert (int(slots.seed[2]), int(slots.choice[2]), int(slots.top_k[2])) == (-(2**63), 11, 40)
    assert slots.temperature.tolist()[:4] == [0.0, 1.0, 0.5, 1.0]
    assert slots.top_p.tolist()[:4] == pytest.approx([1.0, 1.0, 0.9, 1.0])


def test_appends_extend_rows_in_their_order(slots: Slots) -> None:
    """Several blocks of one slot, mixed with another's, keep the order in which they came."""
    apply(slots, admits=[admit(1, [1], [0]), admit(3, [1], [])])
    apply(slots, appends=pack([3, 7, 1, 5, 3, 6, 1, 4, 3, 2]))
    apply(slots, appends=pack([1, 8]))
    assert row(slots, 1) == [0, 5, 4, 8] + [SPARE] * 2
    assert row(slots, 3) == [7, 6, 2] + [SPARE] * 3
    assert slots.blocks.tolist() == [0, 4, 0, 3]


def test_a_slot_is_given_on_within_one_plan(slots: Slots) -> None:
    """Releases come first, then admits, then appends: the next owner finds nothing of the one before."""
    apply(slots, admits=[admit(1, [1] * 9, [0, 1, 2], stops=[3], top_k=5)])
    slots.dead[1], slots.lengths[1], slots.last[1] = True, 9, 4
    apply(slots, releases=pack([1]), admits=[admit(1, [2], [7])], appends=pack([1, 8]))
    assert row(slots, 1) == [7, 8] + [SPARE] * 4
    assert slots.stops[1].tolist() == [-1] * 9
    assert (bool(slots.dead[1]), int(slots.lengths[1]), int(slots.last[1]), int(slots.top_k[1])) == (False, 0, 0, 0)


def test_the_roster_stays_until_another_comes(slots: Slots) -> None:
    """`decode=None` means the slots of the plan before, and costs nothing: the very same tensors."""
    apply(slots, admits=[admit(slot, [1], [slot]) for slot in range(3)])
    slots.prefilled(unpack(pack([0, 1, 2])))
    apply(slots, decode=pack([2, 0]))
    before = slots.decode
    apply(slots)
    assert slots.decode is before
    assert before.slots.tolist() == [2, 0]
    apply(slots, decode=b"")
    assert slots.decode.slots.tolist() == []


@pytest.mark.parametrize(
    ("fields", "greedy_only", "plain"),
    [
        ({"temperature": 0.0, "top_k": 3}, True, True),
        ({"temperature": 1.0}, False, True),
        ({"temperature": 1.0, "top_k": 3}, False, False),
        ({"temperature": 1.0, "top_p": 0.5}, False, False),
    ],
)
def test_the_host_knows_how_rows_are_sampled(
    slots: Slots, fields: dict[str, float], greedy_only: bool, plain: bool
) -> None:
    """So the sampler may take its short ways without asking the device."""
    apply(slots, admits=[admit(0, [1], [0]), admit(1, [1], [1], **fields)])
    both = unpack(pack([0, 1]))
    roster = slots.roster(both, torch.from_numpy(both))
    assert (roster.greedy_only, roster.plain) == (greedy_only, plain)


def test_it_prints_its_state(slots: Slots) -> None:
    """One line for a person who looks into a worker."""
    apply(slots, admits=[admit(0, [1], [0]), admit(1, [1], [1])])
    slots.prefilled(unpack(pack([1])))
    apply(slots, decode=pack([1]))
    assert repr(slots) == "<Slots 2 of 4 held, 1 prefilled, 1 decoding>"


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"releases": pack([0])}, "releases a slot that is free"),
        ({"releases": pack([1, 1])}, "releases a slot that is free"),
        ({"releases": pack([4])}, "slot outside 0 … 3"),
        ({"releases": b"abc"}, "no rows of 1 int32"),
        ({"admits": [admit(1, [1], [2])]}, "slot that is taken"),
        ({"admits": [admit(0, [1], [2]), admit(0, [1], [3])]}, "slot that is taken"),
        ({"admits": [admit(-1, [1], [2])]}, "slot outside 0 … 3"),
        ({"admits": [admit(0, [], [2])]}, "without tokens"),
        ({"admits": [admit(0, [1], [2], stops=range(10))]}, "more than 9 stop ids"),
        ({"admits": [admit(0, [1], [2], allowed=pack([97]))]}, "allowed outside 0 … 96"),
        ({"admits": [admit(0, [1], [2], bias_ids=pack([3]))]}, "1 ids have 0 biases"),
        ({"admits": [admit(0, [97], [2], presence_penalty=1.0)]}, "token outside 0 … 96"),
        ({"admits": [admit(0, [1], [SPARE])]}, "block outside 0 … 15"),
        ({"admits": [admit(0, [1], range(7))]}, "more than 6 blocks"),
        ({"appends": pack([1, -1])}, "block outside 0 … 15"),
        ({"appends": pack([0, 1])}, "block to a slot that is free"),
        ({"appends": pack([1, 2, 3])}, "no rows of 2 int32"),
        ({"decode": pack([1])}, "has not been prefilled"),
        ({"decode": pack([2, 2])}, "decodes twice"),
        ({"decode": pack([2]), "releases": pack([2])}, "has not been prefilled"),
        ({"decode": None, "releases": pack([2])}, "has not been prefilled"),
    ],
)
def test_a_plan_that_makes_no_sense_is_refused(slots: Slots, fields: dict[str, object], words: str) -> None:
    """Slot 1 holds a prompt and slot 2 decodes; nothing that contradicts it gets through to the device."""
    apply(slots, admits=[admit(1, [1], [0]), admit(2, [1], [1])])
    slots.prefilled(unpack(pack([2])))
    apply(slots, decode=pack([2]))
    with pytest.raises(BadPlan, match=words):
        apply(slots, **fields)
