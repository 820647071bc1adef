"""What crosses between devices in a step: two sums a layer, one for the embedding, and a few
numbers for each sampled token."""

from __future__ import annotations

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
from jllm.models.sampler import CANDIDATES, SamplerSpec
from jllm.parallel.inspect.collectives import collectives
from jllm.parallel.sharding import CACHE, LOGITS, WHOLE
from tests.parallel.models import MODELS, split

TP, ROWS, SLOTS, LENGTH = 8, 8, 9, 256
SPECS = {
    "decode": StepSpec(num_rows=8, table_width=16),
    "mixed": StepSpec(num_rows=8, table_width=16, num_tokens=64),
}


def mesh() -> jax.sharding.Mesh:
    return jllm.make_mesh(tp=TP)


def arg(shape: tuple[int, ...], spec: Any, dtype: Any = "float32") -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype), sharding=NamedSharding(mesh(), spec))


def sample_program(spec: SamplerSpec, vocab_size: int) -> str:
    """The text of a sampling program for ROWS rows."""
    plan, _ = pack(sample_fields(ROWS))
    rules = jax.eval_shape(lambda: empty_rules(SLOTS, vocab_size))
    rules = jax.tree.map(lambda x: arg(x.shape, WHOLE, x.dtype), rules)
    logits = arg((ROWS, vocab_size), LOGITS)
    tokens = arg((SLOTS, LENGTH), WHOLE, "int32")
    lowered = step.sample.lower(tokens, rules, logits, logits, plan, spec=spec, mesh=mesh())
    text: str = lowered.compile().as_text()
    return text


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
@pytest.mark.parametrize("model", MODELS)
def test_a_forward_pass_sums_twice_per_layer_and_once_for_the_embedding(
    model: str, spec: StepSpec
) -> None:
    params = split(model, TP)
    config = params.config
    cache = [arg((1000, 2, TP, 16, config.head_dim), CACHE)] * config.num_layers
    plan, _ = pack(forward_fields(spec))
    lowered = step.forward.lower(
        params, cache, arg((SLOTS, LENGTH), WHOLE, "int32"), plan, spec=spec, mesh=mesh()
    )
    compiled = lowered.compile()
    assert Counter(one.kind for one in collectives(compiled.as_text())) == {
        "all-reduce": 2 * config.num_layers + 1
    }
    # On every device its eighth of the cache is updated in place.
    memory = compiled.memory_analysis()
    cache_bytes = sum(4 * array.size for array in cache) // TP
    assert memory.alias_size_in_bytes >= cache_bytes
    assert memory.temp_size_in_bytes < cache_bytes


@pytest.mark.parametrize(
    ("sampler", "expected"),
    [
        pytest.param(SamplerSpec(), {"s32[8,8,2]": 1}, id="greedy"),
        pytest.param(SamplerSpec(random=True), {"s32[8,8,2]": 2}, id="temperature"),
        # The largest of each device, the sum of its exponentials, the logit of the chosen token.
        pytest.param(
            SamplerSpec(logprobs=0), {"s32[8,8,2]": 1, "f32[8,8]": 1, "f32[8]": 1}, id="logprobs"
        ),
    ],
)
def test_sampling_exchanges_a_few_numbers_per_row(
    sampler: SamplerSpec, expected: dict[str, int]
) -> None:
    program = sample_program(sampler, vocab_size=1024)
    assert Counter(one.result for one in collectives(program)) == expected


def test_filters_exchange_candidates_and_whole_rows_only_if_these_do_not_suffice() -> None:
    branches, _, always = sample_program(SamplerSpec(filtered=True), 1 << 16).partition("\nENTRY ")
    candidates = f"s32[{TP},{ROWS},{CANDIDATES},2]"
    assert {one.result for one in collectives(always)} == {
        f"s32[{TP},{ROWS},2]",
        candidates,
        f"f32[{TP},{ROWS}]",
    }
    (rows,) = collectives(branches)
    assert (rows.kind, rows.result) == ("all-gather", f"s32[{TP},{ROWS},{(1 << 16) // TP},2]")
