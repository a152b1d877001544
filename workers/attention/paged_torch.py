"""Attention over the paged cache in plain torch, on any device: what the CPU runs, and the oracle of faster kernels.

Decoding rows are vectorised: a layer copies the blocks of a whole bucket of rows out of the cache with one index_select
and attends with one call. Rows of like lengths form a bucket, so that a long row does not pad many short ones, and what
a bucket copies is bounded. Chunks of prompts are attended to row by row, some queries at a time.

Shapes: T tokens, R rows of a bucket, L keys a row, N queries of a part of a chunk, H query heads, K key-value heads, D
size of a head.
"""

from dataclasses import dataclass
from itertools import accumulate

import torch
import torch.nn.functional as F
from torch import Tensor

from workers import memory
from workers.batch import Batch
from workers.kvcache import KVCache
from workers.layers.rope import Rotation

_SPLIT_COST = 512
"""What one more bucket costs in a layer, counted in keys that could be attended to meanwhile."""


@dataclass(frozen=True, slots=True)
class _Keys:
    """Keys and values that a layer copies out of the cache for R rows, and where they then lie."""

    index: Tensor
    """int32[2 · blocks]: what to copy, out of the cache as [(num_blocks + 1) · 2, page_size · K · D]: the keys of all
    rows, then the values."""
    copy: Tensor
    """[2 · blocks, page_size · K · D], in a buffer that all layers and buckets use in turn."""
    k: Tensor
    """[R, K, L, D], a view of `copy`."""
    v: Tensor
    """[R, K, L, D], a view of `copy`."""


@dataclass(frozen=True, slots=True)
class _Bucket:
    """R rows of one token each."""

    tokens: slice | Tensor
    """Which of the T tokens are theirs."""
    keys: _Keys
    mask: Tensor | None
    """[R, 1, 1, L]: 0, and −∞ behind the end of a row. None: every row has L keys."""


@dataclass(frozen=True, slots=True)
class _Part:
    """Queries `first` to `last` (exclusive) of a chunk, which attend to the row's keys before `end`."""

    first: int
    last: int
    end: int
    mask: Tensor | None
    """[N, end], causal, where the row has keys before the part's own. None: N = end, or N = 1."""


@dataclass(frozen=True, slots=True)
class _Chunk:
    """Tokens `first` to `last` (exclusive) of the T are one row's."""

    first: int
    last: int
    keys: _Keys | None
    """None: the row has no other keys than those of this chunk."""
    parts: list[_Part]


@dataclass(frozen=True, slots=True)
class _Step:
    """What all layers of one step share."""

    places: Tensor
    """int64[2T]: see `KVCache.places`."""
    chunks: list[_Chunk]
    buckets: list[_Bucket]


