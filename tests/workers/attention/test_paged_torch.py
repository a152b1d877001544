"""Paged attention against softmax(q kᵀ / √d) v written out."""

import dataclasses
import math
from collections.abc import Iterator
from itertools import accumulate
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.workers.models.test_config import LLAMA
from tests.workers.paged import CPU, Pages
from workers import memory
from workers.attention.paged_torch import PagedTorch
from workers.batch import Batch
from workers.kvcache import KVCache
from workers.layers.rope import Rotation
from workers.models.config import ModelConfig
from workers.models.fields import Fields

CONFIG = dataclasses.replace(
    ModelConfig.parse(Fields(Path("config.json"), LLAMA)), num_heads=6, num_kv_heads=2, head_dim=8
)


class Bench:
    """Attention with random queries, keys and values, and a record of every row's own."""

    def __init__(self, num_blocks: int, page_size: int) -> None:
        self.pages = Pages(num_blocks, page_size)
        self.cache = KVCache(CONFIG, num_blocks, page_size, torch.float32, CPU)
        self.attention = PagedTorch(self.cache)
        self.past: dict[str, Tensor] = {}
        self.generator = torch.Generator().manual_seed(0)

    def check(self, chunks: dict[str, int], decodes: list[str]) -> None:
        """Run every layer of one step over rows that grow by so many tokens, and compare."""
        batch = self.pages.batch({row: [0] * count for row, count in chunks.items()}, dict.fromkeys(decodes, 0))
        total = len(batch.tokens)
        self.attention.plan(batch)
        counts = chunks | dict.fromkeys(decodes, 1)
        qkv = torch.randn(CONFIG.num_layers, total, 10, 8, generator=self.generator)
        got = torch.stack(
            [self.attention.run(x[:, :6], x[:, 6:8], x[:, 8:], unmoved(total), i) for i, x in enumerate(qkv)]
        )
        for (row, count), last in zip(counts.items(), accumulate(counts.values()), strict=True):
            first = last - count
            own = qkv[:, first : first + count]
            self.past[row] = torch.cat((self.past.get(row, own[:, :0, 6:]), own[:, :, 6:]), dim=1)
            for layer in range(CONFIG.num_layers):
                want = attend(own[layer, :, :6], *torch.split(self.past[row][layer], 2, dim=1))
                torch.testing.assert_close(got[layer, first : first + count], want, atol=1e-5, rtol=1e-5)


def unmoved(tokens: int) -> Rotation:
    """By no angle."""
    return Rotation(torch.tensor([[1.0] * 4 + [0.0] * 4]), torch.zeros(tokens, dtype=torch.int64))


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """[N, H, D], [L, K, D], [L, K, D] → [N, H, D]; query i is key L − N + i's own."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    scores = torch.einsum("nhd,lhd->hnl", q, k) / math.sqrt(q.shape[2])
    ahead = torch.ones(len(q), len(k), dtype=torch.bool).triu(len(k) - len(q) + 1)
    return torch.einsum("hnl,lhd->nhd", scores.masked_fill(ahead, -torch.inf).softmax(-1), v)


@pytest.fixture(params=[1, 4, 16])
def bench(request: pytest.FixtureRequest) -> Bench:
    """Pages of each size, filled with other things before."""
    bench = Bench(2048 // request.param, request.param)
    for layer in bench.cache.layers:
        layer.normal_(generator=bench.generator)
    return bench


def test_one_row_decodes(bench: Bench) -> None:
    """From the first token on, over the border of a block."""
    for _ in range(20):
        bench.check({}, ["a"])


def test_rows_of_one_length_decode(bench: Bench) -> None:
    """Rows that need no mask."""
    bench.check({"a": 13, "b": 13, "c": 13}, [])
    for _ in range(5):
        bench.check({}, ["c", "a", "b"])


def test_ragged_rows_decode_in_buckets(bench: Bench) -> None:
    """A long row beside many short ones, and some between."""
    lengths = {"long": 900, "middle": 300, "other": 290} | {f"short{index}": 3 + index for index in range(20)}
    bench.check(lengths, [])
    for _ in range(3):
        bench.check({}, ["short3", "long", *(row for row in lengths if row not in ("short3", "long"))])


def test_chunks_and_decodes_share_a_step(bench: Bench) -> None:
    """Chunks with and without a past, of one token and of many, before decoding rows."""
    bench.check({"a": 9, "b": 30, "c": 1}, [])
    bench.check({"new": 17, "b": 1, "a": 21}, ["c"])
    bench.check({"a": 5}, ["b", "new", "c"])


def test_a_long_chunk_runs_in_parts(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Queries beyond MAX_QUERIES wait for the next part and see all keys before their own."""
    monkeypatch.setattr(memory, "MAX_QUERIES", 8)
    bench.check({"a": 29, "b": 8}, [])
    bench.check({"a": 17, "b": 9}, [])


