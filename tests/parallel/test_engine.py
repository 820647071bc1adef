"""An engine over several devices says what one on one device says."""

from __future__ import annotations

import functools
import re
from typing import Any

import jax
import numpy as np
import pytest

import jllm
from jllm.compilation import compiles_so_far
from jllm.outputs import Logprob
from tests.parallel.models import MODELS, PROMPTS, answers, config, split, weights, with_text
from tests.tiny_model import greedy_params, random_prompts, run


def halved(logits: jax.Array, tokens: jax.Array) -> jax.Array:
    return logits.at[tokens[0]].set(5.0) * 0.5


SAMPLED = jllm.SamplingParams
# Each asks for another part of the sampler; see jllm/models/sampler.py.
OPTIONS: dict[str, dict[str, Any]] = {
    "greedy": dict(temperature=0, logprobs=3),
    "temperature": dict(seed=3, logprobs=0),
    "top_k": dict(seed=3, top_k=20, logprobs=2, logprobs_mode="processed"),
    "top_p": dict(seed=3, top_p=0.9, min_p=0.01),
    # Nearly uniform: more tokens are kept than there are candidates.
    "wide_top_p": dict(
        seed=3, top_p=0.999, temperature=20.0, logprobs=2, logprobs_mode="processed"
    ),
    "penalties": dict(
        seed=5, presence_penalty=0.5, frequency_penalty=0.7, repetition_penalty=1.3, logprobs=0
    ),
    "rules": dict(
        seed=5,
        logit_bias={7: 9.0, 200: 3.0, 511: 9.0},
        bad_words=[[7], [511, 511]],
        min_tokens=3,
        stop_token_ids=[511],
    ),
    "allowed": dict(seed=5, allowed_token_ids=[3, 100, 300, 510], logprobs=4),
    "processor": dict(seed=5, logits_processor=halved, logprobs=1),
    "all_logprobs": dict(seed=5, logprobs=-1),
    "n": dict(seed=5, n=3),
}


@functools.cache
def on_one_device(model: str, option: str) -> list[jllm.RequestOutput]:
    return answers(weights(model), SAMPLED(**OPTIONS[option], max_tokens=8, prompt_logprobs=2))


def assert_close(one: list[Any] | None, other: list[Any] | None) -> None:
    """Logprobs, position by position."""
    assert (one is None) == (other is None)
    for ours, theirs in zip(one or (), other or (), strict=True):
        if ours is None or theirs is None:
            assert ours is theirs
            continue
        first: dict[int, Logprob] = ours
        assert first.keys() == theirs.keys()
        for token, value in first.items():
            assert value.logprob == pytest.approx(theirs[token].logprob, abs=1e-4)


@pytest.mark.parametrize(
    ("model", "option", "tp"),
    [
        *((model, "greedy", tp) for model in MODELS for tp in (2, 4)),
        ("tied", "greedy", 8),
        *(("biased", option, 8) for option in OPTIONS),
    ],
)
def test_tokens_and_logprobs_are_those_of_one_device(model: str, option: str, tp: int) -> None:
    params = SAMPLED(**OPTIONS[option], max_tokens=8, prompt_logprobs=2)
    for one, several in zip(
        on_one_device(model, option), answers(split(model, tp), params), strict=True
    ):
        assert_close(one.prompt_logprobs, several.prompt_logprobs)
        for ours, theirs in zip(one.outputs, several.outputs, strict=True):
            assert ours.token_ids == theirs.token_ids
            assert ours.finish_reason == theirs.finish_reason
            assert_close(ours.logprobs, theirs.logprobs)


