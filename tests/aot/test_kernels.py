"""Every kernel lowers and compiles for an H200, in every dtype and head size."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import pytest

from jllm.kernels.paged_attention import attend_tiles
from tests.aot.compiler import compile_for_h200

pytestmark = pytest.mark.aot

DTYPES = ["bfloat16", "float16"]


def spec(*shape: int, dtype: str = "int32") -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [64, 80, 96, 128, 256])
@pytest.mark.parametrize("size", [1, 64])
def test_paged_attention(size: int, dim: int, dtype: str) -> None:
    tokens, heads, group, block = 64, 8, 4, 16
    attend = jax.jit(functools.partial(attend_tiles, size=size, window=None, scale=dim**-0.5))
    compile_for_h200(
        attend,
        spec(tokens, heads, group, dim, dtype=dtype),
        spec(1000, 2, heads, block, dim, dtype=dtype),
        spec(tokens, 64),
        tuple(spec(tokens) for _ in range(4)),
    )
