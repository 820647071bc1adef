"""Every way to be refused: the status, OpenAI's error body, and a server that goes on."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from starlette.testclient import TestClient

from jllm.server.app import make_app
from jllm.server.limits import MAX_BODY_BYTES
from jllm.server.served import Served
from tests.server.clients import CHAT, COMPLETIONS, complete, error_of, refused
from tests.server.conftest import OPTIONS, make_engine, started

JSON = {"content-type": "application/json"}
USER = [{"role": "user", "content": "hi"}]


@pytest.fixture(autouse=True)
def serves_on(client: TestClient) -> Iterator[None]:
    """Whatever was refused, the next request is answered."""
    yield
    assert client.get("/health").status_code == 200
    assert complete(client, "a", max_tokens=1)["choices"]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        pytest.param({}, "prompt", id="no-prompt"),
        pytest.param({"prompt": ""}, "prompt", id="empty-text"),
        pytest.param({"prompt": []}, "prompt", id="empty-list"),
        pytest.param({"prompt": [""]}, "prompt", id="list-of-empty-text"),
        pytest.param({"prompt": [[]]}, "prompt", id="list-of-empty-list"),
        pytest.param({"prompt": [[5], []]}, "prompt", id="one-empty"),
        pytest.param({"prompt": None}, "prompt", id="null-prompt"),
        pytest.param({"prompt": {"a": 1}}, "prompt", id="object"),
        pytest.param({"prompt": ["a", 5]}, "prompt", id="mixed"),
        pytest.param({"prompt": [1.5]}, "prompt", id="float-ids"),
        pytest.param({"prompt": [-1]}, "prompt", id="negative-id"),
        pytest.param({"prompt": [512]}, "prompt", id="id-beyond-vocabulary"),
        pytest.param({"prompt": [2**70]}, "prompt", id="id-beyond-64-bits"),
        pytest.param({"prompt": ["a"] * 3000}, "prompt", id="too-many-prompts"),
        pytest.param({"prompt": "a", "max_tokens": -1}, "max_tokens", id="max-tokens"),
        pytest.param({"prompt": "a", "max_tokens": "9"}, "max_tokens", id="string-for-int"),
        pytest.param({"prompt": "a", "stream": 1}, "stream", id="int-for-bool"),
        pytest.param({"prompt": "a", "temperature": 2.5}, "temperature", id="temperature"),
        pytest.param({"prompt": "a", "temperature": -1}, "temperature", id="cold"),
        pytest.param({"prompt": "a", "top_p": 0}, "top_p", id="top-p"),
        pytest.param({"prompt": "a", "top_k": -2}, "top_k", id="top-k"),
        pytest.param({"prompt": "a", "repetition_penalty": 0}, "repetition_penalty", id="rep"),
        pytest.param({"prompt": "a", "presence_penalty": 3}, "presence_penalty", id="presence"),
        pytest.param({"prompt": "a", "n": 0}, "n", id="no-samples"),
        pytest.param({"prompt": "a", "n": 129}, "n", id="too-many-samples"),
        pytest.param({"prompt": ["a"] * 100, "n": 100}, "n", id="too-many-samples-in-all"),
        pytest.param({"prompt": "a", "seed": 2**64}, "seed", id="seed"),
        pytest.param({"prompt": "a", "logprobs": 21}, "logprobs", id="logprobs"),
        pytest.param({"prompt": "a", "logit_bias": {"512": 1}}, "logit_bias", id="bias-id"),
        pytest.param({"prompt": "a", "logit_bias": {"x": 1}}, "logit_bias", id="bias-key"),
        pytest.param({"prompt": "a", "logit_bias": {"1": 1, "01": 2}}, "logit_bias", id="bias-01"),
        pytest.param({"prompt": "a", "logit_bias": {"5": 101}}, "logit_bias", id="bias-value"),
        pytest.param({"prompt": "a", "stop": [""]}, "stop", id="empty-stop"),
        pytest.param({"prompt": "a", "stop": ["x"] * 65}, "stop", id="too-many-stops"),
        pytest.param({"prompt": "a", "stop": "x" * 1025}, "stop", id="long-stop"),
        pytest.param({"prompt": "a", "stop": 5}, "stop", id="stop-type"),
        pytest.param({"prompt": "a", "bad_words": ["x"] * 1025}, "bad_words", id="bad-words"),
        pytest.param({"prompt": "a", "stop_token_ids": [512]}, "stop_token_ids", id="stop-ids"),
        pytest.param({"prompt": "a", "allowed_token_ids": []}, "allowed_token_ids", id="none"),
        pytest.param({"prompt": "a", "cache_salt": ""}, "cache_salt", id="salt"),
        pytest.param(
            {"prompt": "a", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens", id="cut"
        ),
        pytest.param({"prompt": "a", "use_beam_search": True}, "use_beam_search", id="beams"),
    ],
)
def test_wrong_fields_are_named(client: TestClient, body: dict[str, Any], param: str) -> None:
    error = refused(client, COMPLETIONS, **body)
    assert (error["type"], error["param"], error["code"]) == ("BadRequestError", param, 400)
    assert param in error["message"]


@pytest.mark.parametrize(
    "messages",
    [
        pytest.param(None, id="none"),
        pytest.param([], id="empty"),
        pytest.param([{"content": "hi"}], id="no-role"),
        pytest.param([{"role": "wizard", "content": "hi"}], id="role"),
        pytest.param([{"role": "user", "content": 5}], id="content"),
        pytest.param([{"role": "user"}], id="no-content"),
        pytest.param([{"role": "user", "content": ["hi"]}], id="part"),
        pytest.param([{"role": "user", "content": [{"type": "text"}]}], id="part-without-text"),
        pytest.param(["hi"], id="text"),
    ],
)
def test_wrong_messages_are_refused(client: TestClient, messages: Any) -> None:
    assert "messages" in refused(client, CHAT, messages=messages)["message"]


@pytest.mark.parametrize(
    "content",
    [
        pytest.param(b"", id="nothing"),
        pytest.param(b'{"prompt": "a"', id="broken"),
        pytest.param(b"[]", id="no-object"),
        pytest.param(b'"a"', id="string"),
        pytest.param(b'{"prompt": "\xff"}', id="not-utf-8"),
        pytest.param(b'{"prompt": "a\\ud800"}', id="lone-surrogate"),
        pytest.param(b'{"prompt": "a", "x\\udc00": 1}', id="lone-surrogate-in-a-name"),
        pytest.param(b'{"prompt": "a", "temperature": NaN}', id="nan"),
        pytest.param(b'{"prompt": "a", "seed": ' + b"9" * 9999 + b"}", id="long-number"),
        pytest.param(b'{"prompt": ' + b"[" * 100_000, id="deep"),
        pytest.param(b'{"a":' * 50_000, id="deep-objects"),
    ],
)
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT, "/tokenize", "/detokenize"])
def test_bodies_that_are_no_json_are_refused(client: TestClient, path: str, content: bytes) -> None:
    response = client.post(path, content=content, headers=JSON)
    assert response.status_code == 400
    assert error_of(response)["type"] == "BadRequestError"


@pytest.mark.parametrize("field", ["temperature", "min_p", "frequency_penalty"])
def test_numbers_must_be_finite(client: TestClient, field: str) -> None:
    content = b'{"prompt": "a", "%s": 1e999}' % field.encode()
    response = client.post(COMPLETIONS, content=content, headers=JSON)
    assert response.status_code == 400 and error_of(response)["param"] == field


def test_a_body_must_be_declared_as_json(client: TestClient) -> None:
    for headers in ({}, {"content-type": "text/plain"}):
        response = client.post(COMPLETIONS, content=b'{"prompt": "a"}', headers=headers)
        assert response.status_code == 400 and "JSON" in error_of(response)["message"]


def test_a_body_beyond_the_limit_is_413(client: TestClient) -> None:
    big = json.dumps({"prompt": "a" * MAX_BODY_BYTES}).encode()

    def in_pieces() -> Iterator[bytes]:  # without a content-length
        yield from (big[i : i + 2**20] for i in range(0, len(big), 2**20))

    for content in (big, in_pieces()):
        response = client.post(COMPLETIONS, content=content, headers=JSON)
        assert response.status_code == 413 and "33554432" in error_of(response)["message"]


def test_a_prompt_of_a_megabyte_is_only_too_long(client: TestClient) -> None:
    error = refused(client, COMPLETIONS, prompt="a" * 1_000_000)
    assert error["code"] == "context_length_exceeded"
    error = refused(client, CHAT, messages=[{"role": "user", "content": "a" * 1_000_000}])
    assert error["code"] == "context_length_exceeded"


@pytest.mark.parametrize(
    ("length", "max_tokens", "fits"),
    [
        pytest.param(250, 6, True, id="to-the-last-position"),
        pytest.param(250, 7, False, id="one-too-many"),
        pytest.param(255, None, True, id="room-for-one"),
        pytest.param(256, None, False, id="no-room"),
        pytest.param(256, 1, False, id="no-room-for-the-one"),
        pytest.param(300, 1, False, id="longer"),
        pytest.param(5, 10**30, False, id="absurd"),
    ],
)
def test_what_does_not_fit_says_so_in_the_words_clients_look_for(
    client: TestClient, length: int, max_tokens: int | None, fits: bool
) -> None:
    prompt = [7] * length
    if fits:
        answer = complete(client, prompt, max_tokens=max_tokens, ignore_eos=True)
        assert answer["usage"]["total_tokens"] == 256
        return
    error = refused(client, COMPLETIONS, prompt=prompt, max_tokens=max_tokens)
    assert error["code"] == "context_length_exceeded"
    assert (
        "prompt is too long: This model's maximum context length is 256 tokens."
        in (error["message"])
    )
    assert f"your prompt contains {length} input tokens" in error["message"]


def test_an_unknown_model_is_404(client: TestClient) -> None:
    for path, body in ((COMPLETIONS, {"prompt": "a"}), (CHAT, {"messages": USER})):
        error = refused(client, path, 404, model="gpt-9", **body)
        assert error["message"] == "The model `gpt-9` does not exist."
        assert (error["type"], error["param"]) == ("NotFoundError", "model")
    assert error_of(client.get("/v1/models/gpt-9"))["param"] == "model"


def test_unknown_routes_and_methods_have_the_same_body(client: TestClient) -> None:
    for response, status in (
        (client.get("/v1/nothing"), 404),
        (client.post("/v1/embeddings", json={}), 404),
        (client.get(COMPLETIONS), 405),
        (client.delete("/health"), 405),
    ):
        assert response.status_code == status
        error_of(response)


def test_a_bug_is_500_and_keeps_its_secrets(
    client: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*arguments: Any, **options: Any) -> None:
        raise KeyError("/secret/path")

    monkeypatch.setattr("jllm.server.tokens.tokenizer_info", broken)
    quiet = TestClient(client.app, raise_server_exceptions=False)
    response = quiet.get("/tokenizer_info")
    assert response.status_code == 500 and "secret" not in response.text
    assert error_of(response)["type"] == "InternalServerError"


def test_one_bad_prompt_of_several_runs_none(client: TestClient) -> None:
    before = client.get("/metrics").text
    refused(client, COMPLETIONS, prompt=[[5, 6], [7, 600]])
    refused(client, COMPLETIONS, prompt=[[5, 6], [7] * 300])
    after = client.get("/metrics").text
    generated = [line for line in before.splitlines() if "generation_tokens_total" in line]
    assert generated and set(generated) <= set(after.splitlines())


@pytest.fixture(scope="module")
def locked() -> Iterator[TestClient]:
    options = replace(OPTIONS, api_key="schlüssel")
    with TestClient(make_app(Served(make_engine(), options))) as asking:
        yield started(asking)


@pytest.mark.parametrize(
    "authorization",
    [
        pytest.param(None, id="none"),
        pytest.param(b"", id="empty"),
        pytest.param(b"Bearer", id="no-key"),
        pytest.param(b"Bearer schluessel", id="wrong"),
        pytest.param("Basic schlüssel".encode(), id="scheme"),
        pytest.param("Bearer schlüssel ".encode() + b"x", id="more"),
        pytest.param(b"Bearer \xff", id="no-text"),
    ],
)
def test_without_the_key_nothing_under_v1_answers(
    locked: TestClient, authorization: bytes | None
) -> None:
    headers = [] if authorization is None else [(b"authorization", authorization)]
    for response in (
        locked.get("/v1/models", headers=headers),
        locked.post(COMPLETIONS, json={"prompt": "a"}, headers=headers),
        locked.get("/v1/nothing", headers=headers),
    ):
        assert response.status_code == 401
        error = error_of(response)
        assert (error["type"], error["code"]) == ("AuthenticationError", "invalid_api_key")
        assert "schl" not in error["message"]


def test_with_the_key_or_outside_v1_all_is_open(locked: TestClient) -> None:
    headers = [(b"authorization", "bearer schlüssel".encode())]
    assert locked.get("/v1/models", headers=headers).status_code == 200
    response = locked.post(COMPLETIONS, json={"prompt": "a"}, headers=headers)
    assert response.status_code == 200
    for path in ("/health", "/metrics", "/version"):
        assert locked.get(path).status_code == 200


def test_request_ids_come_back(client: TestClient) -> None:
    for path, body in ((COMPLETIONS, {"prompt": "a"}), (COMPLETIONS, {}), ("/nowhere", {})):
        response = client.post(path, json=body, headers={"X-Request-Id": "mine"})
        assert response.headers["x-request-id"] == "mine"
    assert client.get("/version").headers["x-request-id"]
    answer = client.post(COMPLETIONS, json={"prompt": "a"}, headers={"X-Request-Id": "mine"})
    assert answer.json()["id"] == "cmpl-mine"
    assert complete(client, "a", request_id="my-own")["id"] == "cmpl-my-own"


def test_unknown_fields_are_ignored_and_logged_once(
    client: TestClient, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(3):
        complete(client, "a", max_tokens=1, frobnicate=1, user="u")
    lines = [record.getMessage() for record in caplog.records if "frobnicate" in record.message]
    assert len(lines) == 1
    assert not any("user" in record.message for record in caplog.records)
