"""Kernels through Triton's compiler, which refuses what its interpreter lets pass, such as a variable that changes its
type in a loop. No GPU is needed, Hopper is named."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
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


def compile_apart(script: str, cache: Path) -> None:
    """Run a test file as a script, in a process without Triton's interpreter and with a compiler's cache of its own."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, script],
        cwd=ROOT,
        env=environment | {"TRITON_CACHE_DIR": str(cache), "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr


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
