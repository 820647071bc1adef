"""The Triton code of decode rows' attention; how it is launched, and over what, says decode.py."""

from __future__ import annotations

import triton
import triton.language as tl

from jllm.kernels.online_softmax import attend_context
from jllm.kernels.rope_kernels import rotated, summed


@triton.jit
def decode_kernel(
    # inputs
    qkv_ptr,  # (PROJECTED, T, K, G + 2, D): of each KV head its queries, its key, its value
    q_norm_ptr,  # (D,)
    k_norm_ptr,  # (D,)
    cos_ptr,  # (T, D / 2) float32
    sin_ptr,  # (T, D / 2) float32
    tables_ptr,  # (B, P) int32
    context_ptr,  # (B,) int32: tokens of each row, the new one included
    row_ptr,  # (X,) int32: row of each part; -1 for none
    begin_ptr,  # (X,) int32: its stretch of the context
    end_ptr,  # (X,) int32
    first_ptr,  # (B,) int32: first part of each row
    number_ptr,  # (B,) int32: its parts
    counts_ptr,  # (B, K) int32: zeros, and zeros again once all programs have ended
    shared_partial_ptr,  # (Y, Q, K, G, D) float32: attention to prefixes that rows share
    shared_lse_ptr,  # (Y, Q, K, G) float32
    shared_first_ptr,  # (B,) int32: first part of each row's prefix
    shared_number_ptr,  # (B,) int32: its parts
    shared_query_ptr,  # (B,) int32: the row's place in them
    kv_ptr,  # (N, 2, K, S, D), in place
    T,
    # outputs
    out_ptr,  # (T, K, G, D): its first B rows
    partial_ptr,  # (X, K, G, D) float32
    lse_ptr,  # (X, K, G) float32: base-2 log of a part's sum of weights
    # sizes
    TABLE_WIDTH: tl.constexpr,  # P
    HEADS: tl.constexpr,  # K
    GROUP: tl.constexpr,  # G
    BLOCK: tl.constexpr,  # S
    DIM: tl.constexpr,  # D
    PROJECTED: tl.constexpr,  # parts of the projection
    # what
    NORM: tl.constexpr,  # whether q and k are normalised
    EPS: tl.constexpr,
    SCALE: tl.constexpr,  # on the scores, log2(e) included
    WINDOW: tl.constexpr,  # tokens a query sees; 0 for all
    SHARED: tl.constexpr,  # Q, if some rows share a prefix; else 0
    # how
    ROWS: tl.constexpr,  # of a matrix product: a power of two, at least 16 and G
    CONTEXT: tl.constexpr,  # context tokens of an iteration
    DIM_PADDED: tl.constexpr,  # D rounded up to a power of two
    MERGED: tl.constexpr,  # parts merged at a time
    MEMBERS: tl.constexpr,  # G rounded up to a power of two
):
    """One KV head's attention of one row over one part of its context."""
    part, head = tl.program_id(0), tl.program_id(1)
    row = tl.load(row_ptr + part)
    if row < 0:
        return
    begin, end = tl.load(begin_ptr + part), tl.load(end_ptr + part)
    position = tl.load(context_ptr + row) - 1
    number = tl.load(number_ptr + row)
    table_ptr = tables_ptr + row * TABLE_WIDTH
    element: tl.constexpr = out_ptr.dtype.element_ty
    stride = T * HEADS * (GROUP + 2) * DIM
    qkv_at = qkv_ptr + (row * HEADS + head).to(tl.int64) * (GROUP + 2) * DIM
    cos_at, sin_at = cos_ptr + row * (DIM // 2), sin_ptr + row * (DIM // 2)
    member, dim = tl.arange(0, ROWS), tl.arange(0, DIM_PADDED)
    inside = dim < DIM
    q = rotated(
        qkv_at + member * DIM, member < GROUP, stride, q_norm_ptr, cos_at, sin_at,
        DIM, PROJECTED, NORM, EPS, DIM_PADDED, element,
    )  # fmt: skip

    best = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    acc = tl.zeros((ROWS, DIM_PADDED), tl.float32)
    if end > position:
        # The new token is in this part: it is attended to from here, and written for later steps.
        one = tl.arange(0, 1)
        k = rotated(
            qkv_at + (GROUP + one) * DIM, one == 0, stride, k_norm_ptr, cos_at, sin_at,
            DIM, PROJECTED, NORM, EPS, DIM_PADDED, element,
        )  # fmt: skip
        v = summed(qkv_at + (GROUP + 1) * DIM + dim, inside, stride, PROJECTED, element)
        block = tl.load(table_ptr + position // BLOCK).to(tl.int64)
        place = (block * (2 * HEADS) + head) * BLOCK + position % BLOCK
        k_at = kv_ptr + place * DIM + dim
        tl.store(k_at[None, :], k, mask=inside[None, :])
        tl.store(k_at + HEADS * BLOCK * DIM, v.to(element), mask=inside)
        best = tl.sum(q.to(tl.float32) * k.to(tl.float32), axis=1) * SCALE
        total += 1.0
        acc += v[None, :]
        end = position
    # Up to here no score needs a mask.
    clear_begin, clear_end = begin, begin + (end - begin) // CONTEXT * CONTEXT
    positions = tl.zeros((ROWS,), tl.int32) + position
    if WINDOW > 0:
        seen_begin = tl.maximum(position + 1 - WINDOW, begin)
        clear_begin = tl.minimum(begin + tl.cdiv(seen_begin - begin, CONTEXT) * CONTEXT, clear_end)
        best, total, acc = attend_context(
            q, kv_ptr, table_ptr, head, positions, begin, clear_begin, end, best, total, acc,
            HEADS, BLOCK, DIM, SCALE, WINDOW, False, True, CONTEXT, DIM_PADDED,
        )  # fmt: skip
    best, total, acc = attend_context(
        q, kv_ptr, table_ptr, head, positions, clear_begin, clear_end, end, best, total, acc,
        HEADS, BLOCK, DIM, SCALE, WINDOW, False, False, CONTEXT, DIM_PADDED,
    )  # fmt: skip
    best, total, acc = attend_context(
        q, kv_ptr, table_ptr, head, positions, clear_end, end, end, best, total, acc,
        HEADS, BLOCK, DIM, SCALE, WINDOW, False, True, CONTEXT, DIM_PADDED,
    )  # fmt: skip
    acc = acc / tl.where(total > 0, total, 1.0)[:, None]

    real = (member < GROUP)[:, None] & inside[None, :]
    place = (row * HEADS + head).to(tl.int64) * GROUP
    num_shared = 0
    if SHARED > 0:
        num_shared = tl.load(shared_number_ptr + row)
    if (number == 1) & (num_shared == 0):
        out_at = out_ptr + (place + member)[:, None] * DIM + dim[None, :]
        tl.store(out_at, acc.to(element), mask=real)
    else:
        part_place = (part * HEADS + head).to(tl.int64) * GROUP + member
        tl.store(partial_ptr + part_place[:, None] * DIM + dim[None, :], acc, mask=real)
        lse = tl.where(total > 0, best + tl.log2(tl.where(total > 0, total, 1.0)), float("-inf"))
        tl.store(lse_ptr + part_place, lse, mask=member < GROUP)
        # The last of a row's programs to come here merges what all have written: each one's writes
        # come before its count, and its reads after.
        tl.debug_barrier()
        count_at = counts_ptr + row * HEADS + head
        if tl.atomic_add(count_at, 1, sem="acq_rel", scope="gpu") == number - 1:
            tl.store(count_at, 0)
            merged_best = tl.full((MEMBERS,), float("-inf"), tl.float32)
            merged_total = tl.zeros((MEMBERS,), tl.float32)
            merged = tl.zeros((MEMBERS, DIM_PADDED), tl.float32)
            own = (tl.load(first_ptr + row) * HEADS + head).to(tl.int64) * GROUP
            merged_best, merged_total, merged = _merge(
                partial_ptr, lse_ptr, own, HEADS * GROUP, number, merged_best, merged_total, merged,
                GROUP, DIM, MERGED, MEMBERS, DIM_PADDED,
            )  # fmt: skip
            if SHARED > 0:
                first, query = tl.load(shared_first_ptr + row), tl.load(shared_query_ptr + row)
                theirs = ((first.to(tl.int64) * SHARED + query) * HEADS + head) * GROUP
                merged_best, merged_total, merged = _merge(
                    shared_partial_ptr, shared_lse_ptr, theirs, SHARED * HEADS * GROUP, num_shared,
                    merged_best, merged_total, merged,
                    GROUP, DIM, MERGED, MEMBERS, DIM_PADDED,
                )  # fmt: skip
            merged = merged / tl.where(merged_total > 0, merged_total, 1.0)[:, None]
            one_of = tl.arange(0, MEMBERS)
            merged_at = out_ptr + (place + one_of)[:, None] * DIM + dim[None, :]
            wanted = (one_of < GROUP)[:, None] & inside[None, :]
            tl.store(merged_at, merged.to(element), mask=wanted)


@triton.jit
def _merge(
    partial_ptr, lse_ptr, place, stride, number, best, total, acc,
    GROUP: tl.constexpr, DIM: tl.constexpr, MERGED: tl.constexpr, MEMBERS: tl.constexpr,
    DIM_PADDED: tl.constexpr,
):  # fmt: skip
    """Adds ``number`` parts of a KV head's attention, ``stride`` queries apart from ``place`` on,
    to a running softmax of its G queries."""
    member, dim = tl.arange(0, MEMBERS), tl.arange(0, DIM_PADDED)
    for start in range(0, number, MERGED):
        part = start + tl.arange(0, MERGED)
        real = (part < number)[:, None] & (member < GROUP)[None, :]
        at = place + part.to(tl.int64)[:, None] * stride + member[None, :]
        # Not from L1: other processors have written it.
        lse = tl.load(lse_ptr + at, mask=real, other=float("-inf"), cache_modifier=".cg")
        x_at = partial_ptr + at[:, :, None] * DIM + dim[None, None, :]
        x_real = real[:, :, None] & (dim < DIM)[None, None, :]
        x = tl.load(x_at, mask=x_real, other=0.0, cache_modifier=".cg")
        new_best = tl.maximum(best, tl.max(lse, axis=0))
        shift = tl.where(new_best == float("-inf"), 0.0, new_best)  # parts that see nothing
        weights = tl.exp2(lse - shift[None, :])
        keep = tl.exp2(best - shift)
        total = total * keep + tl.sum(weights, axis=0)
        acc = acc * keep[:, None] + tl.sum(x * weights[:, :, None], axis=0)
        best = new_best
    return best, total, acc
