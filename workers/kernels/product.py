"""Products of few rows with a weight, y = x Wᵀ + b, whose time is that of reading W once.

Two kernels. Up to `FEW` rows, multiplications and additions of the ordinary kind: every thread of a program holds its
own elements of x and multiplies with them what it loads of `outputs` rows of W; the sums of threads meet at the end.
What stands around a product can be part of it there: the norm of its input, whose scale is one factor a row and so can
wait until the end, and the gate of its output. Up to `MOST` rows, matrix instructions, with W on the left, so that few
rows of x pad little.

Where the outputs alone make too few programs to keep the memory busy, the elements of a row are split over programs.
Each leaves a partial sum, and the last to arrive adds all of them up in the order of the splits: results repeat bit by
bit. Their rounding depends on the kernel, and so on the number of rows.
"""

import math
from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

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
    """How the kernel of multiplications and additions goes about it."""

    outputs: int
    """Rows of W that a program reads."""
    warps: int
    """They lie along a row of W, `_WIDTH` bytes a thread."""
    stages: int = 1
    """Loads in flight through shared memory; 1: each goes straight to registers."""
    splits: int = 1


class Tiles(NamedTuple):
    """How the kernel of matrix instructions goes about it. Not for float32."""

    outputs: int
    """Rows of W that a program reads. From 64 on, Hopper's own instructions take them out of shared memory."""
    depth: int
    """Elements of each that it loads at once."""
    warps: int
    stages: int
    """Loads in flight."""
    splits: int = 1


Tuning = Vector | Tiles

_TUNED: dict[tuple[int, int, int], Tuning | None] = {
    (1, 2048, 2048): Vector(4, 4),
    (1, 3072, 2048): Vector(4, 4),
    (1, 16384, 2048): Vector(8, 2),
    (1, 2048, 8192): Vector(4, 8),
    (1, 128256, 2048): Vector(4, 8),
    (1, 4096, 4096): Vector(4, 4),
    (1, 6144, 4096): Vector(8, 4),
    (1, 28672, 4096): Vector(4, 8),
    (1, 4096, 14336): Vector(4, 4),
    (1, 128256, 4096): Vector(4, 16),
    (2, 2048, 2048): Vector(4, 4),
    (2, 3072, 2048): Vector(4, 4),
    (2, 16384, 2048): Vector(8, 2),
    (2, 2048, 8192): Vector(4, 8),
    (2, 128256, 2048): Vector(4, 4),
    (2, 4096, 4096): Vector(4, 4),
    (2, 6144, 4096): Vector(8, 2),
    (2, 28672, 4096): Vector(8, 2),
    (2, 4096, 14336): Vector(4, 4),
    (2, 128256, 4096): Vector(4, 8),
    (4, 2048, 2048): Vector(4, 4),
    (4, 3072, 2048): Vector(8, 4),
    (4, 16384, 2048): None,
    (4, 2048, 8192): Vector(8, 4, 3),
    (4, 128256, 2048): Tiles(128, 128, 4, 3),
    (4, 4096, 4096): Tiles(128, 64, 4, 5, 4),
    (4, 6144, 4096): None,
    (4, 28672, 4096): None,
    (4, 4096, 14336): None,
    (4, 128256, 4096): Tiles(128, 128, 4, 3),
    (8, 2048, 2048): Tiles(64, 128, 4, 4, 4),
    (8, 3072, 2048): None,
    (8, 16384, 2048): None,
    (8, 2048, 8192): Tiles(64, 128, 4, 4, 4),
    (8, 128256, 2048): Tiles(128, 128, 4, 3),
    (8, 4096, 4096): Tiles(128, 64, 4, 5, 4),
    (8, 6144, 4096): None,
    (8, 28672, 4096): Tiles(128, 128, 4, 3),
    (8, 4096, 14336): Tiles(64, 128, 4, 4, 4),
    (8, 128256, 4096): Tiles(128, 128, 4, 3),
    (16, 2048, 2048): Tiles(64, 128, 4, 4, 4),
    (16, 3072, 2048): Tiles(16, 256, 1, 4),
    (16, 16384, 2048): Tiles(64, 64, 4, 6),
    (16, 2048, 8192): Tiles(32, 128, 2, 5, 4),
    (16, 128256, 2048): Tiles(128, 128, 4, 3),
    (16, 4096, 4096): Tiles(32, 256, 4, 4),
    (16, 6144, 4096): Tiles(16, 256, 1, 4),
    (16, 28672, 4096): Tiles(128, 128, 4, 3),
    (16, 4096, 14336): Tiles(64, 128, 4, 4, 4),
    (16, 128256, 4096): Tiles(128, 128, 4, 3),
}
"""By rows (a power of two), outputs and elements of a row, in bfloat16; None: torch's own product. Found by
`bench/products.py sweep=T`."""


