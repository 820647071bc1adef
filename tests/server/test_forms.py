"""Text of a form and tool calls, through the server: whole, streamed, and by OpenAI's client."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from starlette.testclient import TestClient

pytest.importorskip("llguidance")
openai = pytest.importorskip("openai")

from pydantic import BaseModel  # noqa: E402

from jllm.engine import grammar  # noqa: E402
from jllm.server import Server, ServerOptions  # noqa: E402
from jllm.server.app import make_app  # noqa: E402
from jllm.server.served import Served  # noqa: E402
from tests.server.clients import CHAT, COMPLETIONS, ask, refused, stream  # noqa: E402
from tests.server.conftest import OPTIONS, make_engine, started, wait_until  # noqa: E402

USER: Any = [{"role": "user", "content": "hi"}]
TEMPLATE = (
    "{% if tools %}<tools>{{ tools | tojson }}{% endif %}{% for m in messages %}<{{ m.role }}>"
    "{{ m.content or '' }}{% for c in m.tool_calls or [] %}<tool_call>{{ c.function.name }}"
    "{{ c.function.arguments | tojson }}{% endfor %}{% endfor %}<assistant>"
)
WITH_TOOLS = replace(OPTIONS, chat_template=TEMPLATE, tool_call_parser="hermes")
SCHEMA = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}},
    "required": ["ok"],
    "additionalProperties": False,
}
# One call with one of three numbers, so that even a model that knows nothing comes to an end.
DIAL = {
    "type": "object",
    "properties": {"to": {"enum": [1, 2, 3]}},
    "required": ["to"],
    "additionalProperties": False,
}
FORCED: dict[str, Any] = dict(tool_choice="required", parallel_tool_calls=False, max_tokens=300)
TOOLS = [
    {"type": "function", "function": {"name": "dial", "parameters": DIAL}},
    {"type": "function", "function": {"name": "hang_up"}},
]


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with Server(make_engine(max_model_len=1024), WITH_TOOLS) as made:
        wait_until(lambda: made.served.engine.state == "ready")
        yield made


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[TestClient]:
    import httpx2

    with httpx2.Client(base_url=server.url, timeout=60) as made:
        yield made  # type: ignore[misc]  # of the same methods


@pytest.fixture(scope="module")
def sdk(server: Server) -> Iterator[Any]:
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as made:
        yield made


FORMS: list[tuple[dict[str, Any], str]] = [
    (
        {"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}},
        r'\s*\{\s*"ok"\s*:\s*(true|false)\s*\}\s*',
    ),
    ({"response_format": {"type": "regex", "regex": "[ab]{3}"}}, "[ab]{3}"),
    ({"guided_choice": ["yes", "no"]}, "yes|no"),
    ({"guided_regex": "x[01]"}, "x[01]"),
    ({"structured_outputs": {"choice": ["left", "right"]}}, "left|right"),
    ({"guided_json": SCHEMA}, r'\s*\{\s*"ok"\s*:\s*(true|false)\s*\}\s*'),
]


@pytest.mark.parametrize(("fields", "form"), FORMS)
def test_a_text_has_the_form_asked_for(
    client: TestClient, fields: dict[str, Any], form: str
) -> None:
    answer = ask(client, CHAT, messages=USER, n=3, max_tokens=60, seed=1, **fields)
    for choice in answer["choices"]:
        assert re.fullmatch(form, choice["message"]["content"])
        assert choice["finish_reason"] == "stop"
    answer = ask(client, COMPLETIONS, prompt="hi", max_tokens=60, seed=2, **fields)
    assert re.fullmatch(form, answer["choices"][0]["text"])


def test_a_form_is_kept_to_in_a_stream(client: TestClient) -> None:
    fields = {"guided_regex": "[ab]{9}"}
    chunks = stream(client, CHAT, messages=USER, max_tokens=30, **fields)
    text = "".join(c["choices"][0]["delta"].get("content", "") for c in chunks if c["choices"])
    assert re.fullmatch("[ab]{9}", text)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"guided_regex": "a("}, "regex"),
        ({"guided_choice": []}, "guided_choice"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"guided_choice": ["a"], "guided_regex": "b"}, "several"),
        ({"tools": [{"function": {"name": "no spaces"}}]}, "tools[0].function.name"),
        ({"tools": TOOLS, "tool_choice": {"function": {"name": "sing"}}}, "sing"),
        ({"tool_choice": "required"}, "there are no tools"),
    ],
)
def test_what_cannot_be_is_refused(client: TestClient, fields: dict[str, Any], said: str) -> None:
    assert said in refused(client, CHAT, messages=USER, **fields)["message"]


def test_without_the_package_the_extra_is_named(
    client: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammar.importlib.util, "find_spec", lambda name: None)
    error = refused(client, CHAT, messages=USER, guided_regex="never compiled before")
    assert "jllm[structured]" in error["message"]


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "dial"}}])
def test_a_forced_call_is_parsed(client: TestClient, choice: Any) -> None:
    forced = FORCED | {"tool_choice": choice}
    answer = ask(client, CHAT, messages=USER, tools=TOOLS, n=2, seed=3, **forced)
    for sample in answer["choices"]:
        assert sample["finish_reason"] == "tool_calls"
        message = sample["message"]
        assert message["content"] is None
        for call in message["tool_calls"]:
            assert call["type"] == "function" and call["id"].startswith("call_")
            arguments = json.loads(call["function"]["arguments"])
            if call["function"]["name"] == "dial":
                assert arguments["to"] in (1, 2, 3)
            else:
                assert choice == "required" and arguments == {}


def test_a_streamed_call_is_that_of_the_whole(client: TestClient) -> None:
    options: dict[str, Any] = dict(messages=USER, tools=TOOLS, seed=4, **FORCED)
    whole = ask(client, CHAT, **options)["choices"][0]["message"]["tool_calls"]
    calls: dict[int, dict[str, str]] = {}
    reasons = []
    for chunk in stream(client, CHAT, **options):
        for choice in chunk["choices"]:
            reasons.append(choice["finish_reason"])
            for call in choice["delta"].get("tool_calls", []):
                made = calls.setdefault(call["index"], {"name": "", "arguments": ""})
                made["name"] += call["function"].get("name") or ""
                made["arguments"] += call["function"]["arguments"]
    assert [calls[i] for i in sorted(calls)] == [call["function"] for call in whole]
    assert reasons[-1] == "tool_calls" and set(reasons[:-1]) == {None}


def test_no_call_is_forced_by_auto_and_none_hides_the_tools(client: TestClient) -> None:
    def prompt(**fields: Any) -> str:
        answer = ask(
            client, CHAT, messages=USER, max_tokens=1, tools=TOOLS, return_token_ids=True, **fields
        )
        assert answer["choices"][0]["message"].get("tool_calls") is None
        tokens = {"tokens": answer["prompt_token_ids"]}
        text: str = ask(client, "/detokenize", **tokens)["prompt"]
        return text

    assert prompt(tool_choice="auto").startswith("<tools>") and "dial" in prompt()
    assert prompt(tool_choice="none") == "<user>hi<assistant>"


def test_earlier_calls_and_their_results_reach_the_template(client: TestClient) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "dial", "arguments": '{"to": 2}'}}
    messages = [
        *USER,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "rang", "tool_call_id": "c"},
    ]
    answer = ask(client, CHAT, messages=messages, tools=TOOLS, max_tokens=1, return_token_ids=True)
    text = ask(client, "/detokenize", tokens=answer["prompt_token_ids"])["prompt"]
    assert text.endswith('<user>hi<assistant><tool_call>dial{"to": 2}<tool>rang<assistant>')


def test_a_model_whose_template_shows_no_tools_refuses_them() -> None:
    options = replace(WITH_TOOLS, chat_template="{{ messages[0].content }}")
    with TestClient(make_app(Served(make_engine(), options))) as asking:
        error = refused(started(asking), CHAT, messages=USER, tools=TOOLS)
    assert error["param"] == "tools" and "template" in error["message"]


def test_the_parser_must_be_known() -> None:
    with pytest.raises(ValueError, match="hermes or llama3_json"):
        ServerOptions(tool_call_parser="mistral")


def test_the_id_of_an_answer_is_that_of_its_header(client: TestClient) -> None:
    response = client.post(CHAT, json={"messages": USER, "max_tokens": 1})
    assert response.json()["id"] == "chatcmpl-" + response.headers["x-request-id"]


class Verdict(BaseModel):
    ok: bool


def test_openais_client_parses_a_form(sdk: Any) -> None:
    answer = sdk.chat.completions.parse(
        model="tiny", messages=USER, response_format=Verdict, max_tokens=60, seed=5
    )
    assert isinstance(answer.choices[0].message.parsed, Verdict)


def test_openais_client_streams_calls(sdk: Any) -> None:
    with sdk.chat.completions.stream(
        model="tiny", messages=USER, tools=TOOLS, seed=6, **FORCED
    ) as events:
        final = events.get_final_completion()
    choice = final.choices[0]
    assert choice.finish_reason == "tool_calls"
    assert choice.message.tool_calls[0].function.name in ("dial", "hang_up")
