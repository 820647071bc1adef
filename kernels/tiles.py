"""How attention's queries are cut into tiles, and the contexts of tiles into parts.

Plain XLA on a few numbers per row, computed once per step however many layers use it.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

Array = jax.Array


class Tiles(NamedTuple):
    """Queries cut into tiles: up to Q consecutive tokens of one row. All (M,) int32."""

    row: Array
    token: Array  # the first one's place among the queries
    position: Array  # the first one's position in its row
    length: Array  # tokens; 0 for a tile of padding


class Parts(NamedTuple):
    """Contexts of tiles cut into parts. (X,) int32 each, and then (M,)."""

    tile: Array  # -1 for none
    begin: Array  # the part's tokens of the context
    end: Array
    first: Array  # (M,) first part of a tile
    number: Array  # (M,) how many


class Merge(NamedTuple):
    """Where each of the T queries finds its parts. All (T,) int32."""

    first: Array  # the first part of its tile
    number: Array  # how many those are
    query: Array  # its place in the tile


class SharedTiles(NamedTuple):
    """Decode rows that share the start of their contexts, in tiles of neighbours. int32.

    Attributes:
      row: (M,) the first row of each tile.
      length: (M,) its rows; 0 for a tile of padding.
      context: (M,) tokens that all of them share.
      tile: (B,) the tile of each row; -1 for none.
    """

    row: Array
    length: Array
    context: Array
    tile: Array


def decode_tiles(context_lens: Array) -> Tiles:
    """A tile for each decode row."""
    index = _numbers(len(context_lens))
    return Tiles(index, index, context_lens - 1, (context_lens > 0).astype(jnp.int32))


def prefill_tiles(query_start: Array, context_lens: Array, num_tokens: int, size: int) -> Tiles:
    """Cuts each row's queries into tiles of ``size``: at most T // Q + B of them.

    query_start [0, 4, 6] with size 3 gives tiles of tokens [0 1 2] [3] [4 5] and padding.
    """
    starts, ends = query_start[:-1], query_start[1:]
    num_rows = len(starts)
    tile_ends = _running_sum((ends - starts + size - 1) // size)
    tile_starts = jnp.concatenate([jnp.zeros(1, tile_ends.dtype), tile_ends[:-1]])
    tile = jnp.arange(num_tokens // size + num_rows)
    row = jnp.minimum(owner(tile_ends, tile), num_rows - 1)
    token = starts[row] + (tile - tile_starts[row]) * size
    length = jnp.clip(ends[row] - token, 0, size)  # 0 past the last row's end
    # A tile of padding starts at 0 too: past its row it would look for blocks outside the table.
    position = jnp.where(length > 0, context_lens[row] - ends[row] + token, 0)
    return Tiles(*(x.astype(jnp.int32) for x in (row, token, position, length)))


def whole(begins: Array, ends: Array) -> Parts:
    """One part per tile."""
    index = _numbers(len(begins))
    return Parts(jnp.where(ends > begins, index, -1), begins, ends, index, jnp.ones_like(index))


def cut(begins: Array, ends: Array, *, step: int, programs: int, least: int) -> Parts:
    """Cuts contexts [begins, ends) (M,) into M + ``programs`` parts or fewer, as even as can be.

    Args:
      begins, ends: (M,) int32; empty for a tile of padding.
      step: context tokens per iteration; a part is a whole number of them, but for a tile's last.
      programs: parts beyond one for each tile.
      least: steps of a part, unless the tile has fewer.
    """
    steps = (ends - begins + step - 1) // step
    # With parts of this many steps there are at most sum(steps) / size + M of them.
    size = jnp.maximum((steps.sum() + programs - 1) // programs, least)
    count = (steps + size - 1) // size
    even = (steps + count - 1) // jnp.maximum(count, 1)  # steps per part of each tile
    last = _running_sum(count)
    part = jnp.arange(len(begins) + programs)
    tile = jnp.minimum(owner(last, part), len(begins) - 1)
    begin = begins[tile] + (part - (last - count)[tile]) * even[tile] * step
    end = jnp.minimum(begin + even[tile] * step, ends[tile])
    tile = jnp.where(part < last[-1], tile, -1)
    return Parts(*(x.astype(jnp.int32) for x in (tile, begin, end, last - count, count)))


def first_seen(position: Array, window: int | None, step: int) -> Array:
    """The first context token (M,) that queries from ``position`` (M,) on see, down to a whole
    iteration of ``step`` tokens."""
    if window is None:
        return jnp.zeros_like(position)
    return jnp.maximum(position - window + 1, 0) // step * step


def owner(ends: Array, index: Array) -> Array:
    """Which of the ranges that end at ``ends`` (n,), ascending, holds each index (m,); n for none.

    By comparing all with all: a binary search is a loop, which a CUDA graph does not capture.
    """
    return (ends[None, :] <= index[:, None]).sum(axis=1, dtype=jnp.int32)


def _numbers(count: int) -> Array:
    """0, 1, ... as a constant: an iota XLA makes anew, by a kernel, for every layer's reader."""
    return jnp.asarray(np.arange(count, dtype=np.int32))


def _running_sum(x: Array) -> Array:
    """cumsum, in one kernel."""
    index = jnp.arange(len(x))
    return jnp.where(index[None, :] <= index[:, None], x[None, :], 0).sum(axis=1, dtype=x.dtype)
