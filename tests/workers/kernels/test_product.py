"""Products of few rows, alone and with what stands around them, against torch's."""

import pytest
import torch
from torch import Tensor

from bench import products
from workers.kernels import product
from workers.kernels.ops import TritonOps
from workers.kernels.product import MOST, Products, Tiles, Tuning, Vector, tuning
from workers.layers.ops import TorchOps

PLAIN = TorchOps()
SHAPES = ((16, 256), (37, 300), (5, 1032))
"""Outputs, elements of a row: even ones, and ones that no block divides."""
TUNINGS: tuple[Tuning, ...] = (
    Vector(4, 1),
    Vector(8, 2, stages=3),
    Vector(8, 1, splits=3),
    Tiles(16, 64, 1, 3),
    Tiles(64, 32, 4, 2, splits=4),
)


def normal(*shape: int, dtype: torch.dtype, device: torch.device, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


def close(got: Tensor, want: Tensor, slack: float = 1.0) -> None:
    """As near as roundings to the dtype may lie, measured by the largest: sums of many terms may cancel."""
    bound = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}[got.dtype]
    assert got.shape == want.shape
    assert (got.double() - want.double()).abs().max() <= slack * bound * want.double().abs().max()


@pytest.mark.parametrize(
    ("rows", "tuned"),
    [(rows, tuned) for tuned in TUNINGS for rows in ((1, 2, 3, 4) if isinstance(tuned, Vector) else (1, 5, 16))],
)
def test_any_rows_and_shapes(rows: int, tuned: Tuning, device: torch.device, dtype: torch.dtype) -> None:
    """With a bias and without, for outputs and elements that blocks do not divide."""
    kernels = Products(device)
    for outputs, depth in SHAPES:
        x = normal(rows, depth, dtype=dtype, device=device)
        weight = normal(outputs, depth, dtype=dtype, device=device, seed=1)
        for bias in (None, normal(outputs, dtype=dtype, device=device, seed=2) * 9):
            want = PLAIN.product(x.double(), weight.double(), None if bias is None else bias.double())
            close(kernels.product(x, weight, bias, tuned), want)


@pytest.mark.parametrize("tuned", [Vector(4, 1, splits=3), Tiles(16, 64, 1, 3, splits=8)])
def test_splits_leave_nothing_behind(tuned: Tuning, device: torch.device) -> None:
    """One product after another, of other shapes, shares the memory of the splits: results repeat bit by bit."""
    kernels = Products(device)
    bits = []
    for outputs, depth in (*SHAPES, *SHAPES[::-1]):
        x = normal(2, depth, dtype=torch.float16, device=device)
        bits.append(kernels.product(x, normal(outputs, depth, dtype=torch.float16, device=device), None, tuned))
        assert not kernels._arrived.any()
    assert all(torch.equal(one, again) for one, again in zip(bits, reversed(bits), strict=True))


