"""Finds decode rows whose contexts begin with the same blocks, so that these are read once."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from jllm.engine.batch import LEAST_SHARING, Int32s

LEAST_BLOCKS = 8  # shared by a group: with fewer, merging costs what is spared
LEAST_SPARED = 0.25  # of the step's context tokens
MOST_BLOCKS = 1024  # compared, of a table


class SharedGroup(NamedTuple):
    """Neighbouring rows whose first ``num_blocks`` blocks are the same."""

    first: int
    num_rows: int
    num_blocks: int


def neighbours(first: Int32s) -> NDArray[np.int64] | None:
    """The rows in an order that brings those together that have the same ``first`` block (B,);
    None if no two do."""
    order = np.argsort(first, kind="stable")
    found = first[order]
    return order if (found[1:] == found[:-1]).any() else None


def shared_groups(tables: Int32s, full_blocks: Int32s) -> list[SharedGroup]:
    """Groups worth reading once, if together they spare enough; else none.

    Args:
      tables: (B, P) block ids of the rows, as far as they are of interest; what lies beyond a
        row's own is of no meaning.
      full_blocks: (B,) leading blocks of each row that it reads and does not write.
    """
    width = tables.shape[1]
    if width == 0:
        return []
    same = tables[1:] == tables[:-1]
    common = np.where(same.all(axis=1), width, same.argmin(axis=1))
    common = np.minimum(common, np.minimum(full_blocks[1:], full_blocks[:-1])).tolist()
    groups, first, num_blocks = [], 0, 0
    for row, blocks in enumerate([*common, 0], 1):
        # A neighbour that shares much less would cost the others what they share.
        if row - first > 1 and blocks < max(LEAST_BLOCKS, num_blocks // 2):
            groups.append(SharedGroup(first, row - first, num_blocks))
            first = row
        elif blocks < LEAST_BLOCKS:
            first = row
        else:
            num_blocks = blocks if row - first == 1 else min(num_blocks, blocks)
    groups = [group for group in groups if group.num_rows >= LEAST_SHARING]
    spared = sum((group.num_rows - 1) * group.num_blocks for group in groups)
    return groups if spared >= LEAST_SPARED * int(full_blocks.sum()) else []


def fill_tiles(
    views: dict[str, Int32s], groups: list[SharedGroup], size: int, block_size: int
) -> None:
    """Writes groups into a plan's ``SHARED_FIELDS``, in tiles of up to ``size`` rows."""
    views["shared_tile"][:] = -1
    tile = 0
    for group in groups:
        end = group.first + group.num_rows
        for row in range(group.first, end, size):
            views["shared_row"][tile] = row
            views["shared_length"][tile] = min(size, end - row)
            views["shared_context"][tile] = group.num_blocks * block_size
            views["shared_tile"][row : min(row + size, end)] = tile
            tile += 1
