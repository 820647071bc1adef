"""What the scheduler asks of a cache; ``naive`` and ``radix`` answer it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from jllm.cache.block_pool import Blocks

Tokens = NDArray[np.int32]


class PrefixCache(Protocol):
    """Gives requests their KV blocks and may let them share blocks of equal prefixes.

    ``salt`` separates tenants: prefixes are shared only under the same salt.
    """

    shares: bool  # whether match ever finds anything

    def match(self, tokens: Tokens, salt: str | None) -> Blocks:
        """Blocks that hold the KV of leading tokens; takes no reference. At most
        ``(len(tokens) - 1) // block_size``: one token is always left to run, since its logits
        are wanted."""

    def acquire(self, cached: Blocks, count: int) -> Blocks | None:
        """One reference of each ``cached`` block, which ``match`` just gave, and of ``count``
        fresh ones; None, with nothing changed, if there are not so many."""

    def publish(self, tokens: Tokens, blocks: Blocks, salt: str | None) -> None:
        """Offers the blocks that ``tokens`` fill to later matches. Call it once the step that
        writes them was dispatched: the device runs steps in order, so whoever matches reads
        them after they were written."""

    def release(self, blocks: Blocks, tokens: Tokens, salt: str | None) -> None:
        """Drops one reference of each block; those that ``tokens`` fill may be kept for later
        matches. Pass no tokens if the blocks' content should not be shared."""

    def reset(self) -> None:
        """Forgets every prefix; blocks that requests hold stay theirs."""

    @property
    def num_available(self) -> int:
        """Blocks that ``acquire`` could hand out now."""

    def check_integrity(self, held: Iterable[Blocks]) -> None:
        """Raises AssertionError unless free + cached + ``held`` by requests is the whole pool."""