def test_splits_for_which_there_is_no_memory(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """A product is split no further than there is memory for its sums."""
    monkeypatch.setattr(product, "_PARTIAL", 2 * 2 * 40)  # of two rows and 40 outputs, two sums
    monkeypatch.setattr(product, "_BLOCKS", 10)
    kernels = Products(device)
    for outputs in (37, 41):
        x, weight = (normal(rows, 512, dtype=torch.float32, device=device) for rows in (2, outputs))
        close(kernels.product(x, weight, None, Vector(4, 1, splits=4)), PLAIN.product(x, weight, None))


def test_rows_within_wider_ones(device: torch.device, dtype: torch.dtype) -> None:
    """Rows need not lie next to each other."""
    x, weight = (normal(rows, 640, dtype=dtype, device=device)[:, 64:576] for rows in (3, 20))
    for tuned in (Vector(4, 2), Tiles(16, 64, 1, 3)):
        close(Products(device).product(x, weight, None, tuned), PLAIN.product(x.double(), weight.double(), None))


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("tuned", [Vector(4, 1), Vector(8, 2, splits=3), None])
def test_what_stands_around_a_product(
    rows: int, tuned: Tuning | None, device: torch.device, dtype: torch.dtype
) -> None:
    """Norm and gate, in the product's own launch and beside it, with a residual and without: the sum is rounded to the
    dtype and given back."""
    fused = TritonOps(device, lambda *shape: tuned)
    for outputs, depth in ((16, 256), (38, 300)):
        x, residual, scale, weight, bias = (
            normal(*shape, dtype=dtype, device=device, seed=seed)
            for seed, shape in enumerate(((rows, depth), (rows, depth), (depth,), (outputs, depth), (outputs,)))
        )
        for added, term in ((residual, None), (None, bias)):
            total = x if added is None else x + added
            exact = (scale.double(), 1e-5, weight.double(), None if term is None else term.double())
            for name in ("norm_product", "norm_gated"):
                want, _ = getattr(PLAIN, name)(total.double(), None, *exact)
                got, summed = getattr(fused, name)(x.clone(), added, scale, 1e-5, weight, term)
                assert torch.equal(summed, total)
                # Beside the product, the norm and the product are rounded on the way.
                close(got, want, slack=1 if tuned else 4)


def test_the_table_has_a_kernel_for_every_number_of_rows() -> None:
    """Up to the most, and only there; float32 has no matrix instructions that are exact."""
    for rows in range(1, MOST + 1):
        found = tuning(rows, 2048, 2048, torch.bfloat16)
        assert found is None or rows <= product.FEW or isinstance(found, Tiles)
        assert not isinstance(tuning(rows, 2048, 2048, torch.float32), Tiles)
    assert tuning(0, 2048, 2048, torch.bfloat16) is None
    assert tuning(MOST + 1, 2048, 2048, torch.bfloat16) is None
    assert tuning(1, 2048, 2048, torch.float64) is None


def test_other_shapes_take_the_nearest() -> None:
    """Whose rows begin where 16 bytes can be loaded at once."""
    for shape in ((1, 2048, 2048), (8, 28672, 4096)):
        assert tuning(shape[0], shape[1] + 64, shape[2] - 64, torch.float16) == product._TUNED[shape]
    assert tuning(1, 2048, 2044, torch.bfloat16) is None
    assert tuning(1, 2048, 2044, torch.float32) is not None


def test_every_entry_of_the_table_runs_its_rows() -> None:
    """Each number of rows has entries; few rows may have either kernel, more have matrix instructions."""
    assert {rows for rows, _, _ in product._TUNED} == {1, 2, 4, 8, 16}
    for (rows, _, _), found in product._TUNED.items():
        assert not isinstance(found, Vector) or rows <= product.FEW


def test_a_sweep_writes_the_tables_own_lines() -> None:
    """What it prints can be put in the table."""
    for shape in ("1b", "8b"):
        for each in products.products(shape):
            for rows in (1, 2, 4, 8, 16):
                assert (rows, each.outputs, each.depth) in product._TUNED
                for tuned in products.candidates(each, rows):
                    assert eval(products.written(tuned)) == tuned
    assert products.written(Vector(8, 4)) == "Vector(8, 4)"
    assert products.written(Tiles(64, 128, 4, 3, splits=8)) == "Tiles(64, 128, 4, 3, 8)"
    assert products.written(None) == "None"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(
    ("outputs", "depth"), [(2048, 2048), (3072, 2048), (16384, 2048), (2048, 8192), (4096, 14336), (128256, 2048)]
)
def test_models_products(outputs: int, depth: int) -> None:
    """At the shapes of Llamas, every number of rows, as the table has it: not worse than torch's own bfloat16, and the
    norm's fusion with it nearer to the truth."""
    device = torch.device("cuda")
    fused = TritonOps(device)
    generator = torch.Generator(device).manual_seed(0)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device).to(torch.bfloat16)

    weight, scale = drawn(outputs, depth) * depth**-0.5, drawn(depth)
    for rows in range(1, MOST + 2):
        x, residual = drawn(rows, depth), drawn(rows, depth)
        want = PLAIN.product(x.double(), weight.double(), None)
        theirs = (PLAIN.product(x, weight, None).double() - want).norm()
        assert (fused.product(x, weight, None).double() - want).norm() <= 1.01 * theirs
        given = scale.double(), 1e-5, weight.double(), None
        for name in ("norm_product", "norm_gated"):
            want, _ = getattr(PLAIN, name)((x + residual).double(), None, *given)
            plain, total = getattr(PLAIN, name)(x, residual, scale, 1e-5, weight, None)
            got, summed = getattr(fused, name)(x, residual, scale, 1e-5, weight, None)
            assert torch.equal(summed, total)
            assert (got.double() - want).norm() <= 1.05 * (plain.double() - want).norm()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_recorded_products_repeat() -> None:
    """Splits meet in any order, many times over, and the bits are the same."""
    device = torch.device("cuda")
    x, weight = (normal(rows, 2048, dtype=torch.bfloat16, device=device) for rows in (16, 2048))
    kernels = Products(device)
    for rows, tuned in ((1, Vector(8, 4, splits=2)), (16, Tiles(64, 128, 4, 3, splits=8))):
        want = kernels.product(x[:rows], weight, None, tuned)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            outs = [kernels.product(x[:rows], weight, None, tuned) for _ in range(50)]
        for _ in range(20):
            graph.replay()
        assert all(torch.equal(out, want) for out in outs)
