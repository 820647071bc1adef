"""The model against Hugging Face transformers in float32: every family, every rope type, and the
demo model (data and how it was made: tests/goldens/)."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jllm
from jllm.models.transformer import logits
from tests.demo_model import load_demo_model
from tests.goldens.loader import DemoGolden, load_demo, load_tiny

TINY = load_tiny()
DEMO = load_demo()
all_logits: Any = jax.jit(logits)


@functools.cache
def tiny_params(name: str) -> jllm.Params:
    return jllm.load(TINY[name].path, dtype="float32")


def padded_logits(params: jllm.Params, ids: np.ndarray) -> np.ndarray:
    """Logits of a sequence, padded to a multiple of 64 so that few lengths are compiled."""
    padded = np.pad(ids, (0, -len(ids) % 64))
    return np.asarray(all_logits(params, jnp.asarray(padded)))[: len(ids)]


@pytest.mark.parametrize("name", TINY)
@pytest.mark.parametrize("prompt", ["short", "long"])
def test_logits_equal_transformers(name: str, prompt: str) -> None:
    golden = TINY[name].prompts[prompt]
    ours = padded_logits(tiny_params(name), golden.ids)[golden.positions]
    assert np.abs(ours - golden.logits).max() < 2e-4 * golden.logits.std()


@pytest.mark.parametrize("name", TINY)
def test_greedy_tokens_equal_transformers(name: str) -> None:
    params = tiny_params(name)
    goldens = list(TINY[name].prompts.values())
    sampling = jllm.SamplingParams(
        temperature=0, max_tokens=len(goldens[0].greedy), ignore_eos=True, detokenize=False
    )
    outputs = jllm.generate(params, [g.ids.tolist() for g in goldens], sampling, use_tqdm=False)
    for output, golden in zip(outputs, goldens, strict=True):
        assert output.outputs[0].token_ids == golden.greedy.tolist()


def test_demo_model_greedy_tokens_equal_transformers() -> None:
    params = load_demo_model()
    prompts = list(DEMO.prompts.values())
    sampling = jllm.SamplingParams(temperature=0, max_tokens=64, ignore_eos=True)
    outputs = jllm.generate(params, [p.ids.tolist() for p in prompts], sampling, use_tqdm=False)
    wrong = [
        f"{p.name}: differs at {first_difference(o.outputs[0].token_ids, p.greedy)}"
        for o, p in zip(outputs, prompts, strict=True)
        if o.outputs[0].token_ids != p.greedy.tolist()
    ]
    assert not wrong


@pytest.mark.parametrize("prompt", DEMO.prompts.values(), ids=lambda p: p.name)
def test_demo_model_logits_equal_transformers(prompt: DemoGolden) -> None:
    ours = padded_logits(load_demo_model(), prompt.ids)
    at = ours[prompt.positions]
    difference = np.abs(at[:, DEMO.vocab_ids] - prompt.logits).max(-1)
    assert (difference < 2e-4 * prompt.std).all()
    assert (at.argmax(-1) == prompt.argmax).all()
    logp = jax.nn.log_softmax(ours[:-1], axis=-1)
    if len(prompt.ids) > 1:
        chosen = np.take_along_axis(np.asarray(logp), prompt.ids[1:, None], axis=-1)[:, 0]
        np.testing.assert_allclose(chosen, prompt.logprobs, atol=2e-3)


def first_difference(ours: list[int], golden: np.ndarray) -> int:
    return next(i for i, (a, b) in enumerate(zip(ours, golden, strict=True)) if a != b)
