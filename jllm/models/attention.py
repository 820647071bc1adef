"""Attention over a paged KV cache, and the write into it: the reference in plain XLA.

The cache of one layer is ``kv (N, 2, K, S, D)``: N blocks of S tokens, keys then values, one
contiguous (S, D) tile per head. Block 0 is scratch: padding tokens are written there and no row
reads it.

A step holds B rows (requests) of two kinds, in this order, over one flat array of T tokens:

    tokens   d0 d1 d2 p0 p0 p0 p0 p1 p1 .         d: decode rows, one token each
    rows      0  1  2  3           4       5      p: rows with a chunk of their prompt
    query_start = [0, 1, 2, 3, 7, 9, 9]           .: padding tokens and rows, at the end
    num_decode = 3

Both numbers are data: one compiled step serves every mixture. A step of decode rows alone has
neither; there each row, padding included, has one token.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jllm.kernels import triton_call
from jllm.kernels.launches import shared_tile_rows as shared_tile_rows  # for the engine
from jllm.kernels.tiles import SharedTiles as SharedTiles  # for the engine
from jllm.kernels.tiles import Tiles, decode_tiles, owner, prefill_tiles
from jllm.models.layers import apply_rope, rms_norm, total

Array = jax.Array

QUERY_TILE = 64  # prefill tokens that share one gather of their row's keys and values
CONTEXT_TILE = 64  # context tokens per step of the online softmax


class Chunks(NamedTuple):
    """Where the tokens of a mixed step's rows are. All int32.

    Attributes:
      query_start: (B + 1,) first token of each row, and the end of the last.
      num_decode: (1,) rows, and so tokens, before the first chunk.
    """

    query_start: Array
    num_decode: Array


class Rows(NamedTuple):
    """What the attention op knows of a step's rows. All int32.

    Attributes:
      block_tables: (B, P) block ids of each row, in order of position.
      context_lens: (B,) tokens of each row once this step is written; 0 marks a padding row.
      chunks: None in a step of decode rows alone.
      shared: decode rows that share the start of their contexts, where it pays to read that once;
        a hint, which plain XLA ignores.
    """

    block_tables: Array
    context_lens: Array
    chunks: Chunks | None = None
    shared: SharedTiles | None = None


class Tokens(NamedTuple):
    """Where each of the T tokens of a step belongs. All (T,) int32; padding tokens are at
    position 0 of slot 0, in the scratch block."""

    row: Array
    position: Array
    slot: Array  # block * S + offset


def locate_tokens(rows: Rows, num_tokens: int, block_size: int) -> Tokens:
    """Derives every token's row, position and cache slot from the lengths of the rows.

    The tokens of a row are the last of its context. Deriving this on the device keeps the host's
    plan at a few numbers per row.
    """
    token = jnp.arange(num_tokens, dtype=jnp.int32)
    if rows.chunks is None:
        row, position = token, rows.context_lens - 1
    else:
        ends = rows.chunks.query_start[1:]
        row = jnp.minimum(owner(ends, token), len(ends) - 1)  # padding: past every row
        position = jnp.where(token < ends[-1], rows.context_lens[row] - ends[row] + token, -1)
    real = position >= 0
    position = jnp.where(real, position, 0)
    block = rows.block_tables[row, position // block_size]
    slot = jnp.where(real, block * block_size + position % block_size, 0)
    return Tokens(row, position, slot)


def rotated(
    qkv: Array, norms: tuple[Array, Array] | None, rope: tuple[Array, Array], eps: float
) -> tuple[Array, Array, Array]:
    """q (T, K, G, D), k and v (T, K, D) of the projection's parts (P, T, K, G + 2, D): q and k
    normalised, if the model does that, and rotated to their positions."""
    whole = total(qkv, qkv.dtype)
    q, k, v = whole[:, :, :-2], whole[:, :, -2], whole[:, :, -1]
    if norms is not None:
        q, k = rms_norm(q, norms[0], eps), rms_norm(k, norms[1], eps)
    return apply_rope(q, *rope), apply_rope(k, *rope), v


def write_kv(kv: Array, k: Array, v: Array, slots: Array) -> Array:
    """Writes the step's keys and values (T, K, D) into their cache slots (T,); in place when
    ``kv`` is donated."""
    block_size = kv.shape[3]
    update = jnp.stack([k, v], axis=1)  # (T, 2, K, D)
    return kv.at[slots // block_size, :, :, slots % block_size].set(update.astype(kv.dtype))


class Tiled(NamedTuple):
    """Queries in tiles of up to ``size``."""

    tiles: Tiles
    size: int


class TiledRows(NamedTuple):
    """How the reference cuts a step's decode rows and chunks; without the latter None."""

    decode: Tiled
    prefill: Tiled | None


