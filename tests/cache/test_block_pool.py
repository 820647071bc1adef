"""The pool against a plain dict of counts."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jllm.cache.block_pool import BlockPool


def test_blocks_are_distinct_and_never_the_scratch_block() -> None:
    pool = BlockPool(10)
    parts = [pool.allocate(3), pool.allocate(7)]
    assert pool.allocate(1) is None
    blocks = np.concatenate([part for part in parts if part is not None])
    assert sorted(blocks.tolist()) == list(range(1, 11))


@given(st.lists(st.tuples(st.sampled_from(["allocate", "retain", "release"]), st.integers(0, 5))))
def test_a_block_is_free_once_its_last_reference_is_dropped(ops: list[tuple[str, int]]) -> None:
    pool, counts = BlockPool(8), dict[int, int]()
    for op, n in ops:
        held = sorted(counts)
        if op == "allocate":
            blocks = pool.allocate(n)
            assert (blocks is None) == (n > 8 - len(counts))
            counts |= {} if blocks is None else dict.fromkeys(blocks.tolist(), 1)
        elif held:
            some = held[: n % len(held) + 1]
            getattr(pool, op)(np.array(some, np.int32))
            for block in some:
                counts[block] += 1 if op == "retain" else -1
                if counts[block] == 0:
                    del counts[block]
        assert pool.num_free == 8 - len(counts)
        pool.check_integrity(counts)


@pytest.mark.parametrize("holders", [{}, {1: 2}, {1: 1, 2: 1}], ids=["lost", "counted", "stolen"])
def test_the_integrity_check_sees_a_wrong_count(holders: dict[int, int]) -> None:
    pool = BlockPool(4)
    pool.allocate(1)
    with pytest.raises(AssertionError, match=r"references .* but holders"):
        pool.check_integrity(holders)


def test_the_integrity_check_sees_a_block_that_is_free_and_held() -> None:
    pool = BlockPool(4)
    blocks = pool.allocate(1)
    assert blocks is not None
    pool._free[pool.num_free] = blocks[0]
    pool.num_free += 1
    with pytest.raises(AssertionError, match="both free and held"):
        pool.check_integrity({int(blocks[0]): 1})
