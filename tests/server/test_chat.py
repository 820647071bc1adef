"""POST /v1/chat/completions."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from starlette.testclient import TestClient

import jllm
from jllm.server import ServerOptions
from jllm.server.app import make_app
from jllm.server.served import Served
from tests.server.clients import CHAT, ask, chat, joined, refused, stream
from tests.server.conftest import OPTIONS, make_engine, spoken_model, started

USER = [{"role": "user", "content": "hi"}]
TOKENIZER = spoken_model().tokenizer
assert TOKENIZER is not None


def prompt_text(client: TestClient, messages: Any, **options: Any) -> str:
    """What the model reads."""
    answer = ask(client, CHAT, messages=messages, max_tokens=1, return_token_ids=True, **options)
    return TOKENIZER.decode(answer["prompt_token_ids"], skip_special_tokens=False)


def test_an_answer_has_openais_form(client: TestClient) -> None:
    answer = chat(client, "hi", max_tokens=3, n=2, ignore_eos=True)
    assert answer["id"].startswith("chatcmpl-") and answer["object"] == "chat.completion"
    assert [choice["index"] for choice in answer["choices"]] == [0, 1]
    for choice in answer["choices"]:
        assert choice.keys() == {"index", "message", "logprobs", "finish_reason", "stop_reason"}
        assert choice["message"].keys() == {"role", "content"}
        assert choice["message"]["role"] == "assistant" and choice["finish_reason"] == "length"
    assert answer["usage"]["completion_tokens"] == 6


def test_the_template_writes_the_prompt(client: TestClient) -> None:
    messages = [{"role": "system", "content": "be"}, *USER]
    assert prompt_text(client, messages) == "<system>be<user>hi<assistant>"
    assert prompt_text(client, messages, add_generation_prompt=False) == "<system>be<user>hi"


def test_the_answer_goes_on_to_the_end_of_the_context(client: TestClient) -> None:
    answer = chat(client, "hi", ignore_eos=True)
    assert answer["usage"]["total_tokens"] == 256
    assert answer["choices"][0]["finish_reason"] == "length"


def test_max_completion_tokens_wins(client: TestClient) -> None:
    answer = chat(client, "hi", max_tokens=9, max_completion_tokens=2, ignore_eos=True)
    assert answer["usage"]["completion_tokens"] == 2
    refused(client, CHAT, messages=USER, max_tokens=0)


def test_content_may_be_text_parts(client: TestClient) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert "<user>a\nb<" in prompt_text(client, [{"role": "user", "content": parts}])
    image = [{"type": "image_url", "image_url": {"url": "http://127.0.0.1/x.png"}}]
    error = refused(client, CHAT, messages=[{"role": "user", "content": image}])
    assert "image_url" in error["message"]


def test_a_developer_is_what_system_was(client: TestClient) -> None:
    messages = [{"role": "developer", "content": "be"}, *USER]
    assert prompt_text(client, messages).startswith("<system>be")


def test_the_last_message_can_be_continued(client: TestClient) -> None:
    messages = [*USER, {"role": "assistant", "content": "well"}]
    text = prompt_text(client, messages, add_generation_prompt=False, continue_final_message=True)
    assert text == "<user>hi<assistant>well"
    refused(client, CHAT, messages=messages, continue_final_message=True)


def test_a_template_that_refuses_says_why(client: TestClient) -> None:
    messages = [*USER, {"role": "tool", "content": "x", "tool_call_id": "1"}]
    assert refused(client, CHAT, messages=messages)["message"] == "no tools here"


def test_logprobs_have_true_bytes(client: TestClient) -> None:
    answer = chat(
        client, "hi", max_tokens=20, logprobs=True, top_logprobs=3, return_token_ids=True, seed=1
    )
    choice = answer["choices"][0]
    assert len(choice["logprobs"]["content"]) == len(choice["token_ids"])
    for token, entry in zip(choice["token_ids"], choice["logprobs"]["content"], strict=True):
        assert bytes(entry["bytes"]) == TOKENIZER.token_bytes(token)
        assert entry["token"] == TOKENIZER.token_string(token)
        top = [other["logprob"] for other in entry["top_logprobs"]]
        assert len(top) == 3 and top == sorted(top, reverse=True) and entry["logprob"] <= top[0]


def test_logprobs_alone_show_no_others(client: TestClient) -> None:
    (choice,) = chat(client, "hi", max_tokens=2, logprobs=True)["choices"]
    assert all(entry["top_logprobs"] == [] for entry in choice["logprobs"]["content"])
    refused(client, CHAT, messages=USER, top_logprobs=2)


@pytest.mark.parametrize(
    "fields",
    [
        pytest.param({"chat_template": "{{ 1 }}"}, id="template"),
        pytest.param({"chat_template_kwargs": {"chat_template": "{{ 1 }}"}}, id="kwargs-template"),
        pytest.param({"chat_template_kwargs": {"messages": []}}, id="kwargs-messages"),
        pytest.param({"chat_template_kwargs": {"bos_token": "x"}}, id="kwargs-bos"),
        pytest.param({"chat_template_kwargs": {"add_generation_prompt": False}}, id="kwargs-agp"),
        pytest.param({"tools": [{"function": {}}]}, id="tools"),
        pytest.param({"tool_choice": "sometimes"}, id="tool-choice"),
        pytest.param({"functions": [{"name": "f"}]}, id="functions"),
        pytest.param({"response_format": {"type": "xml"}}, id="format"),
        pytest.param({"guided_regex": "a("}, id="guided"),
        pytest.param({"structured_outputs": {"yaml": "a*"}}, id="structured"),
        pytest.param({"prompt_logprobs": 1, "stream": True}, id="prompt-logprobs-streamed"),
    ],
)
def test_what_cannot_be_done_is_refused_by_name(client: TestClient, fields: dict[str, Any]) -> None:
    error = refused(client, CHAT, messages=USER, **fields)
    assert next(iter(fields)) in error["message"]


def test_what_changes_nothing_is_accepted(client: TestClient) -> None:
    chat(
        client,
        "hi",
        max_tokens=1,
        tools=[],
        tool_choice="none",
        parallel_tool_calls=True,
        response_format={"type": "text"},
        reasoning_effort="low",
        user="u",
        store=True,
        metadata={"a": "b"},
        service_tier="auto",
        verbosity="low",
        prompt_cache_key="k",
        safety_identifier="s",
    )


def test_a_stream_adds_up_to_the_answer(client: TestClient) -> None:
    body: dict[str, Any] = dict(
        messages=USER, n=3, seed=5, max_tokens=12, logprobs=True, top_logprobs=1
    )
    whole = ask(client, CHAT, **body, return_token_ids=True)
    chunks = stream(
        client, CHAT, **body, return_token_ids=True, stream_options={"include_usage": True}
    )
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert len({(chunk["id"], chunk["created"], chunk["model"]) for chunk in chunks}) == 1
    choices = joined(chunks)
    for choice in whole["choices"]:
        streamed = choices[choice["index"]]
        assert streamed["text"] == choice["message"]["content"]
        for name in ("finish_reason", "token_ids"):
            assert streamed[name] == choice[name]
        for mine, theirs in zip(
            streamed["logprobs"]["content"], choice["logprobs"]["content"], strict=True
        ):
            assert (mine["token"], mine["bytes"]) == (theirs["token"], theirs["bytes"])
            assert mine["logprob"] == pytest.approx(theirs["logprob"], abs=1e-4)
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"]


def test_each_choice_begins_with_its_role_and_ends_with_its_reason(client: TestClient) -> None:
    chunks = stream(client, CHAT, messages=USER, n=2, max_tokens=4, ignore_eos=True)
    for index in (0, 1):
        parts = [c for chunk in chunks for c in chunk["choices"] if c["index"] == index]
        assert parts[0]["delta"] == {"role": "assistant", "content": ""}
        assert all("role" not in part["delta"] for part in parts[1:])
        assert [part["finish_reason"] for part in parts] == [None] * 4 + ["length"]


@pytest.fixture(scope="module")
def with_template() -> Iterator[TestClient]:
    """A server started with a template that takes long for long conversations."""
    slow = "{% for m in messages %}{% for i in range(99999) %}{% endfor %}{% endfor %}x"
    options = replace(OPTIONS, chat_template=slow, template_timeout_s=0.2)
    with TestClient(make_app(Served(make_engine(), options))) as asking:
        yield started(asking)


def test_the_servers_template_is_used_and_has_limited_time(with_template: TestClient) -> None:
    assert ask(with_template, "/tokenize", messages=USER)["count"] == 1
    start = time.monotonic()
    error = refused(with_template, CHAT, messages=USER * 500)
    assert "longer than 0.2 s" in error["message"] and time.monotonic() - start < 3
    assert with_template.get("/health").status_code == 200


def test_a_model_without_a_template_cannot_chat() -> None:
    params = spoken_model()
    mute = params.replace(tokenizer=replace(params.tokenizer, chat_template=None))
    engine = jllm.Engine(mute, make_engine().config)
    with TestClient(make_app(Served(engine, ServerOptions(warm_up=False)))) as asking:
        assert "no chat template" in refused(started(asking), CHAT, messages=USER)["message"]
