"""One query a row against a paged KV cache, with the keys of long rows split over programs.

Split-KV attention after Dao et al., "Flash-Decoding for long-context inference" (2023), with the lengths read on the
device: `Splits.list` turns them into a list of items, each some consecutive keys of a row, and `attend` has a program
for each possible item and KV head, those without one leaving at once. So launches depend on the number of rows alone,
and what is recorded once serves any lengths. A row of one item is written at once. The items of any other row leave
partial results, and the last of them to finish merges them all by their log-sum-exps.

Shapes: D rows, H query heads, K key-value heads, G = H / K, S head size.
"""

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

_SCANNED = 1024
"""Lengths that a program of the list reads at once."""
_LISTED = 64
"""Rows whose items one program lists."""


@dataclass(frozen=True, slots=True)
class Tuning:
    """What the GPU decides. Found by `bench/attention.py sweep=T`."""

    block: int
    """Keys a program loads at once."""
    warps: int
    stages: int
    """Loads in flight, in blocks."""
    least: int
    """Keys below which a row is not split."""
    programs: int
    """Programs a multiprocessor should have to do."""
    parts: int = 64
    """Items a row may have: its last one merges them all, while nobody else works for it."""
    merged: int = 4096
    """Elements of partial results that a program merges at once. All programs hold registers for it."""


_TUNED = {
    (16, 2): Tuning(block=64, warps=4, stages=5, least=128, programs=4),
    (32, 2): Tuning(block=64, warps=4, stages=5, least=128, programs=4),
    (64, 2): Tuning(block=64, warps=4, stages=5, least=64, programs=4),
    (128, 2): Tuning(block=64, warps=4, stages=5, least=64, programs=4),
    (256, 2): Tuning(block=32, warps=4, stages=3, least=64, programs=2),
    (16, 4): Tuning(block=64, warps=4, stages=2, least=128, programs=4),
    (32, 4): Tuning(block=32, warps=4, stages=2, least=128, programs=4),
    (64, 4): Tuning(block=32, warps=4, stages=2, least=64, programs=4),
    (128, 4): Tuning(block=16, warps=4, stages=2, least=64, programs=2),
    (256, 4): Tuning(block=16, warps=4, stages=2, least=64, programs=2),
}


def tuning(head_dim: int, dtype: torch.dtype) -> Tuning:
    """For heads of a size and the dtype of the cache. Raises ValueError where the kernels cannot run."""
    found = _TUNED.get((padded(head_dim), dtype.itemsize))
    if found is None or not dtype.is_floating_point:
        raise ValueError(f"attention kernels take heads of at most 256 in 2 or 4 bytes, not {head_dim} in {dtype}")
    return found


def padded(head_dim: int) -> int:
    """Elements that a kernel takes for a head: a power of two, and enough for a matrix product."""
    return max(16, 1 << (head_dim - 1).bit_length())


