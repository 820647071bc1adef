"""Attention of decode rows over the paged cache, all of it in one kernel.

A row's new token sees the whole context of its row. What it costs is reading the context's keys and
values, 4 * D bytes per token and KV head in bfloat16, so everything else rides along: the sums of
the projection's parts, QK-norm, rotation, the write of the new key and value.

For one KV head the G queries of a row share what is read. Contexts are cut into *parts*, a program
each: those of a step of many rows little, those of few rows until the GPU is full, long contexts
into more parts than short ones. Programs of a row count themselves, and the last one merges.

What rows share is attended to before, for many rows at once (shared.py), and merged here.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import triton

from jllm.kernels.decode_kernels import decode_kernel
from jllm.kernels.launches import LOG2_E, AttentionLaunch, decode_launch
from jllm.kernels.rope import enter_qkv
from jllm.kernels.shared import SharedCut, attend_shared, cut_shared
from jllm.kernels.tiles import Parts, SharedTiles, cut, first_seen
from jllm.kernels.triton_call import triton_call

Array = jax.Array

MERGED_VALUES = 4096  # that a warp reads at once when it merges: 128 for each of its threads


class DecodeCut(NamedTuple):
    """How the contexts of a step's decode rows are cut: the same for all layers of one window.

    Attributes:
      parts: see tiles.py.
      context_lens: (B,) int32.
      counts: (B, K) int32 zeros, where programs count themselves; they leave zeros.
      launch: how the kernel is launched.
      shared: of the prefixes that rows share, if some do.
    """

    parts: Parts
    context_lens: Array
    counts: Array
    launch: AttentionLaunch
    shared: SharedCut | None = None


def cut_decode(
    shape: tuple[int, ...],
    dtype: Any,
    context_lens: Array,
    window: int | None,
    launch: AttentionLaunch | None = None,
    shared_tiles: SharedTiles | None = None,
) -> DecodeCut:
    """The cut of one query per row, q (B, K, G, D), with contexts (B,). With a window rows
    share nothing."""
    rows, heads, group, _ = shape
    shared = None if shared_tiles is None else cut_shared(shape, dtype, shared_tiles)
    launch = launch or decode_launch(shape, dtype)
    launch = launch._replace(rows=max(16, triton.next_power_of_2(group)))
    begins = first_seen(context_lens - 1, window, launch.context)
    parts = cut(
        begins if shared is None else shared.context,
        context_lens,
        step=launch.context,
        programs=max(1, launch.programs // heads),
        least=launch.least,
    )
    # Behind a barrier, or each layer's kernel would be given zeros of its own, made by a kernel.
    counts = jax.lax.optimization_barrier(jnp.zeros((rows, heads), jnp.int32))
    return DecodeCut(parts, context_lens, counts, launch, shared)


def attend_rows(
    qkv: Array,
    norms: tuple[Array, Array] | None,
    rope: tuple[Array, Array],
    slots: Array,
    kv: Array,
    tables: Array,
    cut: DecodeCut,
    *,
    window: int | None,
    scale: float,
    eps: float,
) -> tuple[Array, Array]:
    """Attention of the first B tokens, a row each; their keys and values enter the cache.

    Args:
      qkv: (P, T, K, G + 2, D) parts of the projection.
      norms: weights (D,) of q's and of k's RMSNorm, or None.
      rope: cos and sin (T, D / 2), float32.
      slots: (T,) int32 cache slots of the tokens.
      kv: (N, 2, K, S, D), in place.
      tables: (B, P) int32.
      cut: from ``cut_decode``, for the same window.
      window: tokens a query sees, itself included; None for all.
      scale: factor on the scores.
      eps: of the norms.

    Returns:
      (T, K, G, D), undefined but for the B rows that are not padding, and the cache.
    """
    projected, num_tokens, heads, wide, dim = qkv.shape
    group, parts, launch = wide - 2, cut.parts, cut.launch
    num_parts, padded = len(parts.tile), triton.next_power_of_2(dim)
    members, shared = triton.next_power_of_2(group), cut.shared
    lens = cut.context_lens
    prefixes: tuple[Array, ...] = (lens,) * 5  # never read
    if shared is not None:
        rows = len(lens)
        own = (qkv[:, :rows], norms, (rope[0][:rows], rope[1][:rows]), slots[:rows])
        q, kv = enter_qkv(*own, kv, eps)
        prefixes = (*attend_shared(q, kv, tables, shared, scale), *shared.merge)
    cos, sin = rope
    q_norm, k_norm = norms or (cos, cos)  # never read without norms
    given: tuple[Any, ...] = (qkv, q_norm, k_norm, cos, sin, tables, lens)
    given = (*given, parts.tile, parts.begin, parts.end, parts.first, parts.number, cut.counts)
    given = (*given, *prefixes)
    (out, _, _), (kv,) = triton_call(
        *given,
        kv,
        num_tokens,
        kernel=decode_kernel,
        out_type=(
            jax.ShapeDtypeStruct((num_tokens, heads, group, dim), kv.dtype),
            jax.ShapeDtypeStruct((num_parts, heads, group, dim), jnp.float32),
            jax.ShapeDtypeStruct((num_parts, heads, group), jnp.float32),
        ),
        in_place=[len(given)],
        grid=(num_parts, heads),
        num_warps=launch.num_warps,
        num_stages=launch.num_stages,
        TABLE_WIDTH=tables.shape[1],
        HEADS=heads,
        GROUP=group,
        BLOCK=kv.shape[3],
        DIM=dim,
        PROJECTED=projected,
        NORM=norms is not None,
        EPS=eps,
        SCALE=scale * LOG2_E,
        WINDOW=window or 0,
        SHARED=0 if shared is None else shared.size,
        ROWS=launch.rows,
        CONTEXT=launch.context,
        DIM_PADDED=padded,
        MERGED=max(1, MERGED_VALUES * launch.num_warps // (members * padded)),
        MEMBERS=members,
    )
    return out, kv
