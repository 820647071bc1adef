"""From logits to tokens: pure, one row per request, each row with its own options.

The order is fixed and documented here once:

0. ``logits_processor`` changes the model's logits;
1. bias and masks: every token that the grammar of ``structured`` forbids becomes -inf,
   ``logit_bias`` is added, and every token that ``allowed_token_ids``, ``bad_words`` or
   ``min_tokens`` forbids becomes -inf too. Masks win over everything: nothing before or after
   brings a forbidden token back (logit_rules.py);
2. penalties: repetition, then frequency and presence (logit_rules.py);
3. temperature divides the logits; below ``GREEDY_TEMPERATURE`` the row is greedy (argmax, the
   lowest id among equals) and nothing that follows applies to it;
4. min-p keeps tokens at least ``min_p`` times as likely as the likeliest;
5. top-k keeps the k likeliest of those;
6. top-p keeps the likeliest of those, just as many as needed to reach ``top_p`` of their mass.

"Likeliest" is by (probability descending, id ascending), so ties have one answer, and the first
token is always kept. What is left is drawn by the Gumbel-max trick with counter-based noise
(rng.py): argmax of logit + noise. Raw logprobs are of the logits before all this, processed ones
of what the token was drawn from.

A feature that no row of the batch uses is off in the static ``SamplerSpec`` and costs nothing.

On an NVIDIA GPU two Triton kernels do all this; they draw the very same tokens, but neither sort
nor make the host wait, as XLA's conditions do there. XLA's sort remains for alternatives
(``logprobs`` above 0, or -1), and for everything with ``axis``.

With ``axis`` the logits are split by vocabulary over the devices of that mesh axis (vocab.py), and
every device ends with the same tokens. Candidates are then each device's likeliest, merged. Only a
top-p or min-p that keeps more than ``CANDIDATES`` tokens, and ``logprobs=-1``, move whole rows.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jllm.kernels import triton_call
from jllm.models import vocab
from jllm.models.rng import gumbel, gumbel_rows

if TYPE_CHECKING:
    from jllm.kernels.sampling import Options

Array = jax.Array

GREEDY_TEMPERATURE = 1e-5
# Rows whose kept tokens all lie among the likeliest 256 never need the vocabulary sorted.
CANDIDATES = 256
# min-p and top-p compare probabilities that float32 gives to within a few 1e-6: equality within
# this counts as equality, so that of four tokens of 1/4 each top_p=0.5 keeps two, on any device.
BOUNDARY = 1e-5


@dataclass(frozen=True)
class SamplerSpec:
    """Which features some row of the batch uses: static, so each combination is one program.

    Attributes:
      random: some row draws from the whole vocabulary.
      filtered: some row draws through top-k, top-p or min-p.
      rules: some row has a bias, a mask or a penalty.
      processed: some row reports logprobs of the distribution it is drawn from.
      logprobs: None, or how many alternatives to report beside the sampled token's logprob; -1
        for the whole vocabulary.
    """

    random: bool = False
    filtered: bool = False
    rules: bool = False
    processed: bool = False
    logprobs: int | None = None

    def covers(self, other: SamplerSpec) -> bool:
        """Whether a program of this spec gives all that one of the other would."""
        return (
            self.random >= other.random
            and self.filtered >= other.filtered
            and self.rules >= other.rules
            and self.processed >= other.processed
            and _reported(self.logprobs) >= _reported(other.logprobs)
        )


def _reported(logprobs: int | None) -> float:
    return -1 if logprobs is None else math.inf if logprobs == -1 else logprobs


class SamplingRows(NamedTuple):
    """The options of each of the B rows."""

    temperature: Array  # (B,) float32; 0 is greedy
    top_k: Array  # (B,) int32; 0 is off
    top_p: Array  # (B,) float32; 1 is off
    min_p: Array  # (B,) float32; 0 is off
    seeds: Array  # (B, 2) uint32: low and high word
    samples: Array  # (B,) int32: which of the request's n samples
    positions: Array  # (B,) int32: position of the token being drawn
    processed: Array  # (B,) int32: 1 to report logprobs of the distribution it is drawn from


class Sampled(NamedTuple):
    """What a step tells the host."""

    tokens: Array  # (B,) int32
    logprobs: Array | None  # (B,) float32, of the sampled token
    top_ids: Array | None  # (B, n) int32, likeliest first
    top_logprobs: Array | None  # (B, n) float32; processed: -inf for what cannot be drawn


def sample(
    logits: Array, raw: Array, rows: SamplingRows, spec: SamplerSpec, axis: str | None = None
) -> Sampled:
    """Draws one token per row.

    Args:
      logits: (B, V) float32, after bias, masks and penalties; -inf cannot be drawn.
      raw: (B, V) float32, the model's own; only read for raw logprobs.
      rows: the options.
      spec: which features are on.
      axis: the mesh axis that V is split over, if any.
    """
    if axis is None and triton_call.available():
        return _sample_by_kernel(logits, raw, rows, spec)
    return sample_reference(logits, raw, rows, spec, axis)


def sample_reference(
    logits: Array, raw: Array, rows: SamplingRows, spec: SamplerSpec, axis: str | None = None
) -> Sampled:
    """What ``sample`` does, in plain XLA."""
    tokens = vocab.argmax(logits, axis)
    drawn_from = logits
    if spec.random or spec.filtered:
        greedy, filters = _kinds(rows)
        drawn_from = scaled = logits / _divisor(rows)[:, None]
        if spec.random:
            plain = ~greedy & ~filters
            drawn = tokens
            if spec.filtered:  # a spec may have both for a batch that needs one: see planner.py
                drawn = lax.cond(plain.any(), lambda: _draw(scaled, rows, axis), lambda: drawn)
            else:
                drawn = _draw(scaled, rows, axis)
            tokens = jnp.where(plain, drawn, tokens)
        if spec.filtered:
            filtered, kept = _draw_filtered(scaled, rows, filters, spec.processed, axis)
            tokens = jnp.where(filters, filtered, tokens)
            if kept is not None:
                drawn_from = jnp.where(filters[:, None], kept, scaled)
    if spec.logprobs is None:
        return Sampled(tokens, None, None, None)
    if spec.processed:
        raw = jnp.where(rows.processed[:, None] > 0, drawn_from, raw)
    return Sampled(tokens, *token_logprobs(raw, tokens, spec.logprobs, axis))


def _sample_by_kernel(logits: Array, raw: Array, rows: SamplingRows, spec: SamplerSpec) -> Sampled:
    """What ``sample`` does, by Triton kernels; only alternatives are found by XLA's ``top_k``."""
    from jllm.kernels import sampling

    drawn = sampling.draw(
        logits,
        raw,
        kernel_options(rows),
        random=spec.random,
        filtered=spec.filtered,
        logprobs=spec.logprobs is not None,
        processed=spec.processed,
        boundary=BOUNDARY,
    )
    if spec.logprobs is None or spec.logprobs == 0:
        empty = None if spec.logprobs is None else jnp.zeros((len(logits), 0))
        ids = None if empty is None else empty.astype(jnp.int32)
        return Sampled(drawn.tokens, drawn.logprobs, ids, empty)
    if spec.processed:
        scaled = logits / _divisor(rows)[:, None]
        if drawn.cut is not None and drawn.last is not None:
            cut, ids = drawn.cut[:, None], jnp.arange(logits.shape[-1])
            kept = (scaled > cut) | ((scaled == cut) & (ids <= drawn.last[:, None]))
            scaled = jnp.where(kept, scaled, -jnp.inf)
        raw = jnp.where(rows.processed[:, None] > 0, scaled, raw)
    return Sampled(drawn.tokens, *token_logprobs(raw, drawn.tokens, spec.logprobs))


