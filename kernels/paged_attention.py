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

Rows that share their leading blocks attend to those as tiles of many queries, which reads them
once for all (cascade attention); what their own parts then give is merged with it.

Bytes that must move: 4 * D per context token and KV head in bfloat16; decode is bound by them.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from jllm.kernels.tiles import Parts, Tiles, cut, decode_tiles, owner, prefill_tiles, whole
from jllm.kernels.triton_call import triton_call

Array = jax.Array

LOG2_E = 1.4426950408889634


class Launch(NamedTuple):
    """How an attention kernel is launched.

    Attributes:
      rows: of a tile's matrix products, Q * G of them used.
      context: context tokens per iteration.
      num_warps, num_stages: of Triton.
      programs: to fill the GPU, all KV heads together; contexts are cut into parts up to there.
      least: iterations of a part, but for short contexts.
    """

    rows: int
    context: int
    num_warps: int
    num_stages: int
    programs: int
    least: int = 1


DECODE = Launch(rows=16, context=16, num_warps=1, num_stages=3, programs=132 * 8)
PREFILL = Launch(rows=128, context=64, num_warps=4, num_stages=3, programs=132 * 2, least=4)
# float32 is multiplied outside the tensor cores, in code that grows with the tile.
DECODE_FLOAT32 = Launch(rows=16, context=16, num_warps=4, num_stages=2, programs=132 * 4)
PREFILL_FLOAT32 = Launch(rows=16, context=16, num_warps=4, num_stages=2, programs=132 * 4)


@triton.jit
def _attention_kernel(
    # inputs
    q_ptr,  # (T, K, G, D)
    kv_ptr,  # (N, 2, K, S, D)
    tables_ptr,  # (B, P) int32
    tile_ptr,  # (X,) int32: tile of each part; -1 for none
    begin_ptr,  # (X,) int32: its stretch of the context
    end_ptr,  # (X,) int32
    alone_ptr,  # (X,) int32: 1 where nothing else attends for the part's tile
    row_ptr,  # (M,) int32: block table of each tile
    token_ptr,  # (M,) int32: its first query
    position_ptr,  # (M,) int32: position of that query
    length_ptr,  # (M,) int32: its queries
    # outputs
    out_ptr,  # (T, K, G, D)
    partial_ptr,  # (X, Q, K, G, D) float32
    lse_ptr,  # (X, Q, K, G) float32: base-2 log of a part's sum of weights
    # sizes
    TABLE_WIDTH: tl.constexpr,  # P
    HEADS: tl.constexpr,  # K
    GROUP: tl.constexpr,  # G
    BLOCK: tl.constexpr,  # S
    DIM: tl.constexpr,  # D
    QUERIES: tl.constexpr,  # Q
    # what
    SCALE: tl.constexpr,  # on the scores, log2(e) included
    WINDOW: tl.constexpr,  # tokens a query sees; 0 for all
    CAUSAL: tl.constexpr,  # whether queries see the context up to their position only
    PARTIAL: tl.constexpr,  # whether parts that are not alone write partial sums
    # how
    ROWS: tl.constexpr,  # rows of a tile: a power of two, at least 16 and Q * G
    CONTEXT: tl.constexpr,  # context tokens of an iteration
    DIM_PADDED: tl.constexpr,  # D rounded up to a power of two
):
    """One KV head's attention of one tile over one part of its context."""
    part, head = tl.program_id(0), tl.program_id(1)
    tile = tl.load(tile_ptr + part)
    if tile < 0:
        return
    begin, end = tl.load(begin_ptr + part), tl.load(end_ptr + part)
    table_ptr = tables_ptr + tl.load(row_ptr + tile) * TABLE_WIDTH
    token0 = tl.load(token_ptr + tile).to(tl.int64)
    length = tl.load(length_ptr + tile)
    first = tl.load(position_ptr + tile)

    lane = tl.arange(0, ROWS)
    query, member = lane // GROUP, lane % GROUP
    dim = tl.arange(0, DIM_PADDED)
    real = (query < length)[:, None] & (dim < DIM)[None, :]
    q_place = ((token0 + query) * HEADS + head) * GROUP + member
    q = tl.load(q_ptr + q_place[:, None] * DIM + dim[None, :], mask=real, other=0.0)
    position = first + query

    best = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    acc = tl.zeros((ROWS, DIM_PADDED), tl.float32)
    # Up to here every query sees every token, and no score needs a mask.
    clear_begin, clear_end = begin, begin + (end - begin) // CONTEXT * CONTEXT
    if CAUSAL:
        clear_end = tl.minimum(
            clear_end, begin + tl.maximum(first + 1 - begin, 0) // CONTEXT * CONTEXT
        )
    if WINDOW > 0:
        # Tokens before the last query's window need one too.
        seen_by_all = tl.maximum(first + length - WINDOW, begin)
        clear_begin = tl.minimum(begin + tl.cdiv(seen_by_all - begin, CONTEXT) * CONTEXT, clear_end)
        best, total, acc = _attend(
            q, kv_ptr, table_ptr, head, position, begin, clear_begin, end, best, total, acc,
            HEADS, BLOCK, DIM, SCALE, WINDOW, CAUSAL, True, CONTEXT, DIM_PADDED,
        )  # fmt: skip
    best, total, acc = _attend(
        q, kv_ptr, table_ptr, head, position, clear_begin, clear_end, end, best, total, acc,
        HEADS, BLOCK, DIM, SCALE, WINDOW, CAUSAL, False, CONTEXT, DIM_PADDED,
    )  # fmt: skip
    best, total, acc = _attend(
        q, kv_ptr, table_ptr, head, position, clear_end, end, end, best, total, acc,
        HEADS, BLOCK, DIM, SCALE, WINDOW, CAUSAL, True, CONTEXT, DIM_PADDED,
    )  # fmt: skip

    acc = acc / tl.where(total > 0, total, 1.0)[:, None]
    finished = length  # queries whose result this is
    if PARTIAL:
        finished = length * tl.load(alone_ptr + part)
        part_place = ((part.to(tl.int64) * QUERIES + query) * HEADS + head) * GROUP + member
        partial_at = partial_ptr + part_place[:, None] * DIM + dim[None, :]
        partial = query < length - finished
        tl.store(partial_at, acc, mask=partial[:, None] & (dim < DIM)[None, :])
        lse = tl.where(total > 0, best + tl.log2(tl.where(total > 0, total, 1.0)), float("-inf"))
        tl.store(lse_ptr + part_place, lse, mask=partial)
    out_at = out_ptr + q_place[:, None] * DIM + dim[None, :]
    real = (query < finished)[:, None] & (dim < DIM)[None, :]
    tl.store(out_at, acc.to(out_ptr.dtype.element_ty), mask=real)


