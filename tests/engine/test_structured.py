"""Structured outputs in the engine: the text has its form, whatever else is asked and whoever else
is in the batch."""

from __future__ import annotations

import dataclasses
import functools
import json
import re
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax.numpy as jnp
import jsonschema
import numpy as np
import pytest

import jllm
from jllm.engine import grammar
from jllm.tokenizer import Tokenizer
from tests.demo_model import load_demo_model
from tests.tiny_model import greedy, random_prompts, run, tiny_model
from tests.tokenizers_for_tests import byte_level_tokenizer, sentencepiece_tokenizer

PROMPTS = random_prompts([9, 21, 40, 5, 33, 12, 28, 17])
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "b", None]}, "maxItems": 2},
        "more": {"anyOf": [{"type": "boolean"}, {"const": 1.5}]},
    },
    "required": ["name", "age", "more"],
    "additionalProperties": False,
}
SIZES = dict(max_num_seqs=8, num_kv_blocks=128, max_model_len=512)
BUCKETS = dict(decode_buckets=(8,), prefill_buckets=(32,))
BYTES = byte_level_tokenizer()
WORDS = ["he", "hell", "she sells", "a/b\n"]


def model(tokenizer: Tokenizer | None = BYTES) -> jllm.Params:
    """The tiny model with a tokenizer and that one's eos."""
    params = tiny_model()
    eos = params.config.eos_token_ids if tokenizer is None else (tokenizer.eos_token_id,)
    config = dataclasses.replace(params.config, eos_token_ids=eos)
    return dataclasses.replace(params, config=config, tokenizer=tokenizer)


@functools.cache
def engine(tokenizer: Tokenizer | None = BYTES, **options: Any) -> jllm.Engine:
    """Few sizes, so that few programs serve all tests of this file."""
    return jllm.Engine(model(tokenizer), jllm.EngineConfig(**{**SIZES, **BUCKETS, **options}))


def ask(form: dict[str, Any] | None, **options: Any) -> jllm.SamplingParams:
    structured = None if form is None else jllm.Structured(**form)
    return jllm.SamplingParams(**{"max_tokens": 300, "structured": structured, **options})


def complete(
    e: jllm.Engine, params: list[jllm.SamplingParams], prompts: list[list[int]] = PROMPTS
) -> list[list[jllm.CompletionOutput]]:
    names = [
        e.add_request(prompt, option, stream=False)
        for prompt, option in zip(prompts, params, strict=False)
    ]
    outputs = run(e)
    return [outputs[name].outputs for name in names]


def sample(form: dict[str, Any], **options: Any) -> jllm.CompletionOutput:
    [[output]] = complete(engine(), [ask(form, **options)])
    return output


TOKENIZERS = {"byte-level": byte_level_tokenizer, "sentencepiece": sentencepiece_tokenizer}


@pytest.mark.parametrize("tokenizer", TOKENIZERS)
def test_a_random_model_writes_json_of_the_schema(tokenizer: str) -> None:
    e = engine(TOKENIZERS[tokenizer]())
    outputs = complete(e, [ask({"json_schema": SCHEMA}, n=5, seed=seed) for seed in range(8)])
    found = [output for samples in outputs for output in samples]
    values = {output.text for output in found if output.finish_reason == "stop"}
    assert len(values) > 30
    for text in values:
        jsonschema.validate(json.loads(text), SCHEMA)


@pytest.mark.parametrize("tokenizer", TOKENIZERS)
def test_a_random_model_writes_what_the_form_allows_and_then_stops(tokenizer: str) -> None:
    e = engine(TOKENIZERS[tokenizer]())
    regex = r"[A-Za-z]{1,4}(-[0-9]{2}| \(é\))"
    forms: list[dict[str, Any]] = [{"regex": regex}, {"choice": WORDS}, {"json_object": True}]
    outputs = complete(e, [ask(form, n=6, seed=3) for form in forms])
    for output in outputs[0]:
        assert re.fullmatch(regex, output.text)
        assert output.finish_reason == "stop" and output.stop_reason is None
    assert len({output.text for output in outputs[0]}) > 3
    assert {output.text for output in outputs[1]} <= set(WORDS)
    for output in outputs[2]:
        if output.finish_reason == "stop":
            assert isinstance(json.loads(output.text), dict)
        else:
            assert output.finish_reason == "length" and output.text.startswith("{")


