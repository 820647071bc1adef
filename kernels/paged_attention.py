"""Attention over the paged KV cache: FlashAttention-2 tiles over parts of the context.

The unit of work is a *tile*: up to Q consecutive queries that attend to the context of one block
table. For one KV head it holds the G query heads of each query, so keys and values are read once
for Q * G rows of a matrix product:

    tile of 3 queries, G = 2     6 of 16 rows used
    rows   q0h0 q0h1 q1h0 q1h1 q2h0 q2h1 . . .

A prefill tile (128 rows) is one program. Decode tiles hold one query each and wait for memory, so
their contexts are cut into *parts*, a program each: a step of many rows is cut little, one of few
rows until the GPU is full, long contexts into more parts than short ones. A second kernel merges
the parts of a tile.

Bytes that must move: 4 * D per context token and KV head in bfloat16; decode is bound by them.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import triton

from jllm.kernels.attention_kernels import attention_kernel, merge_kernel
from jllm.kernels.launches import AttentionLaunch, decode_launch, prefill_launch
from jllm.kernels.tiles import Parts, Tiles, cut, decode_tiles, owner, prefill_tiles, whole
from jllm.kernels.triton_call import triton_call

Array = jax.Array

LOG2_E = 1.4426950408889634


class Merge(NamedTuple):
    """Where each of the T queries finds its parts. All (T,) int32."""

    first: Array  # the first part of its tile
    number: Array  # how many those are
    query: Array  # its place in the tile


class Cut(NamedTuple):
    """How the queries of a step are cut into tiles and the contexts of tiles into parts: the same
    for all layers of one window, so it is worked out once.

    Attributes:
      tiles, parts: see tiles.py.
      size: Q, queries of a tile.
      causal: whether queries of a tile see different contexts.
      launch: how the kernel is launched.
      merge: None if no tile has several parts.
    """

    tiles: Tiles
    parts: Parts
    size: int
    causal: bool
    launch: AttentionLaunch
    merge: Merge | None = None


def cut_decode(
    shape: tuple[int, ...],
    dtype: Any,
    context_lens: Array,
    window: int | None,
    launch: AttentionLaunch | None = None,
) -> Cut:
    """The cut of one query per row, q (B, K, G, D), with contexts (B,)."""
    heads, group = shape[1:3]
    launch = launch or decode_launch(shape, dtype)
    launch = launch._replace(rows=max(16, triton.next_power_of_2(group)))
    tiles = decode_tiles(context_lens)
    begins = _first_seen(tiles, window, launch)
    parts = cut(
        begins,
        context_lens,
        step=launch.context,
        programs=max(1, launch.programs // heads),
        least=launch.least,
    )
    merge = Merge(parts.first, parts.number, jnp.zeros_like(parts.first))
    return Cut(tiles, parts, 1, False, launch, merge)


def cut_prefill(
    shape: tuple[int, ...],
    dtype: Any,
    query_start: Array,
    context_lens: Array,
    window: int | None,
    launch: AttentionLaunch | None = None,
) -> Cut:
    """The cut of chunks of rows' tokens, q (T, K, G, D), each the last of its row's context."""
    num_tokens, heads, group, _ = shape
    launch = launch or prefill_launch(dtype)
    launch = launch._replace(rows=max(launch.rows, triton.next_power_of_2(group)))
    size = min(launch.rows // group, num_tokens)
    tiles = prefill_tiles(query_start, context_lens, num_tokens, size)
    begins = _first_seen(tiles, window, launch)
    ends = jnp.where(tiles.length > 0, tiles.position + tiles.length, begins)
    # A few tiles would leave most of the GPU idle: then contexts are cut here too.
    programs = (launch.programs - len(begins) * heads) // heads
    if programs <= 0:
        return Cut(tiles, whole(begins, ends), size, True, launch)
    parts = cut(begins, ends, step=launch.context, programs=programs, least=launch.least)
    token = jnp.arange(num_tokens, dtype=jnp.int32)
    tile = jnp.minimum(owner(tiles.token + tiles.length, token), len(begins) - 1)
    query = jnp.minimum(token - tiles.token[tile], size - 1)
    merge = Merge(parts.first[tile], parts.number[tile], query)
    return Cut(tiles, parts, size, True, launch, merge)


def attend(
    q: Array, kv: Array, tables: Array, cut: Cut, *, window: int | None, scale: float
) -> Array:
    """Attention over the cached context.

    Args:
      q: (T, K, G, D); kv: (N, 2, K, S, D); tables: (B, P) int32.
      cut: from ``cut_decode`` or ``cut_prefill``, for the same window.
      window: tokens a query sees, itself included; None for all.
      scale: factor on the scores.

    Returns:
      (T, K, G, D); undefined for rows and queries of padding.
    """
    heads, group, dim = q.shape[1:]
    tiles, parts, launch = cut.tiles, cut.parts, cut.launch
    num_parts = len(parts.tile)
    split = cut.merge is not None
    alone = (parts.number == 1).astype(jnp.int32)[parts.tile]
    shape = (num_parts, cut.size, heads, group) if split else (1, 1, 1, 1)
    out_type = (
        jax.ShapeDtypeStruct(q.shape, q.dtype),
        jax.ShapeDtypeStruct((*shape, dim), jnp.float32),
        jax.ShapeDtypeStruct(shape, jnp.float32),
    )
    out, partial, lse = triton_call(
        q,
        kv,
        tables,
        parts.tile,
        parts.begin,
        parts.end,
        alone,
        tiles.row,
        tiles.token,
        tiles.position,
        tiles.length,
        kernel=attention_kernel,
        out_type=out_type,
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
        CAUSAL=cut.causal,
        PARTIAL=split,
        ROWS=launch.rows,
        CONTEXT=launch.context,
        DIM_PADDED=triton.next_power_of_2(dim),
    )
    if cut.merge is None:
        result: Array = out
        return result
    return _merged(out, partial, lse, cut.merge)


def _first_seen(tiles: Tiles, window: int | None, launch: AttentionLaunch) -> Array:
    """First context token (M,) that a tile's queries see, down to a whole iteration."""
    if window is None:
        return jnp.zeros_like(tiles.position)
    return jnp.maximum(tiles.position - window + 1, 0) // launch.context * launch.context


def _merged(out: Array, partial: Array, lse: Array, merge: Merge) -> Array:
    """``out`` (T, K, G, D) with the queries of several parts filled in."""
    num_tokens, heads, group, dim = out.shape
    # Parts read at once: what a query has if all have as many.
    num_parts, size = partial.shape[:2]
    each = num_parts * size // num_tokens
    each = triton.next_power_of_2(max(4, min(64, each)))
    _, (merged,) = triton_call(
        partial,
        lse,
        *merge,
        out,
        kernel=merge_kernel,
        out_type=(),
        in_place=[5],
        grid=(num_tokens, heads, group),
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