def cut_rows(shape: tuple[int, ...], dtype: Any, rows: Rows, window: int | None) -> Any:
    """How ``attend`` cuts the queries (T, K, G, D) of a step: ``TiledRows``, or for the kernels
    their ``Cuts``. The same for all layers of one window, so it is worked out once."""
    lens, chunks, first = rows.context_lens, None, None
    if rows.chunks is not None:
        query_start, first = rows.chunks
        lens = jnp.where(jnp.arange(len(lens)) < first, lens, 0)
        chunks = jnp.maximum(query_start, first), rows.context_lens  # decode rows: empty chunks
    if triton_call.available():
        from jllm.kernels.attention import Cuts
        from jllm.kernels.decode import cut_decode
        from jllm.kernels.prefill import cut_prefill

        decode = cut_decode((len(lens), *shape[1:]), dtype, lens, window, shared_tiles=rows.shared)
        prefill = None if chunks is None else cut_prefill(shape, dtype, *chunks, window)
        return Cuts(decode, prefill, first)
    one_each = Tiled(decode_tiles(lens), 1)
    return TiledRows(one_each, None if chunks is None else tiled_chunks(*chunks, shape[0]))


def attend(
    qkv: Array,
    norms: tuple[Array, Array] | None,
    rope: tuple[Array, Array],
    slots: Array,
    kv: Array,
    tables: Array,
    cuts: Any,
    *,
    window: int | None,
    scale: float,
    eps: float,
) -> tuple[Array, Array]:
    """A layer's attention in a mixed batch: the step's keys and values enter the cache, and each
    token attends to the context of its row up to itself. Triton kernels on an NVIDIA GPU, plain
    XLA elsewhere.

    Args:
      qkv: (P, T, K, G + 2, D) parts of the projection.
      norms: weights (D,) of q's and of k's RMSNorm, or None.
      rope: cos and sin (T, D / 2), float32.
      slots: (T,) int32 cache slots of the tokens.
      kv: (N, 2, K, S, D) the layer's cache; in place when it is donated.
      tables: (B, P) int32 block tables of the rows.
      cuts: from ``cut_rows``, for the same window.
      window: tokens a query sees, itself included; None for all.
      scale: factor on the scores, normally D ** -0.5.
      eps: of the norms.

    Returns:
      (T, K, G, D), and the cache; what padding tokens give has no meaning, and no other token
      reads it.
    """
    if triton_call.available():
        from jllm.kernels import attention as kernels

        given = (qkv, norms, rope, slots, kv, tables, cuts)
        return kernels.attend(*given, window=window, scale=scale, eps=eps)
    q, k, v = rotated(qkv, norms, rope, eps)
    kv = write_kv(kv, k, v, slots)
    options: dict[str, Any] = dict(window=window, scale=scale)
    out = jnp.zeros_like(q)
    for tiled in cuts:
        if tiled is not None:
            out = attend_tiles(q, kv, tables, tiled, out, **options)
    return out, kv


def tiled_chunks(query_start: Array, context_lens: Array, num_tokens: int) -> Tiled:
    """The reference's tiles of prefill chunks."""
    size = min(QUERY_TILE, num_tokens)
    return Tiled(prefill_tiles(query_start, context_lens, num_tokens, size), size)


def attend_tiles(
    q: Array,
    kv: Array,
    tables: Array,
    cut: Tiled,
    out: Array,
    *,
    window: int | None,
    scale: float,
) -> Array:
    """``out`` (T, K, G, D) with the causal attention of tiles over the cached context filled in.

    q (T, K, G, D), kv (N, 2, K, S, D), tables (B, P).
    """
    tiles, size = cut
    offset = jnp.arange(size)
    token = tiles.token[:, None] + offset  # (M, Q)
    real = offset < tiles.length[:, None]
    position = jnp.where(real, tiles.position[:, None] + offset, -1)
    queries = q[jnp.minimum(token, len(q) - 1)]  # (M, Q, K, G, D)
    found = _online_softmax(queries, kv, tables[tiles.row], position, window, scale)
    token = jnp.where(real, token, len(q))  # past the end: dropped
    return out.at[token].set(found, mode="drop")


