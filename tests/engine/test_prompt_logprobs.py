"""Logprobs of the prompt: those of the uncached model, however the prompt was run."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jllm
from jllm.engine import step
from tests.tiny_model import greedy, greedy_params, random_prompts, run, tiny_model

PROMPT, OTHER = random_prompts([70, 33])


@functools.cache
def expected(prompt: tuple[int, ...]) -> np.ndarray:
    """(T - 1, V): log-probabilities after each token but the last."""
    logits = jllm.models.transformer.logits(tiny_model(), jnp.array(prompt))[:-1]
    return np.asarray(jax.nn.log_softmax(logits, axis=-1))


def check(output: jllm.RequestOutput, count: int) -> None:
    prompt = output.prompt_token_ids
    entries = output.prompt_logprobs
    assert entries is not None and len(entries) == len(prompt) and entries[0] is None
    chosen = jllm.logprobs(tiny_model(), jnp.array(prompt))
    for entry, token, logprob, row in zip(
        entries[1:], prompt[1:], chosen, expected(tuple(prompt)), strict=True
    ):
        assert entry is not None
        assert entry[token].logprob == pytest.approx(float(logprob), abs=1e-4)
        assert count <= len(entry) <= count + 1
        for other, p in entry.items():
            assert p.logprob == pytest.approx(float(row[other]), abs=1e-4)
        top = sorted((p.logprob for p in entry.values()), reverse=True)[:count]
        np.testing.assert_allclose(top, np.sort(row)[::-1][:count], atol=1e-4)


def engine(**options: Any) -> jllm.Engine:
    defaults = dict(max_num_seqs=4, num_kv_blocks=64, max_model_len=128, decode_buckets=(4,))
    defaults |= dict(prefill_buckets=(32,))
    return jllm.Engine(tiny_model(), jllm.EngineConfig(**{**defaults, **options}))


def ask(e: jllm.Engine, prompt: list[int], count: int | None, **options: Any) -> str:
    params = greedy_params(options.pop("max_tokens", 4), prompt_logprobs=count, **options)
    return e.add_request(prompt, params, stream=False)


@pytest.mark.parametrize("cache", ["naive", "radix"])
def test_they_equal_the_uncached_model_with_chunks_neighbours_and_a_warm_cache(cache: str) -> None:
    """CASES 28 and 30: full length and the same values, also when the prompt is in the cache."""
    with engine(prefix_cache=cache) as e:
        run_before = ask(e, PROMPT, None)
        assert run(e)[run_before].prompt_logprobs is None
        names = [ask(e, PROMPT, 3), ask(e, OTHER, 0), ask(e, PROMPT, 20, n=2), ask(e, OTHER, None)]
        outputs = run(e)
        for name, count in zip(names, (3, 0, 20), strict=False):
            check(outputs[name], count)
        assert outputs[names[3]].prompt_logprobs is None
        assert [sample.token_ids for sample in outputs[names[2]].outputs] == [greedy(PROMPT, 4)] * 2


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
def test_a_preempted_request_reports_each_token_once(preemption: str) -> None:
    options = dict(num_kv_blocks=9, max_model_len=96, preemption=preemption)
    with engine(**options) as e:
        names = [ask(e, prompt, 1, max_tokens=40) for prompt in random_prompts([40, 41, 42])]
        outputs = run(e)
        assert e.stats().num_preemptions > 0
        for name in names:
            check(outputs[name], 1)


def test_a_stream_reports_them_once_with_the_first_token() -> None:
    """CASES 29."""
    with engine() as e:
        e.add_request(PROMPT, greedy_params(3, prompt_logprobs=2))
        outputs = []
        while e.has_unfinished():
            outputs += e.step()
    check(outputs[0], 2)
    assert len(outputs) == 3
    assert all(output.prompt_logprobs is None for output in outputs[1:])


def test_a_prompt_of_one_token_has_none_to_predict() -> None:
    with engine() as e:
        name = ask(e, [7], 3)
        assert run(e)[name].prompt_logprobs == [None]


def test_memory_does_not_grow_with_the_prompt_by_a_vocabulary_per_token() -> None:
    """CASES 31: the LM head runs over 256 positions at a time."""
    params = tiny_model()
    vocab_size, width = params.config.vocab_size, params.config.hidden_size

    def temporaries(length: int) -> int:
        hidden = jax.ShapeDtypeStruct((length, width), jnp.float32)
        targets = jax.ShapeDtypeStruct((length,), jnp.int32)
        compiled = step.prompt_logprobs.lower(params, hidden, targets, count=20).compile()
        return int(compiled.memory_analysis().temp_size_in_bytes)

    short, long = temporaries(512), temporaries(4096)
    # What grows are results and copies of the inputs: a vocabulary of logits is much more.
    assert long - short < 0.5 * (4096 - 512) * vocab_size * 4
    assert long < 4096 * vocab_size * 4
