"""What SamplingParams accepts and refuses."""

from __future__ import annotations

import copy
import dataclasses
import math
import pickle
from collections.abc import Mapping
from typing import Any

import pytest

import jllm

FIELDS = [field.name for field in dataclasses.fields(jllm.SamplingParams)]
NAN, INF = math.nan, math.inf

# Per field: values that are fine, and values that are refused.
GOOD: Mapping[str, list[Any]] = {
    "n": [1, 7],
    "temperature": [0, 0.7, 1e-7, 1e30],
    "top_k": [-1, 0, 1, 10**12],
    "top_p": [1e-9, 0.5, 1],
    "min_p": [0, 0.5, 1],
    "seed": [None, 0, -1, 2**40, -(2**63), 2**63 - 1],
    "max_tokens": [None, 1, 10**6],
    "min_tokens": [0, 16],
    "stop": ["x", ["x", "yz"], (), None, ["é", "\n"]],
    "stop_token_ids": [[], [0, 5], (7,), None],
    "include_stop_str_in_output": [True, False],
    "ignore_eos": [True, False],
    "presence_penalty": [-2, 0.5, 2],
    "frequency_penalty": [-2, 0.5, 2],
    "repetition_penalty": [0.01, 1, 100],
    "logit_bias": [None, {}, {0: -100, 5: 100.0}],
    "allowed_token_ids": [None, [0], (4, 4)],
    "bad_words": [(), ["a", " b"], [[1, 2], "c"], None],
    "logprobs": [None, -1, 0, 20],
    "prompt_logprobs": [None, 0, 20],
    "logprobs_mode": ["raw", "processed"],
    "logits_processor": [None, lambda logits, tokens: logits],
    "structured": [None, jllm.Structured(regex="a"), jllm.Structured(json_object=True)],
    "skip_special_tokens": [True, False],
    "spaces_between_special_tokens": [True, False],
    "detokenize": [True, False],
    "priority": [0, -5, 2**40],
}
BAD_FLOATS = [NAN, INF, -INF, "0.5", None, True, [1.0]]
BAD_INTS = [1.0, NAN, "1", True, [1]]
BAD_BOOLS = [0, 1, None, "yes"]
BAD: Mapping[str, list[Any]] = {
    "n": [0, -1, 10_001, None, *BAD_INTS],
    "temperature": [-0.1, *BAD_FLOATS],
    "top_k": [-2, None, *BAD_INTS],
    "top_p": [0, -0.5, 1.0001, *BAD_FLOATS],
    "min_p": [-0.1, 1.1, *BAD_FLOATS],
    "seed": [2**63, 2**64, -(2**63) - 1, *BAD_INTS],
    "max_tokens": [0, -1, *BAD_INTS],
    "min_tokens": [-1, None, *BAD_INTS],
    "stop": ["", ["a", ""], [1], [None], 5, b"x", {"a": 1}],
    "stop_token_ids": [[-1], ["2"], [1.0], [True], "12", 5],
    "include_stop_str_in_output": BAD_BOOLS,
    "ignore_eos": BAD_BOOLS,
    "presence_penalty": [2.1, -2.1, *BAD_FLOATS],
    "frequency_penalty": [2.1, -2.1, *BAD_FLOATS],
    "repetition_penalty": [0, -1, 1e-9, 101, *BAD_FLOATS],  # CASES 22: 0 gave inf
    "logit_bias": [{-1: 1.0}, {"1": 1.0}, {1: 101}, {1: -101}, {1: NAN}, {1: INF}, {1: None}, [1],
                   "x", dict.fromkeys(range(1025), 1)],
    "allowed_token_ids": [[], [-1], ["1"], [True], 5, "12"],
    "bad_words": ["word", [""], ["  "], [[]], [[-1]], [5], [["a"]], ["x"] * 1025],
    "logprobs": [-2, 21, *BAD_INTS],
    "prompt_logprobs": [-1, 21, *BAD_INTS],
    "logprobs_mode": ["RAW", "", None, 1],
    "logits_processor": ["x", 5, [len]],
    "structured": ["a", {"regex": "a"}, jllm.Structured, True],
    "skip_special_tokens": BAD_BOOLS,
    "spaces_between_special_tokens": BAD_BOOLS,
    "detokenize": BAD_BOOLS,
    "priority": [2**63, None, *BAD_INTS],
}  # fmt: skip


