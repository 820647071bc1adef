"""The Triton code of the residual add and RMSNorm; how it is launched says norm.py."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def add_norm_kernel(
    x_ptr,  # (T, E)
    parts_ptr,  # (PARTS, T, E)
    weight_ptr,  # (E,)
    T,
    sum_ptr,  # (T, E)
    out_ptr,  # (T, E)
    E: tl.constexpr,
    PARTS: tl.constexpr,
    EPS: tl.constexpr,
    WIDTH: tl.constexpr,  # E rounded up to a power of two
):
    """One row: ``x`` plus the sum of ``parts``, and its RMSNorm."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, WIDTH)
    real = column < E
    element = out_ptr.dtype.element_ty
    x = tl.load(x_ptr + row * E + column, mask=real, other=0.0)
    if PARTS > 0:
        y = tl.zeros((WIDTH,), tl.float32)
        for part in tl.static_range(PARTS):
            at = parts_ptr + (part * T + row) * E + column
            y += tl.load(at, mask=real, other=0.0).to(tl.float32)
        # Rounded where XLA rounds: the product first, then the sum.
        x = (x.to(tl.float32) + y.to(element).to(tl.float32)).to(element)
        tl.store(sum_ptr + row * E + column, x, mask=real)
    x = x.to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, axis=0) / E + EPS)
    weight = tl.load(weight_ptr + column, mask=real, other=0.0).to(tl.float32)
    out = (x * scale).to(element).to(tl.float32) * weight
    tl.store(out_ptr + row * E + column, out.to(element), mask=real)
