"""POST /v1/completions: prompts go on as text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fastapi import Request, Response

from jllm.outputs import CompletionOutput, RequestOutput
from jllm.server import logprobs
from jllm.server.answer import Piece, answer, answer_id
from jllm.server.errors import bad_request
from jllm.server.limits import MAX_SAMPLES
from jllm.server.protocol import CompletionRequest
from jllm.server.sampling import check_generation, form_of, sampling_params, tokens_to_keep
from jllm.server.served import Served, TokenPrompt
from jllm.server.usage import Usage

DEFAULT_MAX_TOKENS = 16  # OpenAI's


async def complete(served: Served, body: CompletionRequest, request: Request) -> Response:
    """The answer, whole or streamed; raises APIError for what cannot be answered."""
    check_generation(body, served)
    _check(body)
    structured, asked = form_of(body)
    await served.prepare_form(structured, asked)
    prompts = await served.token_prompts(
        body.prompts,
        add_special_tokens=body.add_special_tokens,
        keep=tokens_to_keep(body, served),
    )
    max_tokens = body.output_limit
    if max_tokens == 0:
        max_tokens = 1  # the engine draws at least one, which is left out below
    scored = [body.prompt_logprobs, body.logprobs if body.echo else None]
    params = sampling_params(
        body,
        served,
        prompts,
        max_tokens=max_tokens,
        default_max_tokens=DEFAULT_MAX_TOKENS,
        logprobs=body.logprobs,
        prompt_logprobs=max((count for count in scored if count is not None), default=None),
        structured=structured,
    )
    id = answer_id("cmpl", body, request)
    ticket = await served.engine.submit(
        [prompt.ids for prompt in prompts],
        params,
        name=id,
        cache_salt=body.cache_salt,
        stream=body.stream,
    )
    usage = Usage(sum(len(prompt.ids) for prompt in prompts), body.output_limit != 0)
    texts = [_Text(served, body, prompt, first=i * body.n) for i, prompt in enumerate(prompts)]

    def pieces(index: int, output: RequestOutput) -> list[Piece]:
        return [{"choices": [choice]} for choice in texts[index].choices(output)]

    return await answer(
        request, body, served, ticket, pieces, usage, id=id, object="text_completion"
    )


def _check(body: CompletionRequest) -> None:
    if body.output_limit == 0 and not body.echo:
        raise bad_request("max_tokens can be 0 only with echo: true.", "max_tokens")
    if body.best_of is not None and body.best_of != body.n:
        raise bad_request(f"best_of must be equal to n, {body.n}, not {body.best_of}.", "best_of")
    samples = len(body.prompts) * body.n
    if samples > MAX_SAMPLES:
        message = f"{len(body.prompts)} prompts with n {body.n} are {samples} samples"
        raise bad_request(f"{message}; at most {MAX_SAMPLES} are allowed in one request.", "n")
    if body.suffix:
        raise bad_request("suffix is not supported.", "suffix")


class _Text:
    """One prompt and the texts that follow it.

    Args:
      first: index of the first of its choices.
    """

    def __init__(
        self, served: Served, body: CompletionRequest, prompt: TokenPrompt, first: int
    ) -> None:
        self._tokenizer = served.tokenizer
        self._body = body
        self._prompt = prompt
        self._first = first
        self._spelling = logprobs.Spelling(served.tokenizer, body.return_tokens_as_token_ids)
        self._prompt_logprobs: Sequence[logprobs.Entry] = []
        self._echoed = self._echoed_text() if body.echo else ""
        self._offsets = [self._offsets_from(len(self._echoed)) for _ in range(body.n)]
        self._started = [False] * body.n

    def choices(self, output: RequestOutput) -> list[dict[str, Any]]:
        """What is new of each sample."""
        if output.prompt_logprobs is not None:  # comes no later than the first token
            self._prompt_logprobs = output.prompt_logprobs
        if self._body.output_limit == 0:
            for sample in output.outputs:
                sample.text, sample.token_ids, sample.logprobs = "", [], []
                sample.stop_reason, sample.finish_reason = None, "length"
        return [self._choice(sample) for sample in output.outputs]

    def _choice(self, sample: CompletionOutput) -> dict[str, Any]:
        body, first_news = self._body, not self._started[sample.index]
        self._started[sample.index] = True
        choice = {
            "index": self._first + sample.index,
            "text": self._echoed + sample.text if first_news else sample.text,
            "logprobs": None,
            "finish_reason": sample.finish_reason,
            "stop_reason": sample.stop_reason,
        }
        if body.logprobs is not None:
            choice["logprobs"] = self._logprobs(sample, first_news)
        if body.return_token_ids:
            choice["token_ids"] = sample.token_ids
            if first_news:
                choice["prompt_token_ids"] = self._prompt.ids
        if body.prompt_logprobs is not None:
            choice["prompt_logprobs"] = logprobs.prompt_logprobs(
                self._prompt_logprobs, self._spelling
            )
        return choice

    def _logprobs(self, sample: CompletionOutput, first_news: bool) -> dict[str, list[Any]]:
        offsets = self._offsets[sample.index]
        shown = logprobs.completion_logprobs(
            sample.token_ids, sample.logprobs or [], offsets, self._spelling
        )
        if not (first_news and self._body.echo):
            return shown
        prompt = logprobs.completion_logprobs(
            self._prompt.ids, self._prompt_logprobs, self._prompt_offsets(), self._spelling
        )
        return {name: values + shown[name] for name, values in prompt.items()}

    def _echoed_text(self) -> str:
        return self._decoded() if self._prompt.text is None else self._prompt.text

    def _decoded(self) -> str:
        if self._tokenizer is None:
            return ""
        return self._tokenizer.decode(self._prompt.ids, skip_special_tokens=False)

    def _offsets_from(self, start: int) -> logprobs.TextOffsets:
        return logprobs.TextOffsets(self._tokenizer, start, self._body.skip_special_tokens)

    def _prompt_offsets(self) -> logprobs.TextOffsets:
        # A BOS that the tokenizer put in front of the text is no part of it.
        start = len(self._echoed) - len(self._decoded())
        return logprobs.TextOffsets(self._tokenizer, start, skip_special_tokens=False)
