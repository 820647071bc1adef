"""The Triton code that makes queries, keys and values of a projection; see rope.py, decode.py."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def summed(at, real, stride, PARTS: tl.constexpr, element: tl.constexpr):
    """The sum of parts that lie ``stride`` apart, rounded as XLA rounds a product."""
    total = tl.load(at, mask=real, other=0.0).to(tl.float32)
    for part in tl.static_range(1, PARTS):
        total += tl.load(at + part * stride, mask=real, other=0.0).to(tl.float32)
    return total.to(element).to(tl.float32)


@triton.jit
def rotated(
    at, real, stride, weight_ptr, cos_ptr, sin_ptr,
    DIM: tl.constexpr, PARTS: tl.constexpr, NORM: tl.constexpr, EPS: tl.constexpr,
    DIM_PADDED: tl.constexpr, element: tl.constexpr,
):  # fmt: skip
    """Head vectors (R, DIM_PADDED) at ``at`` (R,), normalised and rotated to a position, in float32
    with the precision of ``element``: each value and the one that it is rotated with."""
    dim = tl.arange(0, DIM_PADDED)
    inside = dim < DIM
    low = dim < DIM // 2
    other = tl.where(low, dim + DIM // 2, dim - DIM // 2)
    angle = tl.where(low, dim, dim - DIM // 2)
    mask = real[:, None] & inside[None, :]
    x = summed(at[:, None] + dim[None, :], mask, stride, PARTS, element)
    y = summed(at[:, None] + other[None, :], mask, stride, PARTS, element)
    if NORM:
        # Rounded where XLA rounds: what is normalised, and what its weight makes of it.
        scale = tl.rsqrt(tl.sum(x * x, axis=1) / DIM + EPS)[:, None]
        x_weight = tl.load(weight_ptr + dim, mask=inside, other=0.0).to(tl.float32)
        y_weight = tl.load(weight_ptr + other, mask=inside, other=0.0).to(tl.float32)
        x = (x * scale).to(element).to(tl.float32) * x_weight[None, :]
        y = (y * scale).to(element).to(tl.float32) * y_weight[None, :]
        x = x.to(element).to(tl.float32)
        y = y.to(element).to(tl.float32)
    cos = tl.load(cos_ptr + angle, mask=inside, other=0.0)
    sin = tl.load(sin_ptr + angle, mask=inside, other=0.0)
    sin = tl.where(low, -sin, sin)
    return (x * cos[None, :] + y * sin[None, :]).to(element)


@triton.jit
def rope_kernel(
    qkv_ptr,  # (PARTS, T, K, G + 2, D): of each KV head its queries, its key, its value
    q_norm_ptr,  # (D,)
    k_norm_ptr,  # (D,)
    cos_ptr,  # (T, D / 2) float32
    sin_ptr,  # (T, D / 2) float32
    slots_ptr,  # (T,) int32: cache slot of each token
    kv_ptr,  # (N, 2, K, S, D), in place
    first_ptr,  # (1,) int32: tokens before it are not for this kernel
    T,
    q_ptr,  # (T, K, G, D)
    HEADS: tl.constexpr,  # K
    GROUP: tl.constexpr,  # G
    DIM: tl.constexpr,  # D
    BLOCK: tl.constexpr,  # S
    PARTS: tl.constexpr,
    NORM: tl.constexpr,  # whether q and k are normalised
    EPS: tl.constexpr,
    ROWS: tl.constexpr,  # G rounded up to a power of two
    DIM_PADDED: tl.constexpr,
):
    """One token and KV head: adds up the parts, normalises and rotates q and k, writes k and v."""
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    if token < tl.load(first_ptr):
        return
    element: tl.constexpr = q_ptr.dtype.element_ty
    stride = T * HEADS * (GROUP + 2) * DIM
    qkv_at = qkv_ptr + (token * HEADS + head) * (GROUP + 2) * DIM
    cos_at, sin_at = cos_ptr + token * (DIM // 2), sin_ptr + token * (DIM // 2)
    row, dim = tl.arange(0, ROWS), tl.arange(0, DIM_PADDED)
    inside = dim < DIM

    is_q = row < GROUP
    q = rotated(
        qkv_at + row * DIM, is_q, stride, q_norm_ptr, cos_at, sin_at,
        DIM, PARTS, NORM, EPS, DIM_PADDED, element,
    )  # fmt: skip
    q_at = q_ptr + ((token * HEADS + head) * GROUP + row)[:, None] * DIM + dim[None, :]
    tl.store(q_at, q, mask=is_q[:, None] & inside[None, :])

    one = tl.arange(0, 1)
    k = rotated(
        qkv_at + (GROUP + one) * DIM, one == 0, stride, k_norm_ptr, cos_at, sin_at,
        DIM, PARTS, NORM, EPS, DIM_PADDED, element,
    )  # fmt: skip
    v = summed(qkv_at + (GROUP + 1) * DIM + dim, inside, stride, PARTS, element)
    slot = tl.load(slots_ptr + token).to(tl.int64)
    place = (slot // BLOCK * (2 * HEADS) + head) * BLOCK + slot % BLOCK
    k_at = kv_ptr + place * DIM + dim
    tl.store(k_at[None, :], k, mask=inside[None, :])
    tl.store(k_at + HEADS * BLOCK * DIM, v.to(element), mask=inside)