class PagedTorch:
    """See `Attention`. `plan` reads lengths on the host, which waits for a device other than the CPU."""

    tiles = None

    def __init__(self, cache: KVCache) -> None:
        layer = cache.layers[0]
        self._cache = cache
        self._kv_heads, self._head_dim = layer.shape[3:]
        self._paged = [tensor.view(tensor.shape[0] * 2, -1) for tensor in cache.layers]
        self._max_blocks = memory.MAX_GATHERED // (layer[0].numel() * layer.element_size())
        self._buffer = layer.new_empty(0)
        self._causal = layer.new_empty(0, 0)
        self._step: _Step | None = None

    def plan(self, batch: Batch) -> None:
        """Once a step: sort the rows into chunks and buckets, and find which blocks they read."""
        prefills, sizes, ends = len(batch.sizes), batch.sizes.tolist(), batch.ends.tolist()
        decodes: list[int] = batch.lengths[prefills:].tolist()
        most = max((*ends, *decodes), default=0)
        tables = batch.tables[:, : self._blocks(most)].index_select(0, batch.rows)
        lasts = list(accumulate(sizes))
        chunks = [
            self._chunk(last - size, last, end, tables[row : row + 1])
            for row, (last, size, end) in enumerate(zip(lasts, sizes, ends, strict=True))
        ]
        members = self._bucketed(decodes)
        buckets = [
            self._bucket(batch.prefilled, rows, decodes, tables[prefills:], whole=len(members) == 1) for rows in members
        ]
        self._step = _Step(self._cache.places(batch.writes), chunks, buckets)

    def run(self, q: Tensor, k: Tensor, v: Tensor, rotation: Rotation, layer: int) -> Tensor:
        """See `Attention.run`."""
        step = self._step
        assert step is not None, "plan comes first"
        q, k = torch.split(rotation(torch.cat((q, k), dim=1)), [q.shape[1], k.shape[1]], dim=1)
        self._cache.write(layer, k, v, step.places)
        if not step.chunks and len(step.buckets) == 1:
            return self._decode(q, step.buckets[0], layer)
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        for chunk in step.chunks:
            self._prefill(q, k, v, chunk, layer, out)
        for bucket in step.buckets:
            out[bucket.tokens] = self._decode(q[bucket.tokens], bucket, layer)
        return out

    def _decode(self, q_RHD: Tensor, bucket: _Bucket, layer: int) -> Tensor:
        keys = self._gather(bucket.keys, layer)
        out_RH1D = F.scaled_dot_product_attention(
            q_RHD.unsqueeze(2), keys.k, keys.v, attn_mask=bucket.mask, enable_gqa=True
        )
        return out_RH1D.squeeze(2)

    def _prefill(self, q: Tensor, k: Tensor, v: Tensor, chunk: _Chunk, layer: int, out: Tensor) -> None:
        own = slice(chunk.first, chunk.last)
        if chunk.keys is None:
            k_1KLD, v_1KLD = k[own].transpose(0, 1)[None], v[own].transpose(0, 1)[None]
        else:
            keys = self._gather(chunk.keys, layer)
            k_1KLD, v_1KLD = keys.k, keys.v
        q_1HTD = q.transpose(0, 1)[None]
        for part in chunk.parts:
            out_1HND = F.scaled_dot_product_attention(
                q_1HTD[:, :, part.first : part.last],
                k_1KLD[:, :, : part.end],
                v_1KLD[:, :, : part.end],
                attn_mask=part.mask,
                is_causal=part.last - part.first == part.end,
                enable_gqa=True,
            )
            out[part.first : part.last] = out_1HND[0].transpose(0, 1)

    def _gather(self, keys: _Keys, layer: int) -> _Keys:
        """Copy the rows' blocks of one layer to where `keys` looks at them."""
        torch.index_select(self._paged[layer], 0, keys.index, out=keys.copy)
        return keys

    def _bucketed(self, lengths: list[int]) -> list[list[int]]:
        """Rows by number, in buckets. One ends before a row that wastes much of what it would be padded to, or where
        more blocks would be copied than a bucket may."""
        order = sorted(range(len(lengths)), key=lambda row: -lengths[row])
        buckets: list[list[int]] = []
        longest = 0
        for done, row in enumerate(order):
            wasted = (longest - lengths[row]) * (len(order) - done)
            if (
                not buckets
                or (2 * lengths[row] < longest and wasted > _SPLIT_COST)
                or (len(buckets[-1]) + 1) * self._blocks(longest) > self._max_blocks
            ):
                buckets.append([])
                longest = lengths[row]
            buckets[-1].append(row)
        return buckets

    def _bucket(self, first: int, rows: list[int], lengths: list[int], tables: Tensor, *, whole: bool) -> _Bucket:
        """`rows` of the decoding rows, whose tokens begin at `first`. `whole`: they are all of them."""
        if whole:
            rows = list(range(len(rows)))
            tokens: slice | Tensor = slice(first, first + len(rows))
        else:
            chosen = torch.tensor(rows, device=tables.device)
            tokens, tables = chosen + first, tables.index_select(0, chosen)
        own = [lengths[row] for row in rows]
        longest = max(own)
        mask = None
        if min(own) < longest:
            behind = torch.arange(longest, device=tables.device) >= torch.tensor(own, device=tables.device)[:, None]
            mask = self._buffer.new_zeros(behind.shape).masked_fill_(behind, -torch.inf)[:, None, None]
        return _Bucket(tokens, self._keys(tables, longest), mask)

    def _chunk(self, first: int, last: int, length: int, table: Tensor) -> _Chunk:
        past = length - (last - first)
        parts = []
        for start in range(first, last, memory.MAX_QUERIES):
            stop = min(start + memory.MAX_QUERIES, last)
            end = past + stop - first
            count = stop - start
            parts.append(_Part(start, stop, end, self._mask(count, end - count) if 1 < count < end else None))
        return _Chunk(first, last, self._keys(table, length) if past else None, parts)

    def _keys(self, tables: Tensor, length: int) -> _Keys:
        """What to copy for the first `length` keys (L) of R rows, and where to. `tables`: int32[R, blocks or more]."""
        rows, blocks = len(tables), self._blocks(length)
        index = (tables[:, :blocks] * 2).flatten()
        size = self._paged[0].shape[1]
        needed = 2 * rows * blocks * size
        if needed > len(self._buffer):
            # What was planned before keeps the old buffer; each copy is used at once, so the two cannot meet.
            self._buffer = self._buffer.new_empty(needed)
        copy = self._buffer[:needed].view(-1, size)
        k, v = copy.view(2, rows, -1, self._kv_heads, self._head_dim)[:, :, :length].transpose(2, 3)
        return _Keys(torch.cat((index, index + 1)), copy, k, v)

    def _mask(self, queries: int, past: int) -> Tensor:
        """[N, past + N]: 0, and −∞ for keys after the query's own. A view of one matrix that serves all chunks."""
        most = self._causal.shape[0]
        before = self._causal.shape[1] - most
        if queries > most or past > before:
            most, before = max(queries, most), max(past, before)
            ahead = torch.ones(most, most, dtype=torch.bool, device=self._causal.device).triu_(1)
            self._causal = self._causal.new_zeros(most, before + most)
            self._causal[:, before:].masked_fill_(ahead, -torch.inf)
        return self._causal[:queries, before - past : before + queries]

    def _blocks(self, tokens: int) -> int:
        return -(-tokens // self._cache.page_size)
