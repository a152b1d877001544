"""Every half of attention, by every backend, against softmax(q kᵀ / √d) v written out.

The cache is filled as a step would leave it: rows' blocks in no order, and NaN wherever no row has a key.
"""

import dataclasses
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.workers.models.test_config import LLAMA
from workers.attention.base import Half
from workers.attention.flashinfer_decode import FlashInferDecode
from workers.attention.flashinfer_prefill import FlashInferPrefill, usable
from workers.attention.triton_decode import TritonDecode
from workers.attention.triton_prefill import TritonPrefill, tiles
from workers.batch import Batch
from workers.kernels.decode import Splits, Tuning
from workers.kernels.prefill import Tuning as PrefillTuning
from workers.kvcache import KVCache
from workers.models.config import ModelConfig
from workers.models.fields import Fields

CONFIG = ModelConfig.parse(Fields(Path("config.json"), LLAMA))
TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
SMALL = Tuning(block=16, warps=4, stages=2, least=16, programs=4)
"""Splits rows that are short enough for the interpreter."""
SMALL_TILES = PrefillTuning(tile=16, block=16, warps=4, stages=2)
gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


class Rows:
    """Rows of given lengths, each in a slot of its own, over a cache of one layer."""

    def __init__(
        self,
        lengths: list[int],
        *,
        page: int = 4,
        heads: int = 4,
        kv_heads: int = 2,
        size: int = 16,
        dtype: torch.dtype = torch.float32,
        device: torch.device,
        stale: float = math.nan,
    ) -> None:
        self.generator = torch.Generator().manual_seed(0)
        self.lengths, self.page, self.device, self.dtype = lengths, page, device, dtype
        self.heads, self.kv_heads, self.size = heads, kv_heads, size
        counts = [-(-length // page) for length in lengths]
        blocks = sum(counts)
        config = dataclasses.replace(CONFIG, num_layers=1, num_heads=heads, num_kv_heads=kv_heads, head_dim=size)
        self.cache = KVCache(config, blocks, page, dtype, device)
        order = torch.randperm(blocks, generator=self.generator).tolist()
        slots = len(lengths) + 3
        self.rows = torch.randperm(slots, generator=self.generator)[: len(lengths)]
        self.tables = torch.full((slots, max(counts) + 1), blocks, dtype=torch.int32)
        layer = torch.full(self.cache.layers[0].shape, stale, dtype=torch.float32)
        layer[blocks] = 0.0
        self.keys, self.values = [], []
        for row, (length, count) in enumerate(zip(lengths, counts, strict=True)):
            own, order = order[:count], order[count:]
            self.tables[self.rows[row], :count] = torch.tensor(own, dtype=torch.int32)
            k, v = self.random(2, length, kv_heads, size)
            at = torch.arange(length)
            block = torch.tensor(own, dtype=torch.int64)[at // page]
            layer[block, 0, at % page] = k
            layer[block, 1, at % page] = v
            self.keys.append(k)
            self.values.append(v)
        self.cache.layers[0].copy_(layer)

    def random(self, *shape: int) -> Tensor:
        """float32, on the CPU, with no more digits than the dtype has."""
        return torch.randn(*shape, generator=self.generator).to(self.dtype).float()

    def batch(self, sizes: list[int]) -> Batch:
        """Chunks of the first rows, of such sizes, up to their ends; the other rows decode."""
        prefills = len(sizes)
        nothing = torch.zeros(0, dtype=torch.int64, device=self.device)
        return Batch(
            tokens=nothing,
            positions=nothing,
            writes=nothing,
            rows=self.rows.to(self.device),
            tables=self.tables.to(self.device),
            lengths=torch.tensor(self.lengths, dtype=torch.int32, device=self.device),
            samples=nothing,
            sizes=np.array(sizes, np.int64),
            ends=np.array(self.lengths[:prefills], np.int64),
            bounds=np.array(self.lengths[prefills:], np.int64),
        )

    def check(self, half: Half, sizes: list[int], *, prefill: bool) -> None:
        """Plan and run one half of a step, and compare."""
        half.plan(self.batch(sizes))
        first, last = (0, len(sizes)) if prefill else (len(sizes), len(self.lengths))
        counts = sizes if prefill else [1] * (last - first)
        q = self.random(sum(counts), self.heads, self.size)
        out = torch.full(q.shape, math.nan, dtype=self.dtype, device=self.device)
        half.run(q.to(self.device, self.dtype), 0, out)
        at = 0
        for row, count in zip(range(first, last), counts, strict=True):
            want, _ = attend(q[at : at + count], self.keys[row], self.values[row])
            close(out[at : at + count], want)
            at += count


def attend(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """[N, H, D], [L, K, D], [L, K, D] → [N, H, D], and [N, H]: the log-sum-exp, base 2. Query i is key L − N + i's."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    scores = torch.einsum("nhd,lhd->hnl", q, k) / math.sqrt(q.shape[2])
    ahead = torch.ones(len(q), len(k), dtype=torch.bool).triu(len(k) - len(q) + 1)
    scores = scores.masked_fill(ahead, -torch.inf)
    out = torch.einsum("hnl,lhd->nhd", scores.softmax(-1), v)
    return out, scores.logsumexp(-1).T * math.log2(math.e)


def close(got: Tensor, want: Tensor) -> None:
    """Equal but for the rounding of the dtype that `got` has."""
    bound = TOLERANCE[got.dtype]
    torch.testing.assert_close(got.cpu().float(), want, atol=bound, rtol=bound)


def decoding(rows: Rows, tuned: Tuning | None = SMALL) -> TritonDecode:
    return TritonDecode(rows.cache, rows.heads, max_rows=len(rows.lengths), tuned=tuned)


def prefilling(rows: Rows, tuned: PrefillTuning | None = SMALL_TILES) -> TritonPrefill:
    return TritonPrefill(rows.cache, rows.heads, tuned)


@pytest.mark.parametrize("page", [1, 4, 16])
def test_ragged_rows_decode(page: int, device: torch.device, dtype: torch.dtype) -> None:
    """A row of one key, rows that end inside and at the end of a block, rows of one item and of many."""
    rows = Rows([1, 16, 150, 33, 7], page=page, dtype=dtype, device=device)
    rows.check(decoding(rows), [], prefill=False)


@pytest.mark.parametrize("page", [1, 4, 16])
def test_chunks_with_and_without_a_past(page: int, device: torch.device, dtype: torch.dtype) -> None:
    """Whole prompts, a chunk that follows others, one of a single token, one whose tiles begin within blocks."""
    rows = Rows([37, 50, 29, 1, 90], page=page, dtype=dtype, device=device)
    rows.check(prefilling(rows), [37, 13, 1, 1, 41], prefill=True)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "size"), [(1, 1, 8), (3, 3, 20), (14, 2, 32), (8, 1, 80), (20, 1, 96), (4, 2, 256)]
)
def test_heads_of_any_number_and_size(heads: int, kv_heads: int, size: int, device: torch.device) -> None:
    """Groups that are no power of two, or larger than a matrix product needs; sizes that are padded."""
    rows = Rows([19, 70], heads=heads, kv_heads=kv_heads, size=size, device=device)
    rows.check(decoding(rows), [], prefill=False)
    rows.check(prefilling(rows), [19, 35], prefill=True)


def test_more_heads_than_a_tile_holds(device: torch.device) -> None:
    """A tile has the heads of one query at least."""
    rows = Rows([9, 40], heads=20, kv_heads=1, device=device)
    rows.check(prefilling(rows), [9, 3], prefill=True)


def test_the_halves_of_a_mixed_step(device: torch.device) -> None:
    """Each takes its own rows of one batch."""
    rows = Rows([30, 21, 60, 5, 44], device=device)
    rows.check(prefilling(rows), [30, 4], prefill=True)
    rows.check(decoding(rows), [30, 4], prefill=False)


def test_one_half_serves_step_after_step(device: torch.device) -> None:
    """What a step leaves behind, such as counts of arrived items, disturbs no other, whatever its number of rows."""
    rows = Rows([300, 1, 80, 33, 200, 64], device=device)
    half = decoding(rows)
    for prefills in (0, 3, 1, 5, 0):
        rows.check(half, rows.lengths[:prefills], prefill=False)


def test_the_values_that_the_gpu_uses(device: torch.device) -> None:
    """The defaults split and tile as the small ones of these tests do."""
    rows = Rows([700, 3, 150], size=32, device=device)
    rows.check(decoding(rows, None), [], prefill=False)
    rows.check(prefilling(rows, None), [80, 3, 130], prefill=True)


def test_rows_that_only_pad(device: torch.device) -> None:
    """Any number of rows of the spare slot, with one key in the spare block, get something finite."""
    rows = Rows([3, 5], device=device)
    batch = rows.batch([])
    spare = torch.tensor([index for index in range(5) if index not in rows.rows.tolist()][:1])
    padded = dataclasses.replace(
        batch,
        rows=spare.repeat(4).to(device),
        lengths=torch.ones(4, dtype=torch.int32, device=device),
    )
    half = TritonDecode(rows.cache, rows.heads, max_rows=4, tuned=SMALL)
    half.plan(padded)
    out = torch.full((4, 4, 16), math.nan, device=device)
    half.run(torch.randn(4, 4, 16).to(device), 0, out)
    assert not out.any()


def test_queries_may_be_strided(device: torch.device) -> None:
    """A token's heads lie next to each other, tokens need not."""
    rows = Rows([12, 40], device=device)
    half = decoding(rows)
    half.plan(rows.batch([]))
    q = rows.random(2, 7, 16)
    out = torch.empty(2, 4, 16, device=device)
    half.run(q.to(device)[:, 1:5], 0, out)
    close(out, torch.cat([attend(q[i : i + 1, 1:5], rows.keys[i], rows.values[i])[0] for i in range(2)]))


def test_the_log_sum_exp(device: torch.device) -> None:
    """In base 2, of rows of one item and of many."""
    rows = Rows([1, 260, 17], device=device)
    half = decoding(rows)
    half.plan(rows.batch([]))
    q, out, lse = rows.random(3, 4, 16), torch.empty(3, 4, 16, device=device), torch.empty(3, 4, device=device)
    half.run(q.to(device), 0, out, lse)
    for row in range(3):
        want, want_lse = attend(q[row : row + 1], rows.keys[row], rows.values[row])
        close(out[row : row + 1], want)
        close(lse[row : row + 1], want_lse)


def test_rows_begin_where_they_are_told_to(device: torch.device) -> None:
    """From a first key on, within a block too; a row that has none left gets 0, and −∞ for its log-sum-exp."""
    rows = Rows([30, 200, 9, 50], device=device)
    firsts = [5, 64, 9, 0]
    half = decoding(rows)
    half.plan(rows.batch([]), torch.tensor(firsts, dtype=torch.int32, device=device))
    q, out, lse = rows.random(4, 4, 16), torch.empty(4, 4, 16, device=device), torch.empty(4, 4, device=device)
    half.run(q.to(device), 0, out, lse)
    for row in (0, 1, 3):
        want, want_lse = attend(q[row : row + 1], rows.keys[row][firsts[row] :], rows.values[row][firsts[row] :])
        close(out[row : row + 1], want)
        close(lse[row : row + 1], want_lse)
    assert not out[2].any()
    assert (lse[2] == -math.inf).all()


@pytest.mark.parametrize(
    ("lengths", "least"),
    [
        ([1], 16),
        ([5000], 16),
        ([3000] + [25] * 63, 16),
        ([25] * 63 + [3000], 64),
        ([1] * 70, 16),
        ([0] * 3, 16),
        ([17 * index % 400 for index in range(1100)], 128),
        ([100_000] * 1030, 64),
    ],
)
def test_the_items_cover_every_key_once(lengths: list[int], least: int, device: torch.device) -> None:
    """Within the memory there is: no more than `target` items over one a row, split rows before others, and items of a
    row one after another. Those that are not the list's are not read."""
    count = len(lengths)
    tuned = dataclasses.replace(SMALL, least=least)
    splits = Splits(4, 2, 16, max(count, 4), device, tuned)
    slots = torch.arange(count + 1, device=device).flip(0)
    splits.list(slots, torch.tensor([9, *lengths], dtype=torch.int32, device=device), 1)
    number = int(splits.number)
    items, spans = splits.items[:number].cpu().numpy(), splits.spans[:count].cpu().numpy()
    assert number == spans[:, 1].sum() <= count + splits.target(count)
    split = spans[:, 1] > 1
    assert spans[split, 1].sum() <= len(splits.partial)
    assert not spans[split].size or spans[split].sum(1).max() <= spans[split, 1].sum()
    for row, (begin, parts) in enumerate(spans.tolist()):
        own = items[begin : begin + parts]
        assert (own[:, 0] == row).all()
        assert (own[:, 1] == count - 1 - row).all()
        assert own[0, 2] == 0
        assert own[-1, 3] == lengths[row]
        assert (own[1:, 2] == own[:-1, 3]).all()
        assert (own[:, 3] > own[:, 2]).all() or lengths[row] == 0
    longest = (items[:, 3] - items[:, 2]).max()
    assert longest <= max(least, -(-sum(lengths) // splits.target(count)), 1) + tuned.block


def test_a_row_has_few_items(device: torch.device) -> None:
    """However long it is, its items are merged by one program."""
    splits = Splits(4, 2, 16, 4, device, dataclasses.replace(SMALL, programs=100, parts=7))
    splits.list(torch.arange(3, device=device), torch.tensor([100, 1, 9000], dtype=torch.int32, device=device), 0)
    assert splits.spans[:3, 1].tolist() == [3, 1, 7]
    assert splits.items[:11, 3].max() == 9000


def test_a_long_row_among_short_ones_is_split(device: torch.device) -> None:
    """As many keys as one long row has keep more than one program busy."""
    splits = Splits(4, 2, 16, 64, device, dataclasses.replace(SMALL, least=64))
    lengths = torch.tensor([30_000] + [256] * 63, dtype=torch.int32, device=device)
    splits.list(torch.arange(64, device=device), lengths, 0)
    assert splits.spans[0, 1] > 1


def test_tiles_cover_every_query_once() -> None:
    """The last of a chunk may be short; those with most keys come first."""
    sizes, ends = np.array([9, 1, 30]), np.array([9, 100, 64])
    found = tiles(sizes, ends, 4)
    assert (np.diff(found[:, 2]) <= 0).all()
    assert found[:, 3].max() == 4
    positions: dict[int, list[int]] = {0: [], 1: [], 2: []}
    for row, token, position, count in found.tolist():
        assert token - np.append(0, np.cumsum(sizes))[row] == position - (ends - sizes)[row]
        positions[row] += range(position, position + count)
    assert [sorted(each) for each in positions.values()] == [list(range(9)), [99], list(range(34, 64))]


@pytest.mark.parametrize(("size", "dtype"), [(257, torch.float32), (64, torch.float64), (64, torch.int32)])
def test_what_the_kernels_cannot_do_is_refused(size: int, dtype: torch.dtype) -> None:
    """Before anything is allocated."""
    config = dataclasses.replace(CONFIG, num_layers=1, head_dim=size)
    cache = KVCache(config, 1, 4, dtype, torch.device("cpu"))
    with pytest.raises(ValueError, match="heads of at most 256"):
        TritonDecode(cache, config.num_heads, 1)
    with pytest.raises(ValueError, match="heads of at most 256"):
        TritonPrefill(cache, config.num_heads)


def test_flashinfer_is_refused_where_it_cannot_run() -> None:
    """On a CPU, without so much as an import."""
    cache = KVCache(dataclasses.replace(CONFIG, head_dim=64), 1, 4, torch.float16, torch.device("cpu"))
    with pytest.raises(ValueError, match="FlashInfer"):
        FlashInferPrefill(cache, CONFIG.num_heads)
    with pytest.raises(ValueError, match="FlashInfer"):
        FlashInferDecode(cache, CONFIG.num_heads, 1)


CUDA = torch.device("cuda")
REAL = [1, 17, 1000, 33, 2048, 5, 16, 777, 30_000]
"""Lengths of rows on the GPU."""


@pytest.fixture(params=["triton", "flashinfer"])
def backend(request: pytest.FixtureRequest) -> str:
    """For the GPU; FlashInfer's is left out where there is none."""
    name: str = request.param
    if name == "flashinfer" and not usable(64, torch.bfloat16, CUDA):
        pytest.skip("FlashInfer is not installed")
    return name


def real(lengths: list[int], backend: str, page: int, size: int, dtype: torch.dtype) -> tuple[Rows, Half, Half]:
    """Llama's heads; a prefill half and a decode half. FlashInfer promises nothing beside NaN."""
    stale = math.nan if backend == "triton" else 1e4
    rows = Rows(lengths, page=page, heads=32, kv_heads=8, size=size, dtype=dtype, device=CUDA, stale=stale)
    if backend == "triton":
        return rows, TritonPrefill(rows.cache, 32), TritonDecode(rows.cache, 32, len(lengths))
    return rows, FlashInferPrefill(rows.cache, 32), FlashInferDecode(rows.cache, 32, len(lengths))


class TestOnAGpu:
    """Compiled kernels and FlashInfer's, at real shapes."""

    pytestmark = gpu

    @pytest.mark.parametrize("page", [1, 16])
    @pytest.mark.parametrize("size", [64, 128])
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
    def test_real_lengths(self, backend: str, page: int, size: int, dtype: torch.dtype) -> None:
        """Decoding rows of 1 to 30,000 keys; chunks with and without a past."""
        rows, prefill, decode = real(REAL, backend, page, size, dtype)
        rows.check(decode, [], prefill=False)
        sizes = [1, 17, 1000, 20, 500, 5, 1, 256]
        rows.check(prefill, sizes, prefill=True)
        rows.check(decode, sizes, prefill=False)

    def test_float32_is_exact(self) -> None:
        """No rounding to TF32."""
        rows, prefill, decode = real([1, 700, 64, 3000], "triton", 16, 64, torch.float32)
        rows.check(decode, [], prefill=False)
        rows.check(prefill, [1, 200, 64], prefill=True)

    @pytest.mark.parametrize("size", [64, 128])
    def test_a_recorded_batch_serves_any_lengths(self, backend: str, size: int) -> None:
        """A graph of plan and run, or of the run alone behind `replan`, is replayed after the lengths have changed."""
        rows, _, half = real(REAL, backend, 16, size, torch.bfloat16)
        batch = dataclasses.replace(rows.batch([]), bounds=None)
        batch.lengths.fill_(1)
        q = torch.zeros(len(REAL), 32, size, dtype=torch.bfloat16, device=CUDA)
        out = torch.zeros_like(q)
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]  # torch has no types for it
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(stream):
            half.plan(batch)
            half.run(q, 0, out)
            with torch.cuda.graph(graph, stream=stream):
                half.plan(batch)
                half.run(q, 0, out)
            for lengths in (REAL, [length // 2 + 1 for length in REAL], [1] * len(REAL)):
                batch.lengths.copy_(torch.tensor(lengths))
                asked = rows.random(len(REAL), 32, size)
                q.copy_(asked)
                out.fill_(math.nan)
                if isinstance(half, FlashInferDecode):
                    half.replan(batch.rows, batch.tables, np.array(lengths, np.int64))
                graph.replay()
                for row, length in enumerate(lengths):
                    want, _ = attend(asked[row : row + 1], rows.keys[row][:length], rows.values[row][:length])
                    close(out[row : row + 1], want)

    def test_merging_is_ordered(self) -> None:
        """Many items of few rows, again and again: whoever arrives last sees what all others wrote."""
        rows, _, half = real([30_000, 20_000, 9], "triton", 16, 64, torch.bfloat16)
        half.plan(rows.batch([]))
        q = rows.random(3, 32, 64)
        want = torch.cat([attend(q[i : i + 1], rows.keys[i], rows.values[i])[0] for i in range(3)])
        asked = q.to(CUDA, torch.bfloat16)
        outs = torch.full((200, 3, 32, 64), math.nan, dtype=torch.bfloat16, device=CUDA)
        for out in outs:
            half.run(asked, 0, out)
        close(outs[0], want)
        assert all(torch.equal(out, outs[0]) for out in outs[1:])

    def test_offsets_beyond_32_bits(self, backend: str) -> None:
        """A layer of more than 2^31 elements, of which the row uses the last block but one."""
        config = dataclasses.replace(CONFIG, num_layers=1, num_heads=32, num_kv_heads=8, head_dim=128)
        blocks = 2**31 // (2 * 16 * 8 * 128) + 100
        try:
            cache = KVCache(config, blocks, 16, torch.bfloat16, CUDA)
        except torch.OutOfMemoryError:
            pytest.skip("needs 5 GB of free memory")
        rows = Rows([16], page=16, heads=32, kv_heads=8, size=128, dtype=torch.bfloat16, device=CUDA)
        cache.layers[0][blocks - 1] = rows.cache.layers[0][0]
        rows.cache = cache
        rows.tables[rows.rows[0], 0] = blocks - 1
        prefill: Half = TritonPrefill(cache, 32) if backend == "triton" else FlashInferPrefill(cache, 32)
        decode: Half = TritonDecode(cache, 32, 1) if backend == "triton" else FlashInferDecode(cache, 32, 1)
        rows.check(prefill, [16], prefill=True)
        rows.check(decode, [], prefill=False)
