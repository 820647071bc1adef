"""Through the real engine: whatever the cache, the preemption, the chunks, the pool and the
overlap, every request says what it says alone."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

import jllm
from tests.tiny_model import greedy_params, random_prompts, run, tiny_model

PREFIX = random_prompts([70], seed=1)[0]
# Shared prefixes (one ends on a block, one prompt is a prefix of another), twins, and strangers.
PROMPTS = [
    *(PREFIX[:48] + tail for tail in random_prompts([1, 9, 20], seed=2)),
    PREFIX[:64],
    PREFIX[:64],
    PREFIX,
    *random_prompts([5, 33], seed=3),
]
SAMPLED = jllm.SamplingParams(seed=11, n=2, max_tokens=56, ignore_eos=True, top_p=0.9)


def requests() -> list[tuple[list[int], jllm.SamplingParams]]:
    greedy = [(prompt, greedy_params(56)) for prompt in PROMPTS]
    return [*greedy, *((prompt, SAMPLED) for prompt in PROMPTS[3:6])]


def outputs(**options: Any) -> tuple[list[list[list[int]]], jllm.engine.stats.EngineStats]:  # type: ignore[name-defined]
    shape = dict(max_num_seqs=8, max_model_len=128, num_kv_blocks=80, decode_buckets=(8,))
    config = jllm.EngineConfig(**{**shape, "prefill_buckets": (64,), **options})
    with jllm.Engine(tiny_model(), config) as engine:
        for i, (prompt, params) in enumerate(requests()):
            engine.add_request(prompt, params, request_id=str(i), stream=False)
        done = run(engine)
        assert engine.stats().kv_usage == 0
        ids = [[s.token_ids for s in done[str(i)].outputs] for i in range(len(done))]
        return ids, engine.stats()


@pytest.fixture(scope="module")
def alone() -> list[list[list[int]]]:
    return outputs(max_num_seqs=1, decode_buckets=(1,), prefix_cache="naive", overlap=False)[0]


@pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "no overlap"])
@pytest.mark.parametrize("pool", [80, 12], ids=["roomy pool", "tight pool"])
@pytest.mark.parametrize("chunk", [64, 13], ids=["chunks of 64", "chunks of 13"])
@pytest.mark.parametrize(
    ("cache", "preemption"), [*itertools.product(["naive", "radix"], ["recompute", "swap"])]
)
def test_tokens_are_those_of_the_request_alone(
    alone: list[list[list[int]]],
    cache: str,
    preemption: str,
    chunk: int,
    pool: int,
    overlap: bool,
) -> None:
    got, stats = outputs(
        prefix_cache=cache,
        preemption=preemption,
        prefill_buckets=(chunk,),
        num_kv_blocks=pool,
        overlap=overlap,
    )
    assert got == alone
    assert (stats.num_preemptions > 0) == (pool == 12)
    assert (stats.num_swaps > 0) == (pool == 12 and preemption == "swap")
    assert (stats.prefix_hits > 0) == (cache == "radix")


def test_samples_of_one_seed_differ_and_repeat(alone: list[list[list[int]]]) -> None:
    first, second = alone[-1]
    assert first != second
    assert alone[-2] != alone[-1]


def test_a_trace_of_2000_requests_with_shared_prefixes_aborts_and_preemption_leaks_nothing(
    capsys: pytest.CaptureFixture[str],
) -> None:
    rng = np.random.default_rng(0)
    prefixes = random_prompts(rng.integers(16, 64, 20), seed=4)
    config = jllm.EngineConfig(
        max_num_seqs=16,
        block_size=4,
        num_kv_blocks=160,
        max_model_len=160,
        preemption="swap",
        swap_space_gib=0.0001,
        decode_buckets=(16,),
        prefill_buckets=(128,),
    )
    aborted, finished = set(), set()
    with jllm.Engine(tiny_model(), config) as engine:
        added: list[str] = []
        while len(added) < 2000 or engine.has_unfinished():
            for _ in range(min(rng.integers(0, 8), 2000 - len(added))):
                tail = rng.integers(3, 512, rng.integers(1, 30)).tolist()
                prompt = prefixes[rng.zipf(1.5) % 20] + tail
                params = jllm.SamplingParams(max_tokens=int(rng.integers(1, 64)), seed=len(added))
                added.append(engine.add_request(prompt, params, stream=False))
            for output in engine.step():
                finished.add(output.request_id)
                if output.outputs[0].finish_reason == "abort":
                    aborted.add(output.request_id)
            if added and rng.random() < 0.2:
                engine.abort(added[-int(rng.integers(1, min(len(added), 30) + 1))])
        engine.check_integrity()
        stats = engine.stats()
    with capsys.disabled():
        print(
            f"\n2000 requests: {stats.num_steps} steps, prefix hit rate "
            f"{stats.prefix_hit_rate:.1%}, {stats.num_preemptions} preemptions, "
            f"{stats.num_swaps} swaps, {len(aborted)} aborted"
        )
    assert finished == set(added)
    assert len(aborted) > 50
    assert stats.num_preemptions > stats.num_swaps > 0
    assert stats.prefix_hit_rate > 0.3
    assert (stats.running, stats.waiting, stats.swapped, stats.kv_usage) == (0, 0, 0, 0)