@pytest.mark.parametrize("tp", [2, 8])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"logit_bias": {100: 5.0}, "bad_words": [[100]], "presence_penalty": 1.0},
        {"allowed_token_ids": [300]},  # which the form does not allow
        {"logprobs": 5, "logprobs_mode": "processed", "top_k": 3},
    ],
    ids=["alone", "rules", "contradiction", "logprobs"],
)
def test_structured_outputs_are_those_of_one_device(tp: int, options: dict[str, Any]) -> None:
    form = jllm.Structured(regex="[a-z]{3}( [a-z]{3}){2}")
    params = SAMPLED(**options, seed=3, n=2, max_tokens=40, structured=form)
    one, several = (
        answers(with_text(model), params) for model in (weights("biased"), split("biased", tp))
    )
    for ours, theirs in zip(one, several, strict=True):
        for mine, other in zip(ours.outputs, theirs.outputs, strict=True):
            assert re.fullmatch("[a-z]{3}( [a-z]{3}){2}", other.text)
            assert mine.token_ids == other.token_ids
            assert_close(mine.logprobs, other.logprobs)


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
@pytest.mark.parametrize("tp", [2, 8])
def test_preempted_requests_go_on_where_they_were(tp: int, preemption: str) -> None:
    prompts = random_prompts([40, 41, 42, 43])
    params = greedy_params(40)
    expected = [out.outputs[0].token_ids for out in answers(weights("biased"), params, prompts)]
    small = config(num_kv_blocks=14, preemption=preemption)
    with jllm.Engine(split("biased", tp), small) as engine:
        ids = [engine.add_request(p, params, stream=False) for p in prompts]
        outputs = run(engine)
        stats = engine.stats()
    assert stats.num_preemptions > 0 and (stats.num_swaps > 0) == (preemption == "swap")
    assert [outputs[i].outputs[0].token_ids for i in ids] == expected


def test_shared_prefixes_are_computed_once() -> None:
    prefix = random_prompts([64])[0]
    prompts = [prefix + rest for rest in random_prompts([5, 9], seed=1)]
    expected = [
        out.outputs[0].token_ids for out in answers(weights("tied"), greedy_params(6), prompts)
    ]
    with jllm.Engine(split("tied", 4), config()) as engine:
        for prompt, tokens in zip(prompts, expected, strict=True):
            request_id = engine.add_request(prompt, greedy_params(6), stream=False)
            assert run(engine)[request_id].outputs[0].token_ids == tokens
        assert engine.stats().prefix_hits == 64


def test_nothing_compiles_after_warm_up() -> None:
    mesh = jllm.make_mesh(tp=4)
    options = dict(num_kv_blocks=14, preemption="swap")
    model = with_text(weights("tied"))
    with jllm.Engine(model, config(**options), mesh=mesh) as engine:
        assert engine.warm_up() > 0
        before = compiles_so_far()
        form = jllm.Structured(regex="[a-z]{9}")
        engine.add_request(PROMPTS[1], SAMPLED(seed=1, structured=form))
        for index, option in enumerate(OPTIONS):
            if option in ("processor", "all_logprobs"):  # as warm_up says
                continue
            prompt = random_prompts([40], seed=index)[0]
            engine.add_request(prompt, SAMPLED(**OPTIONS[option], max_tokens=40))
        run(engine)
        assert engine.stats().num_swaps > 0
        assert compiles_so_far() == before

        engine.update_params(jax.tree.map(np.negative, jax.device_get(model)))
        engine.update_params(model)
        before = compiles_so_far()
        engine.update_params(jax.tree.map(np.copy, jax.device_get(model)))
        engine.add_request(PROMPTS[0], greedy_params(3))
        run(engine)
        assert compiles_so_far() == before


def test_generate_keeps_the_engine_of_a_mesh() -> None:
    options = dict(sampling_params=greedy_params(5), config=config(), use_tqdm=False)
    jllm.generate(split("tied", 2), PROMPTS, **options)
    before = compiles_so_far()
    outputs = jllm.generate(jax.tree.map(lambda x: x, split("tied", 2)), PROMPTS, **options)
    assert compiles_so_far() == before
    one = answers(weights("tied"), greedy_params(5))
    assert [o.outputs[0].token_ids for o in outputs] == [o.outputs[0].token_ids for o in one]
    # Another mesh is another engine, and not one that runs on the devices of the first.
    outputs = jllm.generate(split("tied", 4), PROMPTS, **options)
    assert [o.outputs[0].token_ids for o in outputs] == [o.outputs[0].token_ids for o in one]
    jllm.release()


@pytest.mark.parametrize("model", MODELS)
def test_logprobs_takes_params_of_a_mesh(model: str) -> None:
    ids = np.array(PROMPTS[1])
    np.testing.assert_allclose(
        jllm.logprobs(split(model, 8), ids), jllm.logprobs(weights(model), ids), atol=1e-4
    )


def test_a_mesh_of_one_device_runs_the_programs_of_none() -> None:
    params, asked = weights("tied"), greedy_params(6)
    alone = answers(params, asked)
    before = compiles_so_far()
    split_over_one = answers(split("tied", 1), asked)
    assert compiles_so_far() == before
    assert [o.outputs[0].token_ids for o in split_over_one] == [
        o.outputs[0].token_ids for o in alone
    ]
