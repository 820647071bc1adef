"""LiteLLM, by way of its provider for vLLM's servers."""

from __future__ import annotations

from typing import Any

import litellm
import pytest

from tests.clients.conftest import MODEL

MESSAGES = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.fixture
def options(server: str) -> dict[str, Any]:
    return dict(model=f"hosted_vllm/{MODEL}", api_base=server + "/v1", temperature=0, max_tokens=12)


def test_chat_whole_and_streamed_is_the_same(options: dict[str, Any]) -> None:
    answer = litellm.completion(messages=MESSAGES, **options)
    text = answer.choices[0].message.content
    assert "Paris" in text and answer.usage.completion_tokens <= 12
    chunks = list(litellm.completion(messages=MESSAGES, stream=True, **options))
    assert len(chunks) > 3
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == text
    assert chunks[-1].choices[0].finish_reason == answer.choices[0].finish_reason


def test_text_completion(options: dict[str, Any]) -> None:
    answer = litellm.text_completion(prompt="The capital of France is", **options)
    assert "Paris" in answer.choices[0].text and answer.usage.completion_tokens == 12


def test_a_context_that_is_too_long_is_litellms_own_error(options: dict[str, Any]) -> None:
    messages = [{"role": "user", "content": "word " * 600}]
    with pytest.raises(litellm.ContextWindowExceededError):
        litellm.completion(messages=messages, **options)
