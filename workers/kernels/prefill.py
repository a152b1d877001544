"""Chunks of prompts against a paged KV cache that holds their keys and values already, and those of their past.

Flash attention (Dao et al. 2022, arXiv:2205.14135, algorithm 1, with the loop order of Dao 2023, arXiv:2307.08691).
A program takes a tile: some consecutive queries of one row, with all the query heads of one KV head, so that a key that
is loaded once serves them all.

Shapes: N tokens of all chunks, H query heads, K key-value heads, G = H / K, S head size.
"""

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from workers.kernels.decode import padded


@dataclass(frozen=True, slots=True)
class Tuning:
    """What the GPU decides. Found by `bench/attention.py sweep=T`."""

    tile: int
    """Queries times heads that a program takes; where one query has more heads, those of one query."""
    block: int
    """Keys a program loads at once."""
    warps: int
    stages: int
    """Loads in flight, in blocks."""


_TUNED = {
    (16, 2): Tuning(tile=128, block=64, warps=4, stages=3),
    (32, 2): Tuning(tile=128, block=64, warps=4, stages=3),
    (64, 2): Tuning(tile=128, block=64, warps=4, stages=3),
    (128, 2): Tuning(tile=128, block=64, warps=8, stages=3),
    (256, 2): Tuning(tile=64, block=32, warps=4, stages=2),
    (16, 4): Tuning(tile=32, block=32, warps=4, stages=2),
    (32, 4): Tuning(tile=32, block=32, warps=4, stages=2),
    (64, 4): Tuning(tile=32, block=32, warps=4, stages=2),
    (128, 4): Tuning(tile=16, block=16, warps=4, stages=2),
    (256, 4): Tuning(tile=16, block=16, warps=4, stages=2),
}


def tuning(head_dim: int, dtype: torch.dtype) -> Tuning:
    """For heads of a size and the dtype of the cache. Raises ValueError where the kernel cannot run."""
    found = _TUNED.get((padded(head_dim), dtype.itemsize))
    if found is None or not dtype.is_floating_point:
        raise ValueError(f"attention kernels take heads of at most 256 in 2 or 4 bytes, not {head_dim} in {dtype}")
    return found


