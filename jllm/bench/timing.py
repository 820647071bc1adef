"""Times one op on the device, without its launch and without the cache's help.

One program runs the op on many input sets one after the other. The sets together are larger than
the L2 cache, so every byte comes from memory, as it does in a model's step. On a GPU the time is
that of the kernels, see trace.py. Elsewhere calls of the program are queued without waiting: a
dispatch costs the host 50 us or more.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jllm.bench.trace import kernel_seconds, marker
from jllm.compilation import compiles_so_far
from jllm.kernels import triton_call
from jllm.models.layers import matmul

Op = Callable[..., Any]

BATCHES = 7  # timed batches of calls; the median counts
BATCH_S = 0.03  # seconds that a batch should take
MAX_CALLS = 64  # queued in one batch: their outputs take memory
MAX_SETS = 32  # ops in one program: it has to be compiled


class Timed(NamedTuple):
    """Seconds of one op, one value per batch, and programs compiled meanwhile."""

    seconds: list[float]
    num_compiles: int


def num_sets(bytes_of_one: float, rotate_bytes: float) -> int:
    """How many input sets exceed ``rotate_bytes`` together; at least 2."""
    return int(min(MAX_SETS, max(2, -(-rotate_bytes // max(bytes_of_one, 1)))))


def time_op(op: Op, sets: Sequence[tuple[Any, ...]]) -> Timed:
    """Times ``op(*set)``, the sets in turn.

    Each op waits for the one before through a barrier on its first argument: otherwise XLA merges
    small ops of equal shape into one kernel.
    """

    def program(sets: Sequence[tuple[Any, ...]]) -> list[Any]:
        outs: list[Any] = []
        for first, *rest in sets:
            if outs:
                first, outs[-1] = lax.optimization_barrier((first, outs[-1]))
            outs.append(op(first, *rest))
        return outs

    call = jax.jit(program)
    return _time(lambda: call(sets), len(sets))


def time_in_place(op: Op, carry: Any, sets: Sequence[tuple[Any, ...]]) -> Timed:
    """Times ``carry = op(carry, *set)`` with ``carry`` donated, as a KV cache is."""

    def program(carry: Any, sets: Sequence[tuple[Any, ...]]) -> Any:
        for args in sets:
            carry = op(carry, *args)
        return carry

    call = jax.jit(program, donate_argnums=0)
    kept = [carry]

    def run() -> Any:
        kept[0] = call(kept[0], sets)
        return kept[0]

    return _time(run, len(sets))


def _time(call: Callable[[], Any], ops: int) -> Timed:
    for _ in range(2):  # compile; then whatever the first run does once
        jax.block_until_ready(call())
    if triton_call.available():
        marker()
        before = compiles_so_far()
        (found,) = kernel_seconds([call], BATCHES)
        return Timed([s / ops for s in found], compiles_so_far() - before)
    start = time.perf_counter()
    jax.block_until_ready(call())
    once = time.perf_counter() - start
    calls = int(min(MAX_CALLS, max(1, BATCH_S // once)))
    before = compiles_so_far()
    seconds = []
    for _ in range(BATCHES):
        start = time.perf_counter()
        for _ in range(calls):
            out = call()
        jax.block_until_ready(out)
        seconds.append((time.perf_counter() - start) / calls / ops)
    return Timed(seconds, compiles_so_far() - before)


class Ceilings(NamedTuple):
    """What this device reached in this run."""

    read: Timed
    copy: Timed
    matmul: Timed
    bytes: int  # of the array that was read or copied
    flops: float  # of the matrix product

    @property
    def read_bytes_per_s(self) -> float:
        return self.bytes / min(self.read.seconds)

    @property
    def copy_bytes_per_s(self) -> float:
        """Bytes read and written together."""
        return 2 * self.bytes / min(self.copy.seconds)

    @property
    def flops_per_s(self) -> float:
        return self.flops / min(self.matmul.seconds)


def ceilings(size: int, width: int, dtype: Any, key: jax.Array) -> Ceilings:
    """Measures the memory and arithmetic ceilings.

    Args:
      size: bytes of the array to read and to copy: far more than any cache.
      width: of the square matrix product.
      dtype: of the product.
    """
    rows = size // 4 // 1024
    arrays = [(jax.random.bits(k, (rows, 1024), jnp.uint32),) for k in jax.random.split(key, 2)]
    read = time_op(lambda x: x.sum(axis=1), arrays)
    copy = time_op(lambda x: x ^ jnp.uint32(1), arrays)
    del arrays
    a, b = (jax.random.normal(k, (width, width), dtype) for k in jax.random.split(key, 2))
    product = time_op(matmul, [(a, b), (b, a)])
    return Ceilings(read, copy, product, rows * 4096, 2.0 * width**3)
