"""Attention over the paged KV cache (FlashAttention-2 tiles, split-KV decode).

One kernel serves decode rows and prefill chunks. A tile is up to Q consecutive tokens of one row;
its program for one KV head handles the G query heads of that head for all its tokens at once, so
keys and values are read once for Q * G queries:

    tile of 3 tokens, G = 2      M = 6 of 16 rows used
    queries  t0h0 t0h1 t1h0 t1h1 t2h0 t2h1 . . .

A decode row is a tile of one token. Decode has few tiles and long contexts, so the context is cut
into ``splits`` parts with a program each, and their partial softmaxes are merged afterwards.

Bytes that must move: the context's keys and values once per tile, 4 * D bytes per token and KV head
in bfloat16; decode reads each byte once and is bound by that.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from jllm.kernels.triton_call import triton_call

Array = jax.Array

LOG2_E = 1.4426950408889634
PROGRAMS = 132 * 4  # four for each multiprocessor of an H200 hide each other's latency
MAX_SPLITS = 32


@triton.jit
def _attention_kernel(
    # inputs
    q_ptr,  # (T, K, G, D)
    kv_ptr,  # (N, 2, K, S, D)
    tables_ptr,  # (B, P) int32
    row_ptr,  # (M,) int32: row of each tile
    token_ptr,  # (M,) int32: its first token
    position_ptr,  # (M,) int32: position of that token
    length_ptr,  # (M,) int32: its tokens; 0 for a tile of padding
    # outputs
    out_ptr,  # (T, K, G, D), or partial sums (M, K, SPLITS, G, D) float32
    lse_ptr,  # (M, K, SPLITS, G) float32, base-2 log of the partial sums of weights
    # sizes
    TABLE_WIDTH: tl.constexpr,  # P
    HEADS: tl.constexpr,  # K
    GROUP: tl.constexpr,  # G
    BLOCK: tl.constexpr,  # S
    DIM: tl.constexpr,  # D
    SCALE: tl.constexpr,  # on the scores, log2(e) included
    WINDOW: tl.constexpr,  # tokens a query sees; 0 for all
    SPLITS: tl.constexpr,
    # tiles
    ROWS: tl.constexpr,  # queries of a program: a power of two, at least 16 and Q * G
    CONTEXT: tl.constexpr,  # context tokens of a step
    DIM_PADDED: tl.constexpr,  # D rounded up to a power of two
):
    """Computes one tile's attention for one KV head over one part of the context."""
    tile, head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    row = tl.load(row_ptr + tile)
    first = tl.load(position_ptr + tile)
    length = tl.load(length_ptr + tile)
    token0 = tl.load(token_ptr + tile).to(tl.int64)

    # This part's stretch of the context, whole steps of CONTEXT tokens.
    end = first + length
    begin = 0
    if WINDOW > 0:
        begin = tl.maximum(first - WINDOW + 1, 0) // CONTEXT * CONTEXT
    steps = tl.cdiv(end - begin, CONTEXT)
    steps_here = tl.cdiv(steps, SPLITS)
    begin += split * steps_here * CONTEXT
    end = tl.minimum(begin + steps_here * CONTEXT, end)

    query = tl.arange(0, ROWS)  # (M,)
    token, member = query // GROUP, query % GROUP
    dim = tl.arange(0, DIM_PADDED)  # (D,)
    real_query = token < length
    real_dim = dim < DIM
    q_offset = ((token0 + token) * HEADS + head) * GROUP + member
    q = tl.load(
        q_ptr + q_offset[:, None] * DIM + dim[None, :],
        mask=real_query[:, None] & real_dim[None, :],
        other=0.0,
    )  # (M, D)
    position = first + token  # (M,)

    best = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    acc = tl.zeros((ROWS, DIM_PADDED), tl.float32)
    for start in range(begin, end, CONTEXT):
        at = start + tl.arange(0, CONTEXT)  # (C,)
        inside = at < end
        block = tl.load(tables_ptr + row * TABLE_WIDTH + at // BLOCK, mask=inside, other=0)
        place = (block.to(tl.int64) * 2 * HEADS + head) * BLOCK + at % BLOCK
        k_at = kv_ptr + place[:, None] * DIM + dim[None, :]
        seen = inside[:, None] & real_dim[None, :]
        k = tl.load(k_at, mask=seen, other=0.0)  # (C, D)
        v = tl.load(k_at + HEADS * BLOCK * DIM, mask=seen, other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * SCALE  # (M, C)
        allowed = (at[None, :] <= position[:, None]) & inside[None, :]
        if WINDOW > 0:
            allowed &= at[None, :] > position[:, None] - WINDOW
        scores = tl.where(allowed, scores, float("-inf"))
        new_best = tl.maximum(best, tl.max(scores, axis=1))
        # Until a query has seen a key its best is -inf, and -inf - -inf would be nan.
        shift = tl.where(new_best == float("-inf"), 0.0, new_best)
        weights = tl.exp2(scores - shift[:, None])
        keep = tl.exp2(best - shift)
        total = total * keep + tl.sum(weights, axis=1)
        acc = acc * keep[:, None]
        acc += tl.dot(weights.to(v.dtype), v, input_precision="ieee")
        best = new_best

    if SPLITS == 1:
        acc = acc / tl.where(total > 0, total, 1.0)[:, None]
        tl.store(
            out_ptr + q_offset[:, None] * DIM + dim[None, :],
            acc.to(out_ptr.dtype.element_ty),
            mask=real_query[:, None] & real_dim[None, :],
        )
    else:
        # Tiles of padding are written too: the merge reads every partial sum.
        part = ((tile.to(tl.int64) * HEADS + head) * SPLITS + split) * GROUP + member
        first_token = token == 0
        tl.store(
            out_ptr + part[:, None] * DIM + dim[None, :],
            acc / tl.where(total > 0, total, 1.0)[:, None],
            mask=first_token[:, None] & real_dim[None, :],
        )
        lse = tl.where(total > 0, best + tl.log2(total), float("-inf"))
        tl.store(lse_ptr + part, lse, mask=first_token)


def attend_tiles(
    q: Array,
    kv: Array,
    tables: Array,
    tiles: tuple[Array, Array, Array, Array],
    *,
    size: int,
    window: int | None,
    scale: float,
) -> Array:
    """Attention of M tiles, each up to ``size`` consecutive tokens of one row.

    Args:
      q: (T, K, G, D); kv: (N, 2, K, S, D); tables: (B, P) int32.
      tiles: row, token, position and length (M,) int32, see the kernel.
      size: most tokens of a tile. 1, decode, needs tile m to be token m, and splits the context.
      window: tokens a query sees, itself included; None for all.
      scale: factor on the scores.

    Returns:
      (T, K, G, D); what no tile covers is undefined.
    """
    num_tokens, heads, group, dim = q.shape
    row, token, position, length = tiles
    num_tiles = len(row)
    rows = max(16, triton.next_power_of_2(size * group))
    # Enough programs to fill the GPU; each split must be worth its share of the merge.
    splits = 1
    if size == 1:
        assert num_tiles == num_tokens, "decode tiles are the tokens"
        splits = min(MAX_SPLITS, max(1, PROGRAMS // (num_tiles * heads)))
    partial = jax.ShapeDtypeStruct((num_tiles, heads, splits, group, dim), jnp.float32)
    out_type = (
        jax.ShapeDtypeStruct(q.shape, q.dtype) if splits == 1 else partial,
        jax.ShapeDtypeStruct((num_tiles, heads, splits, group), jnp.float32),
    )
    out, lse = triton_call(
        q,
        kv,
        tables,
        row,
        token,
        position,
        length,
        kernel=_attention_kernel,
        out_type=out_type,
        grid=(num_tiles, heads, splits),
        num_warps=4,
        num_stages=3 if size == 1 else 2,
        TABLE_WIDTH=tables.shape[1],
        HEADS=heads,
        GROUP=group,
        BLOCK=kv.shape[3],
        DIM=dim,
        SCALE=scale * LOG2_E,
        WINDOW=window or 0,
        SPLITS=splits,
        ROWS=rows,
        CONTEXT=64,
        DIM_PADDED=triton.next_power_of_2(dim),
    )
    if splits == 1:
        whole: Array = out
        return whole
    weights = jax.nn.softmax(lse / LOG2_E, axis=2, where=lse > -jnp.inf)
    merged = jnp.einsum("bksg,bksgd->bkgd", jnp.nan_to_num(weights), out)
    result: Array = merged.astype(q.dtype)
    return result
