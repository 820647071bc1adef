"""The sampling kernels on a GPU, over a whole vocabulary, against the XLA sampler there."""

from __future__ import annotations

import numpy as np
import pytest

from jllm.kernels import triton_call
from jllm.models.sampler import SamplerSpec
from tests.kernels.sampling_problems import KINDS, by_kernel, by_xla, logits_of, mixed_rows

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("vocab", [128_256, 50_257, 151_936])
@pytest.mark.parametrize("kind", KINDS)
def test_tokens_and_logprobs_are_those_of_the_xla_sampler(
    kind: str, vocab: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert triton_call.available()
    rows = mixed_rows(6)
    count = len(rows.top_k)
    logits, raw = logits_of(kind, count, vocab), logits_of("normal", count, vocab, seed=1)
    spec = SamplerSpec(random=True, filtered=True, logprobs=0)
    got, expected = by_kernel(monkeypatch, logits, raw, rows, spec), by_xla(logits, raw, rows, spec)
    np.testing.assert_array_equal(got.tokens, expected.tokens)
    np.testing.assert_allclose(got.logprobs, expected.logprobs, atol=1e-5)
