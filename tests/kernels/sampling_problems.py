"""Random sampling problems: mixed rows, ties, masks, and the XLA sampler's answers."""

from __future__ import annotations

import functools
from typing import Any

import jax
import numpy as np
import pytest

from jllm.kernels import triton_call
from jllm.models import sampler
from jllm.models.sampler import Sampled, SamplerSpec, SamplingRows

# One of each kind of row.
MIX: dict[str, dict[str, float]] = {
    "greedy": {"temperature": 0.0},
    "plain": {},
    "cold": {"temperature": 0.3},
    "hot": {"temperature": 3.0},
    "boiling": {"temperature": 1e30},
    "freezing": {"temperature": 2e-5},
    "top-k": {"top_k": 4},
    "top-k 1": {"top_k": 1},
    "top-k 50": {"top_k": 50, "temperature": 1.5},
    "top-k of more than the candidates": {"top_k": 5000, "temperature": 4.0},
    "top-k over the vocabulary": {"top_k": 1 << 20},
    "top-p": {"top_p": 0.85},
    "tiny top-p": {"top_p": 1e-6},
    "top-p of nearly all": {"top_p": 0.9999, "temperature": 2.0},
    "min-p": {"min_p": 0.3},
    "tiny min-p": {"min_p": 1e-6},
    "min-p 1": {"min_p": 1.0},
    "top-k and top-p": {"top_k": 50, "top_p": 0.95},
    "top-k of most and top-p": {"top_k": 6000, "top_p": 0.7, "temperature": 5.0},
    "min-p and top-p": {"min_p": 0.02, "top_p": 0.8},
    "min-p and top-k": {"min_p": 0.01, "top_k": 7},
    "all": {"temperature": 1.3, "top_k": 30, "top_p": 0.9, "min_p": 0.01},
}


def mixed_rows(count: int = len(MIX), seed: int = 0) -> SamplingRows:
    """So many rows of different kinds, each with a seed and a position of its own."""
    rng = np.random.default_rng(seed)
    every = [dict(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0) | x for x in MIX.values()]
    first = int(rng.integers(len(MIX)))
    options = [every[(first + i) % len(MIX)] for i in range(count)]
    columns: dict[str, Any] = {name: [x[name] for x in options] for name in options[0]}
    return SamplingRows(
        temperature=np.array(columns["temperature"], np.float32),
        top_k=np.array(columns["top_k"], np.int32),
        top_p=np.array(columns["top_p"], np.float32),
        min_p=np.array(columns["min_p"], np.float32),
        seeds=rng.integers(0, 2**32, (count, 2), np.uint32),
        samples=rng.integers(0, 4, count).astype(np.int32),
        positions=rng.integers(0, 100_000, count).astype(np.int32),
        processed=np.arange(count, dtype=np.int32) % 2,
    )  # type: ignore[arg-type]


def logits_of(kind: str, rows: int, vocab: int, seed: int = 0) -> np.ndarray:
    """(rows, vocab) float32."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(rows, vocab)) * 3
    if kind == "rounded":  # to eight bits, as a bfloat16 head gives: many ties
        x = np.round(x * 4) / 4
    elif kind == "flat":
        x = np.zeros_like(x)
    elif kind == "peaked":
        x[np.arange(rows), rng.integers(0, vocab, rows)] = 30
    elif kind == "masked":
        x = np.where(rng.random((rows, vocab)) < 0.97, -np.inf, x)
        x[:, vocab // 2] = 0
    elif kind == "one left":
        x = np.full_like(x, -np.inf)
        x[np.arange(rows), rng.integers(0, vocab, rows)] = -1e30
    elif kind == "extreme":
        x = np.where(rng.random((rows, vocab)) < 0.5, -1e30, x)
        x[:, 3] = 1e30
    else:
        assert kind == "normal"
    return x.astype(np.float32)


KINDS = ["normal", "rounded", "flat", "peaked", "masked", "one left", "extreme"]


def by_kernel(
    monkeypatch: pytest.MonkeyPatch, logits: Any, raw: Any, rows: SamplingRows, spec: SamplerSpec
) -> Sampled:
    monkeypatch.setattr(triton_call, "available", lambda: True)
    # A function of its own, so that what jit has traced without the kernel does not count.
    run = jax.jit(functools.partial(sampler.sample, spec=spec))
    result: Sampled = run(logits, raw, rows)
    return result


@functools.partial(jax.jit, static_argnames="spec")
def by_xla(logits: Any, raw: Any, rows: SamplingRows, spec: SamplerSpec) -> Sampled:
    return sampler.sample_reference(logits, raw, rows, spec)


def assert_the_xla_sampler_agrees(
    monkeypatch: pytest.MonkeyPatch, logits: Any, raw: Any, rows: SamplingRows, spec: SamplerSpec
) -> None:
    """The very tokens, and logprobs to within float32's rounding."""
    got, expected = by_kernel(monkeypatch, logits, raw, rows, spec), by_xla(logits, raw, rows, spec)
    np.testing.assert_array_equal(got.tokens, expected.tokens)
    if spec.logprobs is not None:
        # Of logprobs like -1e30 a few parts in a million are a lot.
        np.testing.assert_allclose(got.logprobs, expected.logprobs, rtol=1e-6, atol=1e-5)
        np.testing.assert_array_equal(got.top_ids, expected.top_ids)
        np.testing.assert_allclose(got.top_logprobs, expected.top_logprobs, rtol=1e-6, atol=1e-5)
