"""The memory that an engine keeps free is what XLA needs for its largest programs."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import jllm
from jllm.engine import step
from jllm.engine.batch import Buckets, pack, sample_fields
from jllm.engine.sizing import resolve, working_bytes
from jllm.kernels import triton_call
from jllm.models.sampler import SamplerSpec
from jllm.parallel.inspect.memory import tables
from tests.aot.compiler import compile_for_h200
from tests.aot.test_step import compiled_step

pytestmark = pytest.mark.aot


@pytest.mark.parametrize("preset", ["qwen3-0.6b", "llama-3.1-8b"])
def test_the_largest_programs_fit_what_is_kept_free(
    preset: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(triton_call, "available", lambda: True)
    model = jllm.ModelConfig.preset(preset)
    asked = jllm.EngineConfig(max_model_len=4096)
    memory = {"bytes_limit": 100 << 30, "bytes_in_use": 20 << 30}
    config = resolve(asked, model, bytes_per_value=2, memory=memory)
    largest = Buckets.of(config).all_specs()[-1]
    two_layers = dataclasses.replace(model, num_layers=2)  # more need no more
    forward = compiled_step(two_layers, largest).memory_analysis()
    sample = compiled_sampler(model, config, largest.num_rows).memory_analysis()

    kept = working_bytes(config, model, 2)
    given = sum(
        2 * (program.output_size_in_bytes - program.alias_size_in_bytes)
        for program in (forward, sample)
    )
    needed = given + max(forward.temp_size_in_bytes, sample.temp_size_in_bytes)
    needed += sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tables(model, config)))
    assert needed < kept < 2 * needed


def compiled_sampler(model: jllm.ModelConfig, config: jllm.EngineConfig, rows: int) -> Any:
    """Sampling with every feature."""
    logits = jax.ShapeDtypeStruct((rows, model.vocab_size), jnp.float32)
    plan = jax.ShapeDtypeStruct(pack(sample_fields(rows))[0].shape, jnp.int32)
    features = SamplerSpec(random=True, filtered=True, processed=True, rules=True, logprobs=20)
    return compile_for_h200(
        step.sample, *tables(model, config), logits, logits, plan, spec=features
    )
