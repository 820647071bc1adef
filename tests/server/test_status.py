"""Models, versions, metrics and the tokenizer's routes."""

from __future__ import annotations

import re
from typing import Any

import pytest
from starlette.testclient import TestClient

import jllm
from jllm.server import ServerOptions
from jllm.server.app import make_app
from jllm.server.served import Served
from tests.server.clients import COMPLETIONS, ask, complete, error_of, refused, stream
from tests.server.conftest import TEMPLATE, make_engine, spoken_model, started, wait_until
from tests.tiny_model import tiny_model

TOKENIZER = spoken_model().tokenizer
assert TOKENIZER is not None

VLLM_NAMES = """
num_requests_running num_requests_waiting kv_cache_usage_perc prefix_cache_queries_total
prefix_cache_hits_total num_preemptions_total prompt_tokens_total generation_tokens_total
request_success_total time_to_first_token_seconds_bucket inter_token_latency_seconds_bucket
request_time_per_output_token_seconds_bucket e2e_request_latency_seconds_bucket
request_queue_time_seconds_bucket request_prefill_time_seconds_bucket
request_decode_time_seconds_bucket request_prompt_tokens_bucket request_generation_tokens_bucket
request_params_n_bucket request_params_max_tokens_bucket iteration_tokens_total_bucket
"""


def test_models_are_listed_under_each_name(client: TestClient) -> None:
    answer = client.get("/v1/models").json()
    assert answer["object"] == "list"
    assert [model["id"] for model in answer["data"]] == ["tiny", "alias"]
    for model in answer["data"]:
        assert client.get(f"/v1/models/{model['id']}").json() == model
        assert (model["object"], model["root"], model["parent"]) == ("model", "some/where", None)
        assert model["max_model_len"] == 256 and isinstance(model["created"], int)


def test_a_models_name_may_hold_a_slash() -> None:
    options = ServerOptions(served_model_name=("owner/name",), warm_up=False)
    with TestClient(make_app(Served(make_engine(), options))) as asking:
        assert started(asking).get("/v1/models/owner/name").json()["id"] == "owner/name"


def test_the_version_is_the_packages(client: TestClient) -> None:
    assert client.get("/version").json() == {"version": jllm.__version__}


def test_the_routes_describe_themselves(client: TestClient) -> None:
    schema = client.get("/openapi.json").json()
    body = schema["paths"][COMPLETIONS]["post"]["requestBody"]["content"]["application/json"]
    name = body["schema"]["$ref"].rpartition("/")[2]
    assert "prompt" in schema["components"]["schemas"][name]["properties"]


def metrics(client: TestClient) -> dict[str, float]:
    """Each sample's value, by name and labels."""
    response = client.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain")
    lines = (line.rpartition(" ") for line in response.text.splitlines() if line[0] != "#")
    return {name: float(value) for name, _, value in lines}


def test_metrics_have_vllms_names_and_labels(client: TestClient) -> None:
    complete(client, "a", max_tokens=2, ignore_eos=True)
    stream(client, COMPLETIONS, prompt="a", max_tokens=3, ignore_eos=True)
    found = metrics(client)
    names = {name.partition("{")[0] for name in found}
    missing = {"vllm:" + name for name in VLLM_NAMES.split()} - names
    assert not missing
    assert {"jllm:xla_compilations_total", "jllm:compile_seconds_total"} <= names
    labelled = re.compile(r'.*\{.*engine="0".*model_name="tiny".*\}')
    assert all(labelled.fullmatch(name) for name in found if name.startswith(("vllm", "jllm")))


def change(client: TestClient, work: Any) -> dict[str, float]:
    before = metrics(client)
    work()
    after = metrics(client)
    return {name: after[name] - before.get(name, 0) for name in after}


def test_metrics_count_what_happened(client: TestClient) -> None:
    def work() -> None:
        body = {"max_tokens": 5, "ignore_eos": True, "n": 2, "cache_salt": "counted"}
        complete(client, [3] * 40, **body)
        stream(client, COMPLETIONS, prompt=[3] * 40, **body)
        complete(client, [9], max_tokens=5, logit_bias={"1": 100})

    found = change(client, work)
    grown = {
        name.replace('{engine="0",model_name="tiny"}', "").removeprefix("vllm:"): value
        for name, value in found.items()
        if value
    }
    assert grown["prompt_tokens_total"] == 81 and grown["generation_tokens_total"] == 21
    by_reason = 'request_success_total{engine="0",finished_reason="%s",model_name="tiny"}'
    assert (grown[by_reason % "length"], grown[by_reason % "stop"]) == (4, 1)
    assert grown["prefix_cache_hits_total"] >= 32  # the second request finds two blocks
    for name, count in (
        ("time_to_first_token_seconds", 3),
        ("e2e_request_latency_seconds", 3),
        ("request_queue_time_seconds", 3),
        ("request_prefill_time_seconds", 3),
        ("request_decode_time_seconds", 3),
        ("request_prompt_tokens", 3),
        ("request_params_n", 3),
        ("request_params_max_tokens", 3),
        ("request_generation_tokens", 5),
        ("request_time_per_output_token_seconds", 2),  # not of the one token
        ("inter_token_latency_seconds", 4),  # of the stream of five
    ):
        assert grown[name + "_count"] == count, name
    assert grown["request_prompt_tokens_sum"] == 81 and grown["request_generation_tokens_sum"] == 21
    assert grown["e2e_request_latency_seconds_sum"] == pytest.approx(
        grown["request_queue_time_seconds_sum"]
        + grown["request_prefill_time_seconds_sum"]
        + grown["request_decode_time_seconds_sum"]
    )
    # Each prompt once per sample but for what was cached, and all tokens but a sample's last. That
    # eos was the last shows only when the next step is under way.
    run = 40 * 4 + 1 - grown["prefix_cache_hits_total"] + 4 * 4 + 1
    assert grown["iteration_tokens_total_sum"] == run


