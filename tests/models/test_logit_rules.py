"""Bias, masks and penalties against plain Python, in batches of rows with different options."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import jllm
from jllm.engine.rules import request_rules
from jllm.models.logit_rules import (
    BAD_SEQUENCE_TOKENS,
    HISTORY_CHUNK,
    RuleRows,
    Rules,
    apply_rules,
    empty_rules,
)
from tests.models.sampler_oracle import penalised

V = 40  # no multiple of 32
L = 2 * HISTORY_CHUNK + 77
B = 4
_apply: Any = jax.jit(apply_rules)

Row = tuple[Sequence[int], Sequence[int], dict[str, Any]]  # prompt, output, SamplingParams


def apply(logits: np.ndarray, rows: Sequence[Row], eos: Sequence[int] = ()) -> np.ndarray:
    """Logits (len(rows), V): rows that end at different places, in slots of another order."""
    assert len(rows) <= B
    rows = [*rows, *[([1], [], {})] * (B - len(rows))]
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, V, (B + 1, L)).astype(np.int32)  # what lies beyond must not matter
    rules = jax.tree.map(np.array, empty_rules(B + 1, V))
    slots = np.array([2, 0, 3, 1], np.int32)
    params = [jllm.SamplingParams(max_tokens=None, **options) for _, _, options in rows]
    ruled = np.zeros(B, np.int32)
    for slot, row, (prompt, output, _), p in zip(slots, range(B), rows, params, strict=True):
        tokens[slot, : len(prompt) + len(output)] = [*prompt, *output]
        mine = request_rules(p, None, eos, V)
        ruled[row] = mine is not None
        if mine is not None:
            for table, value in zip(rules, mine, strict=True):
                table[slot] = value
    options = RuleRows(
        positions=np.array([len(prompt) + len(output) for prompt, output, _ in rows], np.int32),
        num_prompt=np.array([len(prompt) for prompt, _, _ in rows], np.int32),
        ruled=ruled,
        min_tokens=np.array([p.min_tokens for p in params], np.int32),
        presence_penalty=np.array([p.presence_penalty for p in params], np.float32),
        frequency_penalty=np.array([p.frequency_penalty for p in params], np.float32),
        repetition_penalty=np.array([p.repetition_penalty for p in params], np.float32),
    )  # type: ignore[arg-type]
    return np.asarray(_apply(np.tile(logits, (B, 1)), tokens, slots, Rules(*rules), options))


def forbidden(row: np.ndarray) -> set[int]:
    return set(np.flatnonzero(np.isneginf(row)).tolist())


LOGITS = np.random.default_rng(1).normal(size=V).astype(np.float32) * 4
penalties = st.fixed_dictionaries(
    {
        "presence_penalty": st.sampled_from([0.0, 0.5, -2.0, 2.0]),
        "frequency_penalty": st.sampled_from([0.0, 0.25, -1.0, 2.0]),
        "repetition_penalty": st.sampled_from([1.0, 1.3, 0.5, 100.0]),
    }
)
ids = st.lists(st.integers(0, V - 1), max_size=12)


@settings(max_examples=60)
@given(st.lists(st.tuples(ids.map(lambda x: [*x, 0]), ids, penalties), min_size=B, max_size=B))
def test_penalties_equal_the_oracle(rows: list[Row]) -> None:
    got = apply(LOGITS, rows)
    for row, (prompt, output, p) in zip(got, rows, strict=True):
        values = (p[name] for name in ("presence_penalty", "frequency_penalty"))
        expected = penalised(LOGITS, prompt, output, *values, p["repetition_penalty"])
        np.testing.assert_allclose(row, expected, rtol=1e-5, atol=1e-5)


def test_penalties_count_a_long_history_whole() -> None:
    rng = np.random.default_rng(2)
    prompt, output = rng.integers(0, 9, 300).tolist(), rng.integers(0, 20, 250).tolist()
    got = apply(LOGITS, [(prompt, output, {"frequency_penalty": 0.01, "repetition_penalty": 1.5})])
    expected = penalised(LOGITS, prompt, output, 0, 0.01, 1.5)
    np.testing.assert_allclose(got[0], expected, rtol=1e-4, atol=1e-4)


def test_presence_and_frequency_count_no_prompt_and_no_padding() -> None:
    got = apply(LOGITS, [([3, 4, 5], [], {"presence_penalty": 1.0, "frequency_penalty": 1.0})])
    np.testing.assert_array_equal(got[0], LOGITS)


def test_a_row_without_rules_keeps_its_logits_to_the_bit_beside_rows_that_have_all() -> None:
    every: dict[str, Any] = dict(
        logit_bias={1: 5.0}, allowed_token_ids=[1, 2, 3], bad_words=[[4, 2]], min_tokens=9,
        stop_token_ids=[3], presence_penalty=1.0, frequency_penalty=1.0, repetition_penalty=2.0,
    )  # fmt: skip
    got = apply(LOGITS, [([1, 4], [], every), ([1, 4], [2, 2], {}), ([4], [4], every)])
    np.testing.assert_array_equal(got[1], LOGITS)
    for row in (0, 2):
        assert forbidden(got[row]) == set(range(V)) - {1}


def test_bias_is_added_and_a_zero_changes_nothing() -> None:
    got = apply(LOGITS, [([1], [], {"logit_bias": {0: -100, 7: 2.5, 8: 0.0, V - 1: 100.0}})])
    expected = LOGITS.copy()
    expected[[0, 7, V - 1]] += np.float32([-100, 2.5, 100])
    np.testing.assert_array_equal(got[0], expected)


@settings(max_examples=30)
@given(st.lists(st.sets(st.integers(0, V - 1), min_size=1), min_size=B, max_size=B))
def test_allowed_tokens_are_all_that_is_left(allowed: list[set[int]]) -> None:
    got = apply(LOGITS, [([1], [], {"allowed_token_ids": sorted(some)}) for some in allowed])
    for row, some in zip(got, allowed, strict=True):
        assert forbidden(row) == set(range(V)) - some
        np.testing.assert_array_equal(row[sorted(some)], LOGITS[sorted(some)])


def test_every_stop_token_is_forbidden_until_min_tokens() -> None:
    """CASES 15: two eos ids, of which only one was masked."""
    options = {"min_tokens": 2, "stop_token_ids": [9]}
    rows = [([1, 5], [5] * n, options) for n in range(4)]
    assert [forbidden(row) for row in apply(LOGITS, rows, eos=(2, 37))] == [
        {2, 9, 37}, {2, 9, 37}, set(), set(),
    ]  # fmt: skip


def test_ignored_eos_is_no_stop_token() -> None:
    options = {"min_tokens": 2, "stop_token_ids": [9], "ignore_eos": True}
    assert forbidden(apply(LOGITS, [([1], [], options)], eos=(2, 37))[0]) == {9}
    assert forbidden(apply(LOGITS, [([1], [], {"min_tokens": 2, "ignore_eos": True})])[0]) == set()


@settings(max_examples=100)
@given(
    words=st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=4), max_size=6),
    history=st.lists(st.integers(0, 2), min_size=1, max_size=6),
)
def test_bad_words_forbid_exactly_the_token_that_would_complete_one(
    words: list[list[int]], history: list[int]
) -> None:
    expected = {
        word[-1] for word in words if len(word) == 1 or history[-len(word) + 1 :] == word[:-1]
    }
    # Prompt and output alike are history.
    rows = [(history, [], {"bad_words": words}), (history[:1], history[1:], {"bad_words": words})]
    got = apply(LOGITS, rows)
    assert forbidden(got[0]) == forbidden(got[1]) == expected


def test_the_longest_bad_word_is_found() -> None:
    word = list(range(BAD_SEQUENCE_TOKENS))
    got = apply(LOGITS, [(word[:-1], [], {"bad_words": [word]}), (word[1:-1], [], {})])
    assert [forbidden(row) for row in got[:2]] == [{word[-1]}, set()]


def test_a_long_bad_word_gives_way_where_nothing_else_is_allowed() -> None:
    options = {"allowed_token_ids": [5], "bad_words": [[4, 5], [6]]}
    got = apply(LOGITS, [([4], [], options), ([3], [], options)])
    assert forbidden(got[0]) == forbidden(got[1]) == set(range(V)) - {5}


def test_penalties_leave_forbidden_tokens_forbidden() -> None:
    for repetition in (0.01, 100.0):
        options = {
            "allowed_token_ids": [5], "repetition_penalty": repetition, "logit_bias": {4: 100},
            "presence_penalty": -2.0, "frequency_penalty": -2.0,
        }  # fmt: skip
        got = apply(LOGITS, [([4], [3, 4], options)])
        assert forbidden(got[0]) == set(range(V)) - {5}
        assert np.isfinite(got[0][5])


@pytest.mark.parametrize(
    "options",
    [
        {"allowed_token_ids": [5], "bad_words": [[5]]},
        {"allowed_token_ids": [9, 2], "min_tokens": 1, "stop_token_ids": [9]},
        {"allowed_token_ids": [9, 5], "min_tokens": 1, "stop_token_ids": [9], "bad_words": [[5]]},
        {"bad_words": [[token] for token in range(V)]},
    ],
    ids=["allowed but bad", "only stops", "stops and bad words", "all bad"],
)
def test_options_that_forbid_every_token_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"allowed_token_ids, bad_words and min_tokens .* every"):
        request_rules(jllm.SamplingParams(**options), None, (2,), V)


def test_a_bad_word_of_too_many_tokens_is_refused() -> None:
    params = jllm.SamplingParams(bad_words=[[1] * (BAD_SEQUENCE_TOKENS + 1)])
    with pytest.raises(ValueError, match=r"of 17 tokens; a bad word must have between 1 and 16"):
        request_rules(params, None, (), V)


def test_a_request_without_rules_has_none() -> None:
    params = jllm.SamplingParams(presence_penalty=1.0, stop_token_ids=[3])
    assert request_rules(params, None, (2,), V) is None
