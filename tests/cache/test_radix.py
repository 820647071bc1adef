"""The radix cache alone: what is found, what is shared, what is evicted first."""

from __future__ import annotations

import numpy as np
import pytest

from jllm.cache.block_pool import BlockPool, Blocks
from jllm.cache.radix import RadixCache

SIZE = 4


def ids(*tokens: int) -> np.ndarray:
    return np.array(tokens, np.int32)


def prompt(*blocks: int, extra: int = 1) -> np.ndarray:
    """A prompt of whole blocks, each of one repeated token, and ``extra`` tokens more."""
    return ids(*(token for block in blocks for token in [block] * SIZE), *[99] * extra)


class Cache(RadixCache):
    """With shorthands; ``held`` is what requests hold."""

    def __init__(self, num_blocks: int = 20) -> None:
        super().__init__(BlockPool(num_blocks), SIZE)
        self.held: list[Blocks] = []

    def run(self, tokens: np.ndarray, salt: str | None = None) -> Blocks:
        """Admits and computes a request."""
        cached = self.match(tokens, salt)
        blocks = self.acquire(cached, -(-len(tokens) // SIZE) - len(cached))
        assert blocks is not None
        self.held.append(blocks)
        self.publish(tokens, blocks, salt)
        self.check_integrity(self.held)
        return blocks

    def finish(self, blocks: Blocks, tokens: np.ndarray, salt: str | None = None) -> None:
        self.held = [held for held in self.held if held is not blocks]
        self.release(blocks, tokens, salt)
        self.check_integrity(self.held)

    def pass_through(self, tokens: np.ndarray) -> None:
        self.finish(self.run(tokens), tokens)

    def found(self, tokens: np.ndarray, salt: str | None = None) -> int:
        return len(self.match(tokens, salt))


@pytest.mark.parametrize(
    ("tokens", "found"),
    [
        pytest.param(prompt(1, 2, 3), 3, id="the same"),
        pytest.param(prompt(1, 2, 3, 4), 3, id="longer"),
        pytest.param(prompt(1, 2, 4), 2, id="another third block"),
        pytest.param(prompt(2, 2, 3), 0, id="another first block"),
        pytest.param(prompt(1, 2, 3, extra=0), 2, id="only whole blocks: the last is run again"),
        pytest.param(ids(1, 1, 1, 1, 2, 2), 1, id="half a block"),
        pytest.param(ids(1, 1), 0, id="less than a block"),
    ],
)
def test_the_longest_cached_prefix_is_found(tokens: np.ndarray, found: int) -> None:
    cache = Cache()
    cache.pass_through(prompt(1, 2, 3))
    assert cache.found(tokens) == found


def test_requests_share_the_very_blocks() -> None:
    cache = Cache()
    first = cache.run(prompt(1, 2))
    second = cache.run(prompt(1, 2, 3))
    assert second[:2].tolist() == first[:2].tolist()
    assert len(set(second.tolist()) - set(first.tolist())) == 2


def test_blocks_in_use_are_not_evicted_and_count_as_taken() -> None:
    cache = Cache(6)
    cache.run(prompt(1, 2))
    assert cache.num_available == 3
    assert cache.acquire(ids(), 4) is None
    assert cache.found(prompt(1, 2)) == 2
    cache.check_integrity(cache.held)


def test_a_failed_acquire_changes_nothing() -> None:
    cache = Cache(4)
    cache.pass_through(prompt(1, 2))
    cached = cache.match(prompt(1, 2), None)
    assert cache.acquire(cached, 3) is None
    assert cache.num_available == 4
    cache.check_integrity([])
    blocks = cache.acquire(ids(), 4)  # everything can still be evicted
    assert blocks is not None


def test_the_least_recently_used_leaf_goes_first() -> None:
    cache = Cache(7)
    for tokens in (prompt(1, 2, extra=0), prompt(1, 3, extra=0), prompt(4, 5, extra=0)):
        cache.pass_through(tokens)
    cache.pass_through(prompt(1, 2))  # used again: [1 3] is the oldest leaf now
    fresh = cache.acquire(ids(), 3)
    assert fresh is not None
    assert cache.found(prompt(1, 3)) == 1
    assert cache.found(prompt(1, 2)) == 2
    assert cache.found(prompt(4, 5)) == 2


def test_a_parent_outlives_its_children() -> None:
    cache = Cache(4)
    cache.pass_through(prompt(1, 2, 3, extra=0))
    for left in (2, 1, 0):
        blocks = cache.acquire(ids(), cache._pool.num_free + 1)
        assert blocks is not None
        assert cache.found(prompt(1, 2, 3)) == left
        cache.finish(blocks, ids())


def test_a_running_request_does_not_publish_below_another_ones_block() -> None:
    """Two requests computed [1] side by side; the second's [2] must not hang below the first's
    block, which nobody may hold soon."""
    cache = Cache()
    blocks = [cache.acquire(ids(), 3), cache.acquire(ids(), 3)]
    first, second = (b for b in blocks if b is not None)
    cache.held = [first, second]
    cache.publish(prompt(1, extra=0), first, None)
    cache.publish(prompt(1, 2), second, None)
    assert cache.found(prompt(1, 2)) == 1
    cache.finish(first, prompt(1, extra=0))
    cache.finish(second, prompt(1, 2))  # giving its blocks back, it may
    assert cache.found(prompt(1, 2)) == 2
    assert cache.num_available == 20


def test_salts_have_trees_of_their_own_that_vanish_when_empty() -> None:
    cache = Cache(3)
    cache.finish(cache.run(prompt(1), "a"), prompt(1), "a")
    assert cache.found(prompt(1), "a") == 1
    assert cache.found(prompt(1), "b") == cache.found(prompt(1)) == 0
    cache.acquire(ids(), 3)
    assert not cache._roots


def test_the_heap_of_leaves_does_not_grow_with_every_request() -> None:
    cache = Cache()
    for _ in range(500):
        cache.pass_through(prompt(1, 2))
    assert len(cache._leaves) < 100
    assert cache.acquire(ids(), 20) is not None


def test_reset_forgets_everything_and_keeps_what_is_held() -> None:
    cache = Cache()
    cache.pass_through(prompt(1, 2))
    running = cache.run(prompt(1, 3))
    cache.reset()
    cache.check_integrity(cache.held)
    assert cache.found(prompt(1, 2)) == 0
    cache.finish(running, ids())
    assert cache.num_available == 20


@pytest.mark.parametrize("damage", ["lose a node", "miscount", "drop a leaf", "swap a block"])
def test_the_integrity_check_sees_damage(damage: str) -> None:
    cache = Cache()
    cache.pass_through(prompt(1, 2))
    root = cache._roots[None]
    if damage == "lose a node":
        root.children.clear()
    elif damage == "miscount":
        cache._num_evictable -= 1
    elif damage == "drop a leaf":
        cache._leaves.clear()
    else:
        next(iter(root.children.values())).block = 17
    with pytest.raises(AssertionError):
        cache.check_integrity([])
