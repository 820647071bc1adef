"""From logits to tokens: pure, one row per request, each row with its own options.

The order is fixed and documented here once:

1. temperature divides the logits; below ``GREEDY_TEMPERATURE`` the row is greedy (argmax, the
   lowest id among equals) and nothing that follows applies to it;
2. min-p keeps tokens at least ``min_p`` times as likely as the likeliest;
3. top-k keeps the k likeliest of those;
4. top-p keeps the likeliest of those, just as many as needed to reach ``top_p`` of their mass.

"Likeliest" is by (probability descending, id ascending), so ties have one answer, and the first
token is always kept. What is left is drawn by the Gumbel-max trick with counter-based noise
(rng.py): argmax of logit + noise.

A feature that no row of the batch uses is off in the static ``SamplerSpec`` and costs nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jllm.models.rng import gumbel, gumbel_rows

Array = jax.Array

GREEDY_TEMPERATURE = 1e-5
# Rows whose kept tokens all lie among the likeliest 256 never need the vocabulary sorted.
CANDIDATES = 256


@dataclass(frozen=True)
class SamplerSpec:
    """Which features some row of the batch uses: static, so each combination is one program.

    Attributes:
      random: some row draws from the whole vocabulary.
      filtered: some row draws through top-k, top-p or min-p.
      logprobs: None, or how many alternatives to report beside the sampled token's logprob.
    """

    random: bool = False
    filtered: bool = False
    logprobs: int | None = None


class SamplingRows(NamedTuple):
    """The options of each of the B rows."""

    temperature: Array  # (B,) float32; 0 is greedy
    top_k: Array  # (B,) int32; 0 is off
    top_p: Array  # (B,) float32; 1 is off
    min_p: Array  # (B,) float32; 0 is off
    seeds: Array  # (B, 2) uint32: low and high word
    samples: Array  # (B,) int32: which of the request's n samples
    positions: Array  # (B,) int32: position of the token being drawn


class Sampled(NamedTuple):
    """What a step tells the host."""

    tokens: Array  # (B,) int32
    logprobs: Array | None  # (B,) float32, of the sampled token under the raw distribution
    top_ids: Array | None  # (B, n) int32, likeliest first
    top_logprobs: Array | None  # (B, n) float32


def sample(logits: Array, rows: SamplingRows, spec: SamplerSpec) -> Sampled:
    """Draws one token per row from logits (B, V), float32."""
    tokens = jnp.argmax(logits, axis=-1).astype(jnp.int32)
    greedy = rows.temperature < GREEDY_TEMPERATURE
    if spec.random or spec.filtered:
        scaled = logits / jnp.where(greedy, 1.0, rows.temperature)[:, None]
        uses_filter = (rows.top_k > 0) | (rows.top_p < 1) | (rows.min_p > 0)
        if spec.random:
            tokens = jnp.where(greedy | uses_filter, tokens, _draw(scaled, rows))
        if spec.filtered:
            tokens = jnp.where(greedy | ~uses_filter, tokens, _draw_filtered(scaled, rows))
    if spec.logprobs is None:
        return Sampled(tokens, None, None, None)
    return Sampled(tokens, *_logprobs(logits, tokens, spec.logprobs))


def _draw(scaled: Array, rows: SamplingRows) -> Array:
    noise = gumbel_rows(rows.seeds, rows.samples, rows.positions, scaled.shape[-1])
    return jnp.argmax(scaled + noise, axis=-1).astype(jnp.int32)


def _draw_filtered(scaled: Array, rows: SamplingRows) -> Array:
    vocab_size = scaled.shape[-1]
    total = jax.nn.logsumexp(scaled, axis=-1)

    def draw(count: int) -> tuple[Array, Array]:
        # Likeliest first, lowest id first among equals. Without the barrier XLA merges the slices
        # below into the sort behind top_k and sorts the whole vocabulary: 45 ms instead of 2.
        values, ids = lax.optimization_barrier(lax.top_k(scaled, count))
        keep = keep_mask(values, total, rows, vocab_size)
        noise = gumbel(rows.seeds, rows.samples, rows.positions, ids)
        best = jnp.argmax(jnp.where(keep, values + noise, -jnp.inf), axis=-1)
        tokens = jnp.take_along_axis(ids, best[:, None], axis=-1)[:, 0]
        return tokens, ~keep[:, -1]  # the last candidate dropped: no later token can be kept

    if vocab_size <= CANDIDATES:
        return draw(vocab_size)[0]
    tokens, complete = draw(CANDIDATES)
    uses_filter = (rows.top_k > 0) | (rows.top_p < 1) | (rows.min_p > 0)
    complete |= ~uses_filter | (rows.top_k == CANDIDATES)
    exact: Array = lax.cond(complete.all(), lambda: tokens, lambda: draw(vocab_size)[0])
    return exact


def keep_mask(values: Array, total: Array, rows: SamplingRows, vocab_size: int) -> Array:
    """Which candidates survive min-p, top-k and top-p.

    Args:
      values: (B, C) tempered logits of the C likeliest tokens, descending.
      total: (B,) their logsumexp over the whole vocabulary.
      rows: the options.
      vocab_size: V; C = V makes the answer exact for any options, a smaller C whenever the last
        candidate is not kept.

    Returns:
      (B, C) bool: a prefix of ones in every row, at least one long.
    """
    rank = jnp.arange(values.shape[-1])
    # min-p 0 gives log 0 = -inf: everything passes.
    keep = values >= values[:, :1] + jnp.log(rows.min_p)[:, None]
    keep &= rank < jnp.where(rows.top_k > 0, rows.top_k, vocab_size)[:, None]
    # Mass that min-p and top-k leave: if they cut nothing here, it is the whole vocabulary's.
    weight = jnp.where(keep, jnp.exp(values - total[:, None]), 0.0)
    cut = (rows.top_k > 0) | (rows.min_p > 0)
    mass = jnp.where(cut, weight.sum(-1), 1.0)
    before = jnp.cumsum(weight, axis=-1) - weight  # mass of the likelier tokens
    keep &= (before < rows.top_p[:, None] * mass[:, None]) | (rows.top_p >= 1)[:, None]
    return keep | (rank == 0)


def _logprobs(logits: Array, tokens: Array, count: int) -> tuple[Array, Array, Array]:
    total = jax.nn.logsumexp(logits, axis=-1, keepdims=True)
    chosen = jnp.take_along_axis(logits, tokens[:, None], axis=-1) - total
    if count == 0:
        empty = jnp.zeros((len(tokens), 0))
        return chosen[:, 0], empty.astype(jnp.int32), empty
    values, ids = lax.top_k(logits, min(count, logits.shape[-1]))
    return chosen[:, 0], ids.astype(jnp.int32), values - total
