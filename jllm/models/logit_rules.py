"""Rules that change logits before a token is drawn: bias, masks and penalties.

All of it is computed on the device from two tables, so a step never waits for the host:

- the token table ``tokens (R + 1, L)`` of step.py, from which a row's history is read: row b has
  drawn nothing yet at ``positions[b]``, its prompt is ``tokens[slots[b], :num_prompt[b]]`` and its
  output goes from there to ``positions[b]``;
- the ``Rules`` table, one entry per request slot, written when a request that needs one is
  admitted and meaningless for other slots: ``RuleRows.ruled`` says which rows use theirs.

The order is that of sampler.py: ``logit_bias`` is added; forbidden tokens become -inf; penalties
change what is left. Nothing later makes -inf finite, so a forbidden token is never drawn.

Both tables are whole on every device of a mesh, and each applies them to the logits it holds.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jllm.models import vocab

Array = jax.Array

BIAS_IDS = 1024
# A word of several tokens, as it is and with a space before it: two sequences for each of 1024.
BAD_SEQUENCES = 2048
BAD_SEQUENCE_TOKENS = 16
HISTORY_CHUNK = 256
NO_TOKEN = -1


class Rules(NamedTuple):
    """Per request: what is biased and what is forbidden. V32 is V / 32 rounded up; bit v % 32 of
    word v // 32 stands for token v. On the device every field has a leading axis of slots."""

    allowed: Array  # (V32,) uint32: tokens that may be drawn at all
    stops: Array  # (V32,) uint32: tokens that may not be drawn before min_tokens
    bias_ids: Array  # (BIAS_IDS,) int32; V where unused
    bias: Array  # (BIAS_IDS,) float32
    # (BAD_SEQUENCES, BAD_SEQUENCE_TOKENS) int32, each sequence at the right, NO_TOKEN before it:
    # [[-1, -1, 5, 9], [-1, -1, -1, -1]] forbids 9 after 5 and nothing else.
    bad_words: Array


class RuleRows(NamedTuple):
    """The options of each of the B rows."""

    positions: Array  # (B,) int32: position of the token being drawn
    num_prompt: Array  # (B,) int32
    ruled: Array  # (B,) int32: 1 where the Rules of the row's slot apply
    min_tokens: Array  # (B,) int32
    presence_penalty: Array  # (B,) float32; 0 is off
    frequency_penalty: Array  # (B,) float32; 0 is off
    repetition_penalty: Array  # (B,) float32; 1 is off