def kernel_options(rows: SamplingRows) -> Options:
    """The options as ``kernels.sampling.draw`` takes them."""
    from jllm.kernels import sampling

    greedy, filters = _kinds(rows)
    drawn_as = jnp.where(filters, sampling.FILTERED, sampling.PLAIN)
    return sampling.Options(
        kind=jnp.where(greedy, sampling.GREEDY, drawn_as).astype(jnp.int32),
        divisor=_divisor(rows),
        top_k=rows.top_k,
        top_p=rows.top_p,
        log_min_p=jnp.log(rows.min_p),
        seeds=rows.seeds,
        samples=rows.samples,
        positions=rows.positions,
        processed=rows.processed,
    )


def _kinds(rows: SamplingRows) -> tuple[Array, Array]:
    """Which rows (B,) are greedy, and which of the others draw through a filter."""
    greedy = rows.temperature < GREEDY_TEMPERATURE
    return greedy, ~greedy & ((rows.top_k > 0) | (rows.top_p < 1) | (rows.min_p > 0))


def _divisor(rows: SamplingRows) -> Array:
    """What logits are divided by (B,): the temperature, but for greedy rows."""
    return jnp.where(rows.temperature < GREEDY_TEMPERATURE, 1.0, rows.temperature)


def _draw(scaled: Array, rows: SamplingRows, axis: str | None) -> Array:
    width = scaled.shape[-1]
    first = vocab.first_id(width, axis)
    noise = gumbel_rows(rows.seeds, rows.samples, rows.positions, width, first)
    return vocab.argmax(scaled + noise, axis)