def test_the_demo_model_writes_json_of_the_schema() -> None:
    params = load_demo_model()
    sizes = dict(max_num_seqs=4, num_kv_blocks=128, decode_buckets=(4,), prefill_buckets=(64,))
    config = jllm.EngineConfig(**sizes)
    messages = [{"role": "user", "content": "Give me a person as JSON with name and age."}]
    options = [ask({"json_schema": SCHEMA}, temperature=t, seed=1) for t in (0, 0.7)]
    answers = jllm.chat(params, [messages] * 2, options, config=config, use_tqdm=False)
    for answer in answers:
        jsonschema.validate(json.loads(answer.outputs[0].text), SCHEMA)
        assert answer.outputs[0].finish_reason == "stop"
    words = ask({"choice": ["Paris", "Rome", "Berlin"]}, temperature=0)
    prompt = "The capital of France is "
    answers = jllm.generate(params, prompt, words, config=config, use_tqdm=False)
    assert answers[0].outputs[0].text == "Paris"
    jllm.release()


VARIETY: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "random": {"seed": 5},
    "filtered": {"seed": 5, "top_k": 3, "top_p": 0.9},
    "penalties": {"seed": 5, "repetition_penalty": 1.3, "presence_penalty": 1.0},
    "biased": {"seed": 5, "logit_bias": {3: 9.0, 40: -50.0}},
    "logprobs": {"seed": 5, "logprobs": 3},
    "processed": {"seed": 5, "logprobs": 3, "logprobs_mode": "processed"},
}


@pytest.mark.parametrize("name", VARIETY)
def test_sampling_options_apply_to_what_the_form_allows(name: str) -> None:
    output = sample({"regex": "[a-m]{5}x?"}, **VARIETY[name])
    assert re.fullmatch("[a-m]{5}x?", output.text) and output.finish_reason == "stop"


def plain(index: int, **options: Any) -> jllm.SamplingParams:
    return ask(None, seed=index, max_tokens=24, ignore_eos=True, **options)


def structured(index: int) -> jllm.SamplingParams:
    forms: list[dict[str, Any]] = [
        {"json_schema": SCHEMA},
        {"choice": WORDS},
        {"regex": "[ab]{40}"},
    ]
    return ask(forms[index % 3], seed=index, temperature=1.3, max_tokens=60)


MIXTURE = [plain(0), structured(0), plain(1, logprobs=2), structured(1), structured(2)]
MIXTURE += [plain(2, temperature=0), structured(3), structured(4)]


@functools.cache
def solo() -> list[list[int]]:
    """What each request of the mixture says when it is alone."""
    tokens = []
    for prompt, params in zip(PROMPTS, MIXTURE, strict=True):
        [[output]] = complete(engine(), [params], [prompt])
        tokens.append(output.token_ids)
    return tokens


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"overlap": False},
        {"prefix_cache": "naive"},
        {"num_kv_blocks": 40, "block_size": 4, "max_model_len": 128},
        {"num_kv_blocks": 40, "block_size": 4, "max_model_len": 128, "preemption": "swap"},
        {"prefill_buckets": (8,), "max_num_batched_tokens": 16},
        {"max_num_seqs": 3, "decode_buckets": (3,)},
    ],
    ids=str,
)
def test_no_row_notices_who_shares_its_batch(options: dict[str, Any]) -> None:
    e = engine(**options)
    before = e.stats().num_preemptions
    outputs = complete(e, MIXTURE)
    assert [output.token_ids for [output] in outputs] == solo()
    if "num_kv_blocks" in options:
        assert e.stats().num_preemptions > before


