"""Triton kernels run here as they do in their own tests."""

from tests.workers.kernels.conftest import device, dtype

__all__ = ["device", "dtype"]
