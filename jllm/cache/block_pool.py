"""The blocks of the KV pool: who is free, and how many hold each of the others."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Blocks = NDArray[np.int32]


class BlockPool:
    """Hands out block ids 1 to ``num_blocks``; block 0 is scratch and never handed out.

    Every block is free or referenced: a request that uses it holds one reference, and so does
    a prefix cache that keeps it. It returns to the pool when the last reference is dropped.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._references = np.zeros(num_blocks + 1, np.int32)
        # A stack: the ids at [0, num_free) are free; the block freed last is reused first, while
        # its memory is still warm.
        self._free = np.arange(num_blocks, 0, -1, dtype=np.int32)
        self.num_free = num_blocks

    def allocate(self, count: int) -> Blocks | None:
        """Takes ``count`` blocks with one reference each, or None if there are not so many."""
        if count > self.num_free:
            return None
        self.num_free -= count
        blocks = self._free[self.num_free : self.num_free + count][::-1].copy()
        self._references[blocks] = 1
        return blocks

    def retain(self, blocks: Blocks) -> None:
        """Adds a reference to each of these (distinct) blocks, all of them in use."""
        assert (self._references[blocks] > 0).all(), "a free block was retained"
        self._references[blocks] += 1

    def release(self, blocks: Blocks) -> None:
        """Drops a reference of each of these (distinct) blocks."""
        self._references[blocks] -= 1
        left = self._references[blocks]
        assert (left >= 0).all(), "a free block was released"
        freed = blocks[left == 0]
        self._free[self.num_free : self.num_free + len(freed)] = freed
        self.num_free += len(freed)

    def references(self, blocks: Blocks) -> NDArray[np.int32]:
        """How many references each block has."""
        return self._references[blocks]

    def count(self, block: int) -> int:
        """How many references one block has."""
        return int(self._references[block])

    def check_integrity(self, holders: dict[int, int]) -> None:
        """Checks the pool against a count of references per block made elsewhere.

        Raises AssertionError with the numbers: free + held == total, nothing both free and held,
        and every count right.
        """
        free = self._free[: self.num_free]
        held = np.flatnonzero(self._references)
        assert len(np.unique(free)) == len(free), "a block is free twice"
        assert not np.isin(free, held).any(), "a block is both free and held"
        assert len(free) + len(held) == self.num_blocks, (
            f"{len(free)} free + {len(held)} held != {self.num_blocks} blocks"
        )
        counted = {int(block): int(self._references[block]) for block in held}
        assert counted == {b: n for b, n in holders.items() if n}, (
            f"references {counted} but holders {holders}"
        )
