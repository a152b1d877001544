"""Groups of running sequences that begin with the same blocks.

Attention over a prefix that many sequences share can read its keys and values once for all of them (Juravsky et al.,
"Hydragen", 2024). The groups are kept as sequences come and go, never searched for: sequences that agree on their first
`min_blocks` blocks are a family; the blocks that all of a family share are the first level; members that agree on the
block behind these are a branch, whose further common blocks are the second level. A level counts once it has `min_size`
members. It is a radix tree cut off after two forks.

A common prefix is exact when somebody joins. When somebody leaves it may become longer; that is looked at again only
after as many have left as are there, so a sequence costs the same however large its family is.
"""

import numpy as np

from toka.core.blocks import Ints
from toka.wire import Group

NO_GROUP = -1
MIN_BRANCH_BLOCKS = 4
"""Blocks that a branch must share behind its family's to be worth a pass of its own."""


def common(one: Ints, other: Ints) -> int:
    """How many blocks two rows have in common at their beginning."""
    count = min(len(one), len(other))
    differ = np.flatnonzero(one[:count] != other[:count])
    return int(differ[0]) if len(differ) else count


class _Level:
    """Rows that begin alike. `prefix` is what they share behind the first `start` blocks; `group` is its id while it
    counts, and `spared` the blocks that its members, but for one, need not read."""

    __slots__ = ("gone", "group", "prefix", "rows", "spared", "start")

    def __init__(self, start: int) -> None:
        self.start = start
        self.spared = 0
        self.rows: dict[int, Ints] = {}
        self.prefix: Ints = np.zeros(0, dtype=np.int32)
        self.gone = 0
        self.group = NO_GROUP

    def join(self, seat: int, row: Ints) -> bool:
        """Returns whether the prefix has become shorter."""
        tail = row[self.start :]
        length = common(self.prefix, tail) if self.rows else len(tail)
        shorter = bool(self.rows) and length < len(self.prefix)
        self.prefix = tail[:length]
        self.rows[seat] = row
        return shorter

    def leave(self, seat: int) -> bool:
        """Returns whether the prefix has become longer: looked at once as many have left as are there."""
        del self.rows[seat]
        self.gone += 1
        if not self.rows or self.gone < len(self.rows):
            return False
        self.gone = 0
        before = len(self.prefix)
        rows = iter(self.rows.values())
        self.prefix = next(rows)[self.start :]
        for row in rows:
            self.prefix = self.prefix[: common(self.prefix, row[self.start :])]
        return len(self.prefix) != before


class _Family(_Level):
    """The first level, and its branches by the block that follows the common ones."""

    __slots__ = ("branches",)

    def __init__(self) -> None:
        super().__init__(0)
        self.branches: dict[int, _Level] = {}

    def key_of(self, row: Ints) -> int | None:
        """The key of a row's branch; None if the row ends where the common blocks do."""
        end = len(self.prefix)
        return int(row[end]) if len(row) > end else None

    def branch_of(self, row: Ints) -> _Level | None:
        """The branch of a row that is in the family."""
        key = self.key_of(row)
        return None if key is None else self.branches[key]


