"""Text and ends of a sample: deltas, stop strings, stop tokens, as tokens arrive one by one."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import jllm
from jllm.engine.completion import Completion
from jllm.engine.request import Request
from jllm.tokenizer import Tokenizer
from tests.tiny_model import run
from tests.tokenizers_for_tests import demo_tokenizer, sentencepiece_tokenizer

TEXT = "Ça va? 你好，世界! 👩‍👩‍👧 naïve ABCDEFGHIJ 🎉🎉 end."


def completion(
    tokenizer: Tokenizer | None, eos: Sequence[int] = (), num_tokens: int = 500, **options: Any
) -> Completion:
    params = jllm.SamplingParams(max_tokens=None, **options)
    tokens = np.zeros(1 + num_tokens, np.int32)
    return Completion(Request(0, tokens, 1, params), tokenizer, eos)


def feed(c: Completion, tokens: Sequence[int]) -> list[jllm.CompletionOutput]:
    """The streamed outputs of tokens that arrive one by one, until the sample ends."""
    outputs = []
    for token in tokens:
        if c.request.finished:
            break
        c.request.pending += 1
        c.push(token, None)
        if c.has_news:
            outputs.append(c.news())
    return outputs


@pytest.mark.parametrize("make", [demo_tokenizer, sentencepiece_tokenizer])
def test_deltas_never_hold_half_a_character_and_add_up_to_the_whole(make: Any) -> None:
    """CASES 10 and 11: emoji over several tokens, and SentencePiece's spaces."""
    tokenizer = make()
    ids = tokenizer.encode(TEXT, add_special_tokens=False)
    assert len(ids) > len(TEXT) / 2
    c = completion(tokenizer, num_tokens=len(ids))
    outputs = feed(c, ids)
    assert all("\ufffd" not in output.text for output in outputs)
    assert "".join(output.text for output in outputs) == c.whole().text == tokenizer.decode(ids)


def test_text_that_ends_inside_a_character_shows_it_replaced_at_the_end() -> None:
    tokenizer = demo_tokenizer()
    ids = tokenizer.encode("ok 🎉", add_special_tokens=False)[:-1]
    c = completion(tokenizer, num_tokens=len(ids))
    outputs = feed(c, ids)
    assert outputs[-1].finish_reason == "length"
    assert "".join(output.text for output in outputs) == tokenizer.decode(ids) == "ok \ufffd"


def test_a_stop_string_over_several_tokens_is_never_shown_in_part() -> None:
    """CASES 8."""
    tokenizer = demo_tokenizer()
    ids = tokenizer.encode("ABC DEFGHIJ more", add_special_tokens=False)
    c = completion(tokenizer, stop="DEFGHIJ")
    outputs = feed(c, ids)
    assert "".join(output.text for output in outputs) == "ABC "
    assert (outputs[-1].finish_reason, outputs[-1].stop_reason) == ("stop", "DEFGHIJ")
    assert [output.finish_reason for output in outputs[:-1]] == [None] * (len(outputs) - 1)


@pytest.mark.parametrize("end", ["length", "eos"])
def test_held_text_is_shown_when_the_sample_ends_another_way(end: str) -> None:
    """CASES 9 and 12."""
    tokenizer = demo_tokenizer()
    ids = tokenizer.encode("ABC DEFGH", add_special_tokens=False)
    length = len(ids) if end == "length" else len(ids) + 5
    c = completion(tokenizer, (2,), length, stop="DEFGHIJ")
    outputs = feed(c, [*ids, 2])
    assert "".join(output.text for output in outputs) == c.whole().text == "ABC DEFGH"
    assert outputs[-1].finish_reason == ("length" if end == "length" else "stop")
    assert outputs[-1].stop_reason is None


