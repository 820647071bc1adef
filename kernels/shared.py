"""Attention of decode rows to a prefix that they share, read once for many rows.

Rows of one prompt, or of one system prompt, have the same blocks at the start of their tables.
Neighbours among them form a tile, as the queries of a chunk do, which attends to the shared blocks;
each row then attends to the rest of its context and merges both (arXiv 2402.05099, 2501.01005).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import triton

from jllm.kernels.launches import LOG2_E, AttentionLaunch, shared_launch, shared_tile_rows
from jllm.kernels.prefill_kernels import prefill_kernel
from jllm.kernels.tiles import Merge, Parts, SharedTiles, cut
from jllm.kernels.triton_call import triton_call

Array = jax.Array


class SharedCut(NamedTuple):
    """How shared prefixes are cut into parts.

    Attributes:
      tiles: the rows that share.
      parts: of the prefixes, see tiles.py.
      size: rows of a tile, at most.
      launch: how the kernel is launched.
      merge: where each of the B rows finds the parts of its prefix.
      context: (B,) tokens that a row shares.
    """

    tiles: SharedTiles
    parts: Parts
    size: int
    launch: AttentionLaunch
    merge: Merge
    context: Array


def cut_shared(shape: tuple[int, ...], dtype: Any, tiles: SharedTiles) -> SharedCut:
    """The cut of what rows of q (B, K, G, D) share, in tiles of ``shared_tile_rows(G)`` rows."""
    rows, heads, group, _ = shape
    launch = shared_launch(dtype)
    launch = launch._replace(rows=max(launch.rows, triton.next_power_of_2(group)))
    parts = cut(
        jnp.zeros_like(tiles.context),
        tiles.context,
        step=launch.context,
        programs=max(1, launch.programs // heads),
        least=launch.least,
    )
    shares = tiles.tile >= 0
    tile = jnp.maximum(tiles.tile, 0)
    row = jnp.arange(rows, dtype=jnp.int32)
    merge = Merge(
        parts.first[tile], jnp.where(shares, parts.number[tile], 0), row - tiles.row[tile]
    )
    context = jnp.where(shares, tiles.context[tile], 0)
    return SharedCut(tiles, parts, shared_tile_rows(group), launch, merge, context)


def attend_shared(
    q: Array, kv: Array, tables: Array, cut: SharedCut, scale: float
) -> tuple[Array, Array]:
    """Attention of rows' queries to the prefixes that they share, in parts.

    q (B, K, G, D), kv (N, 2, K, S, D), tables (B, P) -> normalised sums (X, Q, K, G, D) and base-2
    logs of the sums of weights (X, Q, K, G), float32.
    """
    heads, group, dim = q.shape[1:]
    tiles, parts, launch = cut.tiles, cut.parts, cut.launch
    num_parts = len(parts.tile)
    never = jnp.zeros_like(parts.tile)  # no part is all of a row's attention
    shape = (num_parts, cut.size, heads, group)
    given: tuple[Any, ...] = (q, kv, tables, parts.tile, parts.begin, parts.end, never)
    given = (*given, tiles.row, tiles.row, tiles.row, tiles.length)
    _, partial, lse = triton_call(
        *given,
        kernel=prefill_kernel,
        out_type=(
            jax.ShapeDtypeStruct((1,), q.dtype),
            jax.ShapeDtypeStruct((*shape, dim), jnp.float32),
            jax.ShapeDtypeStruct(shape, jnp.float32),
        ),
        grid=(num_parts, heads),
        num_warps=launch.num_warps,
        num_stages=launch.num_stages,
        TABLE_WIDTH=tables.shape[1],
        HEADS=heads,
        GROUP=group,
        BLOCK=kv.shape[3],
        DIM=dim,
        QUERIES=cut.size,
        SCALE=scale * LOG2_E,
        WINDOW=0,
        CAUSAL=False,
        PARTIAL=True,
        ROWS=launch.rows,
        CONTEXT=launch.context,
        DIM_PADDED=triton.next_power_of_2(dim),
    )
    return partial, lse
