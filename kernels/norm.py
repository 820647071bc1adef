"""Residual add and RMSNorm in one kernel, which adds up the parts of the product before it too."""

from __future__ import annotations

import jax
import triton

from jllm.kernels.norm_kernels import add_norm_kernel
from jllm.kernels.triton_call import triton_call

Array = jax.Array

# Values that a warp loads at once, 32 for each of its threads: with more, loads wait for registers.
WARP_VALUES = 1024


def add_norm(x: Array, parts: Array | None, weight: Array, eps: float) -> tuple[Array, Array]:
    """``models.layers.add_norm``, of x (T, E) and parts (P, T, E) -> two of (T, E)."""
    rows, width = x.shape
    padded = triton.next_power_of_2(width)
    num_parts = 0 if parts is None else len(parts)
    out_type = jax.ShapeDtypeStruct(x.shape, x.dtype)
    # Without parts the sum is x itself, and the kernel touches neither of the two.
    none = jax.ShapeDtypeStruct((1, 1), x.dtype)
    total, normed = triton_call(
        x,
        x if parts is None else parts,
        weight,
        rows,
        kernel=add_norm_kernel,
        out_type=(out_type if num_parts else none, out_type),
        grid=(rows,),
        num_warps=min(16, max(4, triton.next_power_of_2(padded * num_parts) // WARP_VALUES)),
        num_stages=1,
        E=width,
        PARTS=num_parts,
        EPS=eps,
        WIDTH=padded,
    )
    return (total if num_parts else x), normed
