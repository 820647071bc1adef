"""The attention kernel, in Triton's interpreter, against the XLA reference."""

from __future__ import annotations

import pytest

from jllm.engine.shared_prefix import SharedGroup
from jllm.kernels.launches import decode_launch
from tests.kernels.attention_problems import (
    TOLERANCE,
    decoded,
    prefilled,
    problem,
    relative_error,
)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize(
    ("heads", "group", "dim", "block", "window", "parts", "normed"),
    [
        pytest.param(2, 4, 64, 16, None, 4, False, id="group 4, four parts"),
        pytest.param(1, 3, 80, 32, 50, 1, True, id="dim 80, window, normed"),
        pytest.param(1, 1, 96, 64, None, 2, True, id="dim 96, MHA, normed"),
    ],
)
@pytest.mark.parametrize("programs", [None, 1], ids=["split", "whole rows"])
def test_decode_equals_the_reference(
    heads: int,
    group: int,
    dim: int,
    block: int,
    window: int | None,
    parts: int,
    normed: bool,
    programs: int | None,
    dtype: str,
) -> None:
    lens = [1, 15, 16, 17, 300, 64, 65, 2, 0]
    given = problem(lens, len(lens), heads, group, dim, block, dtype)
    shape = given[0].shape
    launch = decode_launch(shape, given[0].dtype)
    launch = launch._replace(programs=programs or launch.programs)
    out, exact = decoded(given, lens, window=window, parts=parts, normed=normed, launch=launch)
    assert relative_error(out[:-1], exact[:-1]) < TOLERANCE[dtype]  # but for the padding row


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize(("group", "dim", "parts"), [(4, 64, 2), (7, 80, 1)])
def test_what_rows_share_is_read_once(group: int, dim: int, parts: int, dtype: str) -> None:
    """Two groups, one of several tiles, beside rows that share nothing, and a padding row."""
    groups = [SharedGroup(0, 19, 9), SharedGroup(20, 4, 3)]
    lens = [145 + 7 * i for i in range(19)] + [200] + [49, 64, 65, 80] + [33, 0]
    given = problem(lens, len(lens), 2, group, dim, 16, dtype)
    out, exact = decoded(given, lens, parts=parts, groups=groups)
    assert relative_error(out[:-1], exact[:-1]) < TOLERANCE[dtype]


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
    out, exact = prefilled(given, chunks, lens, window=window, decode_rows=3)
    assert relative_error(out, exact) < TOLERANCE[dtype]
