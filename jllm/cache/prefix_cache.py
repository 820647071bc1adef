"""What the scheduler asks of a cache; ``naive`` and ``radix`` answer it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from jllm.cache.block_pool import Blocks

Tokens = NDArray[np.int32]


class PrefixCache(Protocol):
    """Gives requests their KV blocks and may let them share blocks of equal prefixes."""

    def match(self, tokens: Tokens) -> Blocks:
        """Blocks that already hold the KV of leading tokens, one reference of each now the
        caller's. At most ``(len(tokens) - 1) // block_size``: one token is always left to run,
        since its logits are wanted."""

    def allocate(self, count: int) -> Blocks | None:
        """``count`` fresh blocks, or None if so many cannot be had; then nothing changes."""

    def publish(self, tokens: Tokens, blocks: Blocks) -> None:
        """Offers the blocks that ``tokens`` fill to later matches. Call it once the step that
        writes them was dispatched: the device runs steps in order, so whoever matches reads
        them after they were written."""

    def release(self, blocks: Blocks) -> None:
        """Drops one reference of each block."""

    def reset(self) -> None:
        """Forgets every prefix that nobody holds."""

    @property
    def num_available(self) -> int:
        """Blocks that ``allocate`` could hand out now."""

    def check_integrity(self, held: Iterable[Blocks]) -> None:
        """Raises AssertionError unless free + cached + ``held`` by requests is the whole pool."""
