"""The transformer: one pure function for every supported family, told apart by ModelConfig.

How a layer attends is a parameter, so the serving step (paged cache) and ``jllm.logprobs``
(whole sequence, differentiable) run the very same model code. Dimension letters: see params.py.

With ``axis`` the code runs on each device of that mesh axis and sees its part of the arrays: V, K
and F are a device's share of them (parallel/sharding.py). Its block then yields a part of each
sum, and the parts are added up: after attention, after the MLP, and in the embedding.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jllm.models import vocab
from jllm.models.attention import dense_attention, rotated
from jllm.models.layers import all_sum, matmul, rope_tables, total
from jllm.models.ops import REFERENCE, Ops
from jllm.params import Layer, Params

Array = jax.Array

Rope = tuple[Array, Array]
# attend(window, layer, qkv (P, T, K, G + 2, D), rope, kv) -> (out (T, K, G, D), kv)
Attend = Callable[[int | None, Layer, Array, Rope, Any], tuple[Array, Any]]


def forward(
    params: Params,
    tokens: Array,
    positions: Array,
    attend: Attend,
    cache: Sequence[Any],
    axis: str | None = None,
    ops: Ops = REFERENCE,
) -> tuple[Array, list[Any]]:
    """Runs the blocks over a flat batch of tokens.

    Args:
      params: the model.
      tokens, positions: (T,) ids and their positions, each within its own sequence.
      attend: how queries reach keys; see ``Attend``.
      cache: one entry per layer, handed to ``attend`` and returned updated.
      axis: the mesh axis that the arrays are split over, if any.
      ops: what the blocks are made of: plain XLA, which can be differentiated, or kernels.

    Returns:
      The final hidden states (T, E), normalised, and the new cache.
    """
    config = params.config
    rope = rope_tables(config, positions)
    with jax.named_scope("embed"):
        x, out = vocab.embed(params.embed, tokens, axis), None

    # A function of its own to JAX, which traces and lowers it once for all layers that see the
    # same window (and for the first, which gets no ``out``): else that takes longer than to read
    # the compiled step from disk. XLA inlines it.
    @functools.partial(jax.jit, static_argnames="window")
    def block(
        x: Array, out: Array | None, layer: Layer, kv: Any, *, window: int | None
    ) -> tuple[Array, Array, Any]:
        with jax.named_scope("attention"):
            x, h = ops.add_norm(x, out, layer.attn_norm, config.rms_norm_eps)
            qkv = _biased(ops.product(h, layer.wqkv), layer.bqkv, h.dtype)
            heads, kv = attend(window, layer, qkv, rope, kv)
            heads = heads.reshape(len(x), -1)  # (T, H * D)
            out = ops.product(heads, layer.wo.reshape(-1, layer.wo.shape[-1]))
            out = _biased(_summed(out, axis, x.dtype), layer.bo, x.dtype)
        with jax.named_scope("mlp"):
            x, h = ops.add_norm(x, out, layer.mlp_norm, config.rms_norm_eps)
            out = ops.product(ops.gated(h, layer.w_gate_up, layer.b_gate_up), layer.w_down)
            out = _biased(_summed(out, axis, x.dtype), layer.b_down, x.dtype)
        return x, out, kv

    new_cache = []
    for index, layer in enumerate(params.layers):
        with jax.named_scope(f"layer{index}"):
            x, out, kv = block(x, out, layer, cache[index], window=config.window(index))
        new_cache.append(kv)
    _, hidden = ops.add_norm(x, out, params.final_norm, config.rms_norm_eps)
    return hidden, new_cache


def _summed(parts: Array, axis: str | None, dtype: Any) -> Array:
    """Parts of a product whose inputs are split over an axis: one, the sum of all devices'."""
    return parts if axis is None else all_sum(total(parts, dtype), axis)[None]


def _biased(parts: Array, bias: Array | None, dtype: Any) -> Array:
    return parts if bias is None else (total(parts, dtype) + bias)[None]


def head(params: Params, hidden: Array, axis: str | None = None) -> Array:
    """Logits (..., V) in float32 of hidden states (..., E); -inf for ids that only pad V."""
    with jax.named_scope("head"):
        if params.lm_head is not None:
            logits = matmul(hidden, params.lm_head)
        else:
            precision = lax.Precision.HIGHEST if hidden.dtype == jnp.float32 else None
            contract = (((hidden.ndim - 1,), (1,)), ((), ()))
            logits = lax.dot_general(hidden, params.embed, contract, precision=precision)
        return vocab.hide_padding(logits.astype(jnp.float32), params.config.vocab_size, axis)


@jax.jit
def logits(params: Params, tokens: Array) -> Array:
    """Next-token logits (T, V) of one whole sequence (T,), without a cache; differentiable."""
    config = params.config

    def attend(
        window: int | None, layer: Layer, qkv: Array, rope: Rope, kv: None
    ) -> tuple[Array, None]:
        scale = config.head_dim**-0.5
        q, k, v = rotated(qkv, layer.norms, rope, config.rms_norm_eps)
        return dense_attention(q, k, v, window=window, scale=scale), kv

    positions = jnp.arange(len(tokens), dtype=jnp.int32)
    hidden, _ = forward(params, tokens, positions, attend, [None] * config.num_layers)
    return head(params, hidden)


def logprobs(params: Params, token_ids: Array) -> Array:
    """Log-probability of each token given those before it: pure, jittable, differentiable.

    Args:
      params: the model.
      token_ids: (..., T) int ids, T at least 2; leading axes are batched.

    Returns:
      (..., T - 1) float32: entry t is log p(token t + 1 | tokens 0..t), of the raw
      distribution (temperature 1, no filter), as ``SamplingParams(logprobs=0)`` reports it.

    Raises:
      ValueError: fewer than two tokens, or an id outside the vocabulary. Under ``jit`` ids are
        not known and so not checked.
    """
    token_ids = jnp.asarray(token_ids)
    if token_ids.ndim == 0 or token_ids.shape[-1] < 2:
        raise ValueError(f"logprobs needs at least two tokens, not shape {token_ids.shape}.")
    if not isinstance(token_ids, jax.core.Tracer) and token_ids.size:
        known = np.asarray(token_ids)  # numpy's min: that of JAX is traced when under jit
        low, high = int(known.min()), int(known.max())
        if low < 0 or high >= params.config.vocab_size:
            raise ValueError(
                f"logprobs got token id {low if low < 0 else high}, outside the vocabulary of "
                f"{params.config.vocab_size}."
            )
    if token_ids.ndim > 1:
        return jax.vmap(lambda ids: logprobs(params, ids))(token_ids)
    logp = jax.nn.log_softmax(logits(params, token_ids[:-1]), axis=-1)
    return jnp.take_along_axis(logp, token_ids[1:, None], axis=-1)[:, 0]
