"""OpenAI's own client against a live server."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

openai = pytest.importorskip("openai")

from jllm.server import Server  # noqa: E402
from tests.server.conftest import wait_until  # noqa: E402

USER: Any = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def client(live: Server) -> Iterator[Any]:
    with openai.OpenAI(base_url=live.url + "/v1", api_key="none", max_retries=0) as made:
        yield made


def test_models(client: Any) -> None:
    assert [model.id for model in client.models.list()] == ["tiny", "alias"]
    assert client.models.retrieve("alias").id == "alias"


def test_completions(client: Any) -> None:
    answer = client.completions.create(
        model="tiny", prompt=["a", "b"], n=2, max_tokens=4, logprobs=2, seed=1, echo=True
    )
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert answer.choices[0].text.startswith("a") and answer.choices[3].text.startswith("b")
    assert answer.choices[0].logprobs.token_logprobs[0] is None
    assert answer.usage.prompt_tokens == 2 and answer.usage.prompt_tokens_details is not None
    assert answer._request_id


def test_completions_streamed(client: Any) -> None:
    options = dict(model="tiny", prompt="a", max_tokens=12, seed=1)
    whole = client.completions.create(**options)
    chunks = list(
        client.completions.create(**options, stream=True, stream_options={"include_usage": True})
    )
    assert "".join(c.choices[0].text for c in chunks[:-1]) == whole.choices[0].text
    assert chunks[-1].choices == [] and chunks[-1].usage.total_tokens == whole.usage.total_tokens


def test_chat(client: Any) -> None:
    answer = client.chat.completions.create(
        model="tiny", messages=USER, max_completion_tokens=5, logprobs=True, top_logprobs=2, seed=1
    )
    message = answer.choices[0].message
    assert message.role == "assistant" and isinstance(message.content, str)
    assert len(answer.choices[0].logprobs.content[0].top_logprobs) == 2


def test_chat_streamed_through_the_helper(client: Any) -> None:
    options: dict[str, Any] = dict(model="tiny", messages=USER, max_tokens=200, seed=1, n=2)
    options["extra_body"] = {"stop_token_ids": list(range(99, 125))}  # any letter
    with client.chat.completions.stream(**options) as stream:
        final = stream.get_final_completion()
    whole = client.chat.completions.create(**options)
    for streamed, choice in zip(final.choices, whole.choices, strict=True):
        assert streamed.message.content == choice.message.content
        assert streamed.finish_reason == choice.finish_reason == "stop"


def test_extensions_go_through_extra_body(client: Any) -> None:
    answer = client.completions.create(
        model="tiny",
        prompt="a",
        max_tokens=6,
        extra_body={"top_k": 1, "ignore_eos": True, "return_token_ids": True},
    )
    assert len(answer.choices[0].token_ids) == 6


def test_mistakes_are_the_clients_own_errors(client: Any) -> None:
    with pytest.raises(openai.BadRequestError, match="top_p must be in") as caught:
        client.completions.create(model="tiny", prompt="a", top_p=7)
    assert caught.value.param == "top_p"
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model="tiny", prompt="a", max_tokens=999)
    assert caught.value.code == "context_length_exceeded"
    with pytest.raises(openai.NotFoundError, match="does not exist"):
        client.chat.completions.create(model="other", messages=USER)


def test_a_stream_that_fails_raises(client: Any, live: Server) -> None:
    from jllm.server.errors import APIError

    engine = live.served.engine
    with pytest.raises(openai.APIError, match="out of order"):
        for _ in client.completions.create(
            model="tiny", prompt="a", max_tokens=200, stream=True, extra_body={"ignore_eos": True}
        ):
            for ticket in list(engine._tickets):
                ticket.fail(APIError(500, "out of order"))
    wait_until(lambda: engine.num_open == 0)


def test_the_asynchronous_client(live: Server) -> None:
    async def ask() -> list[str]:
        async with openai.AsyncOpenAI(base_url=live.url + "/v1", api_key="none") as client:
            answers = await asyncio.gather(
                *(
                    client.chat.completions.create(
                        model="tiny", messages=USER, max_tokens=6, seed=seed % 2
                    )
                    for seed in range(16)
                )
            )
            return [answer.choices[0].message.content for answer in answers]

    texts = asyncio.run(ask())
    assert set(texts[::2]) == {texts[0]} and set(texts[1::2]) == {texts[1]}


def test_closing_a_stream_aborts_it(client: Any, live: Server) -> None:
    stream = client.completions.create(
        model="tiny", prompt="a", max_tokens=200, stream=True, extra_body={"ignore_eos": True}
    )
    next(iter(stream))
    stream.close()
    wait_until(lambda: live.served.engine.num_open == 0)