@pytest.fixture
def tight() -> Iterator[Bench]:
    """So little room that a bucket holds few rows."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(memory, "MAX_GATHERED", 40 * 2 * 4 * 2 * 8 * 4)
        yield Bench(512, 4)


def test_what_a_bucket_copies_is_bounded(tight: Bench) -> None:
    """More rows than the bound allows are split, even if they are of one length; a row that is too long is alone."""
    rows = {f"row{index}": 60 for index in range(12)}
    tight.check(rows | {"long": 400}, [])
    tight.check({}, [*rows, "long"])
    assert tight.attention._buffer.nbytes <= 2 * 101 * 4 * 2 * 8 * 4


def test_buckets_pad_little_and_are_few() -> None:
    """A row of 8,000 keys does not stretch sixty of 50, and rows of like lengths stay together."""
    attention = Bench(4, 16).attention
    ragged = attention._bucketed([50] * 30 + [8000] + [55] * 30)
    assert [len(bucket) for bucket in ragged] == [1, 60]
    assert ragged[0] == [30]
    assert len(attention._bucketed([100 + index for index in range(64)])) == 1
    assert len(attention._bucketed([10, 20, 40, 80])) == 1


def test_a_row_reads_blocks_that_another_fills_in_the_same_step() -> None:
    """All writes of a step come before its reads, so a prefix can be shared at once."""
    cache = KVCache(CONFIG, 4, 4, torch.float32, CPU)
    attention = PagedTorch(cache)
    batch = Batch(
        tokens=torch.zeros(7, dtype=torch.int64),
        positions=torch.tensor([4, 5, 0, 1, 2, 3, 4]),
        writes=torch.tensor([8, 9, 0, 1, 2, 3, 4]),
        rows=torch.tensor([0, 1]),
        tables=torch.tensor([[0, 2], [0, 1]], dtype=torch.int32),
        lengths=torch.tensor([6, 5], dtype=torch.int32),
        samples=torch.tensor([1, 6]),
        sizes=np.array([2, 5]),
        ends=np.array([6, 5]),
        bounds=np.zeros(0, np.int64),
    )
    qkv = torch.randn(7, 10, 8, generator=torch.Generator().manual_seed(0))
    attention.plan(batch)
    got = attention.run(qkv[:, :6], qkv[:, 6:8], qkv[:, 8:], unmoved(7), 1)
    keys = qkv[[2, 3, 4, 5, 0, 1], 6:]
    torch.testing.assert_close(got[:2], attend(qkv[:2, :6], keys[:, :2], keys[:, 2:]), atol=1e-5, rtol=1e-5)


def test_padding_rows_harm_nobody() -> None:
    """A row on the spare block gets some finite result, and the others theirs."""
    bench = Bench(8, 4)
    bench.check({"a": 5}, [])
    batch = bench.pages.batch({}, {"a": 0})
    padded = dataclasses.replace(
        batch,
        tokens=torch.zeros(2, dtype=torch.int64),
        positions=torch.tensor([5, 0]),
        writes=torch.cat((batch.writes, torch.tensor([bench.pages.spare * 4]))),
        rows=torch.tensor([0, 1]),
        lengths=torch.tensor([6, 1], dtype=torch.int32),
        bounds=np.array([6, 1]),
        tables=torch.cat((batch.tables, torch.full_like(batch.tables, bench.pages.spare))),
    )
    bench.attention.plan(padded)
    qkv = torch.randn(2, 10, 8, generator=bench.generator)
    got = bench.attention.run(qkv[:, :6], qkv[:, 6:8], qkv[:, 8:], unmoved(2), 0)
    k, v = torch.split(torch.cat((bench.past["a"][0], qkv[:1, 6:])), 2, dim=1)
    torch.testing.assert_close(got[:1], attend(qkv[:1, :6], k, v), atol=1e-5, rtol=1e-5)
    assert got.isfinite().all()
