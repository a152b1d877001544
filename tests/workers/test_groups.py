"""What a step shares, as it is laid out for attention, against a plain count of who reads which key."""

from collections import defaultdict
from random import Random

import numpy as np
import pytest

from toka.wire import Group, pack
from workers.groups import MAX_PARTS, BadGroup, Groups, Layout, Tiles

PAGE = 4
NONE = np.zeros((0, 2), np.int64)


def group(id: int, blocks: int, parent: int = -1) -> Group:
    return Group(id=id, blocks=pack(range(blocks)), parent=parent)


def members(**groups: list[int]) -> np.ndarray[tuple[int, ...], np.dtype[np.int64]]:
    """`g3=[1, 2]`: slots 1 and 2 are in group 3."""
    return np.array([[slot, int(name[1:])] for name, slots in groups.items() for slot in slots], np.int64)


def read(layout: Layout) -> dict[int, list[tuple[int, int, int, int]]]:
    """By row: (first key, last key, partial result, the slot whose table is read) of everything it shares."""
    found = defaultdict(list)
    for slot, begin, count, first, last, part in layout.tiles.tolist():
        for row in layout.order[begin : begin + count].tolist():
            found[row].append((first, last, part, slot))
    return found


def check(layout: Layout, slots: list[int], prefixes: dict[int, int]) -> None:
    """Each row's parts cover its prefix without a gap, are numbered from 0, and are read from one of its own."""
    found = read(layout)
    for row, slot in enumerate(slots):
        parts = sorted(found.get(row, []))
        keys = [key for first, last, _, _ in parts for key in range(first, last)]
        assert keys == list(range(prefixes.get(slot, 0)))
        assert sorted(part for _, _, part, _ in parts) == list(range(int(layout.parts[row])))
        assert len(parts) <= MAX_PARTS
        assert layout.firsts[row] == prefixes.get(slot, 0)


def test_nothing_is_shared_without_groups() -> None:
    """Nor by too few rows of a group."""
    groups = Groups(64, PAGE)
    assert groups.layout(np.arange(64), Tiles(8, 4)) is None
    groups.apply([group(0, 3)], members(g0=[1, 2, 3]))
    assert groups.layout(np.arange(64), Tiles(8, 4)) is None


def test_rows_of_one_group_read_its_blocks_together() -> None:
    """In tiles of so many rows at most; the others of the step are left alone."""
    groups = Groups(64, PAGE)
    groups.apply([group(5, 3)], members(g5=list(range(10, 30))))
    slots = [*range(40, 50), *range(10, 30)]
    layout = groups.layout(np.array(slots), Tiles(8, 1))
    assert layout is not None
    assert layout.tiles[:, 2].tolist() == [8, 8, 4]
    assert set(layout.tiles[:, 0]) <= set(range(10, 30))
    check(layout, slots, dict.fromkeys(range(10, 30), 12))


def test_a_branch_reads_behind_its_family() -> None:
    """Two levels: what all share first, and then what the branch does."""
    groups = Groups(64, PAGE)
    groups.apply([group(0, 2), group(1, 5, parent=0)], members(g0=list(range(10)), g1=list(range(10, 20))))
    slots = list(range(20))
    layout = groups.layout(np.array(slots), Tiles(16, 1))
    assert layout is not None
    check(layout, slots, dict.fromkeys(range(10), 8) | dict.fromkeys(range(10, 20), 28))


def test_few_rows_split_long_prefixes() -> None:
    """So that the device is busy; not into pieces too short to be worth it."""
    groups = Groups(64, PAGE)
    groups.apply([group(0, 1000)], members(g0=list(range(8))))
    layout = groups.layout(np.arange(8), Tiles(8, 3))
    assert layout is not None
    assert len(layout.tiles) == 3
    check(layout, list(range(8)), dict.fromkeys(range(8), 4000))
    groups.apply([group(0, 0), group(1, 100)], members(g1=list(range(8))))
    short = groups.layout(np.arange(8), Tiles(8, 3))
    assert short is not None
    assert len(short.tiles) == 1


def test_slots_leave_when_they_are_released() -> None:
    """And a group that is dissolved has nobody in it, once the engine has said where they are now."""
    groups = Groups(64, PAGE)
    groups.apply([group(0, 3)], members(g0=list(range(20))))
    groups.release(np.arange(10))
    layout = groups.layout(np.arange(20), Tiles(32, 1))
    assert layout is not None
    check(layout, list(range(20)), dict.fromkeys(range(10, 20), 12))
    groups.apply([group(0, 0)], np.array([[slot, -1] for slot in range(10, 20)]))
    assert groups.layout(np.arange(20), Tiles(32, 1)) is None


def test_layouts_of_any_groups() -> None:
    """Random families and branches; the number of tiles stays within its bound."""
    for seed in range(50):
        random = Random(seed)
        groups, id = Groups(200, PAGE), 0
        prefixes: dict[int, int] = {}
        free = list(range(200))
        random.shuffle(free)
        for _ in range(random.randint(1, 4)):
            family, blocks = id, random.randint(1, 300)
            groups.apply([group(family, blocks)], NONE)
            id += 1
            rest = [free.pop() for _ in range(random.choice((0, 3, 9, 30)))]
            if rest:
                groups.apply([], np.array([[slot, family] for slot in rest]))
            own: dict[int, tuple[int, ...]] = dict.fromkeys(rest, (blocks,))
            for _ in range(random.randint(0, 3)):
                more = random.randint(1, 200)
                branch = [free.pop() for _ in range(random.choice((2, 8, 20)))] if len(free) > 40 else []
                groups.apply([group(id, more, parent=family)], NONE)
                if branch:
                    groups.apply([], np.array([[slot, id] for slot in branch]))
                own |= dict.fromkeys(branch, (blocks, more) if len(branch) >= 8 else (blocks,))
                id += 1
            if len(own) >= 8:
                prefixes |= {slot: PAGE * sum(size) for slot, size in own.items()}
        slots = list(range(200))
        random.shuffle(slots)
        into = Tiles(random.choice((1, 8, 32)), random.choice((1, 5, 60)))
        layout = groups.layout(np.array(slots), into)
        if layout is None:
            assert not prefixes
        else:
            check(layout, slots, prefixes)
            assert len(layout.tiles) <= into.most(len(slots))


@pytest.mark.parametrize("gone", [0, 1])
def test_a_slot_that_decodes_is_in_no_group_that_is_no_more(gone: int) -> None:
    """Nor in one whose parent is no more; a slot that does not decode may be, until it is released."""
    groups = Groups(64, PAGE)
    groups.apply([group(0, 3), group(1, 2, parent=0)], members(g1=list(range(20))))
    groups.apply([group(gone, 0)], NONE)
    with pytest.raises(BadGroup, match=f"group {gone} is no more"):
        groups.layout(np.arange(30), Tiles(32, 1))
    assert groups.layout(np.arange(20, 40), Tiles(32, 1)) is None


@pytest.mark.parametrize(
    ("groups", "moved"),
    [([group(1, 2, parent=0)], NONE), ([], members(g7=[1])), ([], np.array([[64, -1]]))],
)
def test_groups_that_make_no_sense_are_refused(groups: list[Group], moved: np.ndarray) -> None:
    """A parent, a group or a slot that is not there."""
    with pytest.raises(BadGroup):
        Groups(64, PAGE).apply(groups, moved)
