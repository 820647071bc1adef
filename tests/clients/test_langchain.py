"""LangChain's chat model and its older completion model."""

from __future__ import annotations

from typing import Any

import pytest
from langchain_core.messages import HumanMessage
from langchain_openai import ChatOpenAI, OpenAI

from tests.clients.conftest import MODEL

QUESTION = [HumanMessage("What is the capital of France?")]


@pytest.fixture
def options(server: str) -> dict[str, Any]:
    return dict(base_url=server + "/v1", api_key="none", model=MODEL, temperature=0)


def test_chat_whole_streamed_and_in_a_batch_is_the_same(options: dict[str, Any]) -> None:
    chat = ChatOpenAI(**options, max_tokens=12)
    answer = chat.invoke(QUESTION)
    assert "Paris" in answer.content
    assert answer.usage_metadata is not None and answer.usage_metadata["output_tokens"] <= 12
    chunks = list(chat.stream(QUESTION))
    assert len(chunks) > 3 and "".join(str(chunk.content) for chunk in chunks) == answer.content
    assert [each.content for each in chat.batch([QUESTION] * 3)] == [answer.content] * 3


def test_chat_logprobs_spell_the_answer(options: dict[str, Any]) -> None:
    chat = ChatOpenAI(**options, max_tokens=5, logprobs=True, top_logprobs=2)
    answer = chat.invoke(QUESTION)
    content = answer.response_metadata["logprobs"]["content"]
    assert b"".join(bytes(token["bytes"]) for token in content).decode() == answer.content
    assert all(token["logprob"] == token["top_logprobs"][0]["logprob"] for token in content)


def test_completions_of_several_prompts(options: dict[str, Any]) -> None:
    llm = OpenAI(**options, max_tokens=6)
    prompts = ["The capital of France is", "One, two, three,"]
    result = llm.generate(prompts)
    texts = [generations[0].text for generations in result.generations]
    assert "Paris" in texts[0] and "four" in texts[1]
    assert (
        result.llm_output is not None
        and result.llm_output["token_usage"]["completion_tokens"] == 12
    )
    assert "".join(llm.stream(prompts[0])) == texts[0]


def test_a_context_that_is_too_long_is_langchains_own_error(options: dict[str, Any]) -> None:
    from langchain_core.exceptions import ContextOverflowError

    with pytest.raises(ContextOverflowError, match="prompt is too long"):
        ChatOpenAI(**options).invoke("word " * 600)
