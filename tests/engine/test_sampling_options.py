"""Each SamplingParams field changes what the engine gives: a table with an entry per field.

Every entry is run twice: as it is it must pass, and with its own field withheld from the engine it
must fail. So an option that is accepted and ignored cannot go unnoticed.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import jllm
from jllm.tokenizer import Tokenizer
from tests.tiny_model import greedy, random_prompts, run, tiny_model
from tests.tokenizers_for_tests import byte_level_tokenizer, word_tokenizer

FIELDS = [field.name for field in dataclasses.fields(jllm.SamplingParams)]
PROMPT = random_prompts([9])[0]
TOKENIZER = byte_level_tokenizer()
LETTERS = [TOKENIZER.encode(letter)[0] for letter in "abcdfgh"]
EOS = 2  # the tiny model's


@functools.cache
def engine(tokenizer: Tokenizer = TOKENIZER, **options: Any) -> jllm.Engine:
    """Few sizes, so that few programs serve all tests of this file."""
    sizes = dict(max_num_seqs=4, num_kv_blocks=64, max_model_len=128)
    buckets = dict(decode_buckets=(4,), prefill_buckets=(32,))
    params = dataclasses.replace(tiny_model(), tokenizer=tokenizer)
    return jllm.Engine(params, jllm.EngineConfig(**{**sizes, **buckets, **options}))


class Ask:
    """Runs requests on the shared engine, without the option ``withheld``."""

    def __init__(self, withheld: str | None = None) -> None:
        self._withheld = withheld

    def params(self, **options: Any) -> jllm.SamplingParams:
        options = {"max_tokens": 8, **options}
        options.pop(self._withheld or "", None)
        return jllm.SamplingParams(**options)

    def whole(self, tokenizer: Tokenizer = TOKENIZER, **options: Any) -> jllm.RequestOutput:
        e = engine(tokenizer)
        name = e.add_request(PROMPT, self.params(**options), stream=False)
        return run(e)[name]

    def __call__(self, **options: Any) -> jllm.CompletionOutput:
        """Greedy unless asked otherwise, and eos is ignored."""
        return self.whole(**{"temperature": 0, "ignore_eos": True, **options}).outputs[0]

    def tokens(self, **options: Any) -> list[int]:
        return self(**options).token_ids


def expect_n(ask: Ask) -> None:
    outputs = ask.whole(n=3, seed=1).outputs
    assert [output.index for output in outputs] == [0, 1, 2]


def expect_temperature(ask: Ask) -> None:
    assert ask.whole(temperature=0, ignore_eos=True).outputs[0].token_ids == greedy(PROMPT, 8)


def expect_top_k(ask: Ask) -> None:
    assert ask.tokens(temperature=1.5, seed=3, top_k=1) == greedy(PROMPT, 8)


def expect_top_p(ask: Ask) -> None:
    assert ask.tokens(temperature=1.5, seed=3, top_p=1e-6) == greedy(PROMPT, 8)


def expect_min_p(ask: Ask) -> None:
    assert ask.tokens(temperature=1.5, seed=3, min_p=1.0) == greedy(PROMPT, 8)


def expect_seed(ask: Ask) -> None:
    draws = [ask.tokens(temperature=2.0, seed=seed) for seed in (3, 4, 3)]
    assert draws[0] == draws[2] != draws[1]


def expect_max_tokens(ask: Ask) -> None:
    assert len(ask.tokens(max_tokens=3)) == 3


def expect_min_tokens(ask: Ask) -> None:
    stop = greedy(PROMPT, 8)[2]
    assert stop not in ask.tokens(min_tokens=6, stop_token_ids=[stop])[:6]


def expect_stop(ask: Ask) -> None:
    text = ask(allowed_token_ids=LETTERS).text
    stop = text[3:5]
    output = ask(allowed_token_ids=LETTERS, stop=[stop])
    assert output.text == text[: text.index(stop)]
    assert (output.finish_reason, output.stop_reason) == ("stop", stop)


def expect_stop_token_ids(ask: Ask) -> None:
    expected = greedy(PROMPT, 8)
    output = ask(stop_token_ids=[expected[3]])
    assert output.token_ids == expected[: expected.index(expected[3]) + 1]
    assert (output.finish_reason, output.stop_reason) == ("stop", expected[3])


def expect_include_stop_str_in_output(ask: Ask) -> None:
    text = ask(allowed_token_ids=LETTERS).text
    stop = text[3:5]
    output = ask(allowed_token_ids=LETTERS, stop=[stop], include_stop_str_in_output=True)
    assert output.text == text[: text.index(stop) + 2]


def expect_ignore_eos(ask: Ask) -> None:
    output = ask(allowed_token_ids=[EOS], ignore_eos=True, max_tokens=3)
    assert output.token_ids == [EOS] * 3 and output.finish_reason == "length"


def odds(ask: Ask, **options: Any) -> float:
    """Of two tokens allowed: how much more the model likes the first drawn, at the second draw."""
    output = ask(
        allowed_token_ids=[40, 41], max_tokens=2, logprobs=2, logprobs_mode="processed", **options
    )
    first = output.token_ids[0]
    assert output.logprobs is not None
    return output.logprobs[1][first].logprob - output.logprobs[1][81 - first].logprob


def expect_presence_penalty(ask: Ask) -> None:
    assert odds(ask, presence_penalty=1.5) == pytest.approx(odds(ask) - 1.5, abs=1e-3)


def expect_frequency_penalty(ask: Ask) -> None:
    assert odds(ask, frequency_penalty=-1.5) == pytest.approx(odds(ask) + 1.5, abs=1e-3)


def expect_repetition_penalty(ask: Ask) -> None:
    assert odds(ask, repetition_penalty=50.0) < odds(ask) - 0.1


def expect_logit_bias(ask: Ask) -> None:
    biased = odds(ask, logit_bias={40: 3.0, 41: 3.5})
    assert abs(biased - odds(ask)) == pytest.approx(0.5, abs=1e-3)


def expect_allowed_token_ids(ask: Ask) -> None:
    assert set(ask.tokens(temperature=5.0, seed=1, allowed_token_ids=[40, 41])) == {40, 41}


def expect_bad_words(ask: Ask) -> None:
    first, second = greedy(PROMPT, 2)
    assert ask.tokens(bad_words=[[first]])[0] != first
    tokens = ask.tokens(bad_words=[[first, second]])
    assert tokens[0] == first and tokens[1] != second
    assert ask.tokens(bad_words=[[PROMPT[-1], first]])[0] != first  # the prompt is history too
    assert "a" not in ask(bad_words=["a"], allowed_token_ids=LETTERS, temperature=5.0).text


def expect_logprobs(ask: Ask) -> None:
    output = ask(logprobs=2, temperature=1.0, seed=5)
    assert output.logprobs is not None and output.cumulative_logprob is not None
    for token, entry in zip(output.token_ids, output.logprobs, strict=True):
        assert token in entry and 2 <= len(entry) <= 3
    expected = jllm.logprobs(tiny_model(), jnp.array(PROMPT + output.token_ids))[-8:]
    chosen = [e[t].logprob for t, e in zip(output.token_ids, output.logprobs, strict=True)]
    np.testing.assert_allclose(chosen, expected, atol=1e-4)
    assert output.cumulative_logprob == pytest.approx(float(sum(expected)), abs=1e-3)


def expect_prompt_logprobs(ask: Ask) -> None:
    entries = ask.whole(prompt_logprobs=0).prompt_logprobs
    assert entries is not None and entries[0] is None
    got = [entry[t].logprob for entry, t in zip(entries[1:], PROMPT[1:], strict=True) if entry]
    np.testing.assert_allclose(got, jllm.logprobs(tiny_model(), jnp.array(PROMPT)), atol=1e-4)


def expect_logprobs_mode(ask: Ask) -> None:
    output = ask(allowed_token_ids=[40], logprobs=3, logprobs_mode="processed", max_tokens=2)
    assert output.logprobs == [{40: jllm.Logprob(0.0, TOKENIZER.token_string(40))}] * 2


def after_the_last(logits: Any, tokens_so_far: Any) -> Any:
    """Makes the token after the last one certain."""
    last = tokens_so_far[jnp.sum(tokens_so_far >= 0) - 1]
    return jnp.where(jnp.arange(len(logits)) == (last + 1) % len(logits), logits, -jnp.inf)


def expect_logits_processor(ask: Ask) -> None:
    expected = [(PROMPT[-1] + 1 + i) % 512 for i in range(8)]
    assert ask.tokens(logits_processor=after_the_last, temperature=1.0) == expected


def expect_structured(ask: Ask) -> None:
    output = ask.whole(structured=jllm.Structured(regex="[a-d]{3}"), seed=1).outputs[0]
    assert len(output.text) == 3 and set(output.text) <= set("abcd")
    assert output.finish_reason == "stop"


def expect_skip_special_tokens(ask: Ask) -> None:
    assert ask(allowed_token_ids=[0], skip_special_tokens=False, max_tokens=2).text == "<s><s>"


def expect_spaces_between_special_tokens(ask: Ask) -> None:
    options: dict[str, Any] = dict(allowed_token_ids=[0], skip_special_tokens=False, max_tokens=2)
    words = word_tokenizer()
    assert ask(tokenizer=words, **options).text == "<s> <s>"
    assert ask(tokenizer=words, spaces_between_special_tokens=False, **options).text == "<s><s>"


def expect_detokenize(ask: Ask) -> None:
    assert ask(allowed_token_ids=LETTERS).text
    output = ask(allowed_token_ids=LETTERS, detokenize=False)
    assert output.text == "" and len(output.token_ids) == 8


def expect_priority(ask: Ask) -> None:
    e = engine(scheduling_policy="priority")
    for index in range(8):
        priority = 5 if index < 4 else -5
        e.add_request(PROMPT, ask.params(priority=priority, max_tokens=2), request_id=str(index))
    finished = []
    while e.has_unfinished():
        finished += [output.request_id for output in e.step() if output.finished]
    assert set(finished[:4]) == set("4567")


EFFECTS: dict[str, Callable[[Ask], None]] = {
    name.removeprefix("expect_"): effect
    for name, effect in list(globals().items())
    if name.startswith("expect_")
}


@pytest.mark.parametrize("field", FIELDS)
def test_the_field_has_its_effect(field: str) -> None:
    assert field in EFFECTS, (
        f"SamplingParams.{field} has no test of its effect: write expect_{field}"
    )
    EFFECTS[field](Ask())


@pytest.mark.parametrize("field", FIELDS)
def test_the_effect_is_missed_when_the_field_is_ignored(field: str) -> None:
    with pytest.raises(AssertionError):
        EFFECTS[field](Ask(withheld=field))


def test_the_table_has_no_entry_for_a_field_that_is_gone() -> None:
    assert set(EFFECTS) == set(FIELDS)


@pytest.mark.parametrize("seed", [-1, 0, 2**40, -(2**63), 2**63 - 1])
def test_any_int64_is_a_seed_of_its_own(seed: int) -> None:
    """CASES 25."""
    ask = Ask()
    one = ask.tokens(temperature=2.0, seed=seed)
    assert one == ask.tokens(temperature=2.0, seed=seed)
    assert one != ask.tokens(temperature=2.0, seed=seed ^ 2**32 if seed > 0 else seed + 1)


def test_the_defaults_do_not_truncate() -> None:
    """CASES 21: temperature 1 and no filter came out greedy."""
    starts = {tuple(Ask().whole(seed=seed, max_tokens=2).outputs[0].token_ids) for seed in range(8)}
    assert len(starts) > 2


@pytest.mark.parametrize("temperature", [1e-4, 1e-5, 1e-6, 1e-7])
def test_tiny_temperatures_are_finite_and_greedy(temperature: float) -> None:
    """CASES 19."""
    output = Ask()(temperature=temperature, seed=1, logprobs=1, logprobs_mode="processed")
    assert output.token_ids == greedy(PROMPT, 8)
    assert output.logprobs is not None
    assert all(np.isfinite(p.logprob) for entry in output.logprobs for p in entry.values())


@pytest.mark.parametrize("mode", ["raw", "processed"])
def test_logprobs_are_finite_with_one_candidate_left(mode: str) -> None:
    """CASES 27: top_k=1 gave -inf, which JSON cannot hold."""
    output = Ask()(temperature=1.0, top_k=1, logprobs=20, logprobs_mode=mode)
    assert output.logprobs is not None
    for entry in output.logprobs:
        assert len(entry) == (20 if mode == "raw" else 1)
        assert all(np.isfinite(p.logprob) for p in entry.values())


def test_logprobs_minus_one_reports_the_whole_vocabulary() -> None:
    output = Ask()(logprobs=-1, max_tokens=2)
    assert output.logprobs is not None
    for entry in output.logprobs:
        assert set(entry) == set(range(512))
        assert sum(np.exp(p.logprob) for p in entry.values()) == pytest.approx(1, abs=1e-3)


def test_masks_win_over_a_logits_processor() -> None:
    tokens = Ask().tokens(logits_processor=after_the_last, allowed_token_ids=[40, 41])
    assert set(tokens) <= {40, 41}


def nonsense(logits: Any, tokens_so_far: Any) -> Any:
    return jnp.full_like(logits, jnp.nan)


def test_a_logits_processor_that_forbids_everything_still_draws_what_the_masks_allow() -> None:
    assert Ask().tokens(logits_processor=nonsense, bad_words=[[0]], max_tokens=2) == [1, 1]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"logits_processor": lambda logits, tokens: logits[:5]}, r"of shape \(512,\), not .*5"),
        ({"logits_processor": lambda logits, tokens: tokens}, r"floating-point logits of shape"),
        ({"logits_processor": lambda logits: logits}, r"cannot be traced by JAX"),
        ({"logits_processor": lambda logits, tokens: None}, r"must return .*, not None"),
        ({"max_tokens": None, "min_tokens": 120}, r"min_tokens is 120: .* max_model_len, 128"),
        ({"logit_bias": {512: 1.0}}, r"logit_bias has 512, outside the vocabulary of 512"),
        ({"bad_words": ["x" * 17]}, r"of 17 tokens; a bad word must have between 1 and 16"),
        ({"allowed_token_ids": [EOS], "min_tokens": 2}, r"together forbid every token"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_what_cannot_work_is_refused_before_it_is_queued(
    options: dict[str, Any], message: str
) -> None:
    e = engine()
    with pytest.raises(ValueError, match=message):
        e.add_request(PROMPT, jllm.SamplingParams(**options))
    assert not e.has_unfinished()


def test_bad_words_as_text_need_a_tokenizer() -> None:
    message = "'word', but the model has no tokenizer; give token ids"
    with (
        jllm.Engine(tiny_model(), engine().config) as e,
        pytest.raises(ValueError, match=message),
    ):
        e.add_request(PROMPT, jllm.SamplingParams(bad_words=["word"]))


def test_a_bad_word_is_meant_with_and_without_a_space_before_it() -> None:
    space = TOKENIZER.encode(" ")[0]
    ids: Sequence[int] = [space, *LETTERS]
    text = Ask()(bad_words=["ab"], allowed_token_ids=ids, temperature=9.0, max_tokens=100).text
    assert "a" in text and "b" in text and "ab" not in text


def test_spellings_without_their_own_tokens_are_bounded_too() -> None:
    """A text of 16 tokens has 17 with a space before it, so it is refused, not half-covered."""
    with pytest.raises(ValueError, match="of 17 tokens"):
        engine().add_request(PROMPT, jllm.SamplingParams(bad_words=["x" * 16]))
