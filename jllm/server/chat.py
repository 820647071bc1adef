"""POST /v1/chat/completions: messages go in, a message comes out."""

from __future__ import annotations

from typing import Any

from fastapi import Request, Response

from jllm.outputs import CompletionOutput, RequestOutput
from jllm.server import logprobs
from jllm.server.answer import Piece, answer, answer_id
from jllm.server.errors import bad_request
from jllm.server.protocol import ChatRequest
from jllm.server.sampling import check_generation, sampling_params, tokens_to_keep
from jllm.server.served import Served
from jllm.server.usage import Usage


async def chat(served: Served, body: ChatRequest, request: Request) -> Response:
    """The answer, whole or streamed; raises APIError for what cannot be answered."""
    check_generation(body, served)
    _check(body)
    ids = await served.chat_prompt(body.messages, body, add_special_tokens=body.add_special_tokens)
    prompts = await served.token_prompts(
        [ids], add_special_tokens=False, keep=tokens_to_keep(body, served)
    )
    params = sampling_params(
        body,
        served,
        prompts,
        max_tokens=body.output_limit,
        default_max_tokens=None,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        prompt_logprobs=body.prompt_logprobs,
    )
    id = answer_id("chatcmpl", body, request)
    ticket = await served.engine.submit(
        [prompts[0].ids], params, name=id, cache_salt=body.cache_salt, stream=body.stream
    )
    writer = _Deltas if body.stream else _Messages
    pieces = writer(served, body, prompts[0].ids).pieces
    usage = Usage(len(prompts[0].ids))
    object = "chat.completion.chunk" if body.stream else "chat.completion"
    return await answer(request, body, served, ticket, pieces, usage, id=id, object=object)


def _check(body: ChatRequest) -> None:
    if body.output_limit == 0:
        raise bad_request("max_tokens must be at least 1, not 0.", "max_tokens")
    if body.top_logprobs is not None and not body.logprobs:
        raise bad_request("top_logprobs needs logprobs: true.", "top_logprobs")
    if body.tools and body.tool_choice != "none":
        raise bad_request("tools are not supported, except with tool_choice: 'none'.", "tools")
    if body.tool_choice not in (None, "none"):
        raise bad_request("tool_choice is not supported, except 'none'.", "tool_choice")
    if body.functions or body.function_call not in (None, "none"):
        raise bad_request("functions are not supported.", "functions")


class _Messages:
    """Whole answers, each with its message."""

    def __init__(self, served: Served, body: ChatRequest, prompt_ids: list[int]) -> None:
        self._body = body
        self._prompt_ids = prompt_ids
        self._spelling = logprobs.Spelling(served.tokenizer, body.return_tokens_as_token_ids)

    def pieces(self, index: int, output: RequestOutput) -> list[Piece]:
        """The one piece of the answer."""
        piece: Piece = {
            "choices": [
                {
                    "index": sample.index,
                    "message": {"role": "assistant", "content": sample.text},
                    **_rest(sample, self._body, self._spelling),
                }
                for sample in output.outputs
            ]
        }
        if self._body.return_token_ids:
            piece["prompt_token_ids"] = self._prompt_ids
        if output.prompt_logprobs is not None:
            piece["prompt_logprobs"] = logprobs.prompt_logprobs(
                output.prompt_logprobs, self._spelling
            )
        return [piece]


class _Deltas:
    """Chunks: of each sample first the role, then what it says bit by bit."""

    def __init__(self, served: Served, body: ChatRequest, prompt_ids: list[int]) -> None:
        self._body = body
        self._prompt_ids = prompt_ids
        self._spelling = logprobs.Spelling(served.tokenizer, body.return_tokens_as_token_ids)
        self._started = [False] * body.n

    def pieces(self, index: int, output: RequestOutput) -> list[Piece]:
        """A piece for each sample with news, and one before its first."""
        pieces = []
        for sample in output.outputs:
            # With the first token and not before: clients take the time of the first chunk.
            if not self._started[sample.index]:
                self._started[sample.index] = True
                pieces.append(self._opening(sample.index))
            delta = {"content": sample.text} if sample.text or not sample.finish_reason else {}
            rest = _rest(sample, self._body, self._spelling)
            pieces.append({"choices": [{"index": sample.index, "delta": delta, **rest}]})
        return pieces

    def _opening(self, index: int) -> Piece:
        delta = {"role": "assistant", "content": ""}
        opening: Piece = {
            "choices": [{"index": index, "delta": delta, "logprobs": None, "finish_reason": None}]
        }
        if self._body.return_token_ids:
            opening["prompt_token_ids"] = self._prompt_ids
        return opening


def _rest(
    sample: CompletionOutput, body: ChatRequest, spelling: logprobs.Spelling
) -> dict[str, Any]:
    """What a choice has besides its message or delta."""
    rest: dict[str, Any] = {
        "logprobs": None,
        "finish_reason": sample.finish_reason,
        "stop_reason": sample.stop_reason,
    }
    if sample.logprobs is not None:
        rest["logprobs"] = logprobs.chat_logprobs(
            sample.token_ids, sample.logprobs, body.top_logprobs or 0, spelling
        )
    if body.return_token_ids:
        rest["token_ids"] = sample.token_ids
    return rest
