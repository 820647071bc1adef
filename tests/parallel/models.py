"""Tiny models with every size that tensor parallelism must split, pad or copy."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax

import jllm
from jllm.parallel.sharding import place
from tests.tiny_model import random_prompts, run
from tests.tokenizers_for_tests import byte_level_tokenizer

_SIZES: dict[str, Any] = dict(
    hidden_size=64, intermediate_size=128, num_layers=2, head_dim=16, max_position_embeddings=512
)
MODELS = {
    # 517 ids: padded on every mesh. Four key/value heads: two, one, or half of one per device.
    "biased": jllm.ModelConfig(
        vocab_size=517,
        num_heads=8,
        num_kv_heads=4,
        qkv_bias=True,
        o_bias=True,
        mlp_bias=True,
        qk_norm=True,
        **_SIZES,
    ),
    "tied": jllm.ModelConfig(
        vocab_size=512,
        num_heads=8,
        num_kv_heads=2,
        tie_embeddings=True,
        sliding_window=20,
        **_SIZES,
    ),
}
PROMPTS = random_prompts([3, 20, 45])
CONFIG: dict[str, Any] = dict(
    max_num_seqs=4,
    max_model_len=128,
    num_kv_blocks=32,
    decode_buckets=(4,),
    prefill_buckets=(32,),
)


@functools.cache
def weights(name: str) -> jllm.Params:
    """Random weights on one device, larger than usual, so that greedy text varies."""
    params = jllm.init(MODELS[name], jax.random.key(0), dtype="float32")
    return jax.tree.map(lambda x: x * 5 if x.ndim > 1 else x, params)


@functools.cache
def split(name: str, tp: int) -> jllm.Params:
    """The same weights over a mesh."""
    return place(weights(name), jllm.make_mesh(tp=tp))


def with_text(params: jllm.Params) -> jllm.Params:
    """The same arrays, with a tokenizer and its eos."""
    tokenizer = byte_level_tokenizer()
    config = dataclasses.replace(params.config, eos_token_ids=(tokenizer.eos_token_id,))
    return dataclasses.replace(params, config=config, tokenizer=tokenizer)


def config(**options: Any) -> jllm.EngineConfig:
    return jllm.EngineConfig(**{**CONFIG, **options})


def answers(
    params: jllm.Params,
    sampling_params: jllm.SamplingParams,
    prompts: Sequence[Sequence[int]] = PROMPTS,
    **options: Any,
) -> list[jllm.RequestOutput]:
    """What an engine of its own says to all prompts at once."""
    with jllm.Engine(params, config(**options)) as engine:
        ids = [engine.add_request(p, sampling_params, stream=False) for p in prompts]
        outputs = run(engine)
    return [outputs[request_id] for request_id in ids]
