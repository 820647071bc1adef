"""POST /v1/chat/completions: messages go in, a message comes out."""

from __future__ import annotations

from typing import Any

from fastapi import Request, Response

from jllm.outputs import CompletionOutput, RequestOutput
from jllm.server import logprobs
from jllm.server.answer import Piece, answer, answer_id
from jllm.server.errors import bad_request
from jllm.server.protocol import ChatRequest
from jllm.server.sampling import check_generation, form_of, sampling_params, tokens_to_keep
from jllm.server.served import Served
from jllm.server.tool_calls import ToolCall, parse
from jllm.server.tools import AnswerPlan, plan_answer
from jllm.server.usage import Usage
from jllm.structured import Structured


async def chat(served: Served, body: ChatRequest, request: Request) -> Response:
    """The answer, whole or streamed; raises APIError for what cannot be answered."""
    check_generation(body, served)
    _check(body)
    form, asked = form_of(body)
    plan = _plan(body, served, form)
    await served.prepare_form(plan.structured, "tools" if plan.format else asked)
    ids = await served.chat_prompt(
        body.messages,
        body,
        add_special_tokens=body.add_special_tokens,
        **plan.template_options,
    )
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
        structured=plan.structured,
        # Some models write calls with special tokens.
        skip_special_tokens=None if plan.format is None else False,
    )
    id = answer_id("chatcmpl", body, request)
    ticket = await served.engine.submit(
        [prompts[0].ids], params, name=id, cache_salt=body.cache_salt, stream=body.stream
    )
    writer = _Deltas if body.stream else _Messages
    pieces = writer(served, body, plan, prompts[0].ids).pieces
    usage = Usage(len(prompts[0].ids))
    object = "chat.completion.chunk" if body.stream else "chat.completion"
    return await answer(request, body, served, ticket, pieces, usage, id=id, object=object)


def _check(body: ChatRequest) -> None:
    if body.output_limit == 0:
        raise bad_request("max_tokens must be at least 1, not 0.", "max_tokens")
    if body.top_logprobs is not None and not body.logprobs:
        raise bad_request("top_logprobs needs logprobs: true.", "top_logprobs")
    if body.functions or body.function_call not in (None, "none"):
        raise bad_request("functions are not supported.", "functions")


def _plan(body: ChatRequest, served: Served, form: Structured | None) -> AnswerPlan:
    """What the request's tools and form ask for; raises APIError for what cannot be."""
    try:
        return plan_answer(
            body.tools,
            body.tool_choice,
            form,
            format=served.call_format,
            chat_template=served.chat_template,
            parallel_tool_calls=body.parallel_tool_calls,
            special_tokens=served.special_tokens,
        )
    except ValueError as error:
        at_fault = "tool_choice" if str(error).startswith("tool_choice") else "tools"
        raise bad_request(str(error), at_fault) from error


class _Messages:
    """Whole answers, each with its message."""

    def __init__(
        self, served: Served, body: ChatRequest, plan: AnswerPlan, prompt_ids: list[int]
    ) -> None:
        self._body = body
        self._plan = plan
        self._prompt_ids = prompt_ids
        self._spelling = logprobs.Spelling(served.tokenizer, body.return_tokens_as_token_ids)

    def pieces(self, index: int, output: RequestOutput) -> list[Piece]:
        """The one piece of the answer."""
        piece: Piece = {"choices": [self._choice(sample) for sample in output.outputs]}
        if self._body.return_token_ids:
            piece["prompt_token_ids"] = self._prompt_ids
        if output.prompt_logprobs is not None:
            piece["prompt_logprobs"] = logprobs.prompt_logprobs(
                output.prompt_logprobs, self._spelling
            )
        return [piece]

    def _choice(self, sample: CompletionOutput) -> Piece:
        message: dict[str, Any] = {"role": "assistant", "content": sample.text}
        calls: list[ToolCall] = []
        if self._plan.format is not None:
            message["content"], calls = parse(sample.text, self._plan.format, self._plan.tools)
        if calls:
            message["tool_calls"] = [call.as_json() for call in calls]
        rest = _rest(sample, self._body, self._spelling, calls=bool(calls))
        return {"index": sample.index, "message": message, **rest}


class _Deltas:
    """Chunks: of each sample first the role, then what it says bit by bit."""

    def __init__(
        self, served: Served, body: ChatRequest, plan: AnswerPlan, prompt_ids: list[int]
    ) -> None:
        self._body = body
        self._prompt_ids = prompt_ids
        self._spelling = logprobs.Spelling(served.tokenizer, body.return_tokens_as_token_ids)
        self._started = [False] * body.n
        self._parsers = [plan.parser() for _ in range(body.n)]

    def pieces(self, index: int, output: RequestOutput) -> list[Piece]:
        """A piece for each sample with news, and one before its first."""
        pieces = []
        for sample in output.outputs:
            # With the first token and not before: clients take the time of the first chunk.
            if not self._started[sample.index]:
                self._started[sample.index] = True
                pieces.append(self._opening(sample.index))
            delta = self._delta(sample)
            parser = self._parsers[sample.index]
            calls = parser is not None and parser.num_calls > 0
            rest = _rest(sample, self._body, self._spelling, calls=calls)
            pieces.append({"choices": [{"index": sample.index, "delta": delta, **rest}]})
        return pieces

    def _delta(self, sample: CompletionOutput) -> dict[str, Any]:
        """What is new of a message; nothing where that is only its end."""
        parser, ended = self._parsers[sample.index], sample.finish_reason is not None
        if parser is None:
            return {"content": sample.text} if sample.text or not ended else {}
        news = [parser.push(sample.text), *([parser.flush()] if ended else [])]
        delta: dict[str, Any] = {}
        if content := "".join(new.content for new in news):
            delta["content"] = content
        if calls := [call.as_json() for new in news for call in new.calls]:
            delta["tool_calls"] = calls
        return delta

    def _opening(self, index: int) -> Piece:
        delta = {"role": "assistant", "content": ""}
        opening: Piece = {
            "choices": [{"index": index, "delta": delta, "logprobs": None, "finish_reason": None}]
        }
        if self._body.return_token_ids:
            opening["prompt_token_ids"] = self._prompt_ids
        return opening


def _rest(
    sample: CompletionOutput, body: ChatRequest, spelling: logprobs.Spelling, *, calls: bool
) -> dict[str, Any]:
    """What a choice has besides its message or delta; ``calls`` says whether it calls tools."""
    called = calls and sample.finish_reason == "stop"
    rest: dict[str, Any] = {
        "logprobs": None,
        "finish_reason": "tool_calls" if called else sample.finish_reason,
        "stop_reason": sample.stop_reason,
    }
    if sample.logprobs is not None:
        rest["logprobs"] = logprobs.chat_logprobs(
            sample.token_ids, sample.logprobs, body.top_logprobs or 0, spelling
        )
    if body.return_token_ids:
        rest["token_ids"] = sample.token_ids
    return rest
