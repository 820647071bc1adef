"""The engine on a GPU says what the uncached model says."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jllm
from jllm.models import transformer
from tests.tiny_model import greedy, greedy_params, random_prompts, run, tiny_model

pytestmark = pytest.mark.gpu

# Of a logprob in bfloat16: 28 layers of roundings at 2**-9 each, relative to logits of about 4.
TOLERANCE = 0.1


def test_greedy_tokens_equal_the_uncached_model_under_preemption() -> None:
    assert jax.default_backend() == "gpu"
    prompts = random_prompts([1, 5, 16, 17, 64, 65, 100, 150])
    config = jllm.EngineConfig(
        max_num_seqs=8, block_size=4, num_kv_blocks=70, max_num_batched_tokens=64
    )
    with jllm.Engine(tiny_model(), config) as engine:
        for i, prompt in enumerate(prompts):
            engine.add_request(prompt, greedy_params(60), request_id=str(i), stream=False)
        outputs = run(engine)
        assert engine.stats().num_preemptions > 0
    for i, prompt in enumerate(prompts):
        assert outputs[str(i)].outputs[0].token_ids == greedy(prompt, 60)


@pytest.mark.parametrize("preset", ["smollm2-135m", "qwen3-0.6b"])
@pytest.mark.parametrize("repeats", [1, 8])
def test_bfloat16_logprobs_are_those_of_the_plain_model(preset: str, repeats: int) -> None:
    """Prefill, single and repeated decode steps by kernels, against whole sequences in plain XLA:
    the logprob of every greedy token, and that it is the likeliest or as good as."""
    config = jllm.ModelConfig.preset(preset)
    params = jllm.init(config, jax.random.key(1), dtype="bfloat16")
    prompts = random_prompts([3, 40, 200], seed=5)
    sizes = jllm.EngineConfig(max_num_seqs=4, max_model_len=512, decode_repeats=repeats)
    ends = jllm.SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, logprobs=0)
    if repeats > 1:  # they come without logprobs
        ends = dataclasses.replace(ends, logprobs=None)
    with jllm.Engine(params, sizes) as engine:
        for i, prompt in enumerate(prompts):
            engine.add_request(prompt, ends, request_id=str(i), stream=False)
        outputs = run(engine)
    for i, prompt in enumerate(prompts):
        sample = outputs[str(i)].outputs[0]
        logits = jax.jit(transformer.logits)(params, jnp.asarray([*prompt, *sample.token_ids[:-1]]))
        exact = np.asarray(jax.nn.log_softmax(logits[len(prompt) - 1 :]))
        drawn = exact[np.arange(24), sample.token_ids]
        assert (exact.max(axis=-1) - drawn).max() < TOLERANCE
        if sample.logprobs:
            pairs = zip(sample.logprobs, sample.token_ids, strict=True)
            ours = [entry[token].logprob for entry, token in pairs]
            assert np.abs(np.asarray(ours) - drawn).max() < TOLERANCE