@pytest.mark.parametrize("field", FIELDS)
def test_every_field_accepts_its_whole_range(field: str) -> None:
    for value in GOOD[field]:
        jllm.SamplingParams(**{field: value})


@pytest.mark.parametrize("field", FIELDS)
def test_every_field_refuses_what_it_cannot_do_and_names_itself(field: str) -> None:
    for value in BAD[field]:
        with pytest.raises(ValueError, match=rf"^SamplingParams\.{field}\b") as caught:
            jllm.SamplingParams(**{field: value})
        assert str(caught.value).endswith("."), value


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": -0.5}, r"temperature must be in \[0, inf\) and finite, not -0\.5\."),
        ({"top_p": 0}, r"top_p must be in \(0, 1\] and finite, not 0\."),
        ({"repetition_penalty": NAN}, r"repetition_penalty must be in \[0\.01, 100\] and .* nan\."),
        ({"seed": 2**64}, r"seed must be between -9223372036854775808 and 9223372036854775807"),
        ({"logprobs": 21}, r"logprobs must be between -1 and 20, not 21\."),
        ({"logit_bias": {3: 500}}, r"logit_bias\[3\] must be in \[-100, 100\] and finite, not 500"),
        ({"logprobs_mode": "all"}, r"logprobs_mode must be 'raw' or 'processed', not 'all'"),
        ({"n": 0}, r"n must be between 1 and 10000, not 0\."),
        ({"bad_words": ["x"] * 1025}, r"bad_words has 1025 words; at most 1024"),
        ({"min_tokens": 9, "max_tokens": 8}, r"min_tokens is 9, more than max_tokens, 8"),
        ({"stop": "x", "detokenize": False}, r"stop needs text: .* detokenize=False"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_messages_name_field_value_and_range(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        jllm.SamplingParams(**options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"stop_token_ids": [1, 512]}, r"stop_token_ids has 512"),
        ({"allowed_token_ids": [1, 900]}, r"allowed_token_ids has 900"),
        ({"logit_bias": {1: 1.0, 600: 1.0}}, r"logit_bias has 600"),  # CASES 24
        ({"bad_words": [[1, 2], "text", [3, 777]]}, r"bad_words has 777"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_ids_outside_the_vocabulary_are_refused(options: dict[str, Any], message: str) -> None:
    params = jllm.SamplingParams(**options)
    with pytest.raises(ValueError, match=message + ", outside the vocabulary of 512 tokens"):
        params.check_vocab(512)
    params.check_vocab(1000)


def test_params_are_values() -> None:
    options: dict[str, Any] = dict(
        stop=["a"], stop_token_ids=[1], logit_bias={1: 2}, allowed_token_ids=[1], bad_words=[[1, 2]]
    )
    params = jllm.SamplingParams(**options)
    options["logit_bias"][1] = 50  # what the caller does with his own objects later
    assert params.logit_bias == {1: 2.0}
    assert params == jllm.SamplingParams(**(options | {"logit_bias": {1: 2}}))
    for same in (copy.deepcopy(params), pickle.loads(pickle.dumps(params))):
        assert same == params and hash(same) == hash(params)
    assert dataclasses.replace(params, n=2).n == 2
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.n = 2  # type: ignore[misc]


def test_every_field_is_documented() -> None:
    text = jllm.SamplingParams.__doc__ or ""
    for field in FIELDS:
        assert f"\n      {field}: " in text, field
