"""The attention kernel, in Triton's interpreter, against the XLA reference."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from jllm.models.attention import decode_tiles, prefill_tiles
from tests.kernels.attention_problems import TOLERANCE, both, problem, relative_error


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize(
    ("heads", "group", "dim", "block", "window"),
    [
        pytest.param(2, 4, 64, 16, None, id="group 4"),
        pytest.param(1, 3, 80, 32, 50, id="dim 80, window"),
        pytest.param(1, 1, 96, 64, None, id="dim 96, MHA"),
    ],
)
def test_decode_equals_the_reference(
    heads: int, group: int, dim: int, block: int, window: int | None, dtype: str
) -> None:
    lens = [1, 15, 16, 17, 300, 64, 65, 2]
    q, kv, tables = problem(lens, len(lens), heads, group, dim, block, dtype)
    tiles = decode_tiles(jnp.asarray(lens, jnp.int32))
    out, exact = both(q, kv, tables, tiles, size=1, window=window, scale=dim**-0.5)
    assert relative_error(out, exact) < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize(
    ("heads", "group", "dim", "window"), [(2, 4, 64, None), (1, 2, 80, 50), (1, 1, 96, 100)]
)
def test_prefill_chunks_equal_the_reference(
    heads: int, group: int, dim: int, window: int | None, dtype: str
) -> None:
    """Chunks from the start and from mid-context, a padding row, and padding tokens."""
    chunks = [(64, 64), (65, 65), (1, 1), (30, 200)]
    counts, lens = [n for n, _ in chunks], [n for _, n in chunks]
    starts = jnp.asarray([0, *np.cumsum(counts), sum(counts)], jnp.int32)
    q, kv, tables = problem([*lens, 1], 192, heads, group, dim, 16, dtype)
    tiles = prefill_tiles(starts, jnp.asarray([*lens, 0], jnp.int32), len(q), 64)
    out, exact = both(q, kv, tables, tiles, size=64, window=window, scale=dim**-0.5)
    real = sum(counts)
    assert relative_error(out[:real], exact[:real]) < TOLERANCE[dtype]
