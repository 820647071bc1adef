"""From a request's fields to the SamplingParams of each of its prompts."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from jllm.sampling_params import SamplingParams
from jllm.server.errors import bad_request, from_value_error
from jllm.server.protocol import Generation
from jllm.server.response_format import FIELDS, structured_of
from jllm.server.served import Served, TokenPrompt
from jllm.structured import Structured

TOKEN_ID = re.compile(r"0|-?[1-9][0-9]{0,18}")


def check_generation(body: Generation, served: Served) -> None:
    """Raises APIError for what no prompt could make right."""
    served.check_model(body.model)
    if body.n > served.options.max_n:
        raise bad_request(f"n must be at most {served.options.max_n}, not {body.n}.", "n")
    if body.stream_options is not None and not body.stream:
        raise bad_request("stream_options needs stream: true.", "stream_options")
    if body.prompt_logprobs is not None and body.stream:
        raise bad_request("prompt_logprobs cannot be streamed.", "prompt_logprobs")
    keep = body.truncate_prompt_tokens
    if keep is not None and keep < 1 and keep != -1:
        raise bad_request(
            f"truncate_prompt_tokens must be at least 1, or -1, not {keep}.",
            "truncate_prompt_tokens",
        )
    for name in ("use_beam_search", "logits_processors"):
        if getattr(body, name):
            raise bad_request(f"{name} is not supported.", name)


def form_of(body: Generation) -> tuple[Structured | None, str | None]:
    """The form that the text must have, and the field that asks for it; raises APIError for one
    that is malformed."""
    fields = {name: getattr(body, name) for name in FIELDS}
    asked = next((name for name, value in fields.items() if value is not None), None)
    try:
        return structured_of(fields), asked
    except ValueError as error:
        raise bad_request(str(error), asked) from error


def tokens_to_keep(body: Generation, served: Served) -> int | None:
    """How many of a prompt's last tokens ``truncate_prompt_tokens`` keeps; None keeps all."""
    if body.truncate_prompt_tokens == -1:  # what leaves room for the output
        return max(1, served.max_model_len - (body.output_limit or 1))
    return body.truncate_prompt_tokens


def sampling_params(
    body: Generation,
    served: Served,
    prompts: Sequence[TokenPrompt],
    *,
    max_tokens: int | None,
    default_max_tokens: int | None,
    logprobs: int | None,
    prompt_logprobs: int | None,
    structured: Structured | None = None,
    skip_special_tokens: bool | None = None,
) -> list[SamplingParams]:
    """The options of each prompt.

    Args:
      max_tokens: most tokens to generate, if the request says.
      default_max_tokens: otherwise, or fewer if fewer fit; None for as many as fit.
      logprobs, prompt_logprobs, structured: as in SamplingParams.
      skip_special_tokens: instead of the request's.

    Raises:
      APIError: 400 for an option out of its range, and for a prompt that does not fit.
    """
    for prompt in prompts:
        _check_length(len(prompt.ids), max_tokens, served.max_model_len)
    defaults = served.options.sampling_defaults
    try:
        params = SamplingParams(
            n=body.n,
            temperature=_first(body.temperature, defaults.get("temperature"), 1.0),
            top_p=_first(body.top_p, defaults.get("top_p"), 1.0),
            top_k=int(_first(body.top_k, defaults.get("top_k"), 0)),
            min_p=body.min_p,
            seed=body.seed,
            max_tokens=default_max_tokens if max_tokens is None else max_tokens,
            min_tokens=body.min_tokens,
            stop=body.stop,
            stop_token_ids=body.stop_token_ids,
            include_stop_str_in_output=body.include_stop_str_in_output,
            ignore_eos=body.ignore_eos,
            presence_penalty=body.presence_penalty,
            frequency_penalty=body.frequency_penalty,
            repetition_penalty=body.repetition_penalty,
            logit_bias=_logit_bias(body.logit_bias),
            allowed_token_ids=body.allowed_token_ids,
            bad_words=body.bad_words,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            skip_special_tokens=(
                body.skip_special_tokens if skip_special_tokens is None else skip_special_tokens
            ),
            structured=structured,
            spaces_between_special_tokens=body.spaces_between_special_tokens,
            priority=body.priority,
        )
        if max_tokens is not None:
            return [params] * len(prompts)
        return [_fitted(params, served.max_model_len - len(prompt.ids)) for prompt in prompts]
    except ValueError as error:
        raise from_value_error(error) from error


def _fitted(params: SamplingParams, room: int) -> SamplingParams:
    """The params with fewer tokens where the default asks for more than fit."""
    if params.max_tokens is not None and params.max_tokens > room:
        return replace(params, max_tokens=room)
    return params


def _check_length(num_prompt: int, asked: int | None, limit: int) -> None:
    if num_prompt + (asked or 1) > limit:
        # Clients tell this error by its words: LiteLLM by "this model's maximum context length
        # is", LangChain by "prompt is too long" or by the code.
        wanted = "at least 1" if asked is None else asked
        raise bad_request(
            f"prompt is too long: This model's maximum context length is {limit} tokens. However, "
            f"you requested {wanted} output tokens and your prompt contains {num_prompt} input "
            "tokens.",
            "prompt",
            "context_length_exceeded",
        )


def _first(asked: float | None, default: float | None, otherwise: float) -> float:
    if asked is not None:
        return asked
    return otherwise if default is None else default


def _logit_bias(bias: dict[str, float] | None) -> dict[int, float] | None:
    """JSON's keys are strings."""
    if bias is None:
        return None
    for token in bias:
        # One spelling for each id: of "1" and "01" one would be dropped without a word.
        if not TOKEN_ID.fullmatch(token):
            message = f"logit_bias has the key {token!r:.80}, which is no token id."
            raise bad_request(message, "logit_bias")
    return {int(token): value for token, value in bias.items()}
