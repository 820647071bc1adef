"""Times paged attention on a GPU over launch configurations.

    python benchmarks/attention_sweep.py --out attention.json

Everything is compiled first, in threads, and timed afterwards: threads that compile hold the host
back. Every op attends with the output of the one before, so that none is dropped or overlaps, over
blocks scattered in a cache far larger than L2. How contexts are cut is worked out at compile time:
a model does it once per step, for all its layers.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jllm.kernels.paged_attention import DECODE, PREFILL, Launch, decode, prefill

HEADS, GROUP, DIM, BLOCK = 8, 4, 128, 16
NUM_BLOCKS = 33_000  # 2.2 GB of keys and values
SCALE = DIM**-0.5
ROTATE_BYTES = 400e6  # that the ops of a call read together


class Case(NamedTuple):
    """Rows of these contexts, and new tokens of each: 1 for decode."""

    name: str
    lens: list[int]
    queries: int


def ragged(count: int, rng: np.random.Generator) -> list[int]:
    """Lengths log-uniform in 64..32768 that fit the cache together."""
    while True:
        lens = np.exp(rng.uniform(np.log(64), np.log(32768), count)).astype(int)
        if np.ceil(lens / BLOCK).sum() < NUM_BLOCKS - 1:
            return lens.tolist()


def cases(rng: np.random.Generator) -> list[Case]:
    sizes = [(64, 8192), (256, 1024), (64, 1024), (16, 4096), (16, 1024)]
    sizes += [(1, 32768), (1, 4096), (1, 1024)]
    found = [Case(f"decode {b} x {n}", [n] * b, 1) for b, n in sizes]
    found.append(Case("decode 128 ragged", ragged(128, rng), 1))
    chunks = [(4, 8192), (16, 1024), (1, 256)]
    return found + [Case(f"prefill {b} x {n}", [n] * b, n) for b, n in chunks]


def launches(case: Case) -> list[Launch]:
    if case.queries > 1:
        return [PREFILL._replace(programs=132 * n, least=m) for n, m in ((1, 4), (2, 4), (2, 2))]
    tuned = [DECODE._replace(programs=132 * n, least=m) for n in (2, 4, 8, 16) for m in (1, 4)]
    shapes = [(16, 1, 4), (32, 1, 5), (64, 4, 1), (128, 4, 3)]
    others = [
        DECODE._replace(context=c, num_warps=warps, num_stages=stages)
        for c, warps, stages in shapes
    ]
    return tuned + others


def tables(case: Case, rng: np.random.Generator) -> jax.Array:
    """Scattered blocks (B, P) of every row."""
    counts = [-(-n // BLOCK) for n in case.lens]
    blocks = 1 + rng.permutation(NUM_BLOCKS - 1)
    table = np.zeros((len(counts), -(-max(counts) // 4) * 4), np.int32)
    for row, (end, count) in enumerate(zip(np.cumsum(counts), counts, strict=True)):
        table[row, :count] = blocks[end - count : end]
    return jnp.asarray(table)


def program(case: Case, launch: Launch) -> Callable[..., jax.Array]:
    lens = np.asarray(case.lens, np.int32)
    starts = np.arange(len(lens) + 1, dtype=np.int32) * case.queries
    options: dict[str, Any] = dict(window=None, scale=SCALE, launch=launch)

    def run(q: jax.Array, kv: jax.Array, tables: list[jax.Array]) -> jax.Array:
        for table in tables:
            if case.queries == 1:
                q = decode(q, kv, table, jnp.asarray(lens), **options)
            else:
                q = prefill(q, kv, table, jnp.asarray(starts), jnp.asarray(lens), **options)
        return q

    return run


def seconds(call: Callable[[], Any]) -> float:
    """Of one call, the median of five batches of calls that are queued without waiting."""
    jax.block_until_ready(call())
    begin = time.perf_counter()
    jax.block_until_ready(call())
    calls = int(min(20, max(2, 0.006 / (time.perf_counter() - begin))))
    times = []
    for _ in range(5):
        begin = time.perf_counter()
        for _ in range(calls):
            out = call()
        jax.block_until_ready(out)
        times.append((time.perf_counter() - begin) / calls)
    return statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    rng = np.random.default_rng(0)
    key = jax.random.key(0)
    kv = jax.jit(jax.random.normal, static_argnums=(1, 2))(
        key, (NUM_BLOCKS, 2, HEADS, BLOCK, DIM), jnp.bfloat16
    )
    copied = jax.random.bits(key, (512, 1024, 1024), jnp.uint32)
    copy = jax.jit(lambda x: x ^ jnp.uint32(1))
    record: dict[str, Any] = {
        "gpu": jax.devices()[0].device_kind,
        "jax": jax.__version__,
        "copy_tb_s": 2 * copied.nbytes / seconds(functools.partial(copy, copied)) / 1e12,
        "rows": [],
    }
    del copied
    work = []
    for case in cases(rng):
        read = sum(case.lens) * 2 * HEADS * DIM * 2
        count = 8 if case.queries > 1 else int(min(32, max(8, ROTATE_BYTES // read)))
        q = jax.random.normal(key, (len(case.lens) * case.queries, HEADS, GROUP, DIM), jnp.bfloat16)
        args = (q, kv, [tables(case, rng) for _ in range(count)])
        work += [(case, launch, args, read) for launch in launches(case)]
    with ThreadPoolExecutor(14) as pool:
        compiled = list(
            pool.map(lambda w: jax.jit(program(w[0], w[1])).lower(*w[2]).compile(), work)
        )
    for (case, launch, args, read), call in zip(work, compiled, strict=True):
        once = seconds(functools.partial(call, *args)) / len(args[2])
        flops = sum(case.queries * (2 * n - case.queries + 1) / 2 for n in case.lens)
        flops *= 4 * HEADS * GROUP * DIM
        speed = {"tb_s": read / once / 1e12, "tflop_s": flops / once / 1e12}
        record["rows"].append(
            {"case": case.name, "us": once * 1e6, **speed, "launch": launch._asdict()}
        )
        print(f"{case.name:18} {once * 1e6:8.1f} us {speed} {tuple(launch)}", flush=True)
    options.out.write_text(json.dumps(record, indent=1))


if __name__ == "__main__":
    main()
