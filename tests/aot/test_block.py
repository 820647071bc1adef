"""The kernels of a transformer block compile for an H200, in every dtype and head size."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jllm.kernels.launches import gated_launch, matmul_launch
from jllm.kernels.matmul import gated, matmul_parts
from jllm.kernels.norm import add_norm
from jllm.kernels.rope import enter_qkv
from tests.aot.compiler import compile_for_h200

pytestmark = pytest.mark.aot

DTYPES = pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
NUM_BLOCKS, HEADS, GROUP, BLOCK = 1000, 8, 4, 16


def spec(*shape: int, dtype: Any = "int32") -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))


@DTYPES
@pytest.mark.parametrize(("parts", "width"), [(0, 576), (1, 8192), (4, 576)])
def test_add_norm(parts: int, width: int, dtype: str) -> None:
    y = spec(parts, 64, width, dtype="float32" if parts > 1 else dtype) if parts else None
    op = jax.jit(functools.partial(add_norm, eps=1e-5))
    compile_for_h200(op, spec(64, width, dtype=dtype), y, spec(width, dtype=dtype))


@DTYPES
@pytest.mark.parametrize("dim", [64, 80, 96, 128, 256])
@pytest.mark.parametrize(("tokens", "parts", "normed"), [(1, 4, True), (4096, 1, False)])
def test_enter_qkv_writes_the_cache_in_place(
    tokens: int, parts: int, normed: bool, dim: int, dtype: str
) -> None:
    qkv = spec(parts, tokens, HEADS, GROUP + 2, dim, dtype="float32" if parts > 1 else dtype)
    norms = (spec(dim, dtype=dtype), spec(dim, dtype=dtype)) if normed else None
    rope = (spec(tokens, dim // 2, dtype="float32"), spec(tokens, dim // 2, dtype="float32"))
    kv = spec(NUM_BLOCKS, 2, HEADS, BLOCK, dim, dtype=dtype)
    op = jax.jit(functools.partial(enter_qkv, eps=1e-5), donate_argnums=4)
    memory = compile_for_h200(op, qkv, norms, rope, spec(tokens), kv).memory_analysis()
    cache_bytes = NUM_BLOCKS * 2 * HEADS * BLOCK * dim * jnp.dtype(dtype).itemsize
    assert memory.alias_size_in_bytes == cache_bytes
    assert memory.temp_size_in_bytes < cache_bytes


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])  # float32 products are XLA's
@pytest.mark.parametrize(("rows", "inputs", "outputs"), [(1, 576, 1536), (64, 4096, 6144)])
def test_products(rows: int, inputs: int, outputs: int, dtype: str) -> None:
    def op(x: Any, w: Any, w_gate_up: Any) -> Any:
        parts = matmul_parts(x, w, matmul_launch(rows, inputs, outputs))
        return parts, gated(x, w_gate_up, gated_launch(rows, inputs, outputs))

    x = spec(rows, inputs, dtype=dtype)
    w, w_gate_up = spec(inputs, outputs, dtype=dtype), spec(inputs, 2, outputs, dtype=dtype)
    compile_for_h200(jax.jit(op), x, w, w_gate_up)
