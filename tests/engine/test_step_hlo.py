"""What XLA makes of a step: the cache is updated in place, no weight is copied."""

from __future__ import annotations

import re

import jax
import pytest

import jllm
from jllm.engine import step
from jllm.engine.batch import StepSpec, forward_fields, pack

SPECS = {
    "decode": StepSpec(num_rows=8, table_width=16),
    "mixed": StepSpec(num_rows=8, table_width=16, num_tokens=64),
}


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_no_array_of_a_cache_or_weight_size_is_copied(spec: StepSpec) -> None:
    params = jllm.init(jllm.ModelConfig.preset("tiny"), jax.random.key(0), dtype="float32")
    config = params.config
    shape = (1000, 2, config.num_kv_heads, 16, config.head_dim)
    cache = [jax.ShapeDtypeStruct(shape, "float32")] * config.num_layers
    tokens = jax.ShapeDtypeStruct((9, 256), "int32")
    plan, _ = pack(forward_fields(spec))
    compiled = step.forward.lower(params, cache, tokens, plan, spec=spec).compile()

    memory = compiled.memory_analysis()
    cache_bytes = sum(4 * array.size for array in cache)
    assert memory.alias_size_in_bytes >= cache_bytes
    assert memory.temp_size_in_bytes < 4 * cache[0].size
    weights = [leaf.shape for leaf in jax.tree.leaves(params) if leaf.ndim > 1]
    sizes = {tuple(shape), *weights, *((w[0], w[1] * w[2] * w[3]) for w in weights if len(w) == 4)}
    for result, op in re.findall(r"= f32\[([\d,]+)\]\S* ([\w-]+)\(", compiled.as_text()):
        if tuple(int(size) for size in result.split(",")) in sizes:
            assert op not in ("copy", "transpose", "concatenate"), f"{op} of f32[{result}]"
