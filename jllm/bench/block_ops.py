"""The ops of a transformer block but attention, and the head, on a model's real shapes.

A product of few rows may come in parts (models/ops.py); what reads it is given as many here.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jllm.bench.case import EXACT, Args, Case, relative_error
from jllm.config import ModelConfig
from jllm.kernels import triton_call
from jllm.models.attention import rotated, write_kv
from jllm.models.layers import rope_tables
from jllm.models.ops import serving_ops
from jllm.models.transformer import head
from jllm.params import Params
from jllm.roofline import matmul_shapes


def gemms(config: ModelConfig, dtype: Any, m: int, step: str | None) -> Iterator[Case]:
    """The model's matrix products with ``m`` tokens; that of gate and up with its activation."""
    size, ops = jnp.dtype(dtype).itemsize, serving_ops()

    def gated(x: jax.Array, w: jax.Array) -> jax.Array:
        return ops.gated(x, w, None)

    def gated_error(args: Args, out: Any) -> float:
        x, w = (array.astype(jnp.float32) for array in args)
        gate, up = (jnp.dot(x, w[:, index], precision=EXACT) for index in (0, 1))
        return relative_error(out, gate / (1 + jnp.exp(-gate)) * up)

    def product_error(args: Args, out: Any) -> float:
        x, w = (array.astype(jnp.float32) for array in args)
        return relative_error(np.asarray(out, np.float64).sum(0), jnp.dot(x, w, precision=EXACT))

    for shape in matmul_shapes(config):
        if shape.name == "head":
            continue
        is_gated = shape.name == "gate_up"
        columns = (2, shape.outer // 2) if is_gated else (shape.outer,)

        def make(
            key: jax.Array, inner: int = shape.inner, columns: tuple[int, ...] = columns
        ) -> Args:
            a, b = jax.random.split(key)
            x = jax.random.normal(a, (m, inner), dtype)
            return x, jax.random.normal(b, (inner, *columns), dtype) * jnp.asarray(0.02, dtype)

        yield Case(
            f"kernel_us_{shape.name}_M{m}",
            "gemm",
            gated if is_gated else ops.product,
            make,
            gated_error if is_gated else product_error,
            (m * shape.inner + shape.inner * shape.outer) * size,
            m * columns[-1] * size,
            2.0 * m * shape.inner * shape.outer,
            shape.per_step,
            step,
        )


def head_case(config: ModelConfig, dtype: Any, m: int, step: str | None) -> Case:
    """The head of ``m`` rows; its logits are float32."""
    size, e, v = jnp.dtype(dtype).itemsize, config.hidden_size, config.vocab_size

    def make(key: jax.Array) -> Args:
        a, b = jax.random.split(key)
        w = jax.random.normal(b, (v, e) if config.tie_embeddings else (e, v), dtype)
        return jax.random.normal(a, (m, e), dtype), w * jnp.asarray(0.02, dtype)

    def op(hidden: jax.Array, w: jax.Array) -> jax.Array:
        embed, lm_head = (w, None) if config.tie_embeddings else (hidden, w)
        return head(Params(embed, (), hidden[0], lm_head, config), hidden)

    def error(args: Args, out: Any) -> float:
        x, w = (array.astype(jnp.float32) for array in args)
        return relative_error(out, jnp.dot(x, w.T if config.tie_embeddings else w, precision=EXACT))

    moved = (m * e + e * v) * size
    flops = 2.0 * m * e * v
    return Case(f"kernel_us_head_M{m}", "gemm", op, make, error, moved, m * v * 4, flops, 1, step)


def norm_case(config: ModelConfig, dtype: Any, m: int, step: str | None) -> Case:
    """Adds attention's output to the residual of ``m`` tokens, and normalises."""
    c, size, ops = config, jnp.dtype(dtype).itemsize, serving_ops()
    parts = projection(m, c.num_heads * c.head_dim, c.hidden_size, dtype)

    def make(key: jax.Array) -> Args:
        a, b, d = jax.random.split(key, 3)
        x = jax.random.normal(a, (m, c.hidden_size), dtype)
        y = jax.random.normal(b, parts.shape, parts.dtype)
        return x, y, jax.random.normal(d, (c.hidden_size,), dtype)

    def op(x: jax.Array, y: jax.Array, weight: jax.Array) -> tuple[jax.Array, jax.Array]:
        return ops.add_norm(x, y, weight, c.rms_norm_eps)

    def error(args: Args, out: Any) -> float:
        x, y, weight = (np.asarray(array, np.float64) for array in args)
        total = x + y.sum(0)
        normed = _normed(total, weight, c.rms_norm_eps)
        return max(relative_error(out[0], total), relative_error(out[1], normed))

    rows = m * c.hidden_size * size
    return Case(
        f"kernel_us_add_norm_M{m}",
        "norm",
        op,
        make,
        error,
        rows + _bytes(parts),
        2 * rows,
        per_step=2 * c.num_layers + 1,
        step=step,
    )


def enter_case(
    config: ModelConfig, dtype: Any, m: int, step: str | None, block_size: int = 16
) -> Case:
    """Takes the projections of ``m`` tokens to where attention finds them: normalises q and k if
    the model does, rotates both, and writes k and v into scattered slots of the cache."""
    c, size = config, jnp.dtype(dtype).itemsize
    wide, dim, eps = c.group_size + 2, c.head_dim, c.rms_norm_eps
    parts = projection(m, c.hidden_size, c.num_kv_heads * wide * dim, dtype)
    blocks = max(64, 2 * m // block_size)

    def make(key: jax.Array) -> Args:
        a, b, d, e, f = jax.random.split(key, 5)
        kv = jax.random.normal(a, (blocks + 1, 2, c.num_kv_heads, block_size, dim), dtype)
        q = jnp.zeros((m, c.num_kv_heads, c.group_size, dim), dtype)
        qkv = jax.random.normal(b, parts.shape, parts.dtype)
        qkv = qkv.reshape(-1, m, c.num_kv_heads, wide, dim)
        norms = jax.random.normal(d, (2, dim), dtype) if c.qk_norm else None
        positions = jax.random.randint(e, (m,), 0, c.max_position_embeddings)
        slots = block_size + jax.random.permutation(f, blocks * block_size)[:m]
        weights = None if norms is None else (norms[0], norms[1])
        return (kv, q), qkv, weights, rope_tables(c, positions), slots.astype(jnp.int32)

    def op(state: Any, qkv: Any, norms: Any, rope: Any, slots: jax.Array) -> Any:
        if triton_call.available():
            from jllm.kernels.rope import enter_qkv

            q, kv = enter_qkv(qkv, norms, rope, slots, state[0], eps)
        else:
            q, k, v = rotated(qkv, norms, rope, eps)
            kv = write_kv(state[0], k, v, slots)
        # Bound together: of ops in a row XLA would leave out all queries but the last.
        return lax.optimization_barrier((kv, q))

    def error(args: Args, out: Any) -> float:
        (kv, _), qkv, norms, (cos, sin), slots = jax.tree.map(
            lambda array: np.asarray(array, np.float64), args
        )
        whole = qkv.sum(0)
        q, k, v = whole[:, :, :-2], whole[:, :, -2:-1], whole[:, :, -1]
        if norms is not None:
            q, k = _normed(q, norms[0], eps), _normed(k, norms[1], eps)
        kv = kv.copy()
        block, offset = np.divmod(slots.astype(np.int64), block_size)
        kv[block, 0, :, offset] = _turned(k, cos, sin)[:, :, 0]
        kv[block, 1, :, offset] = v
        got, at = np.asarray(out[0], np.float64), (block, slice(None), slice(None), offset)
        return max(
            relative_error(got, kv),  # nothing else was touched
            relative_error(got[at], kv[at]),
            relative_error(out[1], _turned(q, cos, sin)),
        )

    tables = m * dim * 4  # cos and sin
    return Case(
        f"kernel_us_enter_qkv_M{m}",
        "rope and write",
        op,
        make,
        error,
        _bytes(parts) + tables,
        m * c.num_kv_heads * wide * dim * size,
        per_step=c.num_layers,
        step=step,
        in_place=True,
    )


def projection(m: int, inner: int, outer: int, dtype: Any) -> jax.ShapeDtypeStruct:
    """The parts (P, M, O) in which a product of the model's comes."""
    x, w = (jax.ShapeDtypeStruct(shape, dtype) for shape in ((m, inner), (inner, outer)))
    parts: jax.ShapeDtypeStruct = jax.eval_shape(serving_ops().product, x, w)
    return parts


def _bytes(array: jax.ShapeDtypeStruct) -> int:
    size: int = math.prod(array.shape) * jnp.dtype(array.dtype).itemsize
    return size


def _normed(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    normed: np.ndarray = x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * weight
    return normed


def _turned(x: np.ndarray, cos: np.ndarray, sin: np.ndarray) -> np.ndarray:
    """x (T, K, G, D) rotated by cos and sin (T, D / 2)."""
    one, two = np.split(x, 2, axis=-1)
    cos, sin = cos[:, None, None], sin[:, None, None]
    return np.concatenate([one * cos - two * sin, two * cos + one * sin], -1)
