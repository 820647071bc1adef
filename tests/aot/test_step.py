"""A step compiles for an H200 to few kernels, and copies neither weights nor cache."""

from __future__ import annotations

import dataclasses
import math
import re
from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import jllm
from jllm.engine import step
from jllm.engine.batch import StepSpec, forward_fields, pack, sample_fields
from jllm.kernels import triton_call
from jllm.models.logit_rules import empty_rules
from jllm.models.sampler import SamplerSpec
from jllm.params import param_shapes
from tests.aot.compiler import compile_for_h200

pytestmark = pytest.mark.aot

NUM_BLOCKS, SLOTS, LENGTH = 10_000, 257, 4096
KERNEL = re.compile(r"= \S.* (fusion|custom-call|copy|transpose|scatter|sort|dot)\(")


def spec(shape: tuple[int, ...], dtype: Any = jnp.int32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def compiled_step(model: jllm.ModelConfig, sizes: StepSpec) -> Any:
    layer = spec((NUM_BLOCKS, 2, model.num_kv_heads, 16, model.head_dim), jnp.bfloat16)
    return compile_for_h200(
        step.forward,
        param_shapes(model, jnp.bfloat16),
        [layer] * model.num_layers,
        spec((SLOTS, LENGTH)),
        spec(pack(forward_fields(sizes))[0].shape),
        spec=sizes,
    )


def entry_ops(compiled: Any) -> Counter[str]:
    """The instructions of the main computation that run on the device, by what they are."""
    entry = compiled.as_text().split("\nENTRY ")[1]
    return Counter(KERNEL.findall(entry))


@pytest.mark.parametrize("rows", [1, 64])
@pytest.mark.parametrize("preset", ["qwen3-0.6b", "llama-3.1-8b"])
def test_a_layer_of_a_decode_step_is_seven_kernels(
    preset: str, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(triton_call, "available", lambda: True)
    model = jllm.ModelConfig.preset(preset)
    sizes = StepSpec(num_rows=rows, table_width=256)
    compiled = compiled_step(model, sizes)
    ops = entry_ops(compiled)
    # norm, qkv, attention, o, norm, gate and up, down
    assert ops["custom-call"] == 7 * model.num_layers + 1  # and the last norm
    assert ops.total() <= 7 * model.num_layers + 16, ops
    layer_bytes = 2 * math.prod((NUM_BLOCKS, 2, model.num_kv_heads, 16, model.head_dim))
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes >= model.num_layers * layer_bytes  # the cache, in place
    smallest = 2 * model.hidden_size * model.num_heads * model.head_dim  # a wo
    assert memory.temp_size_in_bytes < smallest < layer_bytes  # no room for a copy of either


def test_a_layer_of_a_mixed_step_is_ten_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_call, "available", lambda: True)
    sizes = StepSpec(num_rows=64, table_width=256, num_tokens=2048)
    preset = jllm.ModelConfig.preset("llama-3.1-8b")
    two, three = (
        entry_ops(compiled_step(dataclasses.replace(preset, num_layers=layers), sizes))
        for layers in (2, 3)
    )
    # A decode step's, the chunks' rotation and attention, and the MLP's activation on its own.
    assert three.total() - two.total() == 10
    assert two["copy"] == 0  # not even of the token table, which is read and written


def test_repeated_decode_steps_copy_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_call, "available", lambda: True)
    model = jllm.ModelConfig.preset("qwen3-0.6b")
    sizes = StepSpec(num_rows=16, table_width=256)
    layer = spec((NUM_BLOCKS, 2, model.num_kv_heads, 16, model.head_dim), jnp.bfloat16)
    compiled = compile_for_h200(
        step.decode,
        param_shapes(model, jnp.bfloat16),
        [layer] * model.num_layers,
        spec((SLOTS, LENGTH)),
        jax.eval_shape(lambda: empty_rules(SLOTS, model.vocab_size)),
        spec(pack(forward_fields(sizes))[0].shape),
        spec(pack(sample_fields(16))[0].shape),
        spec=sizes,
        sampler=SamplerSpec(random=True),
        repeats=8,
    )
    text = compiled.as_text()
    # The host does not wait for the device to say whether the loop goes on.
    assert '"known_trip_count":{"n":"8"}' in text
    layer_bytes = 2 * math.prod(layer.shape)
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes >= model.num_layers * layer_bytes
    assert memory.temp_size_in_bytes < layer_bytes