def test_gauges_fall_back_to_nothing(client: TestClient) -> None:
    complete(client, "a", max_tokens=2)
    found = metrics(client)
    for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"):
        assert found[f'vllm:{name}{{engine="0",model_name="tiny"}}'] == 0


def test_texts_become_tokens_and_back(client: TestClient) -> None:
    text = "hello <s> wörld"
    answer = ask(client, "/tokenize", prompt=text)
    assert answer["tokens"] == TOKENIZER.encode(text)
    assert (answer["count"], answer["max_model_len"]) == (len(answer["tokens"]), 256)
    assert ask(client, "/detokenize", tokens=answer["tokens"]) == {"prompt": text}
    assert ask(client, "/tokenize", prompt="")["tokens"] == []
    assert ask(client, "/detokenize", tokens=[])["prompt"] == ""
    strings = ask(client, "/tokenize", prompt="hello", return_token_strs=True)["token_strs"]
    assert strings == ["hell", "o"]


def test_conversations_become_tokens_through_the_template(client: TestClient) -> None:
    messages = [{"role": "user", "content": "hi"}]
    ids = ask(client, "/tokenize", messages=messages)["tokens"]
    assert TOKENIZER.decode(ids) == "<user>hi<assistant>"
    ids = ask(client, "/tokenize", messages=messages, add_generation_prompt=False)["tokens"]
    assert TOKENIZER.decode(ids) == "<user>hi"


def test_what_is_no_token_is_refused(client: TestClient) -> None:
    for tokens in ([-1], [512], [2**80], ["a"], "a"):
        assert refused(client, "/detokenize", tokens=tokens)["param"] == "tokens"
    refused(client, "/tokenize")
    refused(client, "/tokenize", prompt="a", messages=[{"role": "user", "content": "a"}])
    refused(client, "/tokenize", 404, prompt="a", model="other")


def test_the_tokenizer_tells_lm_eval_what_it_asks(client: TestClient) -> None:
    info = client.get("/tokenizer_info").json()
    assert (info["eos_token"], info["chat_template"]) == ("</s>", TEMPLATE)


def test_a_model_without_a_tokenizer_takes_ids_alone() -> None:
    engine = jllm.Engine(tiny_model(), make_engine().config)
    with TestClient(make_app(Served(engine, ServerOptions(warm_up=False)))) as asking:
        started(asking)
        body = {"max_tokens": 2, "return_token_ids": True, "logprobs": 0}
        (choice,) = complete(asking, [5, 6], **body)["choices"]
        assert choice["text"] == "" and len(choice["token_ids"]) == 2
        tokens = [f"token_id:{token}" for token in choice["token_ids"]]
        assert choice["logprobs"]["tokens"] == tokens
        assert "no tokenizer" in refused(asking, COMPLETIONS, prompt="a")["message"]
        assert "no tokenizer" in error_of(asking.get("/tokenizer_info"))["message"]


def test_nothing_compiles_once_the_server_is_ready() -> None:
    # The sizes of the engines that are warmed up in tests/engine: their programs serve here too.
    sizes = dict(max_num_seqs=2, max_num_batched_tokens=None, num_kv_blocks=64, max_model_len=128)
    engine = make_engine(**sizes, decode_buckets=(2,), prefill_buckets=(16,))
    with TestClient(make_app(Served(engine, ServerOptions()))) as asking:
        wait_until(lambda: asking.get("/health").status_code == 200, 300)
        sampled = {"top_k": 5, "top_p": 0.9, "min_p": 0.01, "presence_penalty": 1, "seed": 1}
        masked = {"logit_bias": {"5": 1}, "bad_words": ["hell"], "min_tokens": 2, "stop": "x"}

        def work() -> None:
            complete(asking, "a", max_tokens=3, temperature=0)
            complete(asking, [[7] * 100, [8]], max_tokens=3, n=3, logprobs=20, echo=True)
            complete(asking, "a", max_tokens=3, **sampled, **masked, repetition_penalty=1.1)
            complete(asking, "a", max_tokens=3, prompt_logprobs=5, frequency_penalty=1)

        found = change(asking, work)
        assert found['jllm:xla_compilations_total{engine="0",model_name="model"}'] == 0
        assert found['vllm:generation_tokens_total{engine="0",model_name="model"}'] > 0
