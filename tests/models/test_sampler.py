"""Draws against a float64 oracle: the distribution by chi-squared, masks exactly."""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jllm.engine.planner import all_sampler_specs, sampler_spec
from jllm.models.sampler import Sampled, SamplerSpec, SamplingRows, keep_mask, sample
from tests.models.sampler_oracle import CLOSE, distribution

DRAWS = 20_000
_sample: Any = jax.jit(sample, static_argnames="spec")

# Probabilities .3 .2 .2 .1 .1 .05 .03 .02, with two ties, in no order.
LOGITS = np.log([0.1, 0.2, 0.05, 0.3, 0.02, 0.2, 0.1, 0.03]).astype(np.float32)


def rows(count: int, seed: int = 7, **options: Any) -> SamplingRows:
    """So many rows of the same options, at positions 0, 1, 2, ..."""
    values = dict(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, processed=0) | options
    words = (seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF)
    return SamplingRows(
        temperature=np.full(count, values["temperature"], np.float32),
        top_k=np.full(count, values["top_k"], np.int32),
        top_p=np.full(count, values["top_p"], np.float32),
        min_p=np.full(count, values["min_p"], np.float32),
        seeds=np.tile(np.array(words, np.uint32), (count, 1)),
        samples=np.zeros(count, np.int32),
        positions=np.arange(count, dtype=np.int32),
        processed=np.full(count, values["processed"], np.int32),
    )  # type: ignore[arg-type]


def draw(logits: Any, options: SamplingRows, **spec: Any) -> Sampled:
    logits = jnp.asarray(np.broadcast_to(logits, (len(options.temperature), np.shape(logits)[-1])))
    spec = dict(random=True, filtered=True) | spec
    return _sample(logits, logits, options, spec=SamplerSpec(**spec))


def chi_squared_p(counts: np.ndarray, expected: np.ndarray) -> float:
    """Upper tail by the Wilson-Hilferty approximation; good to a percent from one degree on."""
    degrees = len(expected) - 1
    if degrees == 0:
        return 1.0
    statistic = ((counts - expected) ** 2 / expected).sum()
    z = (statistic / degrees) ** (1 / 3) - (1 - 2 / (9 * degrees))
    return 0.5 * math.erfc(z / math.sqrt(2 / (9 * degrees)) / math.sqrt(2))


CASES = {
    "no filter": {},
    "cold": {"temperature": 0.3},
    "hot": {"temperature": 3.0},
    "boiling": {"temperature": 1e30},
    "freezing": {"temperature": 2e-5},
    "greedy": {"temperature": 0.0},
    "below the greedy threshold": {"temperature": 9e-6},
    "top-k": {"top_k": 4},
    "top-k through a tie": {"top_k": 2},
    "top-k over the vocabulary": {"top_k": 1000},
    "top-k 1": {"top_k": 1},
    "top-p": {"top_p": 0.85},
    "top-p on the boundary of a tie": {"top_p": 0.5},
    "top-p through a tie": {"top_p": 0.6},
    "tiny top-p": {"top_p": 1e-6},
    "top-p of nearly all": {"top_p": 0.9999},
    "min-p": {"min_p": 0.3},
    "min-p on a boundary": {"min_p": 1 / 3},
    "min-p 1": {"min_p": 1.0},
    "all filters": {"temperature": 1.3, "top_k": 6, "top_p": 0.9, "min_p": 0.1},
    "top-k then top-p": {"top_k": 3, "top_p": 0.7},
    "min-p then top-p": {"min_p": 0.2, "top_p": 0.95},
    "min-p then top-k": {"temperature": 0.8, "min_p": 0.05, "top_k": 5},
}


@pytest.mark.parametrize("options", CASES.values(), ids=CASES)
def test_draws_follow_the_distribution(options: dict[str, float]) -> None:
    tokens = np.asarray(draw(LOGITS, rows(DRAWS, **options)).tokens)
    expected = distribution(LOGITS, **options) * DRAWS
    counts = np.bincount(tokens, minlength=len(LOGITS))
    possible = expected > 0
    assert counts[~possible].sum() == 0
    assert chi_squared_p(counts[possible], expected[possible]) > 1e-4


def test_the_chi_squared_test_would_notice_a_slightly_wrong_distribution() -> None:
    tokens = np.asarray(draw(LOGITS, rows(DRAWS, temperature=1.1)).tokens)
    counts = np.bincount(tokens, minlength=len(LOGITS))
    assert chi_squared_p(counts, distribution(LOGITS) * DRAWS) < 1e-4


