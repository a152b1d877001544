"""Triton's compiler takes the kernels of products."""

from pathlib import Path

from tests.workers.compiling import compile_apart, compile_one


def test_the_kernels_compile(tmp_path: Path) -> None:
    """Down to what the GPU's assembler takes, in a process without the interpreter."""
    compile_apart(__file__, tmp_path)


def compile_all() -> None:
    """Every way of the kernels: rows, splits, loads through shared memory, what stands around a product, dtypes."""
    from workers.kernels import product

    flags = ("NORM", "ADD", "GATED", "BIAS")
    for dtype, width, rows, stages, splits, chosen in (
        ("bf16", 8, 1, 1, 1, ()),
        ("bf16", 8, 1, 3, 4, ("BIAS",)),
        ("bf16", 8, 2, 1, 1, ("NORM", "ADD")),
        ("fp16", 8, 4, 2, 1, ("NORM", "ADD", "GATED", "BIAS")),
        ("fp32", 4, 1, 1, 2, ()),
        ("fp32", 4, 4, 1, 1, ("NORM", "GATED")),
    ):
        warps = 8
        sizes = {"ROWS": rows, "OUTPUTS": 8, "DEPTH": warps * 32 * width, "WIDTH": width}
        ways = {"STAGES": stages, "SPLITS": splits, "EVEN": rows == 1} | {flag: flag in chosen for flag in flags}
        compile_one(product._vector, dtype, sizes | ways, warps, stages)
    for dtype, outputs, depth, warps, stages, splits in (
        ("bf16", 64, 128, 4, 4, 1),
        ("bf16", 64, 256, 4, 3, 8),
        ("fp16", 128, 64, 8, 4, 2),
        ("bf16", 32, 128, 2, 4, 4),
        ("fp16", 16, 256, 1, 3, 1),
    ):
        sizes = {"ROWS": product.MOST, "OUTPUTS": outputs, "DEPTH": depth}
        ways = {"STAGES": stages, "SPLITS": splits, "BIAS": splits == 1, "EVEN": splits > 1}
        compile_one(product._tiles, dtype, sizes | ways, warps, stages)


if __name__ == "__main__":
    compile_all()
