"""The Triton attention kernel on a GPU against the XLA reference in float32."""

from __future__ import annotations

import numpy as np
import pytest

from jllm.engine.shared_prefix import SharedGroup
from jllm.kernels import triton_call
from tests.kernels.attention_problems import (
    TOLERANCE,
    decoded,
    prefilled,
    problem,
    relative_error,
)

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(
    ("heads", "group", "dim", "block", "window"),
    [
        pytest.param(8, 4, 128, 16, None, id="llama"),
        pytest.param(8, 2, 128, 16, None, id="qwen3-0.6b"),
        pytest.param(3, 3, 64, 16, None, id="smollm2"),
        pytest.param(2, 8, 80, 32, 50, id="dim 80, window"),
        pytest.param(1, 1, 96, 64, None, id="dim 96, MHA"),
        pytest.param(2, 7, 256, 16, 1000, id="dim 256, group 7"),
    ],
)
@pytest.mark.parametrize("parts", [1, 4])
@pytest.mark.parametrize(
    "lens",
    [
        pytest.param([1], id="one token"),
        pytest.param([5000], id="one long row"),
        pytest.param([1, 15, 16, 17, 63, 64, 65, 700, 33, 2], id="ragged"),
        pytest.param([130 + i for i in range(200)], id="many rows: no splits"),
    ],
)
def test_decode_equals_the_reference(
    lens: list[int],
    heads: int,
    group: int,
    dim: int,
    block: int,
    window: int | None,
    parts: int,
    dtype: str,
) -> None:
    assert triton_call.available()
    given = problem(lens, len(lens), heads, group, dim, block, dtype)
    out, exact = decoded(given, lens, window=window, parts=parts, normed=parts == 1)
    assert np.isfinite(np.asarray(out, np.float32)).all()
    assert relative_error(out, exact) < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(
    ("heads", "group", "dim", "window"),
    [(8, 4, 128, None), (3, 3, 64, None), (2, 2, 80, 50), (2, 1, 256, 100)],
)
def test_prefill_chunks_equal_the_reference(
    heads: int, group: int, dim: int, window: int | None, dtype: str
) -> None:
    """Chunks from the start and from mid-context, a padding row, and padding tokens."""
    chunks, lens = [64, 65, 1, 130, 7, 30, 0], [64, 65, 1, 700, 1000, 31, 0]
    given = problem([*lens[:-1], 1], 512, heads, group, dim, 16, dtype)
    out, exact = prefilled(given, chunks, lens, window=window)
    assert np.isfinite(np.asarray(out, np.float32)).all()
    assert relative_error(out, exact) < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("heads", "group", "dim"), [(8, 4, 128), (8, 2, 128), (2, 7, 80)])
def test_what_rows_share_is_read_once(heads: int, group: int, dim: int, dtype: str) -> None:
    """Two groups, one of several tiles, beside rows that share nothing, and a padding row."""
    groups = [SharedGroup(0, 60, 128), SharedGroup(61, 5, 9)]
    lens = [2050 + 17 * i for i in range(60)] + [1200] + [145, 160, 161, 176, 700] + [33, 0]
    given = problem(lens, len(lens), heads, group, dim, 16, dtype)
    out, exact = decoded(given, lens, parts=2, groups=groups)
    assert relative_error(out[:-1], exact[:-1]) < TOLERANCE[dtype]
