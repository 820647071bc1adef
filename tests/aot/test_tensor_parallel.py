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
from jllm.models.logit_rules import empty_rules
from jllm.models.sampler import SamplerSpec
from jllm.parallel.inspect.collectives import collectives
from jllm.parallel.inspect.programs import Compiler
from jllm.parallel.sharding import CACHE, LOGITS, WHOLE, laid_out, param_specs
from jllm.params import Params, param_shapes
from tests.aot.compiler import H200, compiled, h200_mesh

pytestmark = pytest.mark.aot

TP, NUM_BLOCKS, SLOTS, LENGTH = 8, 100_000, 257, 4096
MODEL = jllm.ModelConfig.preset("llama-3.1-70b")
SPECS = {
    "decode": StepSpec(num_rows=64, table_width=256),
    "mixed": StepSpec(num_rows=64, table_width=256, num_tokens=2048),
}
ENGINE = jllm.EngineConfig(
    max_num_seqs=SLOTS - 1, max_model_len=LENGTH, num_kv_blocks=NUM_BLOCKS - 1
)
H200_BYTES = 141e9


def arg(shape: tuple[int, ...], dtype: Any, spec: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(h200_mesh(TP), spec))


def params() -> Params:
    shapes = param_shapes(laid_out(MODEL, TP), jnp.bfloat16)
    split = jax.tree.map(lambda x, spec: arg(x.shape, x.dtype, spec), shapes, param_specs(shapes))
    return dataclasses.replace(split, config=MODEL)


def kinds(program: Any) -> Counter[str]:
    return Counter(one.kind for one in collectives(program.as_text()))


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_a_forward_pass_of_70b_sums_twice_per_layer_and_copies_nothing(spec: StepSpec) -> None:
    layer = (NUM_BLOCKS, 2, MODEL.num_kv_heads, 16, MODEL.head_dim)
    cache = [arg(layer, jnp.bfloat16, CACHE)] * MODEL.num_layers
    tokens = arg((SLOTS, LENGTH), jnp.int32, WHOLE)
    plan = arg(pack(forward_fields(spec))[0].shape, jnp.int32, WHOLE)
    mesh = h200_mesh(TP)
    program = compiled(step.forward, params(), cache, tokens, plan, spec=spec, mesh=mesh)

    assert kinds(program) == {"all-reduce": 2 * MODEL.num_layers + 1}
    assert "triton_kernel_call" in program.as_text()
    # Of weights and cache a device holds an eighth; the cache is updated in place.
    memory = program.memory_analysis()
    cache_bytes = MODEL.num_layers * 2 * math.prod(layer) // TP
    assert memory.alias_size_in_bytes >= cache_bytes
    weight_bytes = 2 * sum(math.prod(x.shape) for x in jax.tree.leaves(params())) / TP
    assert memory.argument_size_in_bytes < 1.01 * (weight_bytes + cache_bytes)
    assert memory.argument_size_in_bytes + memory.temp_size_in_bytes < H200_BYTES
    smallest = MODEL.hidden_size * MODEL.num_heads * MODEL.head_dim // TP  # elements of a wo
    for result, op in re.findall(r"= bf16\[([\d,]+)\]\S* ([\w-]+)\(", program.as_text()):
        if math.prod(map(int, result.split(","))) >= max(smallest, spec_elements(spec)):
            assert op not in ("copy", "transpose", "concatenate"), f"{op} of bf16[{result}]"
    # Of four layers the program takes as much memory, which ``explain`` relies on.
    few = Compiler(dataclasses.replace(MODEL, num_layers=4), mesh, ENGINE, H200).forward(spec)
    assert few.temporaries == pytest.approx(memory.temp_size_in_bytes, rel=0.05)


def spec_elements(spec: StepSpec) -> int:
    """Larger than any activation of a step on one device."""
    tokens = spec.num_tokens or spec.num_rows
    return tokens * max(MODEL.hidden_size, 2 * MODEL.intermediate_size // TP) + 1


@pytest.mark.parametrize("random", [False, True], ids=["greedy", "temperature"])
def test_sampling_exchanges_only_the_best_of_each_device(random: bool) -> None:
    rows, vocab_size = 64, laid_out(MODEL, TP).vocab_size
    rules = jax.eval_shape(lambda: empty_rules(SLOTS, MODEL.vocab_size))
    logits = arg((rows, vocab_size), jnp.float32, LOGITS)
    program = compiled(
        step.sample,
        arg((SLOTS, LENGTH), jnp.int32, WHOLE),
        jax.tree.map(lambda x: arg(x.shape, x.dtype, WHOLE), rules),
        logits,
        logits,
        arg(pack(sample_fields(rows))[0].shape, jnp.int32, WHOLE),
        spec=SamplerSpec(random=random),
        mesh=h200_mesh(TP),
    )
    assert kinds(program) == {"all-gather": 1}
    # What is computed takes less than the logits of all devices would.
    assert program.memory_analysis().temp_size_in_bytes < 4 * rows * vocab_size // 2
