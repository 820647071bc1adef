"""The small pieces of a transformer block: projection, RMSNorm, rotary positions, gated MLP."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jllm.config import ModelConfig, RopeScaling

Array = jax.Array


def matmul(x: Array, w: Array) -> Array:
    """``x (T, I) @ w (I, ...)`` -> ``(T, ...)``: trailing axes of ``w`` are kept.

    float32 is multiplied in full: by default a GPU would use TF32, 10 bits of mantissa.
    """
    precision = lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    y = lax.dot_general(
        x, w.reshape(w.shape[0], -1), (((x.ndim - 1,), (0,)), ((), ())), precision=precision
    )
    return y.reshape(*x.shape[:-1], *w.shape[1:])


def all_sum(x: Array, axis: str | None) -> Array:
    """The sum of every device's ``x`` over a mesh axis, on each of them; ``x`` if there is none."""
    if axis is None:
        return x
    total: Array = lax.psum(x, axis)
    return total


def rms_norm(x: Array, weight: Array, eps: float) -> Array:
    """``x / rms(x) * weight`` over the last axis (arXiv 1910.07467).

    The mean of squares is taken in float32: squares of a bfloat16 keep 8 bits, and 4096 of them
    summed in bfloat16 stop growing at 256 times the first.
    """
    x32 = x.astype(jnp.float32)
    scale = lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + eps)
    return (x32 * scale).astype(x.dtype) * weight


def product(x: Array, w: Array) -> Array:
    """``x (T, I) @ w (I, ...)`` as parts (P, T, ...), whose sum over P it is: here one part.

    A kernel may cut the sum over I and leave adding up to whatever reads the product.
    """
    return matmul(x, w)[None]


def total(parts: Array, dtype: Any) -> Array:
    """The sum of parts (P, ...) of a product, rounded once."""
    return parts[0] if len(parts) == 1 else parts.sum(axis=0).astype(dtype)


def add_norm(x: Array, parts: Array | None, weight: Array, eps: float) -> tuple[Array, Array]:
    """``x`` (T, E) plus the sum of ``parts`` (P, T, E), if any, and the RMSNorm of that."""
    if parts is not None:
        x = x + total(parts, x.dtype)
    return x, rms_norm(x, weight, eps)


def gated(x: Array, w_gate_up: Array, b_gate_up: Array | None) -> Array:
    """``silu(x @ gate) * (x @ up)`` (arXiv 2002.05202).

    Shapes: x (T, E), w_gate_up (E, 2, F), b_gate_up (2, F) -> (T, F).
    """
    gate_up = matmul(x, w_gate_up)  # (T, 2, F)
    if b_gate_up is not None:
        gate_up = gate_up + b_gate_up
    return jax.nn.silu(gate_up[:, 0]) * gate_up[:, 1]


def apply_rope(x: Array, cos: Array, sin: Array) -> Array:
    """Rotates head vectors by their position (arXiv 2104.09864), pairing d with d + D/2.

    x (T, ..., D) with cos and sin (T, D/2). In float32: bfloat16 rounds position 257 to 256,
    and sin(257) is not sin(256).
    """
    shape = (x.shape[0], *(1,) * (x.ndim - 2), cos.shape[-1])
    cos, sin = cos.reshape(shape), sin.reshape(shape)
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    rotated = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return rotated.astype(x.dtype)


def rope_tables(config: ModelConfig, positions: Array) -> tuple[Array, Array]:
    """cos and sin (T, D/2), float32, of positions (T,): one pair for all layers of a step."""
    frequencies, scale = rope_frequencies(config)
    angles = positions.astype(jnp.float32)[:, None] * frequencies[None, :]
    return jnp.cos(angles) * scale, jnp.sin(angles) * scale


def rope_frequencies(config: ModelConfig) -> tuple[np.ndarray, float]:
    """Radians per position (D/2,) as float32, and the factor that scales cos and sin (yarn's)."""
    exponents = np.arange(0, config.head_dim, 2, dtype=np.float64) / config.head_dim
    base: np.ndarray = np.power(config.rope_theta, -exponents)
    scaling = config.rope_scaling
    if scaling is None:
        return base.astype(np.float32), 1.0
    if scaling.kind == "linear":
        return (base / scaling.factor).astype(np.float32), 1.0
    if scaling.kind == "llama3":
        return _llama3(base, scaling).astype(np.float32), 1.0
    return _yarn(base, scaling, config).astype(np.float32), _yarn_scale(scaling)


def _llama3(base: np.ndarray, scaling: RopeScaling) -> np.ndarray:
    """Slow waves are stretched, fast ones kept, and those between are blended."""
    turns = scaling.original_max_position * base / (2 * np.pi)  # per original context
    keep = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    keep = np.clip(keep, 0.0, 1.0)
    blended: np.ndarray = base / scaling.factor * (1 - keep) + base * keep
    return blended


def _yarn(base: np.ndarray, scaling: RopeScaling, config: ModelConfig) -> np.ndarray:
    """Blends by dimension: below ``low`` waves are kept, above ``high`` they are stretched."""

    def dimension(turns: float) -> float:
        """The dimension whose wave makes that many turns over the original context."""
        span = scaling.original_max_position / (turns * 2 * math.pi)
        return config.head_dim * math.log(span) / (2 * math.log(config.rope_theta))

    low, high = dimension(scaling.beta_fast), dimension(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, config.head_dim - 1)
    high = high + 0.001 if high == low else high  # the same guard as the original code
    stretch = np.clip((np.arange(len(base)) - low) / (high - low), 0.0, 1.0)
    blended: np.ndarray = base / scaling.factor * stretch + base * (1 - stretch)
    return blended


def _yarn_scale(scaling: RopeScaling) -> float:
    """Yarn's attention temperature, as a factor on cos and sin (on q and on k: squared)."""

    def mscale(weight: float) -> float:
        return 0.1 * weight * math.log(scaling.factor) + 1.0 if scaling.factor > 1 else 1.0

    if scaling.attention_factor is not None:
        return scaling.attention_factor
    if scaling.mscale and scaling.mscale_all_dim:
        return mscale(scaling.mscale) / mscale(scaling.mscale_all_dim)
    return mscale(1.0)
