"""The axis of the vocabulary, which may be split over devices.

Over a mesh axis ``axis`` of tp devices, device i holds columns i * W to (i + 1) * W - 1 of every
row of logits (B, V'), W = V' / tp, padding at the end included; ``axis=None`` is one device that
holds them all. Token ids are always those of the whole vocabulary. What crosses between devices
is a few numbers per row: never a row of logits, but for ``gather``.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from jllm.models.layers import all_sum

Array = jax.Array


def num_ids(width: int, axis: str | None) -> int:
    """V', of W columns here."""
    return width if axis is None else width * lax.axis_size(axis)


def first_id(width: int, axis: str | None) -> Array | int:
    """The id of the first of W columns here."""
    return 0 if axis is None else lax.axis_index(axis) * width


def columns(ids: Array, width: int, axis: str | None) -> Array:
    """Where ids are among the W columns here; W, one past the end, for those that are not."""
    if axis is None:
        return ids
    column = ids - first_id(width, axis)
    return jnp.where((column >= 0) & (column < width), column, width)


def embed(table: Array, ids: Array, axis: str | None) -> Array:
    """Rows (T, E) of a table (W, E) split by vocabulary, exactly: all others add zero."""
    if axis is None:
        return table[ids]
    rows = table.at[columns(ids, len(table), axis)].get(mode="fill", fill_value=0)
    return all_sum(rows, axis)


def hide_padding(logits: Array, vocab_size: int, axis: str | None) -> Array:
    """Logits (..., W) with -inf for ids from ``vocab_size`` on, so that none is ever drawn; on one
    device (..., vocab_size)."""
    width = logits.shape[-1]
    if axis is None:
        return logits[..., :vocab_size] if width > vocab_size else logits
    if num_ids(width, axis) == vocab_size:
        return logits
    ids = first_id(width, axis) + jnp.arange(width)
    return jnp.where(ids < vocab_size, logits, -jnp.inf)


def argmax(values: Array, axis: str | None) -> Array:
    """The id (B,) int32 of the largest of values (B, W); the lowest among equals."""
    best = jnp.argmax(values, axis=-1).astype(jnp.int32)
    if axis is None:
        return best
    largest = jnp.take_along_axis(values, best[:, None], axis=-1)[:, 0]
    largest, ids = _exchange(largest, best + first_id(values.shape[-1], axis), axis)
    winner = jnp.argmax(largest, axis=0)  # the first among equals, whose ids are lowest
    return jnp.take_along_axis(ids, winner[None], axis=0)[0]


def top_k(values: Array, count: int, axis: str | None) -> tuple[Array, Array]:
    """The ``count`` largest of values (B, W) and their ids (B, count) int32: largest first, lowest
    id first among equals."""
    if axis is None:
        best, ids = lax.top_k(values, count)
        return best, ids.astype(jnp.int32)
    width = values.shape[-1]
    best, ids = lax.top_k(values, min(count, width))
    best, ids = _exchange(best, ids + first_id(width, axis), axis)
    # In order of devices, (B, tp * k), so that places order equals as ids do.
    best, ids = (x.swapaxes(0, 1).reshape(len(values), -1) for x in (best, ids))
    best, place = lax.top_k(best, count)
    return best, jnp.take_along_axis(ids, place, axis=-1)


def logsumexp(values: Array, axis: str | None) -> Array:
    """(B,) of values (B, W)."""
    total = jax.nn.logsumexp(values, axis=-1)
    return total if axis is None else jax.nn.logsumexp(lax.all_gather(total, axis), axis=0)


def take(values: Array, ids: Array, axis: str | None) -> Array:
    """The values (B,) at one id each (B,), of values (B, W)."""
    if axis is None:
        return jnp.take_along_axis(values, ids[:, None], axis=-1)[:, 0]
    column = columns(ids, values.shape[-1], axis)
    mine = values.at[jnp.arange(len(ids)), column].get(mode="fill", fill_value=0)
    return all_sum(mine, axis)


def any_of(mask: Array, axis: str | None) -> Array:
    """Whether any of mask (B, W) holds, (B, 1) bool."""
    found = mask.any(axis=-1, keepdims=True)
    if axis is None:
        return found
    return all_sum(found.astype(jnp.int32), axis).astype(bool)


def gather(values: Array, vocab_size: int, axis: str | None) -> Array:
    """All the values (B, V) of (B, W), on every device: the one expensive thing here."""
    if axis is None:
        return values
    whole: Array = lax.all_gather(values, axis, axis=1, tiled=True)
    return whole[:, :vocab_size]


def split(values: Array, width: int, axis: str | None) -> Array:
    """The values (B, W) here of all the values (B, V); -inf for padding."""
    if axis is None:
        return values
    padding = num_ids(width, axis) - values.shape[-1]
    values = jnp.pad(values, ((0, 0), (0, padding)), constant_values=-jnp.inf)
    return lax.dynamic_slice_in_dim(values, first_id(width, axis), width, axis=1)


def _exchange(values: Array, ids: Array, axis: str) -> tuple[Array, Array]:
    """Every device's values (...) float32 and ids (...) int32, each (tp, ...): in one transfer."""
    bits = lax.bitcast_convert_type(values, jnp.int32)
    both = lax.all_gather(jnp.stack([bits, ids], axis=-1), axis)
    return lax.bitcast_convert_type(both[..., 0], jnp.float32), both[..., 1]
