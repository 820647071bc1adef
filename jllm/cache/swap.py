"""KV blocks of preempted requests, kept in host memory until there is room again."""

from __future__ import annotations

from typing import Protocol

import numpy as np

from jllm.cache.block_pool import Blocks


class BlockCopier(Protocol):
    """Moves blocks between the device and the host; the device does it in order with the steps."""

    def read_blocks(self, blocks: Blocks) -> list[np.ndarray]:
        """The content of these blocks, once the steps dispatched so far have run."""

    def write_blocks(self, blocks: Blocks, content: list[np.ndarray], first: int) -> None:
        """Puts ``content``, from its block ``first`` on, into these blocks, before any step
        dispatched later."""


class SwapSpace:
    """Host memory for preempted requests' KV, up to a budget. A request is named by its arrival.

    Args:
      copier: reads and writes blocks.
      capacity: blocks that fit the budget.
    """

    def __init__(self, copier: BlockCopier, capacity: int) -> None:
        self._copier = copier
        self._capacity = capacity
        self._content: dict[int, list[np.ndarray]] = {}
        self._sizes: dict[int, int] = {}

    @property
    def num_blocks(self) -> int:
        return sum(self._sizes.values())

    def __len__(self) -> int:
        return len(self._sizes)

    def __contains__(self, request: int) -> bool:
        return request in self._sizes

    def store(self, request: int, blocks: Blocks) -> bool:
        """Copies a request's blocks here; False, with nothing copied, if they do not fit."""
        if self.num_blocks + len(blocks) > self._capacity:
            return False
        self._content[request] = self._copier.read_blocks(blocks)
        self._sizes[request] = len(blocks)
        return True

    def restore(self, request: int, blocks: Blocks, first: int) -> None:
        """Copies what was stored, from block ``first`` on, into ``blocks`` and forgets it."""
        self._copier.write_blocks(blocks, self._content.pop(request), first)
        del self._sizes[request]

    def discard(self, request: int) -> None:
        """Forgets a request that will not come back."""
        self._content.pop(request, None)
        self._sizes.pop(request, None)