def test_prompts_that_are_cached_give_the_same_text() -> None:
    e, params = engine(), [ask({"json_schema": SCHEMA}, n=3, seed=8, max_tokens=60)] * 2
    prompts = [PROMPTS[2], PROMPTS[2]]
    first = complete(e, params, prompts)
    hits = e.stats().prefix_hits
    again = complete(e, params, prompts)
    assert e.stats().prefix_hits > hits
    for samples in (*first, *again):
        assert [s.token_ids for s in samples] == [s.token_ids for s in first[0]]
    assert len({s.text for s in first[0]}) == 3


def test_streamed_pieces_are_the_whole_text() -> None:
    params, e = ask({"json_schema": SCHEMA}, seed=4), engine()
    [[whole]] = complete(e, [params])
    e.add_request(PROMPTS[0], params)
    text = ""
    while e.has_unfinished():
        text += "".join(output.outputs[0].text for output in e.step())
    assert text == whole.text


def test_raw_logprobs_are_the_models_and_processed_ones_those_of_the_allowed_tokens() -> None:
    form = {"regex": "[ab]{4}"}
    raw = sample(form, seed=1, logprobs=0)
    expected = jllm.logprobs(tiny_model(), jnp.array(PROMPTS[0] + raw.token_ids))[-4:]
    assert raw.logprobs is not None
    got = [entry[t].logprob for t, entry in zip(raw.token_ids, raw.logprobs, strict=True)]
    np.testing.assert_allclose(got, expected, atol=1e-4)

    processed = sample(form, seed=1, logprobs=20, logprobs_mode="processed")
    assert processed.token_ids == raw.token_ids and processed.logprobs is not None
    for entry in processed.logprobs:
        assert {value.decoded_token for value in entry.values()} == {"a", "b"}
        assert sum(np.exp(value.logprob) for value in entry.values()) == pytest.approx(1, abs=1e-3)


def test_min_tokens_forbid_the_end_only_while_the_text_can_go_on() -> None:
    eos = BYTES.eos_token_id
    for seed in range(5):
        long = sample({"regex": "[ab]*"}, seed=seed, min_tokens=20, max_tokens=40)
        assert len(long.token_ids) >= 20 and eos not in long.token_ids[:20]
        assert re.fullmatch("[ab]*", long.text)
        short = sample({"choice": ["ab"]}, seed=seed, min_tokens=20)
        assert (short.text, short.finish_reason) == ("ab", "stop")


def test_a_text_that_may_go_on_ends_with_eos() -> None:
    output = sample({"regex": "a*"}, seed=0, logit_bias={BYTES.eos_token_id: 100})
    assert (output.text, output.token_ids) == ("", [BYTES.eos_token_id])
    assert output.finish_reason == "stop"


def test_a_stop_string_cuts_the_text_short() -> None:
    [[output]] = complete(engine(), [ask({"regex": "[ab]{3}cd{5}"}, seed=1, stop=["cd"])])
    assert re.fullmatch("[ab]{3}", output.text)
    assert (output.finish_reason, output.stop_reason) == ("stop", "cd")


def test_max_tokens_cut_the_text_short_but_not_one_that_is_just_complete() -> None:
    assert sample({"regex": "[a-d]{9}"}, seed=1, max_tokens=8).finish_reason == "length"
    assert sample({"regex": "[a-d]{9}"}, seed=1, max_tokens=9).finish_reason == "stop"


@pytest.mark.parametrize(
    "options",
    [
        {"allowed_token_ids": BYTES.encode("xyz")},
        {"bad_words": [[BYTES.encode("a")[0]], "b"]},
        {"allowed_token_ids": BYTES.encode("b"), "bad_words": [[PROMPTS[0][-1], 99]]},
    ],
    ids=str,
)
def test_where_masks_contradict_the_form_the_form_wins(options: dict[str, Any]) -> None:
    assert re.fullmatch("[ab]{4}", sample({"regex": "[ab]{4}"}, seed=2, **options).text)