class Groups:
    """Families by their first blocks, and what the worker has not heard of yet."""

    __slots__ = (
        "_dissolved",
        "_families",
        "_free",
        "_ids",
        "_of",
        "_stale",
        "_told",
        "_touched",
        "min_blocks",
        "min_size",
        "shared",
    )

    def __init__(self, min_blocks: int, min_size: int) -> None:
        """`min_blocks`: blocks that a family shares at least. `min_size`: members from which a level counts."""
        assert min_blocks >= 1
        self.min_blocks = min_blocks
        self.min_size = min_size
        self.shared = 0
        """Blocks that a step of these groups reads less than one without: its members, but for one, times its prefix,
        over all groups."""
        self._families: dict[int, _Family] = {}
        self._of: dict[int, _Family] = {}
        self._told: dict[int, int] = {}
        self._touched: dict[_Level, _Family] = {}
        self._stale: set[int] = set()
        self._dissolved: list[int] = []
        self._free: list[int] = []
        self._ids = 0

    def __repr__(self) -> str:
        return f"<Groups: {len(self._of)} sequences in {len(self._families)} families, {len(self.all())} groups>"

    @property
    def count(self) -> int:
        """Groups that the worker knows, after `news`."""
        return self._ids - len(self._free) - len(self._dissolved)

    def join(self, seat: int, row: Ints) -> None:
        """A sequence starts to decode; `row`: the blocks of its prompt that others may share, in order. One with too
        few of them is in no family."""
        if len(row) < self.min_blocks:
            return
        row = row.copy()
        family = self._families.setdefault(int(row[self.min_blocks - 1]), _Family())
        self._of[seat] = family
        self._stale.add(seat)
        self._touched[family] = family
        if family.join(seat, row):
            self._sort_anew(family)
        else:
            self._into_branch(family, seat, row)

    def leave(self, seat: int) -> None:
        """A sequence gives up its slot. Harmless for one that is in no family."""
        family = self._of.pop(seat, None)
        if family is None:
            return
        self._told.pop(seat, None)
        self._stale.discard(seat)
        row = family.rows[seat]
        key = family.key_of(row)
        if key is not None:
            branch = family.branches[key]
            longer = branch.leave(seat)
            if longer or not branch.rows:
                self._dissolve(branch)
            if not branch.rows:
                del family.branches[key]
                self._touched.pop(branch, None)
            else:
                self._touched[branch] = family
        longer = family.leave(seat)
        self._touched[family] = family
        if longer:
            self._sort_anew(family)
        if not family.rows:
            self._dissolve(family)
            del self._families[int(row[self.min_blocks - 1])]
            del self._touched[family]

    def news(self) -> tuple[list[Group], list[tuple[int, int]]]:
        """What has changed since the last call: groups that are no more (without blocks), groups made, and (seat,
        group) for each sequence that is in another group than before, NO_GROUP for one that is in none."""
        made: list[Group] = []
        # Families first: a branch counts only behind a family that does, and a family's change touches its branches.
        for level, family in list(self._touched.items()):
            if level is family:
                self._weigh(family, len(family.rows) >= self.min_size, made, NO_GROUP)
        for level, family in self._touched.items():
            if level is not family:
                counts = len(level.rows) >= self.min_size and len(level.prefix) >= MIN_BRANCH_BLOCKS
                self._weigh(level, counts and family.group != NO_GROUP, made, family.group)
        for level in self._touched:
            if level.group != NO_GROUP:
                spared = (len(level.rows) - 1) * len(level.prefix)
                self.shared += spared - level.spared
                level.spared = spared
        members: list[tuple[int, int]] = []
        for seat in self._stale:
            group = self._group_of(seat)
            if self._told.get(seat, NO_GROUP) != group:
                self._told[seat] = group
                members.append((seat, group))
        gone = [Group(id=group, blocks=b"") for group in self._dissolved]
        self._free += self._dissolved
        self._touched, self._stale, self._dissolved = {}, set(), []
        return gone + made, members

    def all(self) -> dict[int, tuple[list[int], list[int]]]:
        """Each group's blocks from the first token on, and its members' seats, those of its branches included."""
        found = {}
        for family in self._families.values():
            if family.group != NO_GROUP:
                found[family.group] = (family.prefix.tolist(), sorted(family.rows))
            for branch in family.branches.values():
                if branch.group != NO_GROUP:
                    found[branch.group] = ([*family.prefix.tolist(), *branch.prefix.tolist()], sorted(branch.rows))
        return found

    def _group_of(self, seat: int) -> int:
        """The innermost group of a sequence that is in a family."""
        family = self._of[seat]
        branch = family.branch_of(family.rows[seat])
        return branch.group if branch is not None and branch.group != NO_GROUP else family.group

    def _weigh(self, level: _Level, counts: bool, made: list[Group], parent: int) -> None:
        """Give a level a group if it counts, or take it away if it does not."""
        if not counts:
            self._dissolve(level)
        elif level.group == NO_GROUP:
            level.group = self._new_id()
            self._stale.update(level.rows)
            if isinstance(level, _Family):
                self._touched.update(dict.fromkeys(level.branches.values(), level))
            made.append(Group(id=level.group, blocks=level.prefix.astype("<i4").tobytes(), parent=parent))

    def _dissolve(self, level: _Level) -> None:
        """The level's group, if it has one, is no more, and with a family's those of its branches."""
        if level.group == NO_GROUP:
            return
        self._dissolved.append(level.group)
        self.shared -= level.spared
        level.spared = 0
        self._stale.update(level.rows)
        level.group = NO_GROUP
        if isinstance(level, _Family):
            for branch in level.branches.values():
                self._dissolve(branch)
            self._touched.update(dict.fromkeys(level.branches.values(), level))

    def _new_id(self) -> int:
        if self._free:
            return self._free.pop()
        self._ids += 1
        return self._ids - 1

    def _sort_anew(self, family: _Family) -> None:
        """The family's prefix is another: its group is another, and its members branch elsewhere."""
        self._dissolve(family)
        for branch in family.branches.values():
            self._dissolve(branch)
            self._touched.pop(branch, None)
        family.branches = {}
        for seat, row in family.rows.items():
            self._into_branch(family, seat, row)

    def _into_branch(self, family: _Family, seat: int, row: Ints) -> None:
        key = family.key_of(row)
        if key is None:
            return
        branch = family.branches.setdefault(key, _Level(len(family.prefix)))
        if branch.join(seat, row):
            self._dissolve(branch)
        self._touched[branch] = family
