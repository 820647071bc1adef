"""Several decode steps in one program say what single steps say, and only where nothing is lost."""

from __future__ import annotations

from typing import Any

import pytest

import jllm
from tests.tiny_model import greedy_params, random_prompts, tiny_model

PROMPTS = random_prompts([5, 17, 40, 3, 60], seed=0)
REPEATS = 4


def engine(**options: Any) -> jllm.Engine:
    sizes = dict(max_num_seqs=8, max_model_len=128, decode_buckets=(8,), prefill_buckets=(64,))
    return jllm.Engine(tiny_model(), jllm.EngineConfig(**{**sizes, **options}))


def answers(
    requests: list[tuple[list[int], jllm.SamplingParams]], **options: Any
) -> tuple[dict[str, list[int]], list[int], dict[str, Any]]:
    """Tokens by request, how many came at once, and why each request ended."""
    tokens: dict[str, list[int]] = {}
    sizes: list[int] = []
    ends: dict[str, Any] = {}
    with engine(**options) as e:
        for index, (prompt, params) in enumerate(requests):
            e.add_request(prompt, params, request_id=str(index))
        while e.has_unfinished():
            for output in e.step():
                new = output.outputs[0]
                tokens.setdefault(output.request_id, []).extend(new.token_ids)
                sizes.append(len(new.token_ids))
                ends[output.request_id] = new.finish_reason
            e.check_integrity()
        assert e.stats().kv_usage == 0
    return tokens, sizes, ends


def mixed() -> list[tuple[list[int], jllm.SamplingParams]]:
    sampled = jllm.SamplingParams(seed=3, max_tokens=45, ignore_eos=True, top_p=0.9)
    greedy = [(prompt, greedy_params(30 + 3 * i)) for i, prompt in enumerate(PROMPTS)]
    return [*greedy, (PROMPTS[1], sampled)]


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("pool", [64, 16], ids=["roomy pool", "tight pool"])
def test_tokens_are_those_of_single_steps(pool: int, overlap: bool) -> None:
    options = dict(num_kv_blocks=pool, overlap=overlap)
    single, one_by_one, _ = answers(mixed(), decode_repeats=1, **options)
    repeated, at_once, _ = answers(mixed(), decode_repeats=REPEATS, **options)
    assert repeated == single
    assert set(one_by_one) == {1}
    assert REPEATS in at_once


def test_a_request_that_ends_within_a_program_ends_where_it_must() -> None:
    wanted, _, _ = answers([(PROMPTS[0], greedy_params(40))], decode_repeats=1)
    ids = wanted["0"]
    # Not the first of its four, the first time that it is drawn.
    stop = next(t for i, t in enumerate(ids) if i % REPEATS == 2 and ids.index(t) == i)
    params = jllm.SamplingParams(
        temperature=0, max_tokens=40, ignore_eos=True, stop_token_ids=(stop,)
    )
    requests = [(PROMPTS[0], params), (PROMPTS[1], greedy_params(40))]
    got, _, ends = answers(requests, decode_repeats=REPEATS)
    assert got["0"] == ids[: ids.index(stop) + 1]
    assert ends == {"0": "stop", "1": "length"}


@pytest.mark.parametrize(
    "params",
    [
        jllm.SamplingParams(max_tokens=20, ignore_eos=True, logprobs=1),
        jllm.SamplingParams(max_tokens=20, ignore_eos=True, repetition_penalty=1.2),
        jllm.SamplingParams(max_tokens=20, ignore_eos=True, logit_bias={3: 5.0}),
    ],
    ids=["logprobs", "penalty", "bias"],
)
def test_what_the_host_must_see_comes_one_by_one(params: jllm.SamplingParams) -> None:
    _, sizes, _ = answers([(PROMPTS[0], params)], decode_repeats=REPEATS)
    assert set(sizes) == {1}


def test_a_waiting_request_is_let_in_between() -> None:
    """While one waits for a slot no steps are repeated, lest it waits for all of them."""
    requests = [(prompt, greedy_params(24)) for prompt in PROMPTS[:3]]
    _, sizes, _ = answers(requests, decode_repeats=REPEATS, max_num_seqs=2)
    alone, at_once = sizes.count(1), sizes.count(REPEATS)
    assert at_once > 0 and alone >= 2 * 23


def test_aborting_in_the_middle_leaves_the_pool_whole() -> None:
    with engine(decode_repeats=REPEATS) as e:
        for index, prompt in enumerate(PROMPTS):
            e.add_request(prompt, greedy_params(60), request_id=str(index))
        for _ in range(6):
            e.step()
        e.abort("1")
        e.abort("3")
        while e.has_unfinished():
            e.step()
            e.check_integrity()
        assert e.stats().kv_usage == 0


def test_nothing_compiles_after_warm_up() -> None:
    with engine(decode_repeats=REPEATS) as e:
        e.warm_up()
        before = e.stats().num_compiles
        for prompt, params in mixed():
            e.add_request(prompt, params)
        while e.has_unfinished():
            e.step()
        assert e.stats().num_compiles == before


def test_it_must_be_a_positive_number() -> None:
    with pytest.raises(ValueError, match="decode_repeats"):
        jllm.EngineConfig(decode_repeats=0)
