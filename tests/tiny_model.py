"""A tiny random model whose greedy text varies, and what it should say."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jllm
from jllm.models.transformer import logits

_logits: Any = jax.jit(logits)


@functools.cache
def tiny_model() -> jllm.Params:
    """The ``tiny`` preset with matrices five times their usual size: with small random weights
    a model repeats one token, and then a mistake in the cache or the batch cannot show."""
    params = jllm.init(jllm.ModelConfig.preset("tiny"), jax.random.key(0), dtype="float32")
    return jax.tree.map(lambda x: x * 5 if x.ndim > 1 else x, params)


def random_prompts(lengths: Iterable[int], seed: int = 0) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(3, 512, length).tolist() for length in lengths]


def greedy(prompt: Sequence[int], count: int) -> list[int]:
    """The tokens that greedy decoding must give: by the uncached model, one prefix at a time."""
    return _greedy(tuple(prompt), count)


@functools.cache
def _greedy(prompt: tuple[int, ...], count: int) -> list[int]:
    ids = list(prompt)
    context = max(64, 1 << (len(ids) + count - 1).bit_length())  # few lengths, so few programs
    for _ in range(count):
        padded = jnp.asarray(ids + [0] * (context - len(ids)))
        ids.append(int(jnp.argmax(_logits(tiny_model(), padded)[len(ids) - 1])))
    return ids[len(prompt) :]


def run(engine: jllm.Engine, check: bool = True) -> dict[str, jllm.RequestOutput]:
    """Steps an engine to the end; the last output of each request, by id."""
    outputs = {}
    while engine.has_unfinished():
        for output in engine.step():
            outputs[output.request_id] = output
        if check:
            engine.check_integrity()
    return outputs


def greedy_params(count: int, **options: Any) -> jllm.SamplingParams:
    return jllm.SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, **options)
