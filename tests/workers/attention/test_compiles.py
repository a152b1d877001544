"""Triton's compiler takes the kernels of attention: its interpreter lets pass what the compiler refuses, such as a
variable that changes its type in a loop. No GPU is needed, Hopper is named."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]
INTEGERS = (
    "lengths_ptr",
    "firsts_ptr",
    "items_ptr",
    "spans_ptr",
    "arrived_ptr",
    "number_ptr",
    "tables_ptr",
    "tiles_ptr",
)
FLOATS = ("partial_ptr", "partial_lse_ptr", "lse_ptr")


def test_the_kernels_compile(tmp_path: Path) -> None:
    """Down to what the GPU's assembler takes, in a process without the interpreter."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, __file__],
        cwd=ROOT,
        env=environment | {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr


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


def compile_one(kernel: Any, dtype: str, constants: dict[str, Any], warps: int, stages: int) -> None:
    """Compile for compute capability 9.0, with pointers aligned as torch's are."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    signature, attributes = {}, {}
    for at, name in enumerate(kernel.arg_names):
        if name in constants:
            signature[name] = "constexpr"
        elif name.endswith("_ptr"):
            element = (
                "i32" if name in INTEGERS else "fp32" if name in FLOATS else "i64" if name == "rows_ptr" else dtype
            )
            signature[name] = f"*{element}"
            attributes[(at,)] = [["tt.divisibility", 16]]
        else:
            signature[name] = "fp32" if name in ("scale", "eps") else "i32"
    values = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    source = ASTSource(kernel, signature, constexprs=values, attrs=attributes)
    options = {"num_warps": warps, "num_stages": stages}
    triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)


if __name__ == "__main__":
    compile_all()
