"""What requests look like. An unknown field is ignored, and so is null: it means the default.

Types are strict, as in OpenAI's API: ``"16"`` is no number. Ranges that ``SamplingParams`` checks
are not checked here again.
"""

from __future__ import annotations

import functools
import logging
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    ValidatorFunctionWrapHandler,
    model_validator,
)
from pydantic import field_validator as validator
from pydantic_core import PydanticCustomError

from jllm.server.limits import (
    MAX_NAME,
    MAX_PROMPTS,
    MAX_STOP_BYTES,
    MAX_STOPS,
    MAX_TOP_LOGPROBS,
)

logger = logging.getLogger("jllm.server")

Name = Annotated[str, Field(min_length=1, max_length=MAX_NAME)]
Prompt = str | list[int]
TopLogprobs = Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)]

# Sent by OpenAI's own clients; they change nothing here, and nobody need be told.
IGNORED = frozenset(
    (
        "metadata",
        "modalities",
        "prompt_cache_key",
        "prompt_cache_retention",
        "reasoning_effort",
        "safety_identifier",
        "service_tier",
        "store",
        "user",
        "verbosity",
    )
)
MAX_NAMES_LOGGED = 100  # clients can make up any number of fields
_names_logged: set[str] = set()


class Body(BaseModel):
    """A JSON object whose nulls mean defaults."""

    model_config = ConfigDict(strict=True, extra="ignore", protected_namespaces=())

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        if cls.model_config.get("extra") == "ignore":
            _log_once(data.keys() - _known(cls))
        return {name: value for name, value in data.items() if value is not None}


@functools.cache
def _known(body: type[Body]) -> frozenset[str]:
    return IGNORED | {field.alias or name for name, field in body.model_fields.items()}


def _log_once(unknown: set[str]) -> None:
    for name in sorted(unknown - _names_logged):
        if len(_names_logged) < MAX_NAMES_LOGGED:
            _names_logged.add(name)
            logger.warning("The field %.80r of a request is unknown and was ignored.", name)


class StreamOptions(Body):
    """``include_usage`` asks for a last chunk with the usage, ``continuous_usage_stats`` for the
    usage so far in every chunk."""

    include_usage: bool = False
    continuous_usage_stats: bool = False


class Generation(Body):
    """The fields that both kinds of generation share."""

    model: Name | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    n: int = 1
    stream: bool = False
    stream_options: StreamOptions | None = None

    temperature: Annotated[float, Field(le=2)] | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float = 0.0
    seed: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[str, float] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] = []
    stop: str | list[str] = []
    stop_token_ids: list[int] = []
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    min_tokens: int = 0
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True

    truncate_prompt_tokens: int | None = None
    prompt_logprobs: TopLogprobs | None = None
    return_token_ids: bool = False
    return_tokens_as_token_ids: bool = False
    priority: int = 0
    request_id: Name | None = None
    cache_salt: Name | None = None

    # The form of the text; response_format.py knows what these may be.
    response_format: Any = None
    structured_outputs: Any = None
    guided_json: Any = None
    guided_json_object: Any = None
    guided_regex: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None
    use_beam_search: bool = False
    logits_processors: list[Any] | None = None

    @validator("stop", mode="wrap")
    @classmethod
    def _stop(cls, value: Any, check: ValidatorFunctionWrapHandler) -> str | list[str]:
        try:
            stops = check(value)
        except ValidationError:
            raise _invalid("stop", "must be a string or a list of strings") from None
        several = [stops] if isinstance(stops, str) else stops
        if len(several) > MAX_STOPS:
            raise _invalid("stop", f"has {len(several)} strings; at most {MAX_STOPS} are allowed")
        _check_lengths(several)
        return several

    @validator("bad_words")
    @classmethod
    def _bad_words(cls, words: list[str]) -> list[str]:
        _check_lengths(words)
        return words

    @property
    def output_limit(self) -> int | None:
        """The most tokens to generate, if the request says."""
        if self.max_completion_tokens is not None:
            return self.max_completion_tokens
        return self.max_tokens


class CompletionRequest(Generation):
    """POST /v1/completions."""

    prompt: str | list[str] | list[int] | list[list[int]]
    suffix: str | None = None
    best_of: int | None = None
    echo: bool = False
    logprobs: TopLogprobs | None = None
    add_special_tokens: bool = True

    @validator("prompt", mode="wrap")
    @classmethod
    def _prompt(cls, value: Any, check: ValidatorFunctionWrapHandler) -> list[Prompt]:
        try:
            prompt = check(value)
        except ValidationError:
            forms = "must be a text, a list of texts, a list of token ids, or a list of such lists"
            raise _invalid("prompt", forms) from None
        # Ids of one prompt, unless it is a list of prompts.
        one = isinstance(prompt, str) or (prompt and isinstance(prompt[0], int))
        prompts = [prompt] if one else prompt
        if not prompts:
            raise _invalid("prompt", "is an empty list")
        if len(prompts) > MAX_PROMPTS:
            raise _invalid("prompt", f"has {len(prompts)} prompts; at most {MAX_PROMPTS} may come")
        return prompts

    @property
    def prompts(self) -> list[Prompt]:
        """One text or list of ids for each prompt."""
        return self.prompt  # type: ignore[return-value]  # the validator made it a list of prompts


class Message(Body):
    """One message of a conversation. Templates may read further fields."""

    model_config = ConfigDict(extra="allow")

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[dict[str, Any]] | None = None
    name: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None

    @validator("content", mode="wrap")
    @classmethod
    def _content(cls, value: Any, check: ValidatorFunctionWrapHandler) -> Any:
        try:
            return check(value)
        except ValidationError:
            raise _invalid("content", "must be a string or a list of text parts") from None


class TemplateOptions(Body):
    """How the chat template turns messages into a prompt."""

    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template: Any = None
    chat_template_kwargs: dict[str, Any] = {}


class ChatRequest(TemplateOptions, Generation):
    """POST /v1/chat/completions."""

    messages: Annotated[list[Message], Field(min_length=1)]
    add_special_tokens: bool = False  # the template writes BOS
    logprobs: bool = False
    top_logprobs: TopLogprobs | None = None
    tools: Any = None  # tools.py knows what these two may be
    tool_choice: Any = None
    parallel_tool_calls: bool = True
    functions: list[Any] | None = None
    function_call: Any = None


class TokenizeRequest(TemplateOptions):
    """POST /tokenize, of a text or of a conversation."""

    model: Name | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], Field(min_length=1)] | None = None
    add_special_tokens: bool | None = None  # by default, to a text only
    return_token_strs: bool = False


class DetokenizeRequest(Body):
    """POST /detokenize."""

    model: Name | None = None
    tokens: list[int]


def _check_lengths(texts: list[str]) -> None:
    for text in texts:
        if len(text.encode()) > MAX_STOP_BYTES:
            raise PydanticCustomError(
                "invalid_stop",
                "no string may have more than {limit} bytes",
                {"limit": MAX_STOP_BYTES},
            )


def _invalid(field: str, rule: str) -> PydanticCustomError:
    return PydanticCustomError("invalid_" + field, "{rule}", {"rule": rule})
