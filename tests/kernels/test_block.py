"""The kernels of a transformer block against plain XLA, in Triton's interpreter."""

from __future__ import annotations

import pytest

from jllm.kernels.launches import MatmulLaunch
from tests.kernels.block_problems import (
    ADD_NORM,
    ENTER,
    LAUNCHES,
    PRODUCT,
    check_add_norm,
    check_enter_qkv,
    check_gated,
    check_product,
)

DTYPES = pytest.mark.parametrize("dtype", ["float32", "float16"])


@DTYPES
@ADD_NORM
def test_add_norm(rows: int, width: int, parts: int, dtype: str) -> None:
    check_add_norm(rows, width, parts, dtype)


@PRODUCT
@pytest.mark.parametrize("launch", LAUNCHES)
def test_product(rows: int, inputs: int, outputs: int, launch: MatmulLaunch) -> None:
    check_product(rows, inputs, outputs, launch, "float16")


@PRODUCT
@pytest.mark.parametrize("launch", LAUNCHES)
def test_gated(rows: int, inputs: int, outputs: int, launch: MatmulLaunch) -> None:
    check_gated(rows, inputs, outputs, launch, "float16")


@DTYPES
@ENTER
def test_enter_qkv(
    tokens: int, group: int, dim: int, block: int, parts: int, normed: bool, dtype: str
) -> None:
    check_enter_qkv(tokens, group, dim, block, parts, normed, dtype)