def tuning(rows: int, outputs: int, depth: int, dtype: torch.dtype) -> Tuning | None:
    """For x [rows, depth] and W [outputs, depth]: that of the nearest shape in the table, rows rounded up. None:
    torch's own product."""
    # Rows of W have to begin where a thread can load its bytes at once.
    if not 0 < rows <= MOST or dtype.itemsize not in (2, 4) or depth * dtype.itemsize % _WIDTH:
        return None
    found = _nearest(triton.next_power_of_2(rows), outputs, depth)
    return None if isinstance(found, Tiles) and dtype == torch.float32 else found


@cache
def _nearest(rows: int, outputs: int, depth: int) -> Tuning | None:
    def distance(shape: tuple[int, int, int]) -> float:
        return abs(math.log(shape[1] / outputs)) + abs(math.log(shape[2] / depth))

    return _TUNED[min((shape for shape in _TUNED if shape[0] == rows), key=distance)]


class Products:
    """The kernels, and the memory that products on a device share: they run one after another."""

    def __init__(self, device: torch.device) -> None:
        self._partial = torch.empty(_PARTIAL, dtype=torch.float32, device=device)
        self._arrived = torch.zeros(_BLOCKS, dtype=torch.int32, device=device)
        """Splits of a block of outputs that are done; 0 between products."""

    def product(self, x: Tensor, weight: Tensor, bias: Tensor | None, tuned: Tuning) -> Tensor:
        """x Wᵀ + b, summed in float32: [R, K], [N, K], [N] → [R, N], all of one dtype. Up to `FEW` rows with a
        `Vector`, up to `MOST` with `Tiles`. Elements of a row lie next to each other."""
        assert x.stride(1) == weight.stride(1) == 1
        rows, size = len(x), len(weight)
        out = torch.empty((rows, size), dtype=x.dtype, device=x.device)
        if isinstance(tuned, Vector):
            self._vector(x, None, None, 0.0, weight, bias, out, x, tuned, gated=False)
            return out
        assert rows <= MOST
        blocks = triton.cdiv(size, tuned.outputs)
        loads = triton.cdiv(x.shape[1], tuned.depth)
        splits = self._splits(min(tuned.splits, loads), blocks, MOST * tuned.outputs)
        _tiles[(blocks, splits)](
            x,
            weight,
            out if bias is None else bias,
            out,
            self._partial,
            self._arrived,
            rows,
            size,
            x.shape[1],
            x.stride(0),
            weight.stride(0),
            ROWS=MOST,
            OUTPUTS=tuned.outputs,
            DEPTH=tuned.depth,
            STAGES=tuned.stages,
            SPLITS=splits,
            BIAS=bias is not None,
            EVEN=x.shape[1] % tuned.depth == 0,
            num_warps=tuned.warps,
            num_stages=tuned.stages,
        )
        return out

    def normed(
        self,
        x: Tensor,
        residual: Tensor | None,
        scale: Tensor,
        eps: float,
        weight: Tensor,
        bias: Tensor | None,
        tuned: Vector,
        *,
        gated: bool,
    ) -> tuple[Tensor, Tensor]:
        """The product of the norm of t = x + residual, and t (x itself without a residual), for up to `FEW` rows.

        The norm is t / sqrt(mean(t²) + eps) · scale, and is not rounded. [R, K] twice, [K], [N, K], [N] → [R, N] and
        [R, K]. `gated`: silu(gate) · up of the product instead, whose first half is the gate: [R, N / 2].
        """
        rows, size = len(x), len(weight)
        assert residual is None or residual.is_contiguous()
        out = torch.empty((rows, size // 2 if gated else size), dtype=x.dtype, device=x.device)
        summed = x if residual is None else torch.empty_like(residual)
        self._vector(x, residual, scale, eps, weight, bias, out, summed, tuned._replace(splits=1), gated=gated)
        return out, summed

    def _vector(
        self,
        x: Tensor,
        residual: Tensor | None,
        scale: Tensor | None,
        eps: float,
        weight: Tensor,
        bias: Tensor | None,
        out: Tensor,
        summed: Tensor,
        tuned: Vector,
        *,
        gated: bool,
    ) -> None:
        rows, depth = x.shape
        assert rows <= FEW
        assert x.stride(1) == weight.stride(1) == 1
        width = _WIDTH // x.element_size()
        padded = triton.next_power_of_2(rows)
        warps = min(tuned.warps, max(1, triton.next_power_of_2(depth) // (32 * width)))
        at_once = warps * 32 * width
        blocks = triton.cdiv(len(weight), tuned.outputs)
        loads = triton.cdiv(depth, at_once)
        splits = self._splits(min(tuned.splits, loads), blocks, padded * tuned.outputs)
        _vector[(blocks, splits)](
            x,
            x if residual is None else residual,
            x if scale is None else scale,
            weight,
            out if bias is None else bias,
            out,
            summed,
            self._partial,
            self._arrived,
            rows,
            len(weight),
            depth,
            x.stride(0),
            weight.stride(0),
            eps,
            ROWS=padded,
            OUTPUTS=tuned.outputs,
            DEPTH=at_once,
            WIDTH=width,
            STAGES=tuned.stages,
            SPLITS=splits,
            NORM=scale is not None,
            ADD=residual is not None,
            GATED=gated,
            BIAS=bias is not None,
            EVEN=depth % at_once == 0,
            num_warps=warps,
        )

    def _splits(self, wanted: int, blocks: int, sums: int) -> int:
        """How many there is memory for, of `blocks` blocks of `sums` sums."""
        return max(1, min(wanted, _PARTIAL // (blocks * sums))) if blocks <= _BLOCKS else 1


@triton.jit(do_not_specialize=["rows"])
def _vector(
    x_ptr,
    residual_ptr,
    scale_ptr,
    weight_ptr,
    bias_ptr,
    out_ptr,
    summed_ptr,
    partial_ptr,
    arrived_ptr,
    rows,
    N,
    K,
    x_stride,
    weight_stride,
    eps,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    DEPTH: tl.constexpr,
    WIDTH: tl.constexpr,
    STAGES: tl.constexpr,
    SPLITS: tl.constexpr,
    NORM: tl.constexpr,
    ADD: tl.constexpr,
    GATED: tl.constexpr,
    BIAS: tl.constexpr,
    EVEN: tl.constexpr,
):
    block = tl.program_id(0)
    n = _weight_rows(block, N, OUTPUTS, GATED)
    # Rows that only pad repeat the last one, and so do outputs: what is loaded need not be masked.
    m = tl.minimum(tl.arange(0, ROWS), rows - 1)[:, None, None]
    weight_row = weight_ptr + n.to(tl.int64)[None, :, None] * weight_stride
    begin, end = _span(K, DEPTH, SPLITS)
    acc = tl.zeros([ROWS, OUTPUTS, DEPTH // WIDTH], tl.float32)
    squares = tl.zeros([ROWS, 1, DEPTH // WIDTH], tl.float32)
    for at in tl.range(begin, end, DEPTH, num_stages=STAGES):
        k = (at + tl.arange(0, DEPTH))[None, None, :]
        # W is read once, and x by every program: W should not drive x out of the caches.
        if EVEN:
            w = tl.load(weight_row + k, eviction_policy="evict_first")
            x = tl.load(x_ptr + m * x_stride + k)
        else:
            w = tl.load(weight_row + k, mask=k < K, other=0.0, eviction_policy="evict_first")
            x = tl.load(x_ptr + m * x_stride + k, mask=k < K, other=0.0)
        if ADD:
            residual = tl.load(residual_ptr + m * K + k, mask=k < K, other=0.0)
            # Rounded as the next layer will find it.
            x = (x.to(tl.float32) + residual.to(tl.float32)).to(summed_ptr.dtype.element_ty)
            if block == 0:
                tl.store(summed_ptr + m * K + k, x, mask=k < K)
        x = x.to(tl.float32)
        if NORM:
            squares += tl.sum(tl.reshape(x * x, [ROWS, 1, DEPTH // WIDTH, WIDTH]), 3)
            x *= tl.load(scale_ptr + k, mask=k < K, other=0.0).to(tl.float32)
        # A thread adds up what it loaded at once.
        acc += tl.sum(tl.reshape(w.to(tl.float32) * x, [ROWS, OUTPUTS, DEPTH // WIDTH, WIDTH]), 3)
    y = tl.sum(acc, 2)
    if NORM:
        y *= 1.0 / tl.sqrt(tl.sum(squares, 2) / K + eps)
    _finish(y, bias_ptr, out_ptr, partial_ptr, arrived_ptr, rows, N, ROWS, OUTPUTS, SPLITS, GATED, BIAS)


@triton.jit(do_not_specialize=["rows"])
def _tiles(
    x_ptr,
    weight_ptr,
    bias_ptr,
    out_ptr,
    partial_ptr,
    arrived_ptr,
    rows,
    N,
    K,
    x_stride,
    weight_stride,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    DEPTH: tl.constexpr,
    STAGES: tl.constexpr,
    SPLITS: tl.constexpr,
    BIAS: tl.constexpr,
    EVEN: tl.constexpr,
):
    n = _weight_rows(tl.program_id(0), N, OUTPUTS, False)
    m = tl.minimum(tl.arange(0, ROWS), rows - 1)
    weight_row = weight_ptr + n.to(tl.int64)[:, None] * weight_stride
    x_row = x_ptr + m[None, :] * x_stride
    begin, end = _span(K, DEPTH, SPLITS)
    acc = tl.zeros([OUTPUTS, ROWS], tl.float32)
    for at in tl.range(begin, end, DEPTH, num_stages=STAGES):
        k = at + tl.arange(0, DEPTH)
        if EVEN:
            w = tl.load(weight_row + k[None, :], eviction_policy="evict_first")
            x = tl.load(x_row + k[:, None])
        else:
            w = tl.load(weight_row + k[None, :], mask=(k < K)[None, :], other=0.0, eviction_policy="evict_first")
            x = tl.load(x_row + k[:, None], mask=(k < K)[:, None], other=0.0)
        acc = tl.dot(w, x, acc, input_precision="ieee")
    y = tl.trans(acc)
    _finish(y, bias_ptr, out_ptr, partial_ptr, arrived_ptr, rows, N, ROWS, OUTPUTS, SPLITS, False, BIAS)


@triton.jit
def _weight_rows(block, N, OUTPUTS: tl.constexpr, GATED: tl.constexpr):
    """Rows of W that a block is made of. Of a gated product, each row of the gate and the matching one of the upper
    half are neighbours."""
    at = block * OUTPUTS + tl.arange(0, OUTPUTS)
    if GATED:
        return tl.minimum(at // 2, N // 2 - 1) + at % 2 * (N // 2)
    return tl.minimum(at, N - 1)


@triton.jit
def _span(K, DEPTH: tl.constexpr, SPLITS: tl.constexpr):
    """The elements of W's rows that a program takes: all of them, or whole loads of its split."""
    begin = 0
    end = K
    if SPLITS > 1:
        size = tl.cdiv(tl.cdiv(K, SPLITS), DEPTH) * DEPTH
        begin = tl.program_id(1) * size
        end = tl.minimum(begin + size, K)
    return begin, end


@triton.jit
def _finish(
    y,
    bias_ptr,
    out_ptr,
    partial_ptr,
    arrived_ptr,
    rows,
    N,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    SPLITS: tl.constexpr,
    GATED: tl.constexpr,
    BIAS: tl.constexpr,
):
    """From a program's sums, [ROWS, OUTPUTS], to the outputs."""
    block = tl.program_id(0)
    if SPLITS == 1:
        _store(y, bias_ptr, out_ptr, rows, N, ROWS, OUTPUTS, GATED, BIAS)
    else:
        within = tl.arange(0, ROWS)[:, None] * OUTPUTS + tl.arange(0, OUTPUTS)[None, :]
        own_ptr = partial_ptr + block * (SPLITS * ROWS * OUTPUTS) + within
        tl.store(own_ptr + tl.program_id(1) * (ROWS * OUTPUTS), y)
        # The barrier puts the stores of all threads before the one that announces them; whoever arrives last has
        # acquired what all others released.
        tl.debug_barrier()
        arrived = tl.atomic_add(arrived_ptr + block, 1, sem="acq_rel", scope="gpu")
        if arrived == SPLITS - 1:
            # Other multiprocessors wrote these: past the first-level cache.
            total = tl.load(own_ptr, cache_modifier=".cg")
            for split in tl.static_range(1, SPLITS):
                total += tl.load(own_ptr + split * (ROWS * OUTPUTS), cache_modifier=".cg")
            _store(total, bias_ptr, out_ptr, rows, N, ROWS, OUTPUTS, GATED, BIAS)
            tl.store(arrived_ptr + block, 0)


@triton.jit
def _store(
    y,
    bias_ptr,
    out_ptr,
    rows,
    N,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    GATED: tl.constexpr,
    BIAS: tl.constexpr,
):
    """Bias, gate and rounding."""
    block = tl.program_id(0)
    m = tl.arange(0, ROWS)[:, None]
    if BIAS:
        y += tl.load(bias_ptr + _weight_rows(block, N, OUTPUTS, GATED))[None, :].to(tl.float32)
    if GATED:
        gate, up = tl.split(tl.reshape(y, [ROWS, OUTPUTS // 2, 2]))
        size = N // 2
        n = (block * (OUTPUTS // 2) + tl.arange(0, OUTPUTS // 2))[None, :]
        result = gate / (1.0 + tl.exp(-gate)) * up
    else:
        size = N
        n = (block * OUTPUTS + tl.arange(0, OUTPUTS))[None, :]
        result = y
    to = out_ptr + m.to(tl.int64) * size + n
    tl.store(to, result.to(out_ptr.dtype.element_ty), mask=(m < rows) & (n < size))
