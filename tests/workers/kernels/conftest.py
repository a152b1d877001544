"""Triton kernels, on a GPU where there is one, and otherwise under Triton's interpreter on the CPU."""

import os

import pytest
import torch

if not torch.cuda.is_available():
    # Read when a kernel is defined, which is when its module is imported.
    os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture(
    params=[
        pytest.param(
            "cpu", marks=pytest.mark.skipif(torch.cuda.is_available(), reason="compiled kernels need a GPU's tensors")
        ),
        pytest.param(
            "cuda",
            marks=[
                pytest.mark.gpu,
                pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
            ],
        ),
    ]
)
def device(request: pytest.FixtureRequest) -> torch.device:
    """Where the kernels of a test run."""
    return torch.device(request.param)


@pytest.fixture(params=["float32", "float16", "bfloat16"])
def dtype(request: pytest.FixtureRequest, device: torch.device) -> torch.dtype:
    """What tensors hold. Triton's interpreter gets bfloat16 wrong."""
    found: torch.dtype = getattr(torch, request.param)
    if found == torch.bfloat16 and device.type == "cpu":
        pytest.skip("the interpreter has no bfloat16")
    return found
