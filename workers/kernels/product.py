"""Products of few rows with a weight, y = x Wᵀ + b, whose time is that of reading W once.

Two kernels. Up to `FEW` rows, multiplications and additions of the ordinary kind: every thread of a program takes its
own elements of x into registers, and multiplies with them what it loads of `outputs` rows of W; the sums of threads
meet at the end. What stands around a product can be part of it there: the norm of its input, whose scale is one factor
a row and so can wait until the end, and the gate of its output. Up to `MOST` rows, matrix instructions, with W on the
left, so that few rows of x pad little.

Where the outputs alone make too few programs to keep memory busy, the elements of a row are split over programs. Each
leaves a partial sum, and the last to arrive adds all of them up in the order of the splits: results repeat bit by bit.
They do depend on the kernel, and so, in their rounding, on the number of rows.
"""

import math
from functools import cache
from typing import NamedTuple

import torch

FEW = 4
"""Rows that the plain kernel takes."""
MOST = 16
"""Rows that there are kernels for."""
_WIDTH = 16
"""Bytes that a thread loads at once."""
_PARTIAL = 2**21
"""Partial sums that there is memory for."""
_BLOCKS = 2**12
"""Blocks of outputs that may be split."""


class Vector(NamedTuple):
    """How the kernel of multiplications and additions goes about it. Up to `FEW` rows."""

    outputs: int
    """Rows of W that a program reads."""
    warps: int
    """Of a program. They lie along W's rows, 16 bytes a thread."""
    stages: int = 1
    """Loads in flight through shared memory; 1: straight to registers."""
    splits: int = 1


class Tiles(NamedTuple):
    """How the kernel of matrix instructions goes about it. bfloat16 and float16."""

    outputs: int
    """Rows of W that a program reads. From 64 on, with warps in fours, Hopper reads them out of shared memory."""
    depth: int
    """Elements of each that it loads at once."""
    warps: int
    stages: int
    """Loads in flight."""
    splits: int = 1


Tuning = Vector | Tiles

_TUNED: dict[tuple[int, int, int], Tuning | None] = {
    (1, 2048, 2048): Vector(4, 8),
    (1, 3072, 2048): Vector(8, 8),
    (1, 16384, 2048): Vector(8, 8),
    (1, 2048, 8192): Vector(4, 8),
    (1, 128256, 2048): Vector(16, 8),
    (1, 4096, 4096): Vector(8, 8),
    (1, 6144, 4096): Vector(8, 8),
    (1, 28672, 4096): Vector(8, 8),
    (1, 4096, 14336): Vector(8, 8),
    (1, 128256, 4096): Vector(16, 8),
    (2, 2048, 2048): Vector(4, 8),
    (2, 16384, 2048): Vector(8, 8),
    (2, 2048, 8192): Vector(4, 8),
    (2, 128256, 4096): Vector(8, 8),
    (4, 2048, 2048): Vector(4, 8),
    (4, 16384, 2048): Vector(8, 8),
    (4, 2048, 8192): Vector(4, 8),
    (4, 128256, 4096): Vector(8, 8),
    (8, 2048, 2048): Tiles(64, 128, 4, 3, 8),
    (8, 3072, 2048): Tiles(64, 128, 4, 3, 4),
    (8, 2048, 8192): Tiles(64, 128, 4, 4, 8),
    (8, 16384, 2048): Tiles(64, 128, 4, 4, 1),
    (8, 4096, 4096): Tiles(64, 128, 4, 4, 4),
    (8, 6144, 4096): Tiles(64, 128, 4, 4, 4),
    (8, 4096, 14336): Tiles(64, 128, 4, 4, 8),
    (8, 128256, 4096): Tiles(64, 128, 4, 4, 1),
}
"""By rows (the next power of two), outputs and elements of a row. Found by `bench/products.py sweep=T`; None: torch's
own. Other shapes take the nearest one."""


def tuning(rows: int, outputs: int, depth: int, dtype: torch.dtype) -> Tuning | None:
    """For x [rows, depth] and W [outputs, depth]. None: torch's own product."""
    if not 0 < rows <= MOST or not (dtype.is_floating_point and dtype.itemsize in (2, 4)):
        return None
    return _nearest(1 << (rows - 1).bit_length(), outputs, depth, dtype.itemsize)


@cache
def _nearest(rows: int, outputs: int, depth: int, itemsize: int) -> Tuning | None:
    if depth * itemsize % _WIDTH:
        # Rows of W do not begin where a thread could load its bytes at once.
        return None
    measured = {at for at, _, _ in _TUNED}
    rows = (
        rows
        if rows in measured
        else min(at for at in measured if at <= MOST and at >= rows)
        if rows < max(measured)
        else max(measured)
    )
    shapes = [shape for shape in _TUNED if shape[0] == rows]
    found = _TUNED[min(shapes, key=lambda at: abs(math.log(at[1] / outputs)) + abs(math.log(at[2] / depth)))]
    if isinstance(found, Tiles):
        return None if itemsize == 4 else found
    return found


class Products:
    """The kernels, and the memory that all of them share on a device: they run one after the other."""

    def __init__(self, device: torch.device) -> None:
        self._partial = torch.empty(_PARTIAL, dtype=torch.float32, device=device)
        self._arrived = torch.zeros(_BLOCKS, dtype=torch.int32, device=device)
        """Splits of a block of outputs that are done; 0 between products."""
