"""Groups of sequences with common beginnings: kept as they come and go, and never wrong."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from toka.core.blocks import Ints
from toka.core.hydragen import NO_GROUP, Groups, common
from toka.wire import unpack


def row(*blocks: int) -> Ints:
    return np.array(blocks, dtype=np.int32)


class Mirror:
    """What a worker knows: groups by id, and the group of each sequence, from the news alone."""

    def __init__(self, groups: Groups) -> None:
        self.groups = groups
        self.blocks: dict[int, list[int]] = {}
        self.parent: dict[int, int] = {}
        self.of: dict[int, int] = {}

    def hear(self) -> int:
        """Take the news in; returns how many sequences were told another group."""
        groups, members = self.groups.news()
        for group in groups:
            if not group.blocks:
                del self.blocks[group.id], self.parent[group.id]
            else:
                assert group.id not in self.blocks
                self.blocks[group.id], self.parent[group.id] = unpack(group.blocks), group.parent
        self.of.update(members)
        return len(members)

    def prefix(self, group: int) -> list[int]:
        parent = self.parent[group]
        return (self.prefix(parent) if parent != NO_GROUP else []) + self.blocks[group]

    def all(self) -> dict[int, tuple[list[int], list[int]]]:
        found: dict[int, tuple[list[int], list[int]]] = {}
        for group in self.blocks:
            inside = {group} | {child for child, parent in self.parent.items() if parent == group}
            found[group] = (self.prefix(group), sorted(seat for seat, own in self.of.items() if own in inside))
        return found


def test_enough_sequences_with_a_long_common_beginning_are_a_group() -> None:
    """From `min_size` members on, and not before."""
    groups = Groups(min_blocks=2, min_size=3)
    mirror = Mirror(groups)
    for seat in range(3):
        assert not groups.all()
        groups.join(seat, row(1, 2, 3, 10 + seat))
        mirror.hear()
    assert list(groups.all().values()) == [([1, 2, 3], [0, 1, 2])]
    assert mirror.all() == groups.all()


def test_a_short_common_beginning_is_no_group() -> None:
    """It costs more than it saves."""
    groups = Groups(min_blocks=3, min_size=2)
    for seat in range(4):
        groups.join(seat, row(1, 2, 10 + seat, 20 + seat))
    groups.news()
    assert not groups.all()


def test_a_group_ends_when_too_few_are_left() -> None:
    """And those who are left are told that they are in none."""
    groups = Groups(min_blocks=1, min_size=2)
    mirror = Mirror(groups)
    for seat in range(2):
        groups.join(seat, row(1, 2))
    mirror.hear()
    groups.leave(0)
    del mirror.of[0]
    mirror.hear()
    assert mirror.of == {1: NO_GROUP}
    assert mirror.all() == {}


def test_two_levels() -> None:
    """One system prompt for all, and several samples of each question behind it."""
    groups = Groups(min_blocks=2, min_size=3)
    mirror = Mirror(groups)
    for question in range(2):
        for sample in range(3):
            groups.join(10 * question + sample, row(1, 2, 3, *range(100 * question + 50, 100 * question + 56)))
    mirror.hear()
    found = sorted(groups.all().values())
    assert found == [
        ([1, 2, 3], [0, 1, 2, 10, 11, 12]),
        ([1, 2, 3, *range(50, 56)], [0, 1, 2]),
        ([1, 2, 3, *range(150, 156)], [10, 11, 12]),
    ]
    assert mirror.all() == groups.all()


def test_a_newcomer_may_shorten_what_is_common() -> None:
    """The group is another then; who agreed on more is a branch."""
    groups = Groups(min_blocks=2, min_size=3)
    mirror = Mirror(groups)
    for seat in range(3):
        groups.join(seat, row(*range(10)))
    mirror.hear()
    groups.join(3, row(0, 1, 2, 77))
    mirror.hear()
    assert sorted(groups.all().values()) == [([0, 1, 2], [0, 1, 2, 3]), ([*range(10)], [0, 1, 2])]
    assert mirror.all() == groups.all()


def test_one_more_member_is_one_line_of_news() -> None:
    """A large group that stays what it is costs nothing when it grows or shrinks."""
    groups = Groups(min_blocks=2, min_size=3)
    mirror = Mirror(groups)
    for seat in range(500):
        groups.join(seat, row(1, 2, 3))
    mirror.hear()
    groups.join(500, row(1, 2, 3))
    groups.leave(7)
    assert mirror.hear() == 1


def spared(groups: Groups) -> int:
    """Blocks that are not read, counted one by one: a member reads its innermost group's, as one reader for all."""
    outer_of: dict[int, int] = {}
    total = 0
    for prefix, members in sorted(groups.all().values(), key=lambda group: len(group[0])):
        outer = outer_of.get(members[0], 0)
        total += (len(members) - 1) * (len(prefix) - outer)
        outer_of.update(dict.fromkeys(members, len(prefix)))
    return total


BLOCKS = st.lists(st.integers(0, 2), min_size=1, max_size=14)


@given(data=st.data(), steps=st.integers(1, 60), min_blocks=st.integers(1, 3), min_size=st.integers(2, 4))
@settings(max_examples=150)
def test_whatever_comes_and_goes_the_groups_are_true(
    data: st.DataObject, steps: int, min_blocks: int, min_size: int
) -> None:
    """The worker's picture is the engine's; every member begins with its group's blocks; levels are as large as they
    must be; and a family that is big enough is always a group."""
    groups = Groups(min_blocks, min_size)
    mirror = Mirror(groups)
    present: dict[int, Ints] = {}
    for seat in range(steps):
        leaves: bool = data.draw(st.booleans())
        if present and leaves:
            gone: int = data.draw(st.sampled_from(sorted(present)))
            groups.leave(gone)
            del present[gone]
            mirror.of.pop(gone, None)
        path: list[int] = data.draw(BLOCKS)
        # The same block number stands for the same content, so a block's number says what lies before it.
        one, name = [], 1
        for choice in path:
            name = name * 3 + choice
            one.append(name)
        present[seat] = row(*one)
        groups.join(seat, present[seat])
        hears: bool = data.draw(st.booleans())
        if hears:
            mirror.hear()
            assert mirror.all() == groups.all()
            assert groups.shared == spared(groups)
            assert groups.count == len(groups.all())
    mirror.hear()
    assert mirror.all() == groups.all()
    assert groups.shared == spared(groups)
    families: dict[int, list[int]] = {}
    for seat, own in present.items():
        if len(own) >= min_blocks:
            families.setdefault(int(own[min_blocks - 1]), []).append(seat)
    for prefix, members in groups.all().values():
        assert len(members) >= min_size
        assert len(prefix) >= min_blocks
        for seat in members:
            assert common(present[seat], row(*prefix)) == len(prefix)
    grouped = {tuple(members) for _, members in groups.all().values()}
    for members in families.values():
        assert (tuple(sorted(members)) in grouped) == (len(members) >= min_size)
