"""POST /v1/completions: what it says is what the engine says, in OpenAI's form."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from starlette.testclient import TestClient

import jllm
from jllm.server.app import make_app
from jllm.server.served import Served
from tests.server.clients import CHAT, COMPLETIONS, ask, complete, joined, refused, stream
from tests.server.conftest import OPTIONS, make_engine, spoken_model, started
from tests.tiny_model import run
from tests.tokenizers_for_tests import byte_level_tokenizer

LETTERS = list(range(99, 125))  # ids of a to z
GREEDY: dict[str, Any] = {"temperature": 0, "ignore_eos": True}
TOKENIZER = spoken_model().tokenizer
assert TOKENIZER is not None


def expected(engine: jllm.Engine, prompt: Any, **options: Any) -> jllm.RequestOutput:
    engine.add_request(prompt, jllm.SamplingParams(**options), stream=False)
    (output,) = run(engine).values()
    return output


def test_an_answer_has_openais_form(client: TestClient) -> None:
    answer = complete(client, "hello", model="alias", max_tokens=4, **GREEDY)
    assert answer.keys() == {
        *("id", "object", "created", "model", "system_fingerprint", "choices", "usage")
    }
    assert answer["id"].startswith("cmpl-") and answer["object"] == "text_completion"
    assert isinstance(answer["created"], int) and answer["model"] == "tiny"
    (choice,) = answer["choices"]
    assert choice.keys() == {"index", "text", "logprobs", "finish_reason", "stop_reason"}
    assert choice["index"] == 0 and choice["logprobs"] is None
    assert choice["finish_reason"] == "length" and choice["stop_reason"] is None


def test_text_and_ids_are_the_engines(client: TestClient, engine: jllm.Engine) -> None:
    output = expected(engine, "hello", temperature=0, max_tokens=9, ignore_eos=True)
    answer = complete(client, "hello", max_tokens=9, return_token_ids=True, **GREEDY)
    (choice,) = answer["choices"]
    assert choice["text"] == output.outputs[0].text
    assert choice["token_ids"] == output.outputs[0].token_ids
    assert choice["prompt_token_ids"] == output.prompt_token_ids


def test_sixteen_tokens_unless_asked_and_fewer_where_fewer_fit(client: TestClient) -> None:
    assert complete(client, "a", **GREEDY)["usage"]["completion_tokens"] == 16
    assert complete(client, "a", max_tokens=None, **GREEDY)["usage"]["completion_tokens"] == 16
    assert complete(client, [7] * 250, **GREEDY)["usage"]["completion_tokens"] == 6


def test_max_completion_tokens_is_heard_and_wins(client: TestClient) -> None:
    answer = complete(client, "a", max_tokens=9, max_completion_tokens=3, **GREEDY)
    assert answer["usage"]["completion_tokens"] == 3


@pytest.mark.parametrize(
    ("prompt", "count"),
    [
        pytest.param("ab", 1, id="text"),
        pytest.param(["ab", "c"], 2, id="texts"),
        pytest.param([99, 100], 1, id="ids"),
        pytest.param([[99, 100], [101]], 2, id="lists-of-ids"),
    ],
)
def test_prompts_come_in_four_forms(client: TestClient, prompt: Any, count: int) -> None:
    answer = complete(client, prompt, n=2, seed=3, max_tokens=2, return_token_ids=True)
    assert [choice["index"] for choice in answer["choices"]] == list(range(2 * count))
    assert answer["usage"]["prompt_tokens"] == sum(
        len(choice["prompt_token_ids"]) for choice in answer["choices"][::2]
    )


def test_ids_are_run_as_they_are(client: TestClient) -> None:
    answer = complete(client, [5, 400], max_tokens=1, return_token_ids=True)
    assert answer["choices"][0]["prompt_token_ids"] == [5, 400]


def test_index_counts_samples_within_prompts(client: TestClient, engine: jllm.Engine) -> None:
    answer = complete(
        client, [[5, 6], [7]], n=3, seed=11, max_tokens=6, return_token_ids=True, ignore_eos=True
    )
    for i, prompt in enumerate([[5, 6], [7]]):
        output = expected(engine, prompt, n=3, seed=11, max_tokens=6, ignore_eos=True)
        for j, sample in enumerate(output.outputs):
            assert answer["choices"][3 * i + j]["token_ids"] == sample.token_ids


def test_a_seed_gives_the_same_texts_again_and_n_gives_different_ones(client: TestClient) -> None:
    def texts() -> list[str]:
        answer = complete(client, "a", n=4, seed=-1, max_tokens=8, return_token_ids=True)
        return [str(choice["token_ids"]) for choice in answer["choices"]]

    first = texts()
    assert texts() == first and len(set(first)) == 4


def test_usage_counts_prompts_once_and_all_samples(client: TestClient) -> None:
    usage = complete(client, [[5, 6], [7, 8, 9]], n=3, max_tokens=4, ignore_eos=True)["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (5, 24)
    assert usage["total_tokens"] == 29


def test_usage_includes_the_token_that_stopped_it(client: TestClient) -> None:
    free = complete(client, "hello", max_tokens=8, return_token_ids=True, **GREEDY)
    stop = free["choices"][0]["token_ids"][3]
    answer = complete(client, "hello", max_tokens=8, stop_token_ids=[stop], **GREEDY)
    assert answer["usage"]["completion_tokens"] == 4
    choice = answer["choices"][0]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", stop)


def test_eos_is_a_stop_without_a_reason(client: TestClient) -> None:
    answer = complete(client, "hello", logit_bias={"1": 100}, max_tokens=8)
    choice = answer["choices"][0]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", None)
    assert choice["text"] == "" and answer["usage"]["completion_tokens"] == 1


def test_usage_says_how_much_of_the_prompt_was_cached(client: TestClient) -> None:
    prompt = [13 + i % 90 for i in range(70)]
    salt = {"cache_salt": "mine"}
    cached = [
        complete(client, prompt, max_tokens=2, **options)["usage"]["prompt_tokens_details"]
        for options in (salt, salt, {"cache_salt": "other"})
    ]
    assert [details["cached_tokens"] for details in cached] == [0, 64, 0]


def test_options_reach_the_engine(client: TestClient, engine: jllm.Engine) -> None:
    options: dict[str, Any] = dict(
        temperature=0.9,
        top_p=0.95,
        top_k=50,
        min_p=0.001,
        seed=5,
        presence_penalty=0.5,
        frequency_penalty=0.25,
        repetition_penalty=1.1,
        min_tokens=3,
        max_tokens=12,
        stop_token_ids=[40],
        bad_words=["hell"],
        ignore_eos=True,
    )
    output = expected(engine, [9, 8], **options, logit_bias={70: 3.0})
    answer = complete(client, [9, 8], return_token_ids=True, **options, logit_bias={"70": 3.0})
    assert answer["choices"][0]["token_ids"] == output.outputs[0].token_ids
    allowed = complete(client, [9], allowed_token_ids=[33, 34], max_tokens=9, return_token_ids=True)
    assert set(allowed["choices"][0]["token_ids"]) <= {33, 34}


def test_special_tokens_are_put_in_front_only_where_asked(client: TestClient) -> None:
    def tokens(**options: Any) -> int:
        usage = complete(client, "<s>ab", max_tokens=1, **options)["usage"]
        return int(usage["prompt_tokens"])

    assert tokens() == tokens(add_special_tokens=False) == 3  # this tokenizer adds none


def test_truncation_keeps_the_last_tokens(client: TestClient) -> None:
    ids = list(range(10, 40))
    for keep, kept in ((4, 4), (-1, 30), (500, 30)):
        answer = complete(
            client, ids, max_tokens=2, truncate_prompt_tokens=keep, return_token_ids=True
        )
        assert answer["choices"][0]["prompt_token_ids"] == ids[-kept:]
    long = complete(client, [9] * 999, max_tokens=56, truncate_prompt_tokens=-1, **GREEDY)
    assert long["usage"]["prompt_tokens"] == 200


def test_echo_puts_the_prompt_first(client: TestClient) -> None:
    plain = complete(client, "hello", max_tokens=3, **GREEDY)["choices"][0]["text"]
    echoed = complete(client, "hello", max_tokens=3, echo=True, **GREEDY)
    assert echoed["choices"][0]["text"] == "hello" + plain
    ids = TOKENIZER.encode("hello")
    from_ids = complete(client, ids, max_tokens=3, echo=True, **GREEDY)
    assert from_ids["choices"][0]["text"] == "hello" + plain


@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
def test_echo_of_no_tokens_is_the_prompt_alone(client: TestClient, streamed: bool) -> None:
    body = {"prompt": "hello", "max_tokens": 0, "echo": True, "logprobs": 1}
    if streamed:
        chunks = stream(client, COMPLETIONS, **body, stream_options={"include_usage": True})
        choice, usage = joined(chunks)[0], chunks[-1]["usage"]
    else:
        answer = complete(client, **body)
        choice, usage = answer["choices"][0], answer["usage"]
    assert choice["text"] == "hello" and choice["finish_reason"] == "length"
    assert choice["logprobs"]["tokens"] == ["hell", "o"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (2, 0)


def test_echoed_logprobs_are_whole_and_equal_where_lm_eval_compares(client: TestClient) -> None:
    prompts = [[i % 500 + 3 for i in range(40)], [5, 6, 7]]
    for _ in range(2):  # the second time the prompts are in the cache
        answer = complete(
            client, prompts, max_tokens=1, logprobs=1, echo=True, temperature=0, seed=1234
        )
        for prompt, choice in zip(prompts, answer["choices"], strict=True):
            logprobs = choice["logprobs"]
            assert {len(values) for values in logprobs.values()} == {len(prompt) + 1}
            assert logprobs["token_logprobs"][0] is None and logprobs["top_logprobs"][0] is None
            values, tops = logprobs["token_logprobs"][1:], logprobs["top_logprobs"][1:]
            assert all(value <= max(top.values()) for value, top in zip(values, tops, strict=True))
            assert values[-1] == max(tops[-1].values())  # greedy, so bit for bit the largest


def test_logprobs_are_the_models_own(client: TestClient) -> None:
    import jax.numpy as jnp

    prompt = [i % 500 + 3 for i in range(40)]
    answer = complete(client, prompt, max_tokens=1, logprobs=1, echo=True, temperature=0)
    shown = answer["choices"][0]["logprobs"]["token_logprobs"][1:40]
    reference = jllm.logprobs(spoken_model(), jnp.asarray(prompt))
    assert shown == pytest.approx(reference.tolist(), abs=1e-4)


def test_logprobs_name_the_sampled_token_beside_the_likeliest(client: TestClient) -> None:
    answer = complete(
        client, "a", max_tokens=20, logprobs=2, seed=1, return_tokens_as_token_ids=True
    )
    logprobs = answer["choices"][0]["logprobs"]
    for token, value, top in zip(
        logprobs["tokens"], logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True
    ):
        assert token.startswith("token_id:") and top[token] == value
        assert len(top) in (2, 3) and all(math.isfinite(v) for v in top.values())


def test_text_offsets_count_the_characters_before_each_token(client: TestClient) -> None:
    text = "hello wörld"
    answer = complete(client, text, max_tokens=4, logprobs=0, echo=True, **GREEDY)
    choice = answer["choices"][0]
    offsets, tokens = choice["logprobs"]["text_offset"], choice["logprobs"]["tokens"]
    assert offsets[0] == 0 and offsets == sorted(offsets)
    for token, offset in zip(tokens[:7], offsets[:7], strict=True):
        if token != "\N{REPLACEMENT CHARACTER}":
            assert choice["text"].startswith(token, offset)
    prompt_tokens = len(TOKENIZER.encode(text))
    assert offsets[prompt_tokens] == len(text)
    half = [i for i in range(prompt_tokens) if tokens[i] == "\N{REPLACEMENT CHARACTER}"]
    assert len(half) == 2 and {offsets[i] for i in half} == {text.index("ö")}


def test_prompt_logprobs_can_be_had_without_echo(client: TestClient) -> None:
    choice = complete(client, [5, 6, 7], max_tokens=1, prompt_logprobs=1)["choices"][0]
    first, *rest = choice["prompt_logprobs"]
    assert first is None and [str(id) in entry for id, entry in zip([6, 7], rest, strict=True)]
    assert all(entry.keys() == {"logprob", "decoded_token"} for e in rest for entry in e.values())


def test_nulls_mean_defaults(client: TestClient, engine: jllm.Engine) -> None:
    """As LangChain and GuideLLM send them."""
    names = "best_of echo frequency_penalty logit_bias logprobs max_tokens n presence_penalty"
    names += " seed stop stream stream_options suffix temperature top_p user top_k min_p"
    names += " stop_token_ids ignore_eos min_tokens response_format truncate_prompt_tokens"
    answer = complete(client, "a", model=None, **dict.fromkeys(names.split()))
    assert answer["usage"]["completion_tokens"] <= 16


def test_stop_strings_end_the_text_and_are_named(client: TestClient, engine: jllm.Engine) -> None:
    options: dict[str, Any] = dict(max_tokens=30, seed=2, allowed_token_ids=LETTERS)
    text = expected(engine, "hello", **options).outputs[0].text
    stop = text[6:9]
    assert stop not in text[:8]
    answer = complete(client, "hello", stop=[stop, "1"], **options)
    choice = answer["choices"][0]
    assert choice["text"] == text[: text.index(stop)]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", stop)
    kept = complete(client, "hello", stop=stop, include_stop_str_in_output=True, **options)
    assert kept["choices"][0]["text"] == choice["text"] + stop


def test_fields_that_contradict_are_refused(client: TestClient) -> None:
    refused(client, COMPLETIONS, prompt="a", best_of=2)
    refused(client, COMPLETIONS, prompt="a", suffix="b")
    refused(client, COMPLETIONS, prompt="a", max_tokens=0)
    refused(client, COMPLETIONS, prompt="a", stream_options={"include_usage": True})
    complete(client, "a", best_of=2, n=2, max_tokens=1)
    complete(client, "a", suffix="", max_tokens=1)


@pytest.fixture(scope="module")
def with_bos() -> Iterator[TestClient]:
    """A model whose tokenizer puts <s> before every text, and whose template writes it, too."""
    tokenizer = replace(byte_level_tokenizer(add_bos_token=True), chat_template="<s>{{ messages }}")
    engine = jllm.Engine(spoken_model().replace(tokenizer=tokenizer), make_engine().config)
    with TestClient(make_app(Served(engine, OPTIONS))) as asking:
        yield started(asking)


def test_bos_is_there_once(with_bos: TestClient) -> None:
    def prompt(path: str, **body: Any) -> list[int]:
        answer = ask(with_bos, path, max_tokens=1, return_token_ids=True, **body)
        ids: list[int] = answer.get("prompt_token_ids") or answer["choices"][0]["prompt_token_ids"]
        return ids

    a = 2 + ord("a")
    assert prompt(COMPLETIONS, prompt="a") == [0, a]
    assert prompt(COMPLETIONS, prompt="a", add_special_tokens=False) == [a]
    assert prompt(COMPLETIONS, prompt=[a]) == [a]
    assert prompt(COMPLETIONS, prompt="") == [0]
    messages = [{"role": "user", "content": "a"}]
    assert prompt(CHAT, messages=messages).count(0) == 1
    assert prompt(CHAT, messages=messages, add_special_tokens=True).count(0) == 2


def test_a_bos_that_was_added_is_no_part_of_the_echoed_text(with_bos: TestClient) -> None:
    answer = complete(with_bos, "hey", max_tokens=0, echo=True, logprobs=0)
    (choice,) = answer["choices"]
    assert choice["text"] == "hey"
    assert choice["logprobs"]["tokens"] == ["<s>", "he", "y"]
    assert choice["logprobs"]["text_offset"] == [0, 0, 2]
