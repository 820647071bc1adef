"""What does the host do per step, and is it below the step time of a fast GPU?

    python benchmarks/host_loop.py [--out benchmarks/results/host-loop.json]

Plans steps without running them, on one CPU core: scheduling, packing the plan and accounting for
256 running requests; the same with 4,096 more waiting behind them; and a radix match of a prompt
of 32k tokens that is in the cache. Prints the median and the 99th percentile in milliseconds
beside the limit that each must keep.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from jllm.cache.block_pool import BlockPool
from jllm.cache.radix import RadixCache
from jllm.config import EngineConfig, ModelConfig
from jllm.engine.batch import Buckets
from jllm.engine.planner import Planner
from jllm.engine.queue import fcfs
from jllm.engine.request import Request
from jllm.engine.scheduler import Scheduler
from jllm.engine.sizing import resolve
from jllm.sampling_params import SamplingParams

STEPS, RUNNING, WAITING, PROMPT, LONG_PROMPT = 400, 256, 4096, 512, 32_768


class Host:
    """An engine's host side: what it does in a step, but for waiting and for the device."""

    def __init__(self) -> None:
        self.config = c = resolve(
            EngineConfig(
                max_num_seqs=RUNNING,
                max_num_batched_tokens=8192,
                max_model_len=4096,
                num_kv_blocks=60_000,
            ),
            ModelConfig.preset("llama-3.1-8b"),
            bytes_per_value=2,
            memory=None,
        )
        assert c.num_kv_blocks and c.max_num_seqs and c.max_num_batched_tokens
        assert c.max_model_len
        buckets = Buckets.of(c)
        self.scheduler = Scheduler(
            RadixCache(BlockPool(c.num_kv_blocks), c.block_size),
            fcfs,
            None,
            block_size=c.block_size,
            max_num_seqs=c.max_num_seqs,
            max_num_batched_tokens=c.max_num_batched_tokens,
            max_prefill_tokens=c.max_num_batched_tokens,
            table_width=buckets.table_width,
        )
        self.planner = Planner(
            buckets, c.max_num_seqs, c.max_model_len, block_size=c.block_size, tile_rows=16
        )
        self.rng = np.random.default_rng(0)
        self.count = 0

    def add(self, new_tokens: int) -> None:
        tokens = np.zeros(PROMPT + new_tokens, np.int32)
        tokens[:PROMPT] = self.rng.integers(0, 100_000, PROMPT)
        params = SamplingParams(max_tokens=new_tokens, seed=self.count)
        self.scheduler.add(
            Request(arrival=self.count, tokens=tokens, num_prompt=PROMPT, params=params)
        )
        self.count += 1

    def step(self) -> None:
        schedule = self.scheduler.schedule()
        plan = self.planner.plan(schedule, self.scheduler.block_tables)
        self.scheduler.commit(schedule)
        for _, request, samples in plan.rows:  # as if the results were there at once
            request.in_flight -= 1
            if samples:
                request.append(7)


def timed(call: Callable[[], object], repeat: int) -> dict[str, float]:
    times = []
    for _ in range(repeat):
        start = time.perf_counter()
        call()
        times.append(1e3 * (time.perf_counter() - start))
    return {"median_ms": float(np.median(times)), "p99_ms": float(np.percentile(times, 99))}


def measure_steps(waiting: int) -> dict[str, float]:
    host = Host()
    for _ in range(RUNNING + waiting):
        host.add(3000)
    while len(host.scheduler.running) < RUNNING or any(
        not request.decoding for request in host.scheduler.running
    ):
        host.step()
    return timed(host.step, STEPS)


def measure_match() -> dict[str, float]:
    cache = RadixCache(BlockPool(LONG_PROMPT // 16 + 1), 16)
    tokens = np.random.default_rng(0).integers(0, 100_000, LONG_PROMPT + 1).astype(np.int32)
    blocks = cache.acquire(np.empty(0, np.int32), LONG_PROMPT // 16)
    assert blocks is not None
    cache.publish(tokens, blocks, None)
    assert len(cache.match(tokens, None)) == LONG_PROMPT // 16
    return timed(lambda: cache.match(tokens, None), 200)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", help="a JSON file to write")
    out = parser.parse_args().out
    limits = {
        f"plan a step, {RUNNING} running": 0.5,
        f"plan a step, {RUNNING} running, {WAITING} waiting": 1.5,
        f"radix match of {LONG_PROMPT} tokens": 2.0,
    }
    results = [measure_steps(0), measure_steps(WAITING), measure_match()]
    rows = {
        name: {**result, "limit_ms": limit}
        for (name, limit), result in zip(limits.items(), results, strict=True)
    }
    for name, row in rows.items():
        verdict = "ok" if row["median_ms"] <= row["limit_ms"] else "OVER"
        print(
            f"{name:48} median {row['median_ms']:.3f} ms, p99 {row['p99_ms']:.3f} ms, "
            f"limit {row['limit_ms']} ms: {verdict}"
        )
    if out:
        git = ["git", "rev-parse", "HEAD"]
        commit = subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip()
        record = {
            "command": " ".join(["python", *sys.argv]),
            "commit": commit,
            "python": platform.python_version(),
            "numpy": np.__version__,
            "rows": rows,
        }
        Path(out).write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
