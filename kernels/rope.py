"""QK-norm, rotary positions and the write into the paged cache in one kernel."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import triton

from jllm.kernels.rope_kernels import rope_kernel
from jllm.kernels.triton_call import triton_call

Array = jax.Array


def enter_qkv(
    qkv: Array,
    norms: tuple[Array, Array] | None,
    rope: tuple[Array, Array],
    slots: Array,
    kv: Array,
    eps: float,
    first: Array | None = None,
) -> tuple[Array, Array]:
    """Rotated queries (T, K, G, D), and the cache (N, 2, K, S, D) with the keys and values of their
    tokens, in place.

    Args:
      qkv: (P, T, K, G + 2, D) parts of the projection.
      norms: weights (D,) of q's and of k's RMSNorm, or None.
      rope: cos and sin (T, D / 2), float32.
      slots: (T,) int32 cache slots; those of padding are in the scratch block.
      kv: the layer's cache.
      eps: of the norms.
      first: (1,) int32; tokens before it are left out, their queries undefined. None leaves out
        none.
    """
    parts, tokens, heads, wide, dim = qkv.shape
    cos, sin = rope
    q_norm, k_norm = norms or (cos, cos)  # never read without norms
    first = jnp.zeros(1, jnp.int32) if first is None else first
    q, (kv,) = triton_call(
        qkv,
        q_norm,
        k_norm,
        cos,
        sin,
        slots,
        kv,
        first,
        tokens,
        kernel=rope_kernel,
        out_type=jax.ShapeDtypeStruct((tokens, heads, wide - 2, dim), kv.dtype),
        in_place=[6],
        grid=(tokens, heads),
        num_warps=1,
        num_stages=1,
        HEADS=heads,
        GROUP=wide - 2,
        DIM=dim,
        BLOCK=kv.shape[3],
        PARTS=parts,
        NORM=norms is not None,
        EPS=eps,
        ROWS=triton.next_power_of_2(wide - 2),
        DIM_PADDED=triton.next_power_of_2(dim),
    )
    return q, kv
