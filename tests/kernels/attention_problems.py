"""Random attention problems with scattered blocks and poison, and the XLA reference's answers."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jllm.kernels.tiles import decode_tiles
from jllm.models.attention import Tiled, attend_tiles, tiled_chunks

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


def decoded(problem: Problem, lens: list[int], **options: Any) -> tuple[jax.Array, jax.Array]:
    """What the decode kernel gives, and the reference in float32."""
    from jllm.kernels.paged_attention import cut_decode

    q, *_ = problem
    context = jnp.asarray(lens, jnp.int32)
    return _both(
        problem,
        lambda launch: cut_decode(q.shape, q.dtype, context, options["window"], launch),
        Tiled(decode_tiles(context), 1),
        **options,
    )


def prefilled(
    problem: Problem, chunks: list[int], lens: list[int], **options: Any
) -> tuple[jax.Array, jax.Array]:
    """What the prefill kernel gives for the queries of ``chunks``, and the reference in float32."""
    from jllm.kernels.paged_attention import cut_prefill

    q, *_ = problem
    starts, context = jnp.asarray([0, *np.cumsum(chunks)], jnp.int32), jnp.asarray(lens, jnp.int32)
    out, exact = _both(
        problem,
        lambda launch: cut_prefill(q.shape, q.dtype, starts, context, options["window"], launch),
        tiled_chunks(starts, context, len(q)),
        **options,
    )
    return out[: sum(chunks)], exact[: sum(chunks)]


def _both(
    problem: Problem, cut: Any, tiled: Tiled, *, launch: Any = None, **options: Any
) -> tuple[jax.Array, jax.Array]:
    from jllm.kernels.paged_attention import attend

    q, kv, tables = problem
    out = jax.jit(lambda q, kv: attend(q, kv, tables, cut(launch), **options))(q, kv)
    exact = jax.jit(lambda q, kv: attend_tiles(q, kv, tables, tiled, **options))
    return out, exact(q.astype(jnp.float32), kv.astype(jnp.float32))