def empty_rules(num_slots: int, vocab_size: int) -> Rules:
    """A table for so many slots."""
    words = (num_slots, -(-vocab_size // 32))
    return Rules(
        jnp.zeros(words, jnp.uint32),
        jnp.zeros(words, jnp.uint32),
        jnp.zeros((num_slots, BIAS_IDS), jnp.int32),
        jnp.zeros((num_slots, BIAS_IDS), jnp.float32),
        jnp.zeros((num_slots, BAD_SEQUENCES, BAD_SEQUENCE_TOKENS), jnp.int32),
    )


def bytes_per_slot(vocab_size: int) -> int:
    """Bytes that a slot of the table takes."""
    slot = jax.eval_shape(lambda: empty_rules(1, vocab_size))
    return sum(array.size * array.dtype.itemsize for array in slot)


def apply_rules(
    logits: Array,
    tokens: Array,
    slots: Array,
    rules: Rules,
    rows: RuleRows,
    axis: str | None = None,
) -> Array:
    """Logits (B, V) after bias, masks and penalties.

    Args:
      logits: (B, V) float32, finite, but for padding and for what a grammar forbids.
      tokens: (R + 1, L) int32, the token table.
      slots: (B,) int32, rows of both tables.
      rules: one entry per slot.
      rows: the options of each row.
      axis: the mesh axis that V is split over, if any.
    """
    # A condition each: where no row of the batch has rules, their tables are not even read.
    logits = lax.cond(
        (rows.ruled > 0).any(),
        lambda: _bias_and_mask(logits, tokens, slots, rules, rows, axis),
        lambda: logits,
    )
    penalised: Array = lax.cond(
        _penalised(rows).any(), lambda: _penalise(logits, tokens, slots, rows, axis), lambda: logits
    )
    return penalised


def _bias_and_mask(
    logits: Array, tokens: Array, slots: Array, rules: Rules, rows: RuleRows, axis: str | None
) -> Array:
    width = logits.shape[-1]
    first = vocab.first_id(width, axis)
    mine = Rules(*(table[slots] for table in rules))
    ruled = rows.ruled[:, None] > 0
    row = jnp.arange(len(logits))[:, None]
    bias_ids = jnp.where(ruled, vocab.columns(mine.bias_ids, width, axis), width)
    logits = logits.at[row, bias_ids].add(mine.bias, mode="drop")

    early = (rows.positions - rows.num_prompt < rows.min_tokens)[:, None]
    allowed = unpack_bits(mine.allowed, width, first) & ~(
        early & unpack_bits(mine.stops, width, first)
    )
    bad = next_of_bad_words(mine.bad_words, tokens, slots, rows)
    bad = jnp.where(ruled, vocab.columns(bad, width, axis), width)
    without_bad = allowed.at[row, bad].set(False, mode="drop")
    # Where masks together leave nothing, words of several tokens give way, then all of these masks
    # to a grammar's.
    possible = logits > -jnp.inf
    some = vocab.any_of(possible & allowed, axis)
    some_without_bad = vocab.any_of(possible & without_bad, axis)
    allowed = jnp.where(some_without_bad, without_bad, allowed | ~some)
    return jnp.where(ruled & ~allowed, -jnp.inf, logits)


def next_of_bad_words(words: Array, tokens: Array, slots: Array, rows: RuleRows) -> Array:
    """The tokens that would complete a bad word now.

    Args:
      words: (B, W, K) int32, see ``Rules.bad_words``.
      tokens, slots, rows: see ``apply_rules``.

    Returns:
      (B, W) int32: the last token of each word whose others end the row's history, and V or
      more for each other word.
    """
    back = words.shape[-1] - 1
    where = rows.positions[:, None] + jnp.arange(-back, 0)  # (B, K - 1)
    history = jnp.where(where >= 0, tokens[slots[:, None], jnp.maximum(where, 0)], NO_TOKEN - 1)
    before, last = words[..., :-1], words[..., -1]
    match = ((before == NO_TOKEN) | (before == history[:, None, :])).all(axis=-1)
    return jnp.where(match & (last != NO_TOKEN), last, jnp.iinfo(jnp.int32).max)


def _penalised(rows: RuleRows) -> Array:
    """(B,) bool: which rows have a penalty."""
    additive = (rows.presence_penalty != 0) | (rows.frequency_penalty != 0)
    return additive | (rows.repetition_penalty != 1)


def _penalise(
    logits: Array, tokens: Array, slots: Array, rows: RuleRows, axis: str | None
) -> Array:
    generated, seen = _count(tokens, slots, rows, logits.shape[-1], axis)
    repetition = rows.repetition_penalty[:, None]
    scaled = jnp.where(logits > 0, logits / repetition, logits * repetition)
    logits = jnp.where(seen, scaled, logits)
    logits = logits - rows.frequency_penalty[:, None] * generated
    return logits - rows.presence_penalty[:, None] * (generated > 0)


def _count(
    tokens: Array, slots: Array, rows: RuleRows, width: int, axis: str | None
) -> tuple[Array, Array]:
    """How often each token was generated (B, W) int32, and whether it was seen at all, prompt
    included (B, W) bool, for the W tokens of this device. Chunk by chunk: the cost follows
    the longest history in the batch, not the length of the table."""
    batch, chunk = len(slots), min(HISTORY_CHUNK, tokens.shape[-1])
    row = jnp.arange(batch)[:, None]
    length = jnp.where(_penalised(rows), rows.positions, 0)

    def add(index: Array, counts: tuple[Array, Array]) -> tuple[Array, Array]:
        generated, seen = counts
        where = (index * chunk + jnp.arange(chunk))[None, :]
        ids = tokens.at[slots[:, None], where].get(mode="fill", fill_value=width)
        ids = vocab.columns(ids, width, axis)
        ids = jnp.where(where < length[:, None], ids, width)  # W: past the end, dropped
        seen = seen.at[row, ids].set(True, mode="drop")
        ids = jnp.where(where >= rows.num_prompt[:, None], ids, width)
        return generated.at[row, ids].add(1, mode="drop"), seen

    nothing = jnp.zeros((batch, width), jnp.int32), jnp.zeros((batch, width), bool)
    counts: tuple[Array, Array] = lax.fori_loop(0, -(-length.max() // chunk), add, nothing)
    return counts


def unpack_bits(words: Array, width: int, first: Array | int) -> Array:
    """(B, V32) uint32 -> (B, W) bool, those of the tokens from ``first`` on: a multiple of 32
    where it is not 0. Padding has no bits, so it is forbidden."""
    if not isinstance(first, int):
        mine = first // 32 + jnp.arange(-(-width // 32))
        words = words.at[:, mine].get(mode="fill", fill_value=0)
    bits = words[:, :, None] >> jnp.arange(32, dtype=jnp.uint32) & 1
    return bits.reshape(len(words), -1)[:, :width].astype(bool)
