"""A step of Llama 3.1 70B compiles for eight H200s, fits them, and reshards nothing."""

from __future__ import annotations

import dataclasses
import math
import re
from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding

import jllm
from jllm.engine import step
from jllm.engine.batch import StepSpec, forward_fields, pack, sample_fields
from jllm.kernels import triton_call
from jllm.models.logit_rules import empty_rules
from jllm.models.sampler import SamplerSpec
from jllm.parallel.sharding import CACHE, LOGITS, WHOLE, laid_out, param_specs
from jllm.params import Params, param_shapes
from tests.aot.compiler import h200_mesh

pytestmark = pytest.mark.aot

TP, NUM_BLOCKS, SLOTS, LENGTH = 8, 100_000, 257, 4096
MODEL = jllm.ModelConfig.preset("llama-3.1-70b")
SPECS = {
    "decode": StepSpec(num_decode=64, num_prefill=0, prefill_rows=0, table_width=256),
    "mixed": StepSpec(num_decode=64, num_prefill=2048, prefill_rows=16, table_width=256),
}
# Asynchronous ones are two instructions, of which the second says nothing new.
COLLECTIVE = re.compile(r" (all-\w+|collective-\w+|reduce-scatter|ragged-all-to-all)(?:-start)?\(")
H200_BYTES = 141e9


def arg(shape: tuple[int, ...], dtype: Any, spec: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(h200_mesh(TP), spec))


def params() -> Params:
    shapes = param_shapes(laid_out(MODEL, TP), jnp.bfloat16)
    split = jax.tree.map(lambda x, spec: arg(x.shape, x.dtype, spec), shapes, param_specs(shapes))
    return dataclasses.replace(split, config=MODEL)


def compiled_for_h200s(program: Any, *args: Any, **options: Any) -> Any:
    traced = program.trace(*args, **options, mesh=h200_mesh(TP))
    return traced.lower(lowering_platforms=("cuda",)).compile()


def collectives(compiled: Any) -> Counter[str]:
    return Counter(name.removesuffix("-start") for name in COLLECTIVE.findall(compiled.as_text()))


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_a_forward_pass_of_70b_sums_twice_per_layer_and_copies_nothing(
    spec: StepSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(triton_call, "available", lambda: True)
    layer = (NUM_BLOCKS, 2, MODEL.num_kv_heads, 16, MODEL.head_dim)
    cache = [arg(layer, jnp.bfloat16, CACHE)] * MODEL.num_layers
    tokens = arg((SLOTS, LENGTH), jnp.int32, WHOLE)
    plan = arg(pack(forward_fields(spec))[0].shape, jnp.int32, WHOLE)
    compiled = compiled_for_h200s(step.forward, params(), cache, tokens, plan, spec=spec)

    assert collectives(compiled) == {"all-reduce": 2 * MODEL.num_layers + 1}
    assert "triton_kernel_call" in compiled.as_text()
    # Of weights and cache a device holds an eighth; the cache is updated in place.
    memory = compiled.memory_analysis()
    cache_bytes = MODEL.num_layers * 2 * math.prod(layer) // TP
    assert memory.alias_size_in_bytes >= cache_bytes
    weight_bytes = 2 * sum(math.prod(x.shape) for x in jax.tree.leaves(params())) / TP
    assert memory.argument_size_in_bytes < 1.01 * (weight_bytes + cache_bytes)
    assert memory.argument_size_in_bytes + memory.temp_size_in_bytes < H200_BYTES
    smallest = MODEL.hidden_size * MODEL.num_heads * MODEL.head_dim // TP  # elements of a wo
    for result, op in re.findall(r"= bf16\[([\d,]+)\]\S* ([\w-]+)\(", compiled.as_text()):
        if math.prod(map(int, result.split(","))) >= max(smallest, spec_elements(spec)):
            assert op not in ("copy", "transpose", "concatenate"), f"{op} of bf16[{result}]"


def spec_elements(spec: StepSpec) -> int:
    """Larger than any activation of a step on one device."""
    tokens = spec.num_decode + spec.num_prefill
    return tokens * max(MODEL.hidden_size, 2 * MODEL.intermediate_size // TP) + 1


@pytest.mark.parametrize("random", [False, True], ids=["greedy", "temperature"])
def test_sampling_exchanges_only_the_best_of_each_device(random: bool) -> None:
    rows, vocab_size = 64, laid_out(MODEL, TP).vocab_size
    rules = jax.eval_shape(lambda: empty_rules(SLOTS, MODEL.vocab_size))
    logits = arg((rows, vocab_size), jnp.float32, LOGITS)
    compiled = compiled_for_h200s(
        step.sample,
        arg((SLOTS, LENGTH), jnp.int32, WHOLE),
        jax.tree.map(lambda x: arg(x.shape, x.dtype, WHOLE), rules),
        logits,
        logits,
        arg(pack(sample_fields(rows))[0].shape, jnp.int32, WHOLE),
        spec=SamplerSpec(random=random),
    )
    assert collectives(compiled) == {"all-gather": 1}
    # What is computed takes less than the logits of all devices would.
    assert compiled.memory_analysis().temp_size_in_bytes < 4 * rows * vocab_size // 2
