"""Inputs of the kernels of a transformer block, and what the plain functions make of them."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jllm.kernels.launches import MatmulLaunch
from jllm.kernels.matmul import gated, matmul_parts
from jllm.kernels.norm import add_norm
from jllm.kernels.rope import enter_qkv
from jllm.models import layers
from jllm.models.attention import rotated, write_kv

TOLERANCE = {"float32": 1e-5, "float16": 2e-3, "bfloat16": 1e-2}
LAUNCHES = [
    MatmulLaunch(32, 64, 1, num_warps=4, num_stages=2),
    MatmulLaunch(64, 64, 4, num_warps=4, num_stages=3),
]


def normal(seed: int, shape: tuple[int, ...], dtype: str) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape, jnp.float32).astype(dtype)


def assert_close(got: Any, want: Any, dtype: str) -> None:
    """Within the tolerance of the dtype, relative to the size of the whole."""
    got, want = np.asarray(got, np.float32), np.asarray(want, np.float32)
    assert got.shape == want.shape
    assert np.isfinite(got).all()
    assert np.abs(got - want).max() <= TOLERANCE[dtype] * np.abs(want).max()


def check_add_norm(rows: int, width: int, parts: int, dtype: str) -> None:
    x, weight = normal(0, (rows, width), dtype), normal(1, (width,), dtype)
    y = normal(2, (parts, rows, width), "float32" if parts > 1 else dtype) if parts else None
    got = jax.jit(add_norm, static_argnums=3)(x, y, weight, 1e-5)
    want = layers.add_norm(x, y, weight, 1e-5)
    for ours, theirs in zip(got, want, strict=True):
        assert ours.dtype == x.dtype
        assert_close(ours, theirs, dtype)


def check_product(rows: int, inputs: int, outputs: int, launch: MatmulLaunch, dtype: str) -> None:
    x, w = normal(0, (rows, inputs), dtype), normal(1, (inputs, outputs), dtype)
    parts = jax.jit(matmul_parts, static_argnums=2)(x, w, launch)
    assert parts.shape == (launch.split, rows, outputs)
    want = jnp.matmul(x.astype("float32"), w.astype("float32"), precision="highest")
    assert_close(layers.total(parts, dtype), want, dtype)


def check_gated(rows: int, inputs: int, outputs: int, launch: MatmulLaunch, dtype: str) -> None:
    x, w = normal(0, (rows, inputs), dtype), normal(1, (inputs, 2, outputs), dtype)
    got = jax.jit(gated, static_argnums=2)(x, w / 8, launch._replace(split=1))
    assert got.dtype == x.dtype
    want = layers.gated(x.astype("float32"), (w / 8).astype("float32"), None)
    assert_close(got, want, dtype)


def check_enter_qkv(
    tokens: int, group: int, dim: int, block: int, parts: int, normed: bool, dtype: str
) -> None:
    heads, num_blocks, padding = 2, 9, 2
    shape = (parts, tokens, heads, group + 2, dim)
    qkv = normal(0, shape, "float32" if parts > 1 else dtype)
    norms = (normal(1, (dim,), dtype), normal(2, (dim,), dtype)) if normed else None
    angles = np.random.default_rng(0).uniform(0, 1000, (tokens, dim // 2)).astype(np.float32)
    rope = (jnp.cos(angles), jnp.sin(angles))
    kv = normal(3, (num_blocks, 2, heads, block, dim), dtype)
    # Scattered, and the last tokens are padding, which goes to the scratch block.
    free = np.random.default_rng(1).permutation(np.arange(block, num_blocks * block))
    slots = np.append(free[: tokens - padding], [0] * padding).astype(np.int32)
    got_q, got_kv = jax.jit(enter_qkv, static_argnums=5)(
        qkv, norms, rope, jnp.asarray(slots), kv, 1e-5
    )
    q, k, v = rotated(layers.total(qkv, dtype)[None].astype(dtype), norms, rope, 1e-5)
    want_kv = write_kv(kv, k, v, jnp.asarray(slots))
    assert_close(got_q, q, dtype)
    assert_close(got_kv[1:], want_kv[1:], dtype)


ADD_NORM = pytest.mark.parametrize(
    ("rows", "width", "parts"), [(1, 64, 1), (5, 100, 4), (3, 1024, 0), (2, 576, 2)]
)
PRODUCT = pytest.mark.parametrize(
    ("rows", "inputs", "outputs"), [(1, 256, 128), (7, 200, 72), (33, 512, 64), (64, 100, 130)]
)
ENTER = pytest.mark.parametrize(
    ("tokens", "group", "dim", "block", "parts", "normed"),
    [
        (5, 4, 64, 16, 1, False),
        (9, 2, 128, 16, 4, True),
        (4, 1, 80, 32, 2, False),
        (7, 7, 96, 64, 1, True),
        (3, 3, 256, 16, 1, True),
    ],
)