def queries(group: int, tuned: Tuning) -> int:
    """Queries of a tile, for `group` heads a KV head."""
    return max(1, tuned.tile // group)


def attend(q: Tensor, layer: Tensor, tables: Tensor, rows: Tensor, tiles: Tensor, out: Tensor, tuned: Tuning) -> None:
    """softmax(q kᵀ / √S) v, each query over the keys of its row up to its own.

    q [N, H, S] (tokens may be strided); layer [blocks, 2, page_size, K, S] of the cache; tables int32[slots, blocks];
    rows int64[P or more], the slot of each chunk; out [N, H, S], contiguous. tiles int32[n, 4]: a tile's row, its first
    token in q, the position of that token in its sequence, and how many tokens it has, at most `queries`; one of no
    tokens is none.
    """
    _, heads, size = q.shape
    kv_heads = layer.shape[3]
    assert q.stride(1) == size
    assert q.stride(2) == 1
    assert out.is_contiguous()
    group = heads // kv_heads
    count = queries(group, tuned)
    _attend[(len(tiles) * kv_heads,)](
        q,
        layer,
        tables,
        rows,
        tiles,
        out,
        tables.stride(0),
        q.stride(0),
        math.log2(math.e) / math.sqrt(size),
        K=kv_heads,
        G=group,
        S=size,
        PAGE=layer.shape[2],
        QUERIES=count,
        TILE=max(16, triton.next_power_of_2(count * group)),
        BLOCK=tuned.block,
        SP=padded(size),
        num_warps=tuned.warps,
        num_stages=tuned.stages,
    )


@triton.jit
def _attend(
    q_ptr,
    layer_ptr,
    tables_ptr,
    rows_ptr,
    tiles_ptr,
    out_ptr,
    width,
    q_stride,
    scale,
    K: tl.constexpr,
    G: tl.constexpr,
    S: tl.constexpr,
    PAGE: tl.constexpr,
    QUERIES: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
    SP: tl.constexpr,
):
    tile = tl.program_id(0) // K
    head = tl.program_id(0) % K
    row = tl.load(tiles_ptr + tile * 4)
    token = tl.load(tiles_ptr + tile * 4 + 1).to(tl.int64)
    position = tl.load(tiles_ptr + tile * 4 + 2)
    count = tl.load(tiles_ptr + tile * 4 + 3)
    if count == 0:
        return
    slot = tl.load(rows_ptr + row).to(tl.int64)

    at = tl.arange(0, TILE)
    query = at // G
    heads = head * G + at % G
    s = tl.arange(0, SP)
    inner = ((query < QUERIES) & (query < count))[:, None] & (s < S)[None, :]
    q = tl.load(q_ptr + (token + query)[:, None] * q_stride + heads[:, None] * S + s[None, :], mask=inner, other=0.0)
    keys_ptr = layer_ptr + head * S
    values_ptr = keys_ptr + PAGE * K * S
    table_ptr = tables_ptr + slot * width

    top = tl.full([TILE], float("-inf"), tl.float32)
    mass = tl.zeros([TILE], tl.float32)
    acc = tl.zeros([TILE, SP], tl.float32)
    # Blocks of keys that every query of the tile sees, and then those that some see.
    below = (position + 1) // BLOCK * BLOCK
    top, mass, acc = _blocks(
        q, keys_ptr, values_ptr, table_ptr, top, mass, acc, position + query, 0, below, scale,
        K, S, PAGE, BLOCK, SP, False,
    )  # fmt: skip
    top, mass, acc = _blocks(
        q, keys_ptr, values_ptr, table_ptr, top, mass, acc, position + query, below, position + count, scale,
        K, S, PAGE, BLOCK, SP, True,
    )  # fmt: skip
    result = (acc / mass[:, None]).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + (token + query)[:, None] * (K * G * S) + heads[:, None] * S + s[None, :], result, mask=inner)


@triton.jit
def _blocks(
    q,
    keys_ptr,
    values_ptr,
    table_ptr,
    top,
    mass,
    acc,
    positions,
    first,
    last,
    scale,
    K: tl.constexpr,
    S: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
    SP: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Attend to the keys from `first` to `last` (exclusive). Unless MASKED, all queries see them all, in whole blocks.

    The first block of all has key 0, which every query sees: no maximum is −inf."""
    s = tl.arange(0, SP)
    for at in range(first, last, BLOCK):
        key = at + tl.arange(0, BLOCK)
        if MASKED:
            own = key < last
            block = tl.load(table_ptr + key // PAGE, mask=own, other=0).to(tl.int64)
        else:
            block = tl.load(table_ptr + key // PAGE).to(tl.int64)
        place = (block * (2 * PAGE) + key % PAGE) * (K * S)
        place = place[:, None] + s[None, :]
        if MASKED:
            # What lies behind the row's end may be anything, and 0 · NaN is NaN: values are masked too.
            loaded = own[:, None] & (s < S)[None, :]
            k = tl.load(keys_ptr + place, mask=loaded, other=0.0)
            v = tl.load(values_ptr + place, mask=loaded, other=0.0)
        elif S < SP:
            loaded = tl.broadcast_to((s < S)[None, :], [BLOCK, SP])
            k = tl.load(keys_ptr + place, mask=loaded, other=0.0)
            v = tl.load(values_ptr + place, mask=loaded, other=0.0)
        else:
            k = tl.load(keys_ptr + place)
            v = tl.load(values_ptr + place)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        if MASKED:
            scores = tl.where(own[None, :] & (key[None, :] <= positions[:, None]), scores, float("-inf"))
        higher = tl.maximum(top, tl.max(scores, 1))
        weights = tl.exp2(scores - higher[:, None])
        shrink = tl.exp2(top - higher)
        mass = mass * shrink + tl.sum(weights, 1)
        acc = acc * shrink[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
        top = higher
    return top, mass, acc
