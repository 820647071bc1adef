"""The Triton code that takes q, k and v to where attention finds them; see rope.py."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def rope_kernel(
    qkv_ptr,  # (PARTS, T, K, G + 2, D): of each KV head its queries, its key, its value
    q_norm_ptr,  # (D,)
    k_norm_ptr,  # (D,)
    cos_ptr,  # (T, D / 2) float32
    sin_ptr,  # (T, D / 2) float32
    slots_ptr,  # (T,) int32: cache slot of each token
    kv_ptr,  # (N, 2, K, S, D), in place
    T,
    q_ptr,  # (T, K, G, D)
    HEADS: tl.constexpr,  # K
    GROUP: tl.constexpr,  # G
    DIM: tl.constexpr,  # D
    BLOCK: tl.constexpr,  # S
    PARTS: tl.constexpr,
    NORM: tl.constexpr,  # whether q and k are normalised
    EPS: tl.constexpr,
    ROWS: tl.constexpr,  # G + 2 rounded up to a power of two
    HALF: tl.constexpr,  # D / 2 rounded up to a power of two
):
    """One token and KV head: adds up the parts, normalises and rotates q and k, writes k and v."""
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row = tl.arange(0, ROWS)
    column = tl.arange(0, HALF)
    real = (row < GROUP + 2)[:, None] & (column < DIM // 2)[None, :]
    element = q_ptr.dtype.element_ty
    first = tl.zeros((ROWS, HALF), tl.float32)
    second = tl.zeros((ROWS, HALF), tl.float32)
    for part in tl.static_range(PARTS):
        place = ((part * T + token) * HEADS + head) * (GROUP + 2) + row
        at = qkv_ptr + place[:, None] * DIM + column[None, :]
        first += tl.load(at, mask=real, other=0.0).to(tl.float32)
        second += tl.load(at + DIM // 2, mask=real, other=0.0).to(tl.float32)
    # Rounded where XLA rounds: the product, the normalised, what its weight makes of it.
    first = first.to(element).to(tl.float32)
    second = second.to(element).to(tl.float32)
    rotated = (row <= GROUP)[:, None]  # all but v
    inside = column < DIM // 2
    cos = tl.load(cos_ptr + token * (DIM // 2) + column, mask=inside, other=0.0)[None, :]
    sin = tl.load(sin_ptr + token * (DIM // 2) + column, mask=inside, other=0.0)[None, :]
    a, b = first, second
    if NORM:
        squares = tl.sum(a * a, axis=1) + tl.sum(b * b, axis=1)
        scale = tl.rsqrt(squares / DIM + EPS)[:, None]
        is_q = (row < GROUP)[:, None]
        q_first = tl.load(q_norm_ptr + column, mask=inside, other=0.0).to(tl.float32)[None, :]
        k_first = tl.load(k_norm_ptr + column, mask=inside, other=0.0).to(tl.float32)[None, :]
        later = column + DIM // 2
        q_second = tl.load(q_norm_ptr + later, mask=inside, other=0.0).to(tl.float32)[None, :]
        k_second = tl.load(k_norm_ptr + later, mask=inside, other=0.0).to(tl.float32)[None, :]
        a = (a * scale).to(element).to(tl.float32) * tl.where(is_q, q_first, k_first)
        b = (b * scale).to(element).to(tl.float32) * tl.where(is_q, q_second, k_second)
        a = a.to(element).to(tl.float32)
        b = b.to(element).to(tl.float32)
    first = tl.where(rotated, a * cos - b * sin, first).to(element)
    second = tl.where(rotated, b * cos + a * sin, second).to(element)

    q_place = (token * HEADS + head) * GROUP + row
    q_at = q_ptr + q_place[:, None] * DIM + column[None, :]
    is_q = real & (row < GROUP)[:, None]
    tl.store(q_at, first, mask=is_q)
    tl.store(q_at + DIM // 2, second, mask=is_q)
    slot = tl.load(slots_ptr + token).to(tl.int64)
    which = tl.maximum(row - GROUP, 0)  # 0 for k, 1 for v
    kv_place = ((slot // BLOCK * 2 + which) * HEADS + head) * BLOCK + slot % BLOCK
    kv_at = kv_ptr + kv_place[:, None] * DIM + column[None, :]
    is_kv = real & (row >= GROUP)[:, None]
    tl.store(kv_at, first, mask=is_kv)
    tl.store(kv_at + DIM // 2, second, mask=is_kv)
