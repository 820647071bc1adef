"""The sampling kernels on a GPU, over a whole vocabulary, against the XLA sampler there."""

from __future__ import annotations

import numpy as np
import pytest

from jllm.kernels import triton_call
from jllm.models.sampler import SamplerSpec
from tests.kernels.sampling_problems import (
    KINDS,
    assert_the_xla_sampler_agrees,
    logits_of,
    mixed_rows,
)

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("vocab", [128_256, 50_257, 151_936])
@pytest.mark.parametrize("kind", KINDS)
def test_tokens_and_logprobs_are_those_of_the_xla_sampler(
    kind: str, vocab: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert triton_call.available()
    rows = mixed_rows(132)
    count = len(rows.top_k)
    logits, raw = logits_of(kind, count, vocab), logits_of("normal", count, vocab, seed=1)
    spec = SamplerSpec(random=True, filtered=True, logprobs=0)
    assert_the_xla_sampler_agrees(monkeypatch, logits, raw, rows, spec)


@pytest.mark.parametrize("kind", ["normal", "rounded", "masked"])
def test_alternatives_of_the_distribution_that_is_drawn_from(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = mixed_rows(44)
    logits = logits_of(kind, len(rows.top_k), 128_256)
    spec = SamplerSpec(random=True, filtered=True, processed=True, logprobs=20)
    assert_the_xla_sampler_agrees(monkeypatch, logits, logits, rows, spec)


@pytest.mark.parametrize("random", [False, True], ids=["greedy", "random"])
def test_batches_without_filters(random: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = mixed_rows(256)
    rows = rows._replace(top_k=rows.top_k * 0, top_p=rows.top_p * 0 + 1, min_p=rows.min_p * 0)
    logits = logits_of("rounded", len(rows.top_k), 128_256)
    spec = SamplerSpec(random=random)
    if not random:
        rows = rows._replace(temperature=np.zeros_like(rows.temperature))
    assert_the_xla_sampler_agrees(monkeypatch, logits, logits, rows, spec)
