"""The Triton code that decode and prefill share: softmax over a context, tile by tile."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def attend_context(
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
