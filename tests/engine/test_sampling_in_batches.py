"""A request's tokens depend on the request alone, whatever options it and its neighbours have."""

from __future__ import annotations

import functools
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import jllm
from tests.tiny_model import random_prompts, run, tiny_model

PROMPTS = random_prompts([40, 33, 48, 5, 17, 40])


def away_from_the_last(logits: Any, tokens_so_far: Any) -> Any:
    last = tokens_so_far[jnp.sum(tokens_so_far >= 0) - 1]
    return logits.at[last].add(-3.0)


def repeatable(**options: Any) -> jllm.SamplingParams:
    return jllm.SamplingParams(seed=11, max_tokens=24, ignore_eos=True, **options)


# Everything that is computed from a request's history or its slot's tables.
OPTIONS: list[dict[str, Any]] = [
    dict(temperature=1.2, presence_penalty=1.0, frequency_penalty=0.5, repetition_penalty=1.2),
    dict(temperature=1.5, bad_words=[[i, j] for i in range(3, 40) for j in range(40, 60)][:700]),
    dict(temperature=0, repetition_penalty=1.5, logprobs=2, logprobs_mode="processed"),
    dict(temperature=2.0, allowed_token_ids=range(100, 140), logit_bias={101: 2.0}, top_p=0.9),
    dict(temperature=1.0, min_tokens=20, stop_token_ids=list(range(3, 60)), top_k=50, min_p=0.01),
    dict(temperature=1.0, logits_processor=away_from_the_last),
]  # fmt: skip


def engine(**options: Any) -> jllm.Engine:
    defaults = dict(max_num_seqs=8, num_kv_blocks=64, max_model_len=128, decode_buckets=(8,))
    defaults |= dict(prefill_buckets=(64,))
    return jllm.Engine(tiny_model(), jllm.EngineConfig(**{**defaults, **options}))


def run_all(e: jllm.Engine, **options: Any) -> list[list[int]]:
    names = [
        e.add_request(prompt, repeatable(**mine, **options), stream=False)
        for prompt, mine in zip(PROMPTS, OPTIONS, strict=True)
    ]
    outputs = run(e)
    return [outputs[name].outputs[0].token_ids for name in names]


@functools.cache
def alone() -> list[list[int]]:
    """Each request by itself in an engine that has run nothing else beside it."""
    with engine() as e:
        tokens = []
        for prompt, options in zip(PROMPTS, OPTIONS, strict=True):
            name = e.add_request(prompt, repeatable(**options), stream=False)
            tokens.append(run(e)[name].outputs[0].token_ids)
    return tokens


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, id="all at once"),
        pytest.param({"max_num_seqs": 2, "decode_buckets": (2,)}, id="two at a time"),
        pytest.param({"prefill_buckets": (7,)}, id="chunks of 7"),
        pytest.param({"num_kv_blocks": 14}, id="preemption by recomputing"),
        pytest.param(
            {"num_kv_blocks": 14, "preemption": "swap", "prefix_cache": "radix"},
            id="preemption by swapping",
        ),
        pytest.param({"overlap": False, "prefix_cache": "radix"}, id="one step at a time"),
    ],
)
def test_tokens_do_not_depend_on_the_batch(options: dict[str, Any]) -> None:
    with engine(**options) as e:
        assert run_all(e) == alone()
        if "num_kv_blocks" in options:
            assert e.stats().num_preemptions > 0


def test_a_cached_prefix_does_not_hide_the_history() -> None:
    """With its prompt in the cache a request's tokens do not run through the device: they are
    entered for those who look back at them."""
    with engine(prefix_cache="radix") as e:
        first = run_all(e)
        hits = e.stats().prefix_hits
        # Other requests write over the slots that the first ones left behind.
        for prompt in random_prompts([60] * 8, seed=9):
            e.add_request(prompt, repeatable(), stream=False)
        run(e)
        again = run_all(e)
        assert e.stats().prefix_hits > hits
    assert first == again == alone()


