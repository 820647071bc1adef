"""What a transformer block is made of: plain XLA, or a kernel for each step of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jllm.kernels import triton_call
from jllm.models import layers

Array = jax.Array


class Ops(NamedTuple):
    """See the functions of the same names in layers.py."""

    add_norm: Callable[[Array, Array | None, Array, float], tuple[Array, Array]]
    product: Callable[[Array, Array], Array]
    gated: Callable[[Array, Array, Array | None], Array]


REFERENCE = Ops(layers.add_norm, layers.product, layers.gated)


def serving_ops() -> Ops:
    """The ops of an engine's steps: Triton kernels on an NVIDIA GPU, if they are installed. These
    have no derivative."""
    if not triton_call.available():
        return REFERENCE
    from jllm.kernels.norm import add_norm

    return Ops(add_norm, _product, _gated)


def _product(x: Array, w: Array) -> Array:
    from jllm.kernels.launches import matmul_launch
    from jllm.kernels.matmul import matmul_parts

    if not _few(x):
        return layers.product(x, w)
    flat = w.reshape(len(w), -1)
    parts = matmul_parts(x, flat, matmul_launch(len(x), *flat.shape))
    return parts.reshape(*parts.shape[:2], *w.shape[1:])


def _gated(x: Array, w_gate_up: Array, b_gate_up: Array | None) -> Array:
    from jllm.kernels.launches import gated_launch
    from jllm.kernels.matmul import gated

    if not _few(x) or b_gate_up is not None:
        return layers.gated(x, w_gate_up, b_gate_up)
    inputs, _, outputs = w_gate_up.shape
    return gated(x, w_gate_up, gated_launch(len(x), inputs, outputs))


def _few(x: Array) -> bool:
    """Whether x (T, I) has so few rows that reading the weights is all that matters. float32 is
    left to XLA, which does not multiply it in TF32."""
    from jllm.kernels.launches import MAX_ROWS

    return len(x) <= MAX_ROWS and x.dtype != jnp.float32