def _draw_filtered(
    scaled: Array, rows: SamplingRows, filters: Array, return_kept: bool, axis: str | None
) -> tuple[Array, Array | None]:
    """Tokens (B,), and the logits (B, V) with -inf for every token that was filtered out; both
    are meant only for the rows (B,) that have ``filters``."""
    vocab_size = vocab.num_ids(scaled.shape[-1], axis)
    total = vocab.logsumexp(scaled, axis)

    def draw(count: int) -> tuple[Array, Array, Array | None]:
        # Likeliest first, lowest id first among equals. Without the barrier XLA merges the slices
        # below into the sort behind top_k and sorts the whole vocabulary: 45 ms instead of 2.
        values, ids = lax.optimization_barrier(vocab.top_k(scaled, count, axis))
        keep, complete = keep_mask(values, total, rows)
        noise = gumbel(rows.seeds, rows.samples, rows.positions, ids)
        best = jnp.argmax(jnp.where(keep, values + noise, -jnp.inf), axis=-1)
        tokens = jnp.take_along_axis(ids, best[:, None], axis=-1)[:, 0]
        kept = None
        if return_kept:
            row = jnp.arange(len(ids))[:, None]
            kept = jnp.full_like(scaled, -jnp.inf)
            column = vocab.columns(ids, scaled.shape[-1], axis)
            kept = kept.at[row, column].set(jnp.where(keep, values, -jnp.inf), mode="drop")
        return tokens, complete, kept

    if vocab_size <= CANDIDATES:
        tokens, _, kept = draw(vocab_size)
        return tokens, kept
    tokens, complete, kept = draw(CANDIDATES)
    exact: tuple[Array, Array | None] = lax.cond(
        (complete | ~filters).all(), lambda: (tokens, kept), lambda: draw(vocab_size)[::2]
    )
    return exact


def keep_mask(values: Array, total: Array, rows: SamplingRows) -> tuple[Array, Array]:
    """Which candidates survive min-p, top-k and top-p.

    Args:
      values: (B, C) tempered logits of the C likeliest tokens, descending.
      total: (B,) their logsumexp over the whole vocabulary.
      rows: the options.

    Returns:
      (B, C) bool, a prefix of ones in every row, at least one long; and (B,) bool, whether that
      is the answer for the whole vocabulary. If not, more candidates are needed.
    """
    count = values.shape[-1]
    rank = jnp.arange(count)
    # min-p 0 gives log 0 = -inf: everything passes that can be drawn at all.
    keep = values >= values[:, :1] + jnp.log(rows.min_p)[:, None] - BOUNDARY
    keep &= values > -jnp.inf
    keep &= (rank < rows.top_k[:, None]) | (rows.top_k == 0)[:, None]
    # Top-p is of the mass that min-p and top-k leave. If they are off, that is all of it; if they
    # cut here, it is the candidates'; if they may keep tokens that are no candidates, not known.
    cut = (rows.top_k > 0) | (rows.min_p > 0)
    goes_on = keep[:, -1] & (rows.top_k != count)
    weight = jnp.where(keep, jnp.exp(values - total[:, None]), 0.0)
    mass = jnp.where(cut, weight.sum(-1), 1.0)
    before = jnp.cumsum(weight, axis=-1) - weight  # mass of the likelier tokens
    enough = rows.top_p * mass * (1 - BOUNDARY)
    keep &= (before < enough[:, None]) | (rows.top_p >= 1)[:, None]
    complete = jnp.where(cut, ~goes_on, ~keep[:, -1])
    return keep | (rank == 0), complete


def token_logprobs(
    logits: Array, tokens: Array, count: int, axis: str | None = None
) -> tuple[Array, Array, Array]:
    """Log-probability of each row's token, and of the likeliest ones.

    Args:
      logits: (B, V) float32.
      tokens: (B,) int32.
      count: how many of the likeliest; -1 for all.
      axis: the mesh axis that V is split over, if any.

    Returns:
      (B,) float32; ids (B, n) int32, likeliest first; their log-probabilities (B, n) float32.
    """
    vocab_size = vocab.num_ids(logits.shape[-1], axis)
    total = vocab.logsumexp(logits, axis)
    chosen = vocab.take(logits, tokens, axis) - total
    if count == 0:
        empty = jnp.zeros((len(tokens), 0))
        return chosen, empty.astype(jnp.int32), empty
    count = vocab_size if count == -1 else min(count, vocab_size)
    values, ids = vocab.top_k(logits, count, axis)
    return chosen, ids, values - total[:, None]
