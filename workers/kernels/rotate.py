"""Rotary embedding and the write into the KV cache, in one launch a layer."""

import torch
import triton
import triton.language as tl
from torch import Tensor

_HEADS = 8
"""Heads that one program takes."""


def rotate_and_write(
    q: Tensor, k: Tensor, v: Tensor, table: Tensor, positions: Tensor, layer: Tensor, writes: Tensor
) -> Tensor:
    """Rotate queries and keys of T tokens by their positions; keys and values go into the cache.

    q [T, H, D], k and v [T, K, D] (tokens may be strided, a token's heads lie next to each other); table float32[most
    positions, D], the cosines of a position and then its sines; positions int64[T]; layer [blocks, 2, page_size, K, D]
    of the cache; writes int64[T], flat places in it. Returns the rotated queries, [T, H, D].
    """
    tokens, heads, size = q.shape
    kv_heads, page = k.shape[1], layer.shape[2]
    out = torch.empty((tokens, heads, size), dtype=q.dtype, device=q.device)
    if tokens:
        query_programs = triton.cdiv(heads, _HEADS)
        _rotate[(tokens, query_programs + triton.cdiv(kv_heads, _HEADS))](
            q,
            k,
            v,
            table,
            positions,
            out,
            layer,
            writes,
            q.stride(0),
            k.stride(0),
            v.stride(0),
            query_programs,
            H=heads,
            K=kv_heads,
            D=size,
            PAGE=page,
            HEADS=_HEADS,
            HALF=triton.next_power_of_2(size // 2),
            num_warps=2,
        )
    return out


@triton.jit
def _rotate(
    q_ptr,
    k_ptr,
    v_ptr,
    table_ptr,
    positions_ptr,
    out_ptr,
    layer_ptr,
    writes_ptr,
    q_stride,
    k_stride,
    v_stride,
    query_programs,
    H: tl.constexpr,
    K: tl.constexpr,
    D: tl.constexpr,
    PAGE: tl.constexpr,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    at = tl.arange(0, HALF)
    within = at < D // 2
    position = tl.load(positions_ptr + token)
    cos = tl.load(table_ptr + position * D + at, mask=within, other=0.0)[None, :]
    sin = tl.load(table_ptr + position * D + D // 2 + at, mask=within, other=0.0)[None, :]
    if part < query_programs:
        head = (part * HEADS + tl.arange(0, HEADS))[:, None]
        there = (head < H) & within[None, :]
        lower = head * D + at[None, :]
        x = tl.load(q_ptr + token * q_stride + lower, mask=there, other=0.0).to(tl.float32)
        y = tl.load(q_ptr + token * q_stride + lower + D // 2, mask=there, other=0.0).to(tl.float32)
        to = out_ptr + token * (H * D) + lower
        tl.store(to, (x * cos - y * sin).to(out_ptr.dtype.element_ty), mask=there)
        tl.store(to + D // 2, (y * cos + x * sin).to(out_ptr.dtype.element_ty), mask=there)
    else:
        head = ((part - query_programs) * HEADS + tl.arange(0, HEADS))[:, None]
        there = (head < K) & within[None, :]
        lower = head * D + at[None, :]
        x = tl.load(k_ptr + token * k_stride + lower, mask=there, other=0.0).to(tl.float32)
        y = tl.load(k_ptr + token * k_stride + lower + D // 2, mask=there, other=0.0).to(tl.float32)
        place = tl.load(writes_ptr + token)
        keys = layer_ptr + (place // PAGE * 2 * PAGE + place % PAGE) * (K * D) + lower
        tl.store(keys, (x * cos - y * sin).to(layer_ptr.dtype.element_ty), mask=there)
        tl.store(keys + D // 2, (y * cos + x * sin).to(layer_ptr.dtype.element_ty), mask=there)
        values = keys + PAGE * K * D
        value = tl.load(v_ptr + token * v_stride + lower, mask=there, other=0.0)
        other = tl.load(v_ptr + token * v_stride + lower + D // 2, mask=there, other=0.0)
        tl.store(values, value, mask=there)
        tl.store(values + D // 2, other, mask=there)