@triton.jit
def _attend(
    q, kv_ptr, table_ptr, head, position, start, stop, end, best, total, acc,
    HEADS: tl.constexpr, BLOCK: tl.constexpr, DIM: tl.constexpr, SCALE: tl.constexpr,
    WINDOW: tl.constexpr, CAUSAL: tl.constexpr, MASKED: tl.constexpr,
    CONTEXT: tl.constexpr, DIM_PADDED: tl.constexpr,
):  # fmt: skip
    """Online softmax (arXiv 2205.14135) over context tokens [start, stop), none from ``end`` on."""
    dim = tl.arange(0, DIM_PADDED)
    for at0 in range(start, stop, CONTEXT):
        at = at0 + tl.arange(0, CONTEXT)
        if CONTEXT <= BLOCK:
            block = tl.load(table_ptr + at0 // BLOCK).to(tl.int64)
        else:
            block = tl.load(table_ptr + tl.minimum(at, end - 1) // BLOCK).to(tl.int64)
        place = (block * (2 * HEADS) + head) * BLOCK + at % BLOCK
        k_at = kv_ptr + place[:, None] * DIM + dim[None, :]
        v_at = k_at + HEADS * BLOCK * DIM
        if MASKED or DIM_PADDED != DIM:
            # Past a row's end its blocks hold what others left: 0 * nan would be nan.
            inside = (at < end)[:, None] & (dim < DIM)[None, :]
            k = tl.load(k_at, mask=inside, other=0.0)
            v = tl.load(v_at, mask=inside, other=0.0)
        else:
            k = tl.load(k_at)
            v = tl.load(v_at)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * SCALE
        if MASKED:
            seen = (at < end)[None, :]
            if CAUSAL:
                seen = seen & (at[None, :] <= position[:, None])
            if WINDOW > 0:
                seen = seen & (at[None, :] > position[:, None] - WINDOW)
            scores = tl.where(seen, scores, float("-inf"))
        new_best = tl.maximum(best, tl.max(scores, axis=1))
        shift = new_best
        if MASKED:
            # Until a query has seen a key its best is -inf, and -inf - -inf would be nan.
            shift = tl.where(new_best == float("-inf"), 0.0, new_best)
        weights = tl.exp2(scores - shift[:, None])
        keep = tl.exp2(best - shift)
        total = total * keep + tl.sum(weights, axis=1)
        acc = acc * keep[:, None]
        acc = tl.dot(weights.to(v.dtype), v, acc, input_precision="ieee")
        best = new_best
    return best, total, acc


@triton.jit
def _merge_kernel(
    # Up to two sources of partial results, each with:
    partial_ptr,  # (X, Q, K, G, D) float32: normalised sums of the parts
    lse_ptr,  # (X, Q, K, G) float32
    first_ptr,  # (T,) int32: first part of each query's tile
    count_ptr,  # (T,) int32: its parts
    query_ptr,  # (T,) int32: its place in the tile
    shared_partial_ptr,
    shared_lse_ptr,
    shared_first_ptr,
    shared_count_ptr,
    shared_query_ptr,
    out_ptr,  # (T, K, G, D), in place: queries of one part are there already
    HEADS: tl.constexpr,  # K
    GROUP: tl.constexpr,  # G
    DIM: tl.constexpr,  # D
    QUERIES: tl.constexpr,  # Q of the first source
    SHARED: tl.constexpr,  # Q of the second source; 0 if there is none
    DIM_PADDED: tl.constexpr,
    PARTS: tl.constexpr,  # parts of an iteration
):
    """Merges the parts of one query and head."""
    token, head, member = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    count = tl.load(count_ptr + token)
    shared_count = 0
    if SHARED > 0:
        shared_count = tl.load(shared_count_ptr + token)
    if count + shared_count < 2:
        return
    place = head * GROUP + member
    best = tl.full((), float("-inf"), tl.float32)
    total = tl.zeros((), tl.float32)
    acc = tl.zeros((DIM_PADDED,), tl.float32)
    first, query = tl.load(first_ptr + token), tl.load(query_ptr + token)
    best, total, acc = _merge(
        partial_ptr, lse_ptr, first, count, query, place, best, total, acc,
        HEADS * GROUP, DIM, QUERIES, DIM_PADDED, PARTS,
    )  # fmt: skip
    if SHARED > 0:
        first, query = tl.load(shared_first_ptr + token), tl.load(shared_query_ptr + token)
        best, total, acc = _merge(
            shared_partial_ptr, shared_lse_ptr, first, shared_count, query, place, best, total, acc,
            HEADS * GROUP, DIM, SHARED, DIM_PADDED, PARTS,
        )  # fmt: skip
    dim = tl.arange(0, DIM_PADDED)
    out_at = out_ptr + (token.to(tl.int64) * HEADS * GROUP + place) * DIM + dim
    tl.store(out_at, (acc / total).to(out_ptr.dtype.element_ty), mask=dim < DIM)


@triton.jit
def _merge(
    partial_ptr, lse_ptr, first, count, query, place, best, total, acc,
    ALL_HEADS: tl.constexpr, DIM: tl.constexpr, QUERIES: tl.constexpr,
    DIM_PADDED: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Adds parts [first, first + count) to a running softmax."""
    dim = tl.arange(0, DIM_PADDED)
    for start in range(0, count, PARTS):
        part = start + tl.arange(0, PARTS)
        real = part < count
        at = ((first + part).to(tl.int64) * QUERIES + query) * ALL_HEADS + place
        lse = tl.load(lse_ptr + at, mask=real, other=float("-inf"))
        x_at = partial_ptr + at[:, None] * DIM + dim[None, :]
        x = tl.load(x_at, mask=real[:, None] & (dim < DIM)[None, :], other=0.0)
        new_best = tl.maximum(best, tl.max(lse, axis=0))
        shift = tl.where(new_best == float("-inf"), 0.0, new_best)  # a part that sees nothing
        weights = tl.exp2(lse - shift)
        keep = tl.exp2(best - shift)
        total = total * keep + tl.sum(weights, axis=0)
        acc = acc * keep + tl.sum(x * weights[:, None], axis=0)
        best = new_best
    return best, total, acc


class _Source(NamedTuple):
    """Partial results, and where each of the T queries finds its own."""

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
    launch: Launch | None = None,
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
        launch = DECODE_FLOAT32 if q.dtype == jnp.float32 else DECODE
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
    own = _Source(partial, lse, parts.first, parts.number, jnp.zeros_like(parts.first))
    return _merged(out, own)


def prefill(
    q: Array,
    kv: Array,
    tables: Array,
    query_start: Array,
    context_lens: Array,
    *,
    window: int | None,
    scale: float,
    launch: Launch | None = None,
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
        launch = PREFILL_FLOAT32 if q.dtype == jnp.float32 else PREFILL
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
    own = _Source(partial, lse, parts.first[tile], parts.number[tile], query)
    return _merged(out, own)


def _first_seen(tiles: Tiles, window: int | None, launch: Launch) -> Array:
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
    launch: Launch,
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
        kernel=_attention_kernel,
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


def _merged(out: Array, own: _Source, shared: _Source | None = None) -> Array:
    """``out`` (T, K, G, D) with the queries of several parts filled in."""
    num_tokens, heads, group, dim = out.shape
    _, (merged,) = triton_call(
        *own,
        *(shared or own),
        out,
        kernel=_merge_kernel,
        out_type=(),
        in_place=[10],
        grid=(num_tokens, heads, group),
        num_warps=1,
        num_stages=1,
        HEADS=heads,
        GROUP=group,
        DIM=dim,
        QUERIES=own.partial.shape[1],
        SHARED=shared.partial.shape[1] if shared else 0,
        DIM_PADDED=triton.next_power_of_2(dim),
        PARTS=16,
    )
    result: Array = merged
    return result
