"""Random attention problems with scattered blocks and poison, and the XLA reference's answers."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jllm.engine.batch import SHARED_FIELDS
from jllm.engine.shared_prefix import SharedGroup, fill_tiles
from jllm.kernels.decode import attend_rows, cut_decode
from jllm.kernels.launches import AttentionLaunch, shared_tile_rows
from jllm.kernels.prefill import attend_chunks, cut_prefill
from jllm.kernels.tiles import SharedTiles, decode_tiles
from jllm.models.attention import Tiled, attend_tiles, rotated, tiled_chunks, write_kv
from jllm.models.layers import total

Problem = tuple[jax.Array, jax.Array, jax.Array]

# Relative to the reference in float32 on the same rounded inputs: a few roundings of the output
# and of the softmax weights in bfloat16 (2**-9) and float16 (2**-12).
TOLERANCE = {"bfloat16": 1e-2, "float16": 1e-3, "float32": 1e-5}


def problem(
    lens: list[int], queries: int, heads: int, group: int, dim: int, block: int, dtype: str
) -> Problem:
    """Random queries, a cache full of NaN but for the rows' own scattered blocks, their tables."""
    rng = np.random.default_rng(sum(lens) + dim)
    width = max(-(-n // block) for n in lens) + 1
    tables = rng.permutation(np.arange(1, len(lens) * width + 1)).reshape(len(lens), width)
    kv = np.full((tables.size + 1, 2, heads, block, dim), np.nan, np.float32)
    for table, length in zip(tables, lens, strict=True):
        for index in range(-(-length // block)):
            used = min(block, length - index * block)
            kv[table[index], :, :, :used] = rng.normal(size=(2, heads, used, dim))
    q = rng.normal(size=(queries, heads, group, dim))
    return jnp.asarray(q, dtype), jnp.asarray(kv, dtype), jnp.asarray(tables, jnp.int32)


def relative_error(out: Any, reference: Any) -> float:
    """||out - reference|| / ||reference||."""
    difference = np.asarray(out, np.float64) - np.asarray(reference, np.float64)
    return float(np.linalg.norm(difference) / np.linalg.norm(np.asarray(reference, np.float64)))


def sharing(tables: np.ndarray, groups: Sequence[SharedGroup]) -> np.ndarray:
    """Tables in which the rows of each group begin with the blocks of its first."""
    for first, count, blocks in groups:
        tables[first : first + count, :blocks] = tables[first, :blocks]
    return tables


def decoded(
    problem: Problem,
    lens: list[int],
    *,
    parts: int = 1,
    normed: bool = False,
    window: int | None = None,
    launch: AttentionLaunch | None = None,
    groups: Sequence[SharedGroup] = (),
) -> tuple[jax.Array, jax.Array]:
    """What the decode kernel gives for a projection in ``parts``, and the reference in float32. The
    cache it leaves is checked here: the new tokens' keys and values in place, nothing else. Rows of
    ``groups`` share blocks, which are read for all of them at once."""
    q, kv, tables = problem
    shared = None
    if groups:
        tables = jnp.asarray(sharing(np.array(tables), groups))
        sizes = dict(zip(SHARED_FIELDS, (len(q) // 2,) * 3 + (len(q),), strict=True))
        views = {name: np.zeros(size, np.int32) for name, size in sizes.items()}
        fill_tiles(views, list(groups), shared_tile_rows(q.shape[2]), kv.shape[3])
        shared = SharedTiles(*(jnp.asarray(views[name]) for name in SHARED_FIELDS))
    rows, heads, group, dim = q.shape
    context = jnp.asarray(lens, jnp.int32)
    rng = np.random.default_rng(rows)
    qkv = jnp.asarray(rng.normal(size=(parts, rows, heads, group + 2, dim)))
    qkv = qkv.astype(q.dtype if parts == 1 else jnp.float32)
    norms = tuple(jnp.asarray(rng.normal(size=(2, dim)), q.dtype)) if normed else None
    angles = jnp.asarray(rng.uniform(0, 6, (rows, dim // 2)), jnp.float32)
    rope, eps, options = (jnp.cos(angles), jnp.sin(angles)), 1e-6, {"window": window}
    options["scale"] = dim**-0.5

    position = jnp.maximum(context - 1, 0)
    block = kv.shape[3]
    slots = tables[jnp.arange(rows), position // block] * block + position % block
    slots = jnp.where(context > 0, slots, 0)

    @jax.jit
    def run(qkv: jax.Array, kv: jax.Array) -> tuple[jax.Array, jax.Array]:
        cut = cut_decode(q.shape, q.dtype, context, window, launch, shared)
        return attend_rows(qkv, norms, rope, slots, kv, tables, cut, **options, eps=eps)

    out, new_kv = run(qkv, kv)
    q, k, v = rotated(total(qkv, kv.dtype)[None], norms, rope, eps)
    want_kv = write_kv(kv, k, v, slots)
    # Rounded to the dtype in another order, a value may be its neighbour.
    np.testing.assert_allclose(
        np.asarray(new_kv[1:], np.float32),
        np.asarray(want_kv[1:], np.float32),
        rtol=0,
        atol=TOLERANCE[str(kv.dtype)] * 8,
    )
    tiled = Tiled(decode_tiles(context), 1)
    exact = _exact(q, new_kv, tables, tiled, **options)
    return out, exact


def prefilled(
    problem: Problem,
    chunks: list[int],
    lens: list[int],
    *,
    window: int | None = None,
    launch: AttentionLaunch | None = None,
    decode_rows: int = 0,
) -> tuple[jax.Array, jax.Array]:
    """What the prefill kernel gives for the queries of ``chunks``, and the reference in float32.
    ``decode_rows`` queries before them are none of its business: it must leave theirs alone."""
    q, kv, tables = problem
    q = jnp.concatenate([jnp.full((decode_rows, *q.shape[1:]), jnp.nan, q.dtype), q])
    starts = jnp.asarray(decode_rows + np.cumsum([0, *chunks]), jnp.int32)
    context = jnp.asarray(lens, jnp.int32)
    scale = q.shape[-1] ** -0.5

    @jax.jit
    def run(q: jax.Array, kv: jax.Array, out: jax.Array) -> jax.Array:
        cut = cut_prefill(q.shape, q.dtype, starts, context, window, launch)
        return attend_chunks(q, kv, tables, cut, out, window=window, scale=scale)

    out = run(q, kv, jnp.full(q.shape, 7.0, q.dtype))
    assert (out[:decode_rows] == 7).all()
    tiled = tiled_chunks(starts, context, len(q))
    exact = _exact(q, kv, tables, tiled, window=window, scale=scale)
    own = slice(decode_rows, decode_rows + sum(chunks))
    return out[own], exact[own]


@functools.partial(jax.jit, static_argnames=("window", "scale"))
def _reference(
    q: jax.Array, kv: jax.Array, tables: jax.Array, tiles: Any, size: jax.Array, **options: Any
) -> jax.Array:
    return attend_tiles(q, kv, tables, Tiled(tiles, size.shape[0]), jnp.zeros_like(q), **options)


def _exact(q: jax.Array, kv: jax.Array, tables: jax.Array, tiled: Tiled, **options: Any) -> Any:
    q, kv = q.astype(jnp.float32), kv.astype(jnp.float32)
    return _reference(q, kv, tables, tiled.tiles, jnp.zeros(tiled.size), **options)