def test_samples_of_a_seeded_request_differ_and_repeat() -> None:
    """CASES 26; sample j is the same with other samples, and neighbours, beside it."""
    params = jllm.SamplingParams(n=4, seed=5, max_tokens=10, ignore_eos=True, temperature=1.5)
    runs = []
    with engine() as e:
        for neighbours in (0, 3):
            for prompt in PROMPTS[:neighbours]:
                e.add_request(prompt, repeatable(**OPTIONS[0]), stream=False)
            name = e.add_request(PROMPTS[3], params, stream=False)
            runs.append([sample.token_ids for sample in run(e)[name].outputs])
        two = jllm.SamplingParams(n=2, seed=5, max_tokens=10, ignore_eos=True, temperature=1.5)
        name = e.add_request(PROMPTS[3], two, stream=False)
        fewer = [sample.token_ids for sample in run(e)[name].outputs]
    assert runs[0] == runs[1] and fewer == runs[0][:2]
    assert len({tuple(tokens) for tokens in runs[0]}) == 4


def test_two_logits_processors_in_one_batch_do_not_mix() -> None:
    def only_even(logits: Any, tokens_so_far: Any) -> Any:
        return jnp.where(jnp.arange(len(logits)) % 2 == 0, logits, -jnp.inf)

    def only_odd(logits: Any, tokens_so_far: Any) -> Any:
        return jnp.where(jnp.arange(len(logits)) % 2 == 1, logits, -jnp.inf)

    with engine() as e:
        names = [
            e.add_request(PROMPTS[3], repeatable(logits_processor=processor), stream=False)
            for processor in (only_even, only_odd, None)
        ]
        outputs = run(e)
    even, odd, plain = (
        {token % 2 for token in outputs[name].outputs[0].token_ids} for name in names
    )
    assert (even, odd, plain) == ({0}, {1}, {0, 1})


def test_a_logits_processor_sees_the_prompt_and_the_output_and_then_minus_one() -> None:
    def length_becomes_token(logits: Any, tokens_so_far: Any) -> Any:
        known = tokens_so_far >= 0
        ordered = jnp.all(known == (jnp.arange(len(known)) < known.sum()))
        token = jnp.where(ordered, known.sum() + tokens_so_far[0], 0)
        return jnp.where(jnp.arange(len(logits)) == token, 0.0, -jnp.inf)

    with engine() as e:
        params = jllm.SamplingParams(max_tokens=5, logits_processor=length_becomes_token)
        name = e.add_request([50, 60, 70], params, stream=False)
        assert run(e)[name].outputs[0].token_ids == [53, 54, 55, 56, 57]


def test_nothing_compiles_after_warm_up_whatever_is_asked() -> None:
    sizes = dict(max_num_seqs=2, decode_buckets=(2,), prefill_buckets=(16,))
    with engine(**sizes, prefix_cache="radix") as e:
        e.warm_up()
        compiled = e.stats().num_compiles
        rng = np.random.default_rng(3)
        for index in range(24):
            options = dict(OPTIONS[int(rng.integers(0, 5))])
            options["logprobs"] = (None, 0, 3)[index % 3]
            options["logprobs_mode"] = ("raw", "processed")[index % 2]
            options["prompt_logprobs"] = (None, 0, 5, None)[index % 4]
            e.add_request(PROMPTS[index % 6], repeatable(**options), stream=False)
            e.step()
        run(e)
        assert e.stats().num_compiles == compiled


def test_a_logits_processor_compiles_once_per_batch_size() -> None:
    def fresh(logits: Any, tokens_so_far: Any) -> Any:
        return logits * 0.5

    with engine() as e:
        counts = []
        for _ in range(3):
            e.add_request(PROMPTS[3], repeatable(logits_processor=fresh), stream=False)
            run(e)
            counts.append(e.stats().num_compiles)
    assert counts[2] == counts[1]
