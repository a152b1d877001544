"""Rows of device state for the few slots that use an option, so that the rest pays nothing for it."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Longs = npt.NDArray[np.int64]
Upload = Callable[[npt.NDArray[np.generic]], Tensor]
"""An array on the device, without waiting for it."""

_LEAST = 4
"""Rows of the first allocation."""


@dataclass(frozen=True, slots=True)
class Users:
    """Those rows of a roster (or of a slice of one) that use an option, in their order. n of them."""

    host: Longs
    """int64[n]: which rows, rising."""
    rows: Tensor
    """int64[n], on the device: the same."""
    keys: Tensor
    """int64[n], on the device: where the option's state of each is."""

    def within(self, first: int, end: int) -> "Users | None":
        """Those of the roster's rows first … end − 1, counted from `first`; None: there are none."""
        low, high = np.searchsorted(self.host, (first, end)).tolist()
        if low == high:
            return None
        return Users(self.host[low:high] - first, self.rows[low:high] - first, self.keys[low:high])


class Places:
    """Which row each slot has, out of no more rows than were ever needed at once since the last time all were free."""

    def __init__(self, max_slots: int) -> None:
        self.of: Longs = np.full(max_slots, -1, np.int64)
        """int64[max_slots]: the slot's row; -1: it has none."""
        self.size = 0
        """Rows there are, held or free: a power of two times the first few, at most `max_slots`."""
        self._free: list[int] = []

    def take(self, slot: int) -> int:
        """A row for a slot that has none. Where none is free, `size` grows."""
        if not self._free:
            size = min(max(_LEAST, 2 * self.size), len(self.of))
            self._free = list(range(size - 1, self.size - 1, -1))
            self.size = size
        row = self._free.pop()
        self.of[slot] = row
        return row

    def give(self, slots: Longs) -> None:
        """Take back the rows that some of these slots have; with the last row, `size` returns to 0."""
        rows = self.of[slots]
        rows = rows[rows >= 0]
        if not len(rows):
            return
        self._free += rows.tolist()
        self.of[slots] = -1
        if len(self._free) == self.size:
            self.size, self._free = 0, []

    def users(self, roster: Longs, upload: Upload) -> Users | None:
        """Those of a roster's slots that have rows; None: there are none."""
        if not self.size:
            return None
        rows = self.of[roster]
        host = np.flatnonzero(rows >= 0)
        if not len(host):
            return None
        sent = upload(np.stack([host, rows[host]]))
        return Users(host, sent[0], sent[1])


def resized(old: Tensor, rows: int, width: int, fill: float = 0) -> Tensor:
    """A copy of `old`, [r, w], in the corner of [rows, width] ≥ [r, w], or nothing of it if `rows` is 0. The rest is
    `fill`."""
    new = torch.full((rows, width), fill, dtype=old.dtype, device=old.device)
    if rows:
        new[: old.shape[0], : old.shape[1]] = old
    return new
