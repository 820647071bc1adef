"""The attention kernel, in Triton's interpreter, against the XLA reference."""

from __future__ import annotations

import pytest

from tests.kernels.attention_problems import (
    TOLERANCE,
    decoded,
    prefilled,
    problem,
    relative_error,
)


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
    given = problem(lens, len(lens), heads, group, dim, block, dtype)
    out, exact = decoded(given, lens, window=window, scale=dim**-0.5)
    assert relative_error(out, exact) < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize(
    ("heads", "group", "dim", "window"), [(2, 4, 64, None), (1, 2, 80, 50), (1, 1, 96, 100)]
)
def test_prefill_chunks_equal_the_reference(
    heads: int, group: int, dim: int, window: int | None, dtype: str
) -> None:
    """Chunks from the start and from mid-context, a padding row, and padding tokens."""
    chunks, lens = [64, 65, 1, 30, 0], [64, 65, 1, 200, 0]
    given = problem([*lens[:-1], 1], 192, heads, group, dim, 16, dtype)
    out, exact = prefilled(given, chunks, lens, window=window, scale=dim**-0.5)
    assert relative_error(out, exact) < TOLERANCE[dtype]
