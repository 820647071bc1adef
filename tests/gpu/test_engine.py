"""The engine on a GPU says what the uncached model says."""

from __future__ import annotations

import jax
import pytest

import jllm
from tests.tiny_model import greedy, greedy_params, random_prompts, run, tiny_model

pytestmark = pytest.mark.gpu


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
