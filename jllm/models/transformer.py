"""The transformer: one pure function for every supported family, told apart by ModelConfig.

How a layer attends is a parameter, so the serving step (paged cache) and ``jllm.logprobs``
(whole sequence, differentiable) run the very same model code. Dimension letters: see params.py.

With ``axis`` the code runs on each device of that mesh axis and sees its part of the arrays: V, K
and F are a device's share of them (parallel/sharding.py). Its block then yields a part of each
sum, and the parts are added up: after attention, after the MLP, and in the embedding.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jllm.config import ModelConfig
from jllm.models import vocab
from jllm.models.attention import dense_attention
from jllm.models.layers import all_sum, apply_rope, gated_mlp, matmul, rms_norm, rope_tables
from jllm.params import Layer, Params

Array = jax.Array

# attend(layer index, q (T, K, G, D), k (T, K, D), v (T, K, D), kv) -> (out (T, K, G, D), kv)
Attend = Callable[[int, Array, Array, Array, Any], tuple[Array, Any]]


def forward(
    params: Params,
    tokens: Array,
    positions: Array,
    attend: Attend,
    cache: Sequence[Any],
    axis: str | None = None,
) -> tuple[Array, list[Any]]:
    """Runs the blocks over a flat batch of tokens.

    Args:
      params: the model.
      tokens, positions: (T,) ids and their positions, each within its own sequence.
      attend: how queries reach keys; see ``Attend``.
      cache: one entry per layer, handed to ``attend`` and returned updated.
      axis: the mesh axis that the arrays are split over, if any.

    Returns:
      The final hidden states (T, E), normalised, and the new cache.
    """
    config = params.config
    rope = rope_tables(config, positions)
    with jax.named_scope("embed"):
        x = vocab.embed(params.embed, tokens, axis)
    new_cache = []
    for index, layer in enumerate(params.layers):
        with jax.named_scope(f"layer{index}"):
            x, kv = _block(config, index, layer, x, rope, attend, cache[index], axis)
        new_cache.append(kv)
    return rms_norm(x, params.final_norm, config.rms_norm_eps), new_cache


def _block(
    config: ModelConfig,
    index: int,
    layer: Layer,
    x: Array,
    rope: tuple[Array, Array],
    attend: Attend,
    kv: Any,
    axis: str | None,
) -> tuple[Array, Any]:
    with jax.named_scope("attention"):
        h = rms_norm(x, layer.attn_norm, config.rms_norm_eps)
        qkv = matmul(h, layer.wqkv)  # (T, K, G + 2, D)
        if layer.bqkv is not None:
            qkv = qkv + layer.bqkv
        q, k, v = qkv[:, :, :-2], qkv[:, :, -2], qkv[:, :, -1]
        if layer.q_norm is not None and layer.k_norm is not None:
            q = rms_norm(q, layer.q_norm, config.rms_norm_eps)
            k = rms_norm(k, layer.k_norm, config.rms_norm_eps)
        out, kv = attend(index, apply_rope(q, *rope), apply_rope(k, *rope), v, kv)
        out = out.reshape(len(x), -1)  # (T, H * D)
        out = all_sum(matmul(out, layer.wo.reshape(-1, layer.wo.shape[-1])), axis)
        x = x + (out if layer.bo is None else out + layer.bo)
    with jax.named_scope("mlp"):
        h = rms_norm(x, layer.mlp_norm, config.rms_norm_eps)
        out = all_sum(gated_mlp(h, layer.w_gate_up, layer.b_gate_up, layer.w_down), axis)
        x = x + (out if layer.b_down is None else out + layer.b_down)
    return x, kv


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


def logits(params: Params, tokens: Array) -> Array:
    """Next-token logits (T, V) of one whole sequence (T,), without a cache; differentiable."""
    config = params.config

    def attend(index: int, q: Array, k: Array, v: Array, kv: None) -> tuple[Array, None]:
        scale = config.head_dim**-0.5
        return dense_attention(q, k, v, window=config.window(index), scale=scale), kv

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