@settings(max_examples=100)
@given(data=st.data())
def test_streams_with_stop_strings_equal_the_text_cut_at_the_first(data: st.DataObject) -> None:
    tokenizer = demo_tokenizer()
    pieces = st.sampled_from(["a", "ab", "b", "é", "🎉", " ", "ba"])
    text = "".join(data.draw(st.lists(pieces, max_size=12)))
    stops = data.draw(st.lists(st.lists(pieces, min_size=1, max_size=3).map("".join), max_size=3))
    include = data.draw(st.booleans())
    ids = tokenizer.encode(text, add_special_tokens=False)
    c = completion(tokenizer, num_tokens=len(ids), stop=stops, include_stop_str_in_output=include)
    outputs = feed(c, ids)
    streamed = "".join(output.text for output in outputs)
    assert streamed == c.whole().text
    ends = [(text.index(stop) + len(stop), -len(stop), stop) for stop in stops if stop in text]
    if not ends:
        assert streamed == text
        return
    end, negative_length, stop = min(ends)
    assert streamed == text[: end if include else end + negative_length]
    assert outputs[-1].stop_reason == stop


def test_stop_strings_are_not_looked_for_before_min_tokens() -> None:
    tokenizer = demo_tokenizer()
    ids = tokenizer.encode("one two one two one two", add_special_tokens=False)
    assert len(ids) == 6
    c = completion(tokenizer, stop="one", min_tokens=3)
    outputs = feed(c, ids)
    assert c.whole().text == "one two one two "
    assert outputs[-1].token_ids == ids[4:5] and outputs[-1].stop_reason == "one"


def test_any_of_several_eos_ids_ends_a_sample() -> None:
    """CASES 13."""
    for eos in (9, 37):
        c = completion(None, (9, 37))
        feed(c, [5, 6, eos, 7])
        assert c.whole().token_ids == [5, 6, eos]
        assert (c.whole().finish_reason, c.whole().stop_reason) == ("stop", None)


def test_ignore_eos_ignores_all_of_them_but_not_stop_token_ids() -> None:
    """CASES 14."""
    c = completion(None, (9, 37), ignore_eos=True, stop_token_ids=[37])
    feed(c, [5, 9, 6, 37, 7])
    assert c.whole().token_ids == [5, 9, 6, 37]
    assert (c.whole().finish_reason, c.whole().stop_reason) == ("stop", 37)


@functools.cache
def babbler() -> jllm.Params:
    """A tiny random model that speaks the demo model's vocabulary."""
    tokenizer = demo_tokenizer()
    config = dataclasses.replace(
        jllm.ModelConfig.preset("tiny"), vocab_size=tokenizer.vocab_size, num_layers=1
    )
    return dataclasses.replace(
        jllm.init(config, jax.random.key(1), dtype="float32"), tokenizer=tokenizer
    )


def test_a_whole_engine_streams_what_it_would_return_at_once() -> None:
    """Random tokens of the real vocabulary: halves of characters, special tokens, stop strings."""
    stops = ["e", "th", "\ufffd"]
    config = jllm.EngineConfig(
        max_num_seqs=8, max_model_len=128, num_kv_blocks=64, decode_buckets=(8,),
        prefill_buckets=(32,),
    )  # fmt: skip
    with jllm.Engine(babbler(), config) as e:
        requests = [
            jllm.SamplingParams(
                seed=seed, max_tokens=40, stop=stops[: seed % 4], skip_special_tokens=seed % 2 > 0
            )
            for seed in range(8)
        ]
        whole = [e.add_request("Hello 🎉", params, stream=False) for params in requests]
        expected = run(e)
        streams = [e.add_request("Hello 🎉", params) for params in requests]
        deltas: dict[str, list[jllm.CompletionOutput]] = {name: [] for name in streams}
        while e.has_unfinished():
            for output in e.step():
                deltas[output.request_id] += output.outputs
    for name, streamed, params in zip(whole, streams, requests, strict=True):
        final = expected[name].outputs[0]
        parts = deltas[streamed]
        assert "".join(part.text for part in parts) == final.text
        assert [token for part in parts for token in part.token_ids] == final.token_ids
        assert parts[-1].finish_reason == final.finish_reason
        assert {part.finish_reason for part in parts[:-1]} <= {None}
        assert not any(stop in final.text for stop in params.stop)