class Splits:
    """Which program attends to which keys of which row, for up to `max_rows` rows; and the memory it takes, made once.

    The keys of all rows together make at most `target(D)` items more than there are rows, whatever the lengths:
    an item has at least total / target keys, unless its row is one item.
    """

    def __init__(
        self, heads: int, kv_heads: int, head_dim: int, max_rows: int, device: torch.device, tuned: Tuning
    ) -> None:
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, head_dim
        self.tuned = tuned
        self.max_rows = max_rows
        units = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4
        self._wave = max(1, -(-units * tuned.programs // kv_heads))
        most = self.target(max_rows)
        self.items = torch.zeros((max_rows + most, 4), dtype=torch.int32, device=device)
        """An item: its row, the row's slot, first key, last key (exclusive). The items of split rows come first, then
        rows by falling length, roughly, so that no long one starts when the others are about to end."""
        self.number = torch.zeros(1, dtype=torch.int32, device=device)
        """Items in the list."""
        self.spans = torch.zeros((max_rows, 2), dtype=torch.int32, device=device)
        """Of each row, its first item and how many it has."""
        self.arrived = torch.zeros((max_rows, kv_heads), dtype=torch.int32, device=device)
        """Items of a row that are done in this layer; 0 between layers."""
        # A split row has more keys than an item has at most, so it has less than twice as many items as its keys fill.
        self.partial = torch.empty((2 * most, heads, head_dim), dtype=torch.float32, device=device)
        """Results of the items of split rows, by item."""
        self.partial_lse = torch.empty((2 * most, heads), dtype=torch.float32, device=device)

    def target(self, rows: int) -> int:
        """Items beyond one a row that `rows` rows may be split into."""
        # Where many rows fill the GPU anyway, items need only be so short that none of them outlasts all others.
        return max(self._wave, rows // 4)

    def list(self, rows: Tensor, lengths: Tensor, skip: int, firsts: Tensor | None = None) -> None:
        """List the items of the D rows behind the first `skip`.

        rows int64[skip + D] slots; lengths int32[skip + D]; firsts int32[D], the first key that each row attends to, or
        None for 0. A row without keys has one item without any.
        """
        count = len(rows) - skip
        assert 0 < count <= self.max_rows, "rows for which there is memory"
        _list[(triton.cdiv(count, _LISTED),)](
            rows,
            lengths,
            lengths if firsts is None else firsts,
            self.items,
            self.spans,
            self.arrived,
            self.number,
            skip,
            count,
            self.target(count),
            self.tuned.least,
            self.tuned.parts,
            BLOCK=self.tuned.block,
            K=self.kv_heads,
            KP=triton.next_power_of_2(self.kv_heads),
            FIRSTS=firsts is not None,
            SCAN=_SCANNED,
            ROWS=_LISTED,
        )

    def attend(self, q: Tensor, layer: Tensor, tables: Tensor, out: Tensor, lse: Tensor | None = None) -> None:
        """softmax(q kᵀ / √S) v over the listed keys.

        q [D, H, S] (rows may be strided); layer [blocks, 2, page_size, K, S] of the cache; tables int32[slots, blocks];
        out [D, H, S], contiguous. lse float32[D, H], contiguous: takes log2 Σ 2^(score · log2 e), −inf where a row has
        no keys; its `out` is then 0.
        """
        count, heads, size = q.shape
        assert (heads, size) == (self.heads, self.head_dim)
        assert q.stride(1) == size
        assert q.stride(2) == 1
        assert out.is_contiguous()
        assert lse is None or lse.is_contiguous()
        group = heads // self.kv_heads
        group_padded = triton.next_power_of_2(group)
        size_padded = padded(size)
        _attend[((count + self.target(count)) * self.kv_heads,)](
            q,
            layer,
            tables,
            self.items,
            self.number,
            self.spans,
            self.arrived,
            self.partial,
            self.partial_lse,
            out,
            self.partial_lse if lse is None else lse,
            tables.stride(0),
            q.stride(0),
            math.log2(math.e) / math.sqrt(size),
            K=self.kv_heads,
            G=group,
            S=size,
            PAGE=layer.shape[2],
            BLOCK=self.tuned.block,
            GM=max(16, group_padded),
            GP=group_padded,
            SP=size_padded,
            PARTS=max(1, min(32, self.tuned.merged // (group_padded * size_padded))),
            LSE=lse is not None,
            num_warps=self.tuned.warps,
            num_stages=self.tuned.stages,
        )


@triton.jit
def _keys(lengths_ptr, firsts_ptr, row, there, skip, FIRSTS: tl.constexpr):
    """First key of rows and how many they attend to."""
    last = tl.load(lengths_ptr + skip + row, mask=there, other=0)
    first = tl.zeros_like(last)
    if FIRSTS:
        first = tl.load(firsts_ptr + row, mask=there, other=0)
    return first, tl.maximum(last - first, 0)


@triton.jit
def _parted(keys, chunk, mean, most, BLOCK: tl.constexpr):
    """Items of rows with so many keys, blocks an item has, and the class by which the list is sorted."""
    blocks = tl.maximum((keys + BLOCK - 1) // BLOCK, 1)
    parts = tl.minimum((blocks + chunk - 1) // chunk, most)
    size = (blocks + parts - 1) // parts
    parts = (blocks + size - 1) // size
    rank = tl.where(keys > mean, 1, tl.where(2 * keys.to(tl.int64) > mean, 2, 3))
    return parts, size, tl.where(parts > 1, 0, rank)


@triton.jit(do_not_specialize=["skip", "count", "target"])
def _list(
    rows_ptr,
    lengths_ptr,
    firsts_ptr,
    items_ptr,
    spans_ptr,
    arrived_ptr,
    number_ptr,
    skip,
    count,
    target,
    least,
    most,
    BLOCK: tl.constexpr,
    K: tl.constexpr,
    KP: tl.constexpr,
    FIRSTS: tl.constexpr,
    SCAN: tl.constexpr,
    ROWS: tl.constexpr,
):
    begin = tl.program_id(0) * ROWS
    # Every program reads all lengths: that is cheaper than a second launch.
    sums = tl.zeros([SCAN], tl.int64)
    for at in range(0, count, SCAN):
        row = at + tl.arange(0, SCAN)
        _, keys = _keys(lengths_ptr, firsts_ptr, row, row < count, skip, FIRSTS)
        sums += keys
    total = tl.sum(sums, 0)
    mean = total // count
    chunk = tl.maximum((total + target - 1) // target, least)
    chunk = ((chunk + BLOCK - 1) // BLOCK).to(tl.int32)

    ranks = tl.arange(0, 4)[None, :]
    all_items = tl.zeros([4], tl.int32)
    before = tl.zeros([4], tl.int32)
    for at in range(0, count, SCAN):
        row = at + tl.arange(0, SCAN)
        _, keys = _keys(lengths_ptr, firsts_ptr, row, row < count, skip, FIRSTS)
        parts, _, rank = _parted(keys, chunk, mean, most, BLOCK)
        items = tl.where((rank[:, None] == ranks) & (row < count)[:, None], parts[:, None], 0)
        all_items += tl.sum(items, 0)
        before += tl.sum(tl.where((row < begin)[:, None], items, 0), 0)
    order = tl.arange(0, 4)
    # Where each class begins, and this program's part of it.
    starts = tl.sum(tl.where(order[:, None] < order[None, :], all_items[:, None], 0), 0) + before

    row = begin + tl.arange(0, ROWS)
    there = row < count
    first, keys = _keys(lengths_ptr, firsts_ptr, row, there, skip, FIRSTS)
    parts, size, rank = _parted(keys, chunk, mean, most, BLOCK)
    parts = tl.where(there, parts, 0)
    earlier = (row[None, :] < row[:, None]) & (rank[None, :] == rank[:, None])
    item = tl.sum(tl.where(earlier, parts[None, :], 0), 1)
    item += tl.sum(tl.where(rank[:, None] == ranks, starts[None, :], 0), 1)
    slot = tl.load(rows_ptr + skip + row, mask=there, other=0).to(tl.int32)
    for part in range(0, tl.max(parts, 0)):
        listed = part < parts
        to = items_ptr + (item + part) * 4
        begun = first + part * size * BLOCK
        tl.store(to, row, mask=listed)
        tl.store(to + 1, slot, mask=listed)
        tl.store(to + 2, begun, mask=listed)
        tl.store(to + 3, tl.minimum(begun + size * BLOCK, first + keys), mask=listed)
    tl.store(spans_ptr + row * 2, item, mask=there)
    tl.store(spans_ptr + row * 2 + 1, parts, mask=there)
    head = tl.arange(0, KP)[None, :]
    none = tl.zeros([ROWS, KP], tl.int32)
    tl.store(arrived_ptr + row[:, None] * K + head, none, mask=there[:, None] & (head < K))
    if begin == 0:
        tl.store(number_ptr, tl.sum(all_items, 0))


@triton.jit
def _attend(
    q_ptr,
    layer_ptr,
    tables_ptr,
    items_ptr,
    number_ptr,
    spans_ptr,
    arrived_ptr,
    partial_ptr,
    partial_lse_ptr,
    out_ptr,
    lse_ptr,
    width,
    q_stride,
    scale,
    K: tl.constexpr,
    G: tl.constexpr,
    S: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
    GM: tl.constexpr,
    GP: tl.constexpr,
    SP: tl.constexpr,
    PARTS: tl.constexpr,
    LSE: tl.constexpr,
):
    # The heads of an item are neighbours: what they read lies next to each other.
    item = tl.program_id(0) // K
    head = tl.program_id(0) % K
    # The list is as long as the grid, so an item that is none can be loaded: all of this is one trip to memory.
    number = tl.load(number_ptr)
    row = tl.load(items_ptr + item * 4).to(tl.int64)
    slot = tl.load(items_ptr + item * 4 + 1).to(tl.int64)
    first = tl.load(items_ptr + item * 4 + 2)
    last = tl.load(items_ptr + item * 4 + 3)
    if item >= number:
        return
    g = tl.arange(0, GM)
    s = tl.arange(0, SP)
    heads = head * G + g
    inner = (g < G)[:, None] & (s < S)[None, :]
    q = tl.load(q_ptr + row * q_stride + heads[:, None] * S + s[None, :], mask=inner, other=0.0)
    keys_ptr = layer_ptr + head * S
    values_ptr = keys_ptr + PAGE * K * S
    table_ptr = tables_ptr + slot * width

    top = tl.full([GM], float("-inf"), tl.float32)
    mass = tl.zeros([GM], tl.float32)
    acc = tl.zeros([GM, SP], tl.float32)
    for at in range(first, last, BLOCK):
        key = at + tl.arange(0, BLOCK)
        own = key < last
        block = tl.load(table_ptr + key // PAGE, mask=own, other=0).to(tl.int64)
        place = (block * (2 * PAGE) + key % PAGE) * (K * S)
        loaded = own[:, None] & (s < S)[None, :]
        k = tl.load(keys_ptr + place[:, None] + s[None, :], mask=loaded, other=0.0)
        # What lies behind the row's end may be anything, and 0 · NaN is NaN: values are masked too.
        v = tl.load(values_ptr + place[:, None] + s[None, :], mask=loaded, other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        scores = tl.where(own[None, :], scores, float("-inf"))
        # A block has at least one key, so the maximum is finite and nothing below is −inf − −inf.
        higher = tl.maximum(top, tl.max(scores, 1))
        weights = tl.exp2(scores - higher[:, None])
        shrink = tl.exp2(top - higher)
        mass = mass * shrink + tl.sum(weights, 1)
        acc = acc * shrink[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
        top = higher
    empty = mass == 0.0
    mass = tl.where(empty, 1.0, mass)
    acc = acc / mass[:, None]
    total = tl.where(empty, float("-inf"), top + tl.log2(mass))

    result_ptr = out_ptr + row * (K * G * S)
    parts = tl.load(spans_ptr + row * 2 + 1)
    if parts == 1:
        tl.store(
            result_ptr + heads[:, None] * S + s[None, :],
            acc.to(out_ptr.dtype.element_ty),
            mask=inner,
        )
        if LSE:
            tl.store(lse_ptr + row * (K * G) + heads, total, mask=g < G)
    else:
        mine = item.to(tl.int64) * (K * G)
        tl.store(partial_ptr + (mine + heads)[:, None] * S + s[None, :], acc, mask=inner)
        tl.store(partial_lse_ptr + mine + heads, total, mask=g < G)
        # The barrier puts the stores of all threads before the one that announces them; whoever arrives last has
        # acquired what all others released.
        tl.debug_barrier()
        arrived = tl.atomic_add(arrived_ptr + row * K + head, 1, sem="acq_rel", scope="gpu")
        if arrived == parts - 1:
            _merge(
                spans_ptr, arrived_ptr, partial_ptr, partial_lse_ptr, result_ptr, lse_ptr, row, head, parts,
                K, G, S, GP, SP, PARTS, LSE,
            )  # fmt: skip


@triton.jit
def _merge(
    spans_ptr,
    arrived_ptr,
    partial_ptr,
    partial_lse_ptr,
    result_ptr,
    lse_ptr,
    row,
    head,
    parts,
    K: tl.constexpr,
    G: tl.constexpr,
    S: tl.constexpr,
    GP: tl.constexpr,
    SP: tl.constexpr,
    PARTS: tl.constexpr,
    LSE: tl.constexpr,
):
    """Σ out_i 2^lse_i / Σ 2^lse_i over the items of a row, at least one of which has keys."""
    g = tl.arange(0, GP)
    s = tl.arange(0, SP)
    heads = head * G + g
    inner = (g < G)[:, None] & (s < S)[None, :]
    begin = tl.load(spans_ptr + row * 2).to(tl.int64)
    top = tl.full([GP], float("-inf"), tl.float32)
    mass = tl.zeros([GP], tl.float32)
    acc = tl.zeros([GP, SP], tl.float32)
    for at in range(0, parts, PARTS):
        part = at + tl.arange(0, PARTS)
        there = part < parts
        from_ = (begin + part)[:, None] * (K * G) + heads[None, :]
        # Other multiprocessors wrote these: past the first-level cache.
        lse = tl.load(
            partial_lse_ptr + from_,
            mask=there[:, None] & (g < G)[None, :],
            other=float("-inf"),
            cache_modifier=".cg",
        )
        result = tl.load(
            partial_ptr + from_[:, :, None] * S + s[None, None, :],
            mask=there[:, None, None] & inner[None, :, :],
            other=0.0,
            cache_modifier=".cg",
        )
        # Heads that only pad have no finite score: anything finite will do for them.
        higher = tl.where(g < G, tl.maximum(top, tl.max(lse, 0)), 0.0)
        weights = tl.exp2(lse - higher[None, :])
        shrink = tl.exp2(top - higher)
        mass = mass * shrink + tl.sum(weights, 0)
        acc = acc * shrink[:, None] + tl.sum(result * weights[:, :, None], 0)
        top = higher
    mass = tl.where(g < G, mass, 1.0)
    tl.store(result_ptr + heads[:, None] * S + s[None, :], (acc / mass[:, None]).to(result_ptr.dtype.element_ty), inner)
    if LSE:
        tl.store(lse_ptr + row * (K * G) + heads, top + tl.log2(mass), mask=g < G)
    tl.store(arrived_ptr + row * K + head, 0)
