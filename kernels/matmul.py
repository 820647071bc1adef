"""Matrix products of few rows: every weight is read once, and reading it is all the time they take.

XLA's own products leave bandwidth when there are few rows: their grid is one program per tile of
columns, 40 for 2,560 of them, and a GPU of 132 processors idles. Here the sum over the inputs is
cut into parts too, a program each. The parts are added up by whatever reads the product next (the
residual add, the rotation of q and k), so that cutting costs no kernel.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jllm.kernels.launches import MatmulLaunch, row_tile
from jllm.kernels.matmul_kernels import gated_kernel, matmul_kernel
from jllm.kernels.triton_call import triton_call

Array = jax.Array


def matmul_parts(x: Array, w: Array, launch: MatmulLaunch) -> Array:
    """``x (T, I) @ w (I, O)`` in parts (P, T, O), whose sum over P is the product.

    float32, but a single part has x's dtype.
    """
    (rows, inputs), outputs = x.shape, w.shape[1]
    dtype = x.dtype if launch.split == 1 else jnp.float32
    tile = row_tile(rows)
    result: Array = triton_call(
        x,
        w,
        rows,
        kernel=matmul_kernel,
        out_type=jax.ShapeDtypeStruct((launch.split, rows, outputs), dtype),
        grid=(-(-outputs // launch.columns), launch.split, -(-rows // tile)),
        num_warps=launch.num_warps,
        num_stages=launch.num_stages,
        N=outputs,
        K=inputs,
        SPLIT=launch.split,
        ROWS=tile,
        COLUMNS=launch.columns,
        DEPTH=launch.depth,
    )
    return result


def gated(x: Array, w_gate_up: Array, launch: MatmulLaunch) -> Array:
    """``silu(x @ gate) * (x @ up)`` of x (T, I) and w_gate_up (I, 2, O) -> (T, O)."""
    (rows, inputs), outputs = x.shape, w_gate_up.shape[2]
    tile = row_tile(rows)
    result: Array = triton_call(
        x,
        w_gate_up,
        rows,
        kernel=gated_kernel,
        out_type=jax.ShapeDtypeStruct((rows, outputs), x.dtype),
        grid=(-(-outputs // launch.columns), -(-rows // tile)),
        num_warps=launch.num_warps,
        num_stages=launch.num_stages,
        N=outputs,
        K=inputs,
        ROWS=tile,
        COLUMNS=launch.columns,
        DEPTH=launch.depth,
    )
    return result
