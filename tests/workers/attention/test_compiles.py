"""Triton's compiler takes the kernels of attention."""

from pathlib import Path
from typing import Any

from tests.workers.compiling import compile_apart, compile_one


def test_the_kernels_compile(tmp_path: Path) -> None:
    """Down to what the GPU's assembler takes, in a process without the interpreter."""
    compile_apart(__file__, tmp_path)


def compile_all() -> None:
    """Llama's heads, a size that is padded, a group that is no power of two; with and without what is optional."""
    import torch

    from workers.kernels import decode, prefill

    listed = {"BLOCK": 64, "K": 5, "KP": 8, "FIRSTS": True, "SCAN": 1024, "ROWS": 64}
    compile_one(decode._list, "bf16", listed, 4, 3)
    for dtype, name, size, group in ((torch.bfloat16, "bf16", 80, 7), (torch.float32, "fp32", 64, 4)):
        tuned = decode.tuning(size, dtype)
        heads: dict[str, Any] = {"K": 8, "G": group, "S": size, "PAGE": 16, "SP": decode.padded(size)}
        own = {"BLOCK": tuned.block, "GM": 16, "GP": 1 << (group - 1).bit_length(), "PARTS": 4, "LSE": size == 80}
        compile_one(decode._attend, name, heads | own, tuned.warps, tuned.stages)
        tiled = prefill.tuning(size, dtype)
        own = {"BLOCK": tiled.block, "QUERIES": prefill.queries(group, tiled), "TILE": tiled.tile}
        compile_one(prefill._attend, name, heads | own, tiled.warps, tiled.stages)


if __name__ == "__main__":
    compile_all()