def _online_softmax(
    q: Array, kv: Array, tables: Array, positions: Array, window: int | None, scale: float
) -> Array:
    """Online-softmax attention (arXiv 2205.14135) of M tiles, each within one row.

    q (M, Q, K, G, D), tables (M, P), positions (M, Q) with -1 where nothing is attended.
    The loop runs over the context that is really there, so cost follows the longest row of the
    step and not the width of the block table.
    """
    _, _, num_kv, block_size, head_dim = kv.shape
    blocks = max(1, CONTEXT_TILE // block_size)
    tables = jnp.pad(tables, ((0, 0), (0, -tables.shape[1] % blocks)))
    m_tiles, size, _, group, _ = q.shape
    q32 = q.astype(jnp.float32) * scale

    def body(index: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        best, total, acc = carry
        ids = lax.dynamic_slice_in_dim(tables, index * blocks, blocks, axis=1)
        tile = kv[ids].astype(jnp.float32)  # (M, C, 2, K, S, D)
        k, v = tile[:, :, 0], tile[:, :, 1]
        scores = jnp.einsum("mqkgd,mcksd->mkgqcs", q32, k, precision=lax.Precision.HIGHEST)
        scores = scores.reshape(m_tiles, num_kv, group, size, blocks * block_size)
        at = index * blocks * block_size + jnp.arange(blocks * block_size)
        # Past the end of a row its blocks hold what others left. Weights there are 0, but 0 * nan
        # is nan: one request with broken weights would spoil those that get its blocks next.
        own = (at <= positions.max(axis=1)[:, None]).reshape(m_tiles, blocks, 1, block_size, 1)
        v = jnp.where(own, v, 0.0)
        seen = at <= positions[:, :, None]  # (M, Q, C * S)
        if window is not None:
            seen &= at > positions[:, :, None] - window
        scores = jnp.where(seen[:, None, None], scores, -jnp.inf)
        new_best = jnp.maximum(best, scores.max(-1))
        # Until a query has seen a key its best is -inf, and exp(-inf - -inf) would be nan.
        shift = jnp.where(jnp.isneginf(new_best), 0.0, new_best)
        weights = jnp.exp(scores - shift[..., None])
        keep = jnp.exp(best - shift)
        total = total * keep + weights.sum(-1)
        weights = weights.reshape(m_tiles, num_kv, group, size, blocks, block_size)
        update = jnp.einsum("mkgqcs,mcksd->mkgqd", weights, v, precision=lax.Precision.HIGHEST)
        return new_best, total, acc * keep[..., None] + update

    shape = (m_tiles, num_kv, group, size)
    start = (
        jnp.full(shape, -jnp.inf, jnp.float32),
        jnp.zeros(shape, jnp.float32),
        jnp.zeros((*shape, head_dim), jnp.float32),
    )
    steps = positions.max() // (blocks * block_size) + 1
    _, total, acc = lax.fori_loop(0, steps, body, start)
    out: Array = acc / jnp.maximum(total, jnp.finfo(jnp.float32).tiny)[..., None]
    return out.transpose(0, 3, 1, 2, 4).astype(q.dtype)  # (M, Q, K, G, D)


def dense_attention(q: Array, k: Array, v: Array, *, window: int | None, scale: float) -> Array:
    """Causal attention of one whole sequence, without a cache; differentiable.

    q (T, K, G, D), k and v (T, K, D) -> (T, K, G, D). Scores take K * G * T * T floats.
    """
    at = jnp.arange(len(q))
    seen = at[None, :] <= at[:, None]
    if window is not None:
        seen &= at[None, :] > at[:, None] - window
    scores = jnp.einsum(
        "qkgd,skd->kgqs", q, k, preferred_element_type=jnp.float32, precision=lax.Precision.HIGHEST
    )
    weights = jax.nn.softmax(jnp.where(seen, scores * scale, -jnp.inf), axis=-1)
    out = jnp.einsum("kgqs,skd->qkgd", weights, v.astype(jnp.float32))
    return out.astype(q.dtype)
