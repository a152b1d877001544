"""Decoding rows against the keys that they share, and the merge with what they attend to on their own.

A program takes a tile of rows with all the query heads of one KV head, so that a key that is loaded once serves all of
them; results are float32, with their log-sum-exps, to be merged (Juravsky et al., "Hydragen", 2024, section 3.1).

Shapes: D rows, H query heads, K key-value heads, G = H / K, S head size.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from workers.groups import MAX_PARTS, Shared
from workers.kernels.decode import padded
from workers.kernels.prefill import Tuning, _blocks, queries


class Segments:
    """Attends to shared keys, for up to `max_rows` rows; its memory is made here: the partial results of all rows."""

    def __init__(
        self, heads: int, kv_heads: int, head_dim: int, max_rows: int, device: torch.device, tuned: Tuning
    ) -> None:
        self.tuned = tuned
        self.rows = queries(heads // kv_heads, tuned)
        """Rows of a tile at most."""
        self._kv_heads = kv_heads
        self._partial = torch.empty((MAX_PARTS, max_rows, heads, head_dim), dtype=torch.float32, device=device)
        self._partial_lse = torch.empty((MAX_PARTS, max_rows, heads), dtype=torch.float32, device=device)

    def attend(self, q: Tensor, layer: Tensor, tables: Tensor, shared: Shared) -> None:
        """Partial results of every row for its segments.

        q [D, H, S] (rows may be strided); layer [blocks, 2, page_size, K, S] of the cache; tables int32[slots, blocks].
        """
        _, heads, size = q.shape
        group = heads // self._kv_heads
        _attend[(len(shared.tiles) * self._kv_heads,)](
            q,
            layer,
            tables,
            shared.tiles,
            shared.order,
            self._partial,
            self._partial_lse,
            tables.stride(0),
            q.stride(0),
            self._partial.shape[1],
            math.log2(math.e) / math.sqrt(size),
            K=self._kv_heads,
            G=group,
            S=size,
            PAGE=layer.shape[2],
            ROWS=self.rows,
            TILE=max(16, triton.next_power_of_2(self.rows * group)),
            BLOCK=self.tuned.block,
            SP=padded(size),
            num_warps=self.tuned.warps,
            num_stages=self.tuned.stages,
        )

    def merge(self, out: Tensor, lse: Tensor, shared: Shared) -> None:
        """Add the partial results to those of the rows' own keys: out [D, H, S] and lse float32[D, H] (base 2), both
        contiguous; `out` is changed."""
        count, heads, size = out.shape
        group = heads // self._kv_heads
        _merge[(count, self._kv_heads)](
            out,
            lse,
            shared.parts,
            self._partial,
            self._partial_lse,
            self._partial.shape[1],
            K=self._kv_heads,
            G=group,
            S=size,
            GP=triton.next_power_of_2(group),
            SP=padded(size),
            num_warps=2,
        )


@triton.jit
def _attend(
    q_ptr,
    layer_ptr,
    tables_ptr,
    tiles_ptr,
    order_ptr,
    partial_ptr,
    partial_lse_ptr,
    width,
    q_stride,
    max_rows,
    scale,
    K: tl.constexpr,
    G: tl.constexpr,
    S: tl.constexpr,
    PAGE: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
    SP: tl.constexpr,
):
    tile = tl.program_id(0) // K
    head = tl.program_id(0) % K
    slot = tl.load(tiles_ptr + tile * 6).to(tl.int64)
    begin = tl.load(tiles_ptr + tile * 6 + 1)
    count = tl.load(tiles_ptr + tile * 6 + 2)
    first = tl.load(tiles_ptr + tile * 6 + 3)
    last = tl.load(tiles_ptr + tile * 6 + 4)
    part = tl.load(tiles_ptr + tile * 6 + 5).to(tl.int64)
    if count == 0:
        return
    at = tl.arange(0, TILE)
    query = at // G
    heads = head * G + at % G
    there = (query < ROWS) & (query < count)
    row = tl.load(order_ptr + begin + query, mask=there, other=0).to(tl.int64)
    s = tl.arange(0, SP)
    inner = there[:, None] & (s < S)[None, :]
    q = tl.load(q_ptr + row[:, None] * q_stride + heads[:, None] * S + s[None, :], mask=inner, other=0.0)
    keys_ptr = layer_ptr + head * S
    values_ptr = keys_ptr + PAGE * K * S
    table_ptr = tables_ptr + slot * width

    top = tl.full([TILE], float("-inf"), tl.float32)
    mass = tl.zeros([TILE], tl.float32)
    acc = tl.zeros([TILE, SP], tl.float32)
    # Every row sees every key of its segment.
    positions = query * 0 + last
    whole = first + (last - first) // BLOCK * BLOCK
    top, mass, acc = _blocks(
        q, keys_ptr, values_ptr, table_ptr, top, mass, acc, positions, first, whole, scale,
        K, S, PAGE, BLOCK, SP, False,
    )  # fmt: skip
    top, mass, acc = _blocks(
        q, keys_ptr, values_ptr, table_ptr, top, mass, acc, positions, whole, last, scale,
        K, S, PAGE, BLOCK, SP, True,
    )  # fmt: skip
    to = (part * max_rows + row) * (K * G) + heads
    tl.store(partial_ptr + to[:, None] * S + s[None, :], acc / mass[:, None], mask=inner)
    tl.store(partial_lse_ptr + to, top + tl.log2(mass), mask=there)


@triton.jit
def _merge(
    out_ptr,
    lse_ptr,
    parts_ptr,
    partial_ptr,
    partial_lse_ptr,
    max_rows,
    K: tl.constexpr,
    G: tl.constexpr,
    S: tl.constexpr,
    GP: tl.constexpr,
    SP: tl.constexpr,
):
    """Σ out_i 2^lse_i / Σ 2^lse_i over a row's own result and its partial ones."""
    row = tl.program_id(0).to(tl.int64)
    parts = tl.load(parts_ptr + row)
    if parts == 0:
        return
    g = tl.arange(0, GP)
    s = tl.arange(0, SP)
    heads = tl.program_id(1) * G + g
    inner = (g < G)[:, None] & (s < S)[None, :]
    own_ptr = out_ptr + row * (K * G * S) + heads[:, None] * S + s[None, :]
    top = tl.load(lse_ptr + row * (K * G) + heads, mask=g < G, other=0.0)
    mass = tl.full([GP], 1.0, tl.float32)
    acc = tl.load(own_ptr, mask=inner, other=0.0).to(tl.float32)
    for part in range(0, parts):
        of = (part * max_rows + row) * (K * G) + heads
        lse = tl.load(partial_lse_ptr + of, mask=g < G, other=0.0)
        result = tl.load(partial_ptr + of[:, None] * S + s[None, :], mask=inner, other=0.0)
        higher = tl.maximum(top, lse)
        shrink = tl.exp2(top - higher)
        weight = tl.exp2(lse - higher)
        mass = mass * shrink + weight
        acc = acc * shrink[:, None] + result * weight[:, None]
        top = higher
    tl.store(own_ptr, (acc / mass[:, None]).to(out_ptr.dtype.element_ty), mask=inner)
