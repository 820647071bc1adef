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
MERGE_PARTS, MERGE_WARPS = 32, 4  # parts that one query's merge reads at once


class _Partial(NamedTuple):
    """Results of parts, and where each of the T queries finds its own."""

    partial: Array  # (X, Q, K, G, D) float32
    lse: Array  # (X, Q, K, G) float32
    first: Array  # (T,)
    number: Array  # (T,)
    query: Array  # (T,)


def decode(
    q: Array,
    kv: Array,
    tables: Array,
    context_lens: Array,
    *,
    window: int | None,
    scale: float,
    launch: AttentionLaunch | None = None,
) -> Array:
    """Attention of one query per row, the last of its context.

    Args:
      q: (B, K, G, D); kv: (N, 2, K, S, D); tables: (B, P) int32.
      context_lens: (B,) int32; 0 for a row of padding, whose result is undefined.
      window: tokens a query sees, itself included; None for all.
      scale: factor on the scores.
      launch: instead of the usual one.

    Returns:
      (B, K, G, D).
    """
    heads, group = q.shape[1:3]
    if launch is None:
        launch = decode_launch(q.shape, q.dtype)
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
    out, partial, lse = _launch(
        q, kv, tables, tiles, parts, 1, window=window, scale=scale, causal=False, launch=launch
    )
    query = jnp.zeros_like(parts.first)
    return _merged(out, _Partial(partial, lse, parts.first, parts.number, query))


def prefill(
    q: Array,
    kv: Array,
    tables: Array,
    query_start: Array,
    context_lens: Array,
    *,
    window: int | None,
    scale: float,
    launch: AttentionLaunch | None = None,
) -> Array:
    """Causal attention of chunks of rows' tokens, each the last of its row's context.

    Args:
      q: (T, K, G, D); kv: (N, 2, K, S, D); tables: (B, P) int32.
      query_start: (B + 1,) int32, first query of each row; the last entry is their number.
      context_lens: (B,) int32, tokens of each row, the chunk included.
      window, scale, launch: see ``decode``.

    Returns:
      (T, K, G, D); undefined for queries past the last row's.
    """
    num_tokens, heads, group, _ = q.shape
    if launch is None:
        launch = prefill_launch(q.dtype)
    launch = launch._replace(rows=max(launch.rows, triton.next_power_of_2(group)))
    size = min(launch.rows // group, num_tokens)
    tiles = prefill_tiles(query_start, context_lens, num_tokens, size)
    begins = _first_seen(tiles, window, launch)
    ends = jnp.where(tiles.length > 0, tiles.position + tiles.length, begins)
    options: dict[str, Any] = dict(window=window, scale=scale, causal=True, launch=launch)
    # A few tiles would leave most of the GPU idle: then contexts are cut here too.
    programs = (launch.programs - len(begins) * heads) // heads
    if programs <= 0:
        return _launch(q, kv, tables, tiles, whole(begins, ends), size, **options)[0]
    parts = cut(begins, ends, step=launch.context, programs=programs, least=launch.least)
    out, partial, lse = _launch(q, kv, tables, tiles, parts, size, **options)
    token = jnp.arange(num_tokens, dtype=jnp.int32)
    tile = jnp.minimum(owner(tiles.token + tiles.length, token), len(begins) - 1)
    query = jnp.minimum(token - tiles.token[tile], size - 1)
    return _merged(out, _Partial(partial, lse, parts.first[tile], parts.number[tile], query))


def _first_seen(tiles: Tiles, window: int | None, launch: AttentionLaunch) -> Array:
    """First context token (M,) that a tile's queries see, down to a whole iteration."""
    if window is None:
        return jnp.zeros_like(tiles.position)
    return jnp.maximum(tiles.position - window + 1, 0) // launch.context * launch.context


def _launch(
    q: Array,
    kv: Array,
    tables: Array,
    tiles: Tiles,
    parts: Parts,
    size: int,
    *,
    window: int | None,
    scale: float,
    causal: bool,
    launch: AttentionLaunch,
) -> tuple[Array, Array, Array]:
    """``out`` (T, K, G, D) of tiles of one part, partial sums and their weights of the others."""
    heads, group, dim = q.shape[1:]
    num_parts = len(parts.tile)
    partial = num_parts > len(tiles.row)
    alone = (parts.number == 1).astype(jnp.int32)[parts.tile]
    shape = (num_parts, size, heads, group) if partial else (1, 1, 1, 1)
    out_type = (
        jax.ShapeDtypeStruct(q.shape, q.dtype),
        jax.ShapeDtypeStruct((*shape, dim), jnp.float32),
        jax.ShapeDtypeStruct(shape, jnp.float32),
    )
    results: tuple[Array, Array, Array] = triton_call(
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
        QUERIES=size,
        SCALE=scale * LOG2_E,
        WINDOW=window or 0,
        CAUSAL=causal,
        PARTIAL=partial,
        ROWS=launch.rows,
        CONTEXT=launch.context,
        DIM_PADDED=triton.next_power_of_2(dim),
    )
    return results


def _merged(out: Array, parts: _Partial) -> Array:
    """``out`` (T, K, G, D) with the queries of several parts filled in."""
    num_tokens, heads, group, dim = out.shape
    _, (merged,) = triton_call(
        *parts,
        out,
        kernel=merge_kernel,
        out_type=(),
        in_place=[len(parts)],
        grid=(num_tokens, heads, group),
        num_warps=MERGE_WARPS,
        num_stages=1,
        HEADS=heads,
        GROUP=group,
        DIM=dim,
        QUERIES=parts.partial.shape[1],
        DIM_PADDED=triton.next_power_of_2(dim),
        PARTS=MERGE_PARTS,
    )
    result: Array = merged
    return result
