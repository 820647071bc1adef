"""Random attention problems with scattered blocks and poison, and the XLA reference's answers."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jllm.models.attention import attend_tiles

# Relative to the reference in float32 on the same rounded inputs: a few roundings of the output
# and of the softmax weights in bfloat16 (2**-9) and float16 (2**-12).
TOLERANCE = {"bfloat16": 1e-2, "float16": 1e-3, "float32": 1e-5}


def problem(
    lens: list[int], queries: int, heads: int, group: int, dim: int, block: int, dtype: str
) -> tuple[jax.Array, jax.Array, jax.Array]:
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


def both(q: jax.Array, kv: jax.Array, *rest: Any, **options: Any) -> tuple[jax.Array, jax.Array]:
    """What the kernel gives, and the reference in float32."""
    from jllm.kernels.paged_attention import attend_tiles as kernel

    out = jax.jit(lambda q, kv: kernel(q, kv, *rest, **options))(q, kv)
    exact = jax.jit(lambda q, kv: attend_tiles(q, kv, *rest, **options))
    return out, exact(q.astype(jnp.float32), kv.astype(jnp.float32))
