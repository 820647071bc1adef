"""Random attention problems with scattered blocks and poison, and the XLA reference's answers."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jllm.models.attention import decode_reference, prefill_reference

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
    from jllm.kernels.paged_attention import decode

    q, kv, tables = problem
    rest = tables, jnp.asarray(lens, jnp.int32)
    out = jax.jit(lambda q, kv: decode(q, kv, *rest, **options))(q, kv)
    return out, _exact(decode_reference, q, kv, *rest, **options)


def prefilled(
    problem: Problem, chunks: list[int], lens: list[int], **options: Any
) -> tuple[jax.Array, jax.Array]:
    """What the prefill kernel gives for the queries of ``chunks``, and the reference in float32."""
    from jllm.kernels.paged_attention import prefill

    q, kv, tables = problem
    starts = jnp.asarray([0, *np.cumsum(chunks)], jnp.int32)
    rest = tables, starts, jnp.asarray(lens, jnp.int32)
    out = jax.jit(lambda q, kv: prefill(q, kv, *rest, **options))(q, kv)
    exact = _exact(prefill_reference, q, kv, *rest, **options)
    return out[: sum(chunks)], exact[: sum(chunks)]


def _exact(op: Any, q: jax.Array, kv: jax.Array, *rest: Any, **options: Any) -> jax.Array:
    options.pop("launch", None)
    exact = jax.jit(lambda q, kv: op(q, kv, *rest, **options))
    result: jax.Array = exact(q.astype(jnp.float32), kv.astype(jnp.float32))
    return result
