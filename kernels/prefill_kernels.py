"""The Triton code of chunks' attention; how it is launched, and over what, says prefill.py."""

from __future__ import annotations

import triton
import triton.language as tl

from jllm.kernels.online_softmax import attend_context


@triton.jit
def prefill_kernel(
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
    clear = end - begin
    if CAUSAL:
        clear = tl.minimum(end, first + 1) - begin
    clear_begin, clear_end = begin, begin + tl.maximum(clear, 0) // CONTEXT * CONTEXT
    if WINDOW > 0:
        # Tokens before the last query's window need one too.
        seen_by_all = tl.maximum(first + length - WINDOW, begin)
        clear_begin = tl.minimum(begin + tl.cdiv(seen_by_all - begin, CONTEXT) * CONTEXT, clear_end)
        best, total, acc = attend_context(
            q, kv_ptr, table_ptr, head, position, begin, clear_begin, end, best, total, acc,
            HEADS, BLOCK, DIM, SCALE, WINDOW, CAUSAL, True, CONTEXT, DIM_PADDED,
        )  # fmt: skip
    best, total, acc = attend_context(
        q, kv_ptr, table_ptr, head, position, clear_begin, clear_end, end, best, total, acc,
        HEADS, BLOCK, DIM, SCALE, WINDOW, CAUSAL, False, CONTEXT, DIM_PADDED,
    )  # fmt: skip
    best, total, acc = attend_context(
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
def merge_kernel(
    partial_ptr,  # (X, Q, K, G, D) float32: normalised sums of the parts
    lse_ptr,  # (X, Q, K, G) float32
    first_ptr,  # (T,) int32: first part of each query's tile
    count_ptr,  # (T,) int32: its parts
    query_ptr,  # (T,) int32: its place in the tile
    out_ptr,  # (T, K, G, D), in place: queries of one part are there already
    HEADS: tl.constexpr,  # K
    GROUP: tl.constexpr,  # G
    DIM: tl.constexpr,  # D
    QUERIES: tl.constexpr,  # Q
    DIM_PADDED: tl.constexpr,
    PARTS: tl.constexpr,  # parts of an iteration
):
    """Merges the parts of one query and head."""
    token, head, member = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    count = tl.load(count_ptr + token)
    if count < 2:
        return
    first, query = tl.load(first_ptr + token), tl.load(query_ptr + token)
    place = head * GROUP + member
    dim = tl.arange(0, DIM_PADDED)
    best = tl.full((), float("-inf"), tl.float32)
    total = tl.zeros((), tl.float32)
    acc = tl.zeros((DIM_PADDED,), tl.float32)
    for start in range(0, count, PARTS):
        part = start + tl.arange(0, PARTS)
        real = part < count
        at = ((first + part).to(tl.int64) * QUERIES + query) * (HEADS * GROUP) + place
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
    out_place = token.to(tl.int64) * HEADS * GROUP + place
    out_at = out_ptr + out_place * DIM + dim
    tl.store(out_at, (acc / total).to(out_ptr.dtype.element_ty), mask=dim < DIM)
