"""The sampling kernels, in Triton's interpreter, against the XLA sampler."""

from __future__ import annotations

import numpy as np
import pytest

from jllm.models.sampler import SamplerSpec
from tests.kernels.sampling_problems import KINDS, by_kernel, by_xla, logits_of, mixed_rows

VOCAB = 777  # no multiple of a tile, of a stripe, or of 4


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_and_logprobs_are_those_of_the_xla_sampler(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = mixed_rows()
    count = len(rows.top_k)
    logits, raw = logits_of(kind, count, VOCAB), logits_of("normal", count, VOCAB, seed=1)
    spec = SamplerSpec(random=True, filtered=True, logprobs=0)
    got, expected = by_kernel(monkeypatch, logits, raw, rows, spec), by_xla(logits, raw, rows, spec)
    np.testing.assert_array_equal(got.tokens, expected.tokens)
    np.testing.assert_allclose(got.logprobs, expected.logprobs, atol=1e-5)
