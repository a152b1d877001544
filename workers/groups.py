"""Which sequences begin with the same blocks, as the engine says, and what that means for the rows of a step.

Keys that several decoding rows share are attended to by all of them at once (Juravsky et al., "Hydragen:
high-throughput LLM inference with shared prefixes", 2024), in segments: the blocks of a group, behind those of its
parent. A row's segments are the first of its keys; what is behind them is its own.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from toka.wire import Group
from workers.compact import Longs, Upload

Ints = npt.NDArray[np.int32]

MAX_SPLITS = 4
"""Parts that a segment's keys are split into at most, where few rows share it."""
MAX_PARTS = 2 * MAX_SPLITS
"""Partial results of a row at most: it has two segments."""
MIN_ROWS = 8
"""Rows of a step that must share a segment for it to be read apart."""
_ALIGNED = 4
"""Elements of 16 bytes."""
_MIN_SPLIT = 256
"""Keys of a part at least."""


class BadGroup(ValueError):
    """Groups that no engine should send."""


class Shared(NamedTuple):
    """What the D decoding rows of one step share, on the device."""

    tiles: Tensor
    """int32[n, 6]: some rows of a segment, and some of its keys: the slot of one of the rows, whose table names the
    blocks; the first of the rows in `order` and how many they are; the first key and the last (exclusive); and which of
    the rows' partial results this gives. A tile of no rows is none."""
    order: Tensor
    """int32[m]: decoding rows, those of a segment side by side."""
    firsts: Tensor
    """int32[D]: the first key that is a row's own."""
    parts: Tensor
    """int32[D]: partial results of each row."""


class Tiles(NamedTuple):
    """How attention takes what is shared."""

    rows: int
    """Rows of a tile at most."""
    enough: int
    """Tiles that fill the device: where there are fewer, segments are split along their keys."""

    def most(self, count: int) -> int:
        """Tiles that `count` rows make at most."""
        return 2 * (count // self.rows + count // MIN_ROWS) + 2 + self.enough


class Layout(NamedTuple):
    """`Shared` on the host."""

    tiles: Ints
    order: Ints
    firsts: Ints
    parts: Ints

    def send(self, upload: Upload) -> Shared:
        """To the device, in one piece."""
        # Each part begins at a multiple of 16 bytes, or kernels would be compiled once more for those that do not.
        padded = [-(-part.size // _ALIGNED) * _ALIGNED for part in self]
        whole = np.zeros(sum(padded), np.int32)
        for part, end, size in zip(self, np.cumsum(padded), padded, strict=True):
            whole[end - size : end - size + part.size] = part.ravel()
        sent = torch.split(upload(whole), padded)
        tiles, order, firsts, parts = (piece[: part.size] for piece, part in zip(sent, self, strict=True))
        return Shared(tiles.view(-1, 6), order, firsts, parts)


class _Group(NamedTuple):
    start: int
    """Its first key."""
    end: int
    """Behind its last."""
    parent: int


class Groups:
    """The groups of `max_slots` slots, in a cache of `page_size` tokens a block."""

    def __init__(self, max_slots: int, page_size: int) -> None:
        self._page_size = page_size
        self._groups: dict[int, _Group] = {}
        self.of: Longs = np.full(max_slots, -1, np.int64)
        """The innermost group of each slot; -1: none."""

    def __repr__(self) -> str:
        return f"<Groups {len(self._groups)} of {int(np.count_nonzero(self.of >= 0))} slots>"

    def apply(self, groups: Sequence[Group], members: Longs) -> None:
        """Groups that are no more or new, and slots that go into one, int64[n, 2]. Raises BadGroup."""
        for group in groups:
            size = len(group.blocks) // 4 * self._page_size
            if not size:
                self._groups.pop(group.id, None)
                continue
            above = self._groups.get(group.parent)
            if group.parent >= 0 and (above is None or above.parent >= 0):
                raise BadGroup(f"group {group.id} lies in {group.parent}, which is no group of the first level")
            start = above.end if above is not None else 0
            self._groups[group.id] = _Group(start, start + size, group.parent)
        if len(members):
            slots, ids = members.T
            if slots.min() < 0 or slots.max() >= len(self.of):
                raise BadGroup(f"slot outside 0 … {len(self.of) - 1}")
            if not set(ids.tolist()) <= {-1, *self._groups}:
                raise BadGroup("a slot is in a group that is not there")
            self.of[slots] = ids

    def release(self, slots: Longs) -> None:
        """These slots leave their groups."""
        self.of[slots] = -1

    def layout(self, slots: Longs, into: Tiles) -> Layout | None:
        """What a step shares that decodes `slots`, int64[D]; None: nothing. Raises BadGroup if one of them is in a
        group that is no more."""
        inner = self.of[slots]
        ids = np.unique(inner[inner >= 0])
        if not len(ids):
            return None
        own = {int(id): np.flatnonzero(inner == id) for id in ids}
        # A first-level group has the rows that are in no branch of it as well as those of its branches.
        segments: dict[int, list[Longs]] = {}
        for id, members in own.items():
            segments.setdefault(id, []).append(members)
            parent = self._held(id).parent
            if parent >= 0:
                segments.setdefault(parent, []).append(members)
        chosen = [(self._held(id), np.concatenate(parts)) for id, parts in segments.items()]
        chosen = [(group, members) for group, members in chosen if len(members) >= MIN_ROWS]
        if not chosen:
            return None
        chosen.sort(key=lambda pair: pair[0].start)
        count = sum(-(-len(members) // into.rows) for _, members in chosen)
        most = max(1, min(MAX_SPLITS, into.enough // count))
        firsts, parts = np.zeros(len(slots), np.int32), np.zeros(len(slots), np.int32)
        tiles, order, done = [], [], 0
        for group, members in chosen:
            splits = max(1, min(most, (group.end - group.start) // _MIN_SPLIT))
            cuts = np.linspace(group.start, group.end, splits + 1).astype(np.int64)
            # Rows of one segment may be in different ones above it, but of the same number of parts: there is one.
            before = int(parts[members[0]])
            for first in range(0, len(members), into.rows):
                size = min(into.rows, len(members) - first)
                tiles += [
                    (int(slots[members[0]]), done + first, size, int(start), int(end), before + part)
                    for part, (start, end) in enumerate(pairwise(cuts))
                ]
            order.append(members)
            done += len(members)
            firsts[members] = group.end
            parts[members] += splits
        return Layout(np.array(tiles, np.int32), np.concatenate(order).astype(np.int32), firsts, parts)

    def _held(self, id: int) -> _Group:
        found = self._groups.get(id)
        if found is None:
            raise BadGroup(f"group {id} is no more, and a slot that decodes is still in it")
        return found
