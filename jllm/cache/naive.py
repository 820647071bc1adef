"""No sharing: every request has its own blocks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import numpy as np

from jllm.cache.block_pool import BlockPool, Blocks
from jllm.cache.prefix_cache import Tokens


class NaiveCache:
    """The PrefixCache that never matches."""

    shares = False

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool

    def match(self, tokens: Tokens, salt: str | None) -> Blocks:
        return np.empty(0, np.int32)

    def acquire(self, cached: Blocks, count: int) -> Blocks | None:
        return self._pool.allocate(count)

    def publish(self, tokens: Tokens, blocks: Blocks, salt: str | None) -> None:
        pass

    def release(self, blocks: Blocks, tokens: Tokens, salt: str | None) -> None:
        self._pool.release(blocks)

    def reset(self) -> None:
        pass

    @property
    def num_available(self) -> int:
        return self._pool.num_free

    def check_integrity(self, held: Iterable[Blocks]) -> None:
        self._pool.check_integrity(Counter(int(block) for blocks in held for block in blocks))
