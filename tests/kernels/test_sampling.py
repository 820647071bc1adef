"""The sampling kernels, in Triton's interpreter, against the XLA sampler and a float64 oracle."""

from __future__ import annotations

import functools

import numpy as np
import pytest

from jllm.kernels import sampling
from jllm.models.sampler import SamplerSpec, SamplingRows
from tests.kernels.sampling_problems import (
    KINDS,
    assert_the_xla_sampler_agrees,
    by_kernel,
    logits_of,
    mixed_rows,
)
from tests.models.sampler_oracle import distribution

VOCAB = 777  # no multiple of a tile, of a stripe, or of 4


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_and_logprobs_are_those_of_the_xla_sampler(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    count = 10  # of all options: kinds take different ones
    rows = mixed_rows(count, seed=KINDS.index(kind))
    logits, raw = logits_of(kind, count, VOCAB), logits_of("normal", count, VOCAB, seed=1)
    spec = SamplerSpec(random=True, filtered=True, logprobs=0)
    assert_the_xla_sampler_agrees(monkeypatch, logits, raw, rows, spec)


@pytest.mark.parametrize("room", [32, 4096])
def test_candidates_that_are_not_enough_at_first_or_at_all(
    room: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Top-p tries two peaks first. With room for few candidates most filters read the whole row:
    three tiles, with ties across."""
    monkeypatch.setattr(sampling, "CANDIDATES", room)
    monkeypatch.setattr(sampling, "Launch", functools.partial(sampling.Launch, few_peaks=2))
    rows = mixed_rows()
    if room > 32:
        alone = (rows.top_p < 1) & (rows.top_k == 0)
        rows = SamplingRows(*(np.repeat(np.asarray(x)[alone], 3, axis=0) for x in rows))
    logits = logits_of("rounded", len(rows.top_k), 5_003)
    spec = SamplerSpec(random=True, filtered=True, processed=True, logprobs=3)
    assert_the_xla_sampler_agrees(monkeypatch, logits, logits, rows, spec)


def test_plain_draws_of_many_seeds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Enough for tiles that one token surely wins and for such as have to be computed twice."""
    rows = mixed_rows(80)
    rows = rows._replace(top_k=rows.top_k * 0, top_p=rows.top_p * 0 + 1, min_p=rows.min_p * 0)
    logits = logits_of("normal", 80, 300)
    assert_the_xla_sampler_agrees(monkeypatch, logits, logits, rows, SamplerSpec(random=True))


@pytest.mark.parametrize("count", [0, 5], ids=["token only", "alternatives"])
def test_raw_and_processed_logprobs(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = mixed_rows(16, seed=count)
    logits = logits_of("rounded", 16, 333)
    raw = logits_of("normal", 16, 333, seed=1)
    spec = SamplerSpec(random=True, filtered=True, processed=True, logprobs=count)
    assert_the_xla_sampler_agrees(monkeypatch, logits, raw, rows, spec)


def test_greedy_takes_the_lowest_id_among_equals(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = np.zeros((2, 9_000), np.float32)
    logits[0, [8_999, 4_500, 4_501]] = 7
    got = by_kernel(monkeypatch, logits, logits, mixed_rows(), SamplerSpec())
    assert np.asarray(got.tokens).tolist() == [4_500, 0]
    assert got.logprobs is None and got.top_ids is None and got.top_logprobs is None


def test_filters_keep_exactly_what_the_oracle_keeps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small integer weights: ties and exact boundaries are the rule, not the exception."""
    count, vocab = 36, 300  # three stripes
    rng = np.random.default_rng(6)
    rows = mixed_rows(count)._replace(
        temperature=rng.choice([0.5, 1], count).astype(np.float32),
        top_k=rng.choice([0, 0, 0, 0, 0, 1, 3, 7, 150, 400], count).astype(np.int32),
        top_p=rng.choice([1, 0.25, 0.5, 0.75], count).astype(np.float32),
        min_p=rng.choice([0, 0, 1 / 3, 1 / 9], count).astype(np.float32),
        processed=np.ones(count, np.int32),
    )
    alone = slice(12)  # rows of min-p at a boundary and nothing else
    for name, value in {"temperature": 1, "top_k": 0, "top_p": 1, "min_p": 1 / 3}.items():
        getattr(rows, name)[alone] = value
    weights = np.zeros((count, vocab))
    for row in weights:  # an even number of each: halves and quarters of the mass are boundaries
        row[rng.permutation(vocab)[:8]] = rng.choice([[1] * 8, [1, 1, 1, 1, 3, 3, 3, 3]])
    with np.errstate(divide="ignore"):
        logits = np.log(weights) + rng.uniform(0, 30, (count, 1))  # which rounds the weights
    logits = logits.astype(np.float32)
    spec = SamplerSpec(random=True, filtered=True, processed=True, logprobs=-1)
    got = by_kernel(monkeypatch, logits, logits, rows, spec)
    kept = np.zeros((count, vocab), bool)
    np.put_along_axis(kept, np.asarray(got.top_ids), np.asarray(got.top_logprobs) > -np.inf, 1)
    for row in range(count):
        options = {name: float(getattr(rows, name)[row]) for name in ("temperature", "min_p")}
        options |= {"top_k": int(rows.top_k[row]), "top_p": round(float(rows.top_p[row]), 6)}
        expected = distribution(logits[row], **options) > 0
        np.testing.assert_array_equal(kept[row], expected, err_msg=f"row {row}: {options}")
        assert expected[got.tokens[row]]
