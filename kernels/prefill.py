"""Attention of chunks of prompts over the paged cache: FlashAttention-2 tiles.

A *tile* is up to Q consecutive queries of one row. For one KV head it holds the G query heads of
each query, so keys and values are read once for Q * G rows of a matrix product:

    tile of 3 queries, G = 2     6 rows
    rows   q0h0 q0h1 q1h0 q1h1 q2h0 q2h1

A tile is one program. Where tiles are few their contexts are cut into parts, a program each, and a
second kernel merges the parts of a tile.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import triton

from jllm.kernels.launches import LOG2_E, AttentionLaunch, prefill_launch
from jllm.kernels.prefill_kernels import merge_kernel, prefill_kernel
from jllm.kernels.tiles import Merge, Parts, Tiles, cut, first_seen, owner, prefill_tiles, whole
from jllm.kernels.triton_call import triton_call

Array = jax.Array


class PrefillCut(NamedTuple):
    """How a step's chunks are cut: the same for all layers of one window.

    Attributes:
      tiles, parts: see tiles.py.
      size: Q, queries of a tile.
      launch: how the kernel is launched.
      merge: None if no tile has several parts.
    """

    tiles: Tiles
    parts: Parts
    size: int
    launch: AttentionLaunch
    merge: Merge | None = None


def cut_prefill(
    shape: tuple[int, ...],
    dtype: Any,
    query_start: Array,
    context_lens: Array,
    window: int | None,
    launch: AttentionLaunch | None = None,
) -> PrefillCut:
    """The cut of chunks of rows' tokens.

    Args:
      shape: (T, K, G, D), of all queries.
      dtype: of queries, keys and values.
      query_start: (B + 1,) int32, the first token of each row and the end; those before the first
        row's and from the end on belong to no row.
      context_lens: (B,) int32; a row's tokens are the last of its context.
      window: tokens a query sees, itself included; None for all.
      launch: how the kernel is launched; for tests and tuning.
    """
    num_tokens, heads, group, _ = shape
    launch = launch or prefill_launch(dtype)
    launch = launch._replace(rows=max(launch.rows, triton.next_power_of_2(group)))
    size = min(launch.rows // group, num_tokens)
    tiles = prefill_tiles(query_start, context_lens, num_tokens, size)
    begins = first_seen(tiles.position, window, launch.context)
    ends = jnp.where(tiles.length > 0, tiles.position + tiles.length, begins)
    # Fewer tiles than half the programs would leave most of the GPU idle: then contexts are cut.
    programs = launch.programs // heads - num_tokens // size
    if programs < num_tokens // size:
        return PrefillCut(tiles, whole(begins, ends), size, launch)
    parts = cut(begins, ends, step=launch.context, programs=programs, least=launch.least)
    token = jnp.arange(num_tokens, dtype=jnp.int32)
    tile = jnp.minimum(owner(tiles.token + tiles.length, token), len(begins) - 1)
    query = jnp.clip(token - tiles.token[tile], 0, size - 1)
    number = jnp.where(token < query_start[0], 0, parts.number[tile])
    merge = Merge(parts.first[tile], number, query)
    return PrefillCut(tiles, parts, size, launch, merge)


def attend_chunks(
    q: Array,
    kv: Array,
    tables: Array,
    cut: PrefillCut,
    out: Array,
    *,
    window: int | None,
    scale: float,
) -> Array:
    """Causal attention of chunks, whose keys are in the cache.

    Args:
      q: (T, K, G, D); kv: (N, 2, K, S, D); tables: (B, P) int32.
      cut: from ``cut_prefill``, for the same window.
      out: (T, K, G, D), where the queries of the cut's rows are written, in place.
      window: tokens a query sees, itself included; None for all.
      scale: factor on the scores.

    Returns:
      ``out``; undefined for queries of padding.
    """
    heads, group, dim = q.shape[1:]
    tiles, parts, launch = cut.tiles, cut.parts, cut.launch
    num_parts = len(parts.tile)
    split = cut.merge is not None
    alone = (parts.number == 1).astype(jnp.int32)[parts.tile]
    shape = (num_parts, cut.size, heads, group) if split else (1, 1, 1, 1)
    partial_type = jax.ShapeDtypeStruct((*shape, dim), jnp.float32)
    lse_type = jax.ShapeDtypeStruct(shape, jnp.float32)
    given: tuple[Any, ...] = (q, kv, tables, parts.tile, parts.begin, parts.end, alone)
    given = (*given, tiles.row, tiles.token, tiles.position, tiles.length)
    (partial, lse), (out,) = triton_call(
        *given,
        out,
        kernel=prefill_kernel,
        out_type=(partial_type, lse_type),
        in_place=[len(given)],
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
        WINDOW=window or 0,
        CAUSAL=True,
        PARTIAL=split,
        ROWS=launch.rows,
        CONTEXT=launch.context,
        DIM_PADDED=triton.next_power_of_2(dim),
    )
    return out if cut.merge is None else _merged(out, partial, lse, cut.merge)


def _merged(out: Array, partial: Array, lse: Array, merge: Merge) -> Array:
    """``out`` (T, K, G, D) with the queries of several parts filled in."""
    num_queries, heads, group, dim = out.shape
    # Parts read at once: what a query has if all have as many.
    num_parts, size = partial.shape[:2]
    each = triton.next_power_of_2(max(4, min(64, num_parts * size // num_queries)))
    given = (partial, lse, *merge)
    _, (merged,) = triton_call(
        *given,
        out,
        kernel=merge_kernel,
        out_type=(),
        in_place=[len(given)],
        grid=(num_queries, heads, group),
        num_warps=max(1, min(8, each * triton.next_power_of_2(dim) // 1024)),
        num_stages=1,
        HEADS=heads,
        GROUP=group,
        DIM=dim,
        QUERIES=size,
        DIM_PADDED=triton.next_power_of_2(dim),
        PARTS=each,
    )
    result: Array = merged
    return result
