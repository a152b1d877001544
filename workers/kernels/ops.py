"""The operations of layers in kernels: the small ones between matrix products, one launch each, and around products of
few rows. `workers.layers.ops.Ops` says what they do; sums are in float32 whatever the tensors' dtype."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from workers.kernels.product import Products, Tuning, Vector, tuning

_GATED = 1024
"""Elements of a row that one program gates."""


class TritonOps:
    """See `workers.layers.ops.Ops`. Rows may be strided, elements of a row lie next to each other."""

    def __init__(
        self,
        device: torch.device,
        choose: Callable[[int, int, int, torch.dtype], Tuning | None] = tuning,
    ) -> None:
        """`choose`: which kernel a product takes, as `workers.kernels.product.tuning` says it."""
        self._products = Products(device)
        self._choose = choose

    def product(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """See `Ops.product`."""
        tuned = self._tuned(x, weight)
        if tuned is None:
            return F.linear(x, weight, bias)
        return self._products.product(x, weight, bias, tuned)

    def norm_product(
        self, x: Tensor, residual: Tensor | None, scale: Tensor, eps: float, weight: Tensor, bias: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """See `Ops.norm_product`."""
        tuned = self._tuned(x, weight)
        if isinstance(tuned, Vector):
            return self._products.normed(x, residual, scale, eps, weight, bias, tuned, gated=False)
        normed, summed = self._normed(x, residual, scale, eps)
        return self.product(normed, weight, bias), summed

    def norm_gated(
        self, x: Tensor, residual: Tensor | None, scale: Tensor, eps: float, weight: Tensor, bias: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """See `Ops.norm_gated`."""
        tuned = self._tuned(x, weight)
        if isinstance(tuned, Vector):
            return self._products.normed(x, residual, scale, eps, weight, bias, tuned, gated=True)
        normed, summed = self._normed(x, residual, scale, eps)
        return self.gate(self.product(normed, weight, bias)), summed

    def _tuned(self, x: Tensor, weight: Tensor) -> Tuning | None:
        outputs, depth = weight.shape
        return self._choose(len(x), outputs, depth, x.dtype)

    def _normed(self, x: Tensor, residual: Tensor | None, scale: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        return (self.norm(x, scale, eps), x) if residual is None else self.add_norm(x, residual, scale, eps)

    def norm(self, x: Tensor, scale: Tensor, eps: float) -> Tensor:
        """See `Ops.norm`."""
        size = scale.shape[0]
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        # Heads of tokens, [T, heads, D], are rows in two dimensions of strides: the programs find theirs by both.
        inner = x.shape[-2] if x.dim() == 3 else 1
        rows = x.numel() // size
        if rows:
            _norm[(rows,)](
                x,
                x,
                x,
                scale,
                out,
                x.stride(0),
                x.stride(1) if x.dim() == 3 else 0,
                inner,
                size,
                eps,
                ADD=False,
                BLOCK=triton.next_power_of_2(size),
                num_warps=_warps(size),
            )
        return out

    def add_norm(self, x: Tensor, residual: Tensor, scale: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """See `Ops.add_norm`."""
        size = scale.shape[0]
        out, summed = torch.empty_like(x), torch.empty_like(x)
        if len(x):
            _norm[(len(x),)](
                x,
                residual,
                summed,
                scale,
                out,
                size,
                0,
                1,
                size,
                eps,
                ADD=True,
                BLOCK=triton.next_power_of_2(size),
                num_warps=_warps(size),
            )
        return out, summed

    def gate(self, gate_up: Tensor) -> Tensor:
        """silu(gate) · up: [T, 2F], the gate first → [T, F]."""
        tokens, size = gate_up.shape[0], gate_up.shape[1] // 2
        out = torch.empty((tokens, size), dtype=gate_up.dtype, device=gate_up.device)
        if tokens:
            _gate[(tokens, triton.cdiv(size, _GATED))](gate_up, out, size, BLOCK=_GATED, num_warps=4)
        return out


def _warps(size: int) -> int:
    return min(max(int(triton.next_power_of_2(size)) // 512, 1), 16)


@triton.jit
def _norm(
    x_ptr,
    residual_ptr,
    summed_ptr,
    scale_ptr,
    out_ptr,
    outer_stride,
    inner_stride,
    inner,
    size,
    eps,
    ADD: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    there = at < size
    x = tl.load(x_ptr + row // inner * outer_stride + row % inner * inner_stride + at, mask=there, other=0.0)
    if ADD:
        residual = tl.load(residual_ptr + row * size + at, mask=there, other=0.0)
        # Rounded to the tensors' dtype before it is normalised, as the next layer will find it.
        total = (x.to(tl.float32) + residual.to(tl.float32)).to(out_ptr.dtype.element_ty)
        tl.store(summed_ptr + row * size + at, total, mask=there)
        x = total
    x = x.to(tl.float32)
    shrink = 1.0 / tl.sqrt(tl.sum(x * x, 0) / size + eps)
    scale = tl.load(scale_ptr + at, mask=there, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * size + at, (x * shrink * scale).to(out_ptr.dtype.element_ty), mask=there)


@triton.jit
def _gate(gate_up_ptr, out_ptr, size, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    there = at < size
    gate = tl.load(gate_up_ptr + row * 2 * size + at, mask=there, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + row * 2 * size + size + at, mask=there, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * size + at, (gate / (1.0 + tl.exp(-gate)) * up).to(out_ptr.dtype.element_ty), mask=there)