def test_other_masks_hold_among_what_the_form_allows() -> None:
    output = sample({"regex": "[ab]{8}"}, seed=2, allowed_token_ids=BYTES.encode("bc"))
    assert output.text == "b" * 8
    output = sample({"regex": "[ab]{8}"}, seed=2, bad_words=["aa", [BYTES.encode("b")[0]] * 2])
    assert output.text in ("abababab", "babababa")


def test_the_form_wins_over_a_logits_processor() -> None:
    output = sample({"choice": ["yes"]}, logits_processor=prefers_zero)
    assert output.text == "yes"


def prefers_zero(logits: Any, tokens_so_far: Any) -> Any:
    return jnp.where(jnp.arange(len(logits)) == 0, logits, -jnp.inf)


def test_aborting_one_leaves_the_others_alone() -> None:
    e = engine()
    names = [e.add_request(p, q, stream=False) for p, q in zip(PROMPTS, MIXTURE, strict=True)]
    outputs = {}
    for step in range(1000):
        if not e.has_unfinished():
            break
        if step == 4:
            e.abort(names[1])
            e.abort(names[4])
        outputs |= {output.request_id: output for output in e.step()}
    assert outputs[names[1]].outputs[0].finish_reason == "abort"
    for index in (0, 2, 3, 5, 6, 7):
        assert outputs[names[index]].outputs[0].token_ids == solo()[index]


def test_a_form_that_cannot_be_used_is_refused_before_it_is_queued() -> None:
    e = engine()
    for form in ({"regex": "("}, {"json_schema": {"type": "x"}}, {"grammar": "start: a"}):
        with pytest.raises(ValueError, match="cannot be used"):
            e.add_request(PROMPTS[0], ask(form))
        assert not e.has_unfinished()
    with pytest.raises(ValueError, match="needs text, but the model has no tokenizer"):
        engine(tokenizer=None).add_request(PROMPTS[0], ask({"regex": "a"}))


def test_a_form_can_be_compiled_ahead_by_another_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    e, form = engine(), {"regex": "[ab]{5}c"}
    with ThreadPoolExecutor(1) as pool:
        pool.submit(e.prepare_structured, jllm.Structured(**form)).result()
        bad = pool.submit(e.prepare_structured, jllm.Structured(regex="("))
    with pytest.raises(ValueError, match=r"Structured\.regex cannot be used"):
        bad.result()
    monkeypatch.setattr(grammar, "compile_grammar", None)  # it need not be compiled again
    assert re.fullmatch("[ab]{5}c", sample(form, seed=1).text)


def test_a_grammar_that_meets_a_limit_aborts_its_request_alone() -> None:
    rules = " | ".join(f"r{i}" for i in range(2200))
    source = f'start: "x" ({rules})\n' + "\n".join(f'r{i}: "a" "b{i}"' for i in range(2200))
    e = engine()
    [[bad], [good]] = complete(e, [ask({"grammar": source}), plain(0)], PROMPTS[:1] * 2)
    assert bad.finish_reason == "abort" and "items" in str(bad.stop_reason)
    assert good.token_ids == solo()[0]


def test_nothing_compiles_after_warm_up() -> None:
    sizes = dict(max_num_seqs=2, num_kv_blocks=64, max_model_len=128)
    config = jllm.EngineConfig(**sizes, decode_buckets=(2,), prefill_buckets=(16,))
    with jllm.Engine(model(), config) as e:
        e.warm_up()
        compiled = e.stats().num_compiles
        forms: list[dict[str, Any]] = [{"json_schema": SCHEMA}, {"choice": WORDS}]
        options: list[dict[str, Any]] = [{"seed": 1}, {"temperature": 0}, {"n": 3, "top_p": 0.9}]
        complete(e, [ask(f, max_tokens=30, **o) for f in forms for o in options])
        assert e.stats().num_compiles == compiled


def test_greedy_rows_beside_a_form_are_exact() -> None:
    params = [plain(0, temperature=0), structured(0)]
    [[output], _] = complete(engine(), params, PROMPTS[:2])
    assert output.token_ids == greedy(PROMPTS[0], 24)