def test_draws_of_a_vocabulary_beyond_the_candidates_follow_the_distribution() -> None:
    """Nearly flat over 2000 tokens: the likeliest 256 are not enough, the whole is sorted."""
    logits = np.linspace(0, 1, 2000, dtype=np.float32)
    options = {"top_p": 0.9, "temperature": 0.9}
    tokens = np.asarray(draw(logits, rows(4000, **options)).tokens)
    expected = distribution(logits, **options)
    assert (expected[tokens] > 0).all()
    counts = np.bincount(tokens, minlength=2000).reshape(20, 100).sum(1)
    groups = expected.reshape(20, 100).sum(1) * 4000
    assert chi_squared_p(counts[groups > 0], groups[groups > 0]) > 1e-4


@functools.cache
def _keep() -> Any:
    def keep(logits: jax.Array, options: SamplingRows) -> jax.Array:
        vocab_size = logits.shape[-1]
        values, ids = jax.lax.top_k(logits / options.temperature[:, None], vocab_size)
        total = jax.nn.logsumexp(values, axis=-1)
        kept, _ = keep_mask(values, total, options)
        return jnp.zeros(logits.shape, bool).at[jnp.arange(len(ids))[:, None], ids].set(kept)

    return jax.jit(keep)


@settings(max_examples=150)
@given(
    weights=st.lists(st.integers(0, 12), min_size=8, max_size=8),
    temperature=st.sampled_from([0.25, 0.5, 1.0, 2.0]),
    top_k=st.integers(0, 9),
    top_p=st.integers(1, 40).map(lambda n: n / 40),
    min_p=st.integers(0, 12).map(lambda n: n / 12),
)
def test_filters_keep_exactly_what_the_oracle_keeps(
    weights: list[int], temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    """Small integer weights: ties and exact boundaries are the rule, not the exception."""
    weights[0] = weights[0] or 1
    with np.errstate(divide="ignore"):
        logits = np.log(np.array(weights, np.float64))
    options = dict(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    expected = distribution(logits, **options) > 0
    kept = _keep()(logits.astype(np.float32)[None], rows(1, **options))
    np.testing.assert_array_equal(np.asarray(kept)[0], expected)


@settings(max_examples=50)
@given(seed=st.integers(0, 2**32 - 1), scale=st.sampled_from([0.1, 1.0, 10.0, 100.0]))
def test_filters_keep_what_the_oracle_keeps_of_random_logits(seed: int, scale: float) -> None:
    rng = np.random.default_rng(seed)
    logits = (rng.normal(size=8) * scale).astype(np.float32)
    options = dict(
        temperature=float(rng.uniform(0.1, 2)),
        top_k=int(rng.integers(0, 9)),
        top_p=float(rng.uniform(0.05, 1)),
        min_p=float(rng.choice([0, rng.uniform(0, 1)])),
    )
    kept = np.asarray(_keep()(logits[None], rows(1, **options)))[0]
    # The boundary itself may fall either way.
    wider = dict(options, top_p=min(1.0, options["top_p"] * (1 + 4 * CLOSE)))
    wider["min_p"] *= 1 - 4 * CLOSE
    narrower = dict(options, top_p=options["top_p"] * (1 - 4 * CLOSE))
    narrower["min_p"] = min(1.0, options["min_p"] * (1 + 4 * CLOSE))
    assert (kept >= (distribution(logits, **narrower) > 0)).all()
    assert (kept <= (distribution(logits, **wider) > 0)).all()


def test_a_row_does_not_notice_its_neighbours_options() -> None:
    mixed = [
        rows(1, **options)  # type: ignore[arg-type]
        for options in CASES.values()
    ]
    together = SamplingRows(*(np.concatenate(x) for x in zip(*mixed, strict=True)))  # type: ignore[arg-type]
    together = together._replace(positions=np.arange(len(mixed), dtype=np.int32))  # type: ignore[arg-type]
    tokens = np.asarray(draw(LOGITS, together).tokens)
    for index, options in enumerate(CASES.values()):
        one = rows(1, **options)._replace(positions=np.array([index], np.int32))  # type: ignore[arg-type]
        assert draw(LOGITS, one).tokens[0] == tokens[index]


def test_masked_tokens_are_never_drawn() -> None:
    logits = np.where(np.arange(8) % 3 == 0, LOGITS, -np.inf).astype(np.float32)
    for options in CASES.values():
        tokens = np.asarray(draw(logits, rows(2000, **options)).tokens)
        assert set(tokens.tolist()) <= {0, 3, 6}, options


def test_one_token_left_is_drawn() -> None:
    logits = np.full(8, -np.inf, np.float32)
    logits[5] = -1e30
    for options in CASES.values():
        assert (np.asarray(draw(logits, rows(4, **options)).tokens) == 5).all()


def test_an_unlikely_token_is_drawn_as_often_as_it_should() -> None:
    """Of probability 1e-4: 200,000 draws give it 20 times, give or take."""
    logits = np.log([1 - 1e-4, 1e-4]).astype(np.float32)
    tokens = np.asarray(draw(logits, rows(200_000), filtered=False).tokens)
    assert 5 <= tokens.sum() <= 40


@pytest.mark.parametrize("options", CASES.values(), ids=CASES)
def test_processed_logprobs_are_those_of_the_distribution(options: dict[str, float]) -> None:
    got = draw(LOGITS, rows(50, processed=1, **options), processed=True, logprobs=8)
    expected = distribution(LOGITS, **options)
    if options.get("temperature", 1.0) < 1e-5:
        expected = distribution(LOGITS)  # greedy: no temperature, no filter
    reported = np.zeros(8)
    assert got.top_ids is not None and got.top_logprobs is not None and got.logprobs is not None
    reported[np.asarray(got.top_ids[0])] = np.exp(np.asarray(got.top_logprobs[0], np.float64))
    np.testing.assert_allclose(reported, expected, atol=1e-6)
    np.testing.assert_allclose(np.exp(got.logprobs), expected[np.asarray(got.tokens)], atol=1e-6)


def test_raw_logprobs_ignore_every_option() -> None:
    masked = np.where(np.arange(8) == 4, LOGITS, -np.inf).astype(np.float32)[None]
    got = _sample(
        masked, LOGITS[None], rows(1, temperature=0.2, top_k=1),
        spec=SamplerSpec(random=True, filtered=True, processed=True, logprobs=-1),
    )  # fmt: skip
    assert got.tokens[0] == 4
    np.testing.assert_allclose(got.logprobs[0], math.log(0.02), atol=1e-5)
    expected = [3, 1, 5, 0, 6, 2, 7, 4]  # ties: the lower id first
    assert got.top_ids[0].tolist() == expected
    np.testing.assert_allclose(got.top_logprobs[0], LOGITS[expected], atol=1e-5)


def test_every_need_is_covered_by_a_compiled_spec() -> None:
    compiled = all_sampler_specs()
    assert len(compiled) < 20
    for random, filtered, rules, processed in np.ndindex(2, 2, 2, 2):
        for level in range(4):
            spec = sampler_spec(random, filtered, rules, processed, level)
            assert (spec in compiled) == (level < 3)
            assert spec.random >= random and spec.rules >= rules
            assert spec.filtered >= filtered and spec.processed >= processed
    assert sampler_spec(0, 0, 0, 0, 0) == SamplerSpec()
    assert sampler_spec(0, 1, 0, 0, 2) == SamplerSpec(filtered=True, logprobs=20)


@pytest.mark.parametrize(
    ("options", "complete"),
    [
        ({"top_k": 10}, True),
        ({"top_k": 16}, True),
        ({"top_k": 17}, False),
        ({"top_k": 40, "top_p": 0.5}, False),  # 0.5 of a mass that goes beyond the candidates
        ({"min_p": 0.9, "top_p": 0.5}, False),
        ({"top_p": 0.2}, True),
        ({"top_p": 0.9}, False),
        ({"top_k": 12, "top_p": 0.9}, True),
    ],
    ids=str,
)
def test_candidates_that_are_not_enough_say_so(options: dict[str, float], complete: bool) -> None:
    """64 tokens of nearly one probability, of which the 16 likeliest are candidates."""
    values = -1e-4 * jnp.arange(64.0)[None, :]
    zeros = jnp.zeros(1, jnp.int32)
    rows = SamplingRows(
        temperature=jnp.ones(1),
        top_k=jnp.full(1, options.get("top_k", 0), jnp.int32),
        top_p=jnp.full(1, options.get("top_p", 1.0)),
        min_p=jnp.full(1, options.get("min_p", 0.0)),
        seeds=jnp.zeros((1, 2), jnp.uint32),
        samples=zeros,
        positions=zeros,
        processed=zeros,
    )
    total = jax.nn.logsumexp(values, axis=-1)
    few, said = keep_mask(values[:, :16], total, rows)
    exact, _ = keep_mask(values, total, rows)
    assert bool(said[0]) == complete
    if complete:
        assert few[0].tolist() == exact[0, :16].tolist()
        assert not exact[0, 16:].any()
