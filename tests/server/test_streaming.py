"""Server-sent events of /v1/completions: framing, and what they add up to."""

from __future__ import annotations

from typing import Any

import pytest
from starlette.testclient import TestClient

from tests.server.clients import COMPLETIONS, complete, joined, stream

LETTERS = list(range(99, 125))  # ids of a to z


@pytest.mark.parametrize(
    "body",
    [
        pytest.param({"prompt": "hello", "temperature": 0}, id="plain"),
        pytest.param({"prompt": ["hello", "a"], "n": 3, "seed": 1}, id="n"),
        pytest.param({"prompt": "hello", "echo": True, "seed": 1}, id="echo"),
        pytest.param({"prompt": "hello", "logprobs": 2, "seed": 1}, id="logprobs"),
        pytest.param(
            {"prompt": [[5, 6, 7], [9] * 70], "echo": True, "logprobs": 1, "n": 2, "seed": 1},
            id="echo-logprobs",
        ),
        pytest.param({"prompt": "a", "stop": ["q", "xy"], "seed": 3, "n": 8}, id="stop"),
        pytest.param({"prompt": "a", "logit_bias": {"1": 9}, "seed": 3, "n": 8}, id="eos"),
    ],
)
def test_a_stream_adds_up_to_the_answer(client: TestClient, body: dict[str, Any]) -> None:
    body = {"max_tokens": 24, "return_token_ids": True, "temperature": 1} | body
    if "stop" in body:
        body["allowed_token_ids"] = LETTERS
    whole = complete(client, **body)
    chunks = stream(client, COMPLETIONS, **body)
    assert {chunk["object"] for chunk in chunks} == {"text_completion"}
    assert len({(chunk["id"], chunk["created"], chunk["model"]) for chunk in chunks}) == 1
    choices = joined(chunks)
    assert sorted(choices) == [choice["index"] for choice in whole["choices"]]
    for choice in whole["choices"]:
        streamed = choices[choice["index"]]
        for name in ("text", "finish_reason", "token_ids"):
            assert streamed[name] == choice[name]
        assert streamed.get("stop_reason") == choice["stop_reason"]
        if choice["logprobs"] is None:
            continue
        mine, theirs = streamed["logprobs"], choice["logprobs"]
        assert mine["tokens"] == theirs["tokens"]
        assert mine["text_offset"] == theirs["text_offset"]
        assert len(mine["top_logprobs"]) == len(mine["tokens"])
        values = zip(mine["token_logprobs"], theirs["token_logprobs"], strict=True)
        assert all(a is b is None or a == pytest.approx(b, abs=1e-4) for a, b in values)


def test_every_step_brings_a_chunk_even_when_text_is_held_back(client: TestClient) -> None:
    held = "".join(chr(97 + i) for i in range(26))
    chunks = stream(
        client,
        COMPLETIONS,
        prompt="a",
        max_tokens=9,
        allowed_token_ids=[99],  # only a, the beginning of the stop string
        stop=["a" * 20, held],
    )
    assert len(chunks) == 9
    assert [chunk["choices"][0]["text"] for chunk in chunks] == [""] * 8 + ["a" * 9]
    reasons = [chunk["choices"][0]["finish_reason"] for chunk in chunks]
    assert reasons == [None] * 8 + ["length"]


def test_no_part_of_a_matched_stop_string_is_sent(client: TestClient) -> None:
    chunks = stream(
        client, COMPLETIONS, prompt="a", max_tokens=9, allowed_token_ids=[99], stop="aaaa"
    )
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == ""
    assert chunks[-1]["choices"][0]["stop_reason"] == "aaaa" and len(chunks) == 4


def test_characters_are_sent_whole(client: TestClient) -> None:
    euro = [2 + byte for byte in "€".encode()]
    for index, allowed in enumerate(euro):  # the three bytes one after the other
        prompt = [7, *euro[:index]]
        text = complete(client, prompt, echo=True, max_tokens=1, allowed_token_ids=[allowed])
        assert "logprobs" in text["choices"][0]
    chunks = stream(
        client,
        COMPLETIONS,
        prompt=[7],
        max_tokens=5,
        allowed_token_ids=[euro[0]],  # a first byte again and again: never a character
    )
    texts = [chunk["choices"][0]["text"] for chunk in chunks]
    assert "".join(texts) == "\N{REPLACEMENT CHARACTER}" * 5 and texts[0] == ""


@pytest.mark.parametrize(
    ("options", "last", "each"),
    [
        pytest.param(None, False, False, id="not-asked"),
        pytest.param({}, False, False, id="empty"),
        pytest.param({"include_usage": True}, True, False, id="at-the-end"),
        pytest.param(
            {"include_usage": True, "continuous_usage_stats": True}, True, True, id="guidellm"
        ),
    ],
)
def test_usage_comes_only_where_asked(
    client: TestClient, options: dict[str, bool] | None, last: bool, each: bool
) -> None:
    chunks = stream(
        client, COMPLETIONS, prompt="hello", max_tokens=4, ignore_eos=True, stream_options=options
    )
    if last:
        end = chunks.pop()
        assert end["choices"] == [] and end["usage"]["completion_tokens"] == 4
        assert end["usage"]["prompt_tokens"] == 2
    assert all(len(chunk["choices"]) == 1 for chunk in chunks)
    if each:
        assert [chunk["usage"]["completion_tokens"] for chunk in chunks] == [1, 2, 3, 4]
    else:
        assert not any("usage" in chunk for chunk in chunks)
