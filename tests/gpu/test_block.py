"""The kernels of a transformer block against plain XLA, on a GPU."""

from __future__ import annotations

import pytest

from jllm.kernels.launches import gated_launch, matmul_launch
from tests.kernels.block_problems import (
    ADD_NORM,
    ENTER,
    PRODUCT,
    check_add_norm,
    check_enter_qkv,
    check_gated,
    check_product,
)

pytestmark = pytest.mark.gpu

DTYPES = pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
HALVES = pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
REAL = pytest.mark.parametrize(
    ("rows", "inputs", "outputs"), [(1, 4096, 6144), (16, 14336, 4096), (64, 1024, 3072)]
)


@DTYPES
@ADD_NORM
def test_add_norm(rows: int, width: int, parts: int, dtype: str) -> None:
    check_add_norm(rows, width, parts, dtype)


@HALVES
@PRODUCT
def test_product(rows: int, inputs: int, outputs: int, dtype: str) -> None:
    check_product(rows, inputs, outputs, matmul_launch(rows, inputs, outputs), dtype)
    check_gated(rows, inputs, outputs, gated_launch(rows, inputs, outputs), dtype)


@HALVES
@REAL
def test_product_of_a_real_layer(rows: int, inputs: int, outputs: int, dtype: str) -> None:
    check_product(rows, inputs, outputs, matmul_launch(rows, inputs, outputs), dtype)
    check_gated(rows, inputs, outputs, gated_launch(rows, inputs, outputs), dtype)


@DTYPES
@ENTER
def test_enter_qkv(
    tokens: int, group: int, dim: int, block: int, parts: int, normed: bool, dtype: str
) -> None:
    check_enter_qkv(tokens, group, dim, block, parts, normed, dtype)
