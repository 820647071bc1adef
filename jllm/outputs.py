"""What a request gives back."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

__all__ = ["CompletionOutput", "Logprob", "RequestOutput", "RequestTimes"]

FinishReason = Literal["stop", "length", "abort"]


@dataclass(frozen=True, slots=True)
class Logprob:
    """Log-probability of one token at one position."""

    logprob: float
    decoded_token: str | None = None


@dataclass(slots=True)
class CompletionOutput:
    """One of the n samples of a request.

    Attributes:
      index: which sample, 0 to n - 1.
      text: the generated text; of a streamed output, what is new of it.
      token_ids: the generated ids, the one that ended the generation included; likewise.
      cumulative_logprob: sum of the logprobs of all tokens so far; None unless asked for.
      logprobs: per token, the sampled token's Logprob and the likeliest alternatives', by id.
      finish_reason: None while running; ``stop`` (eos, stop token or stop string), ``length``
        (max_tokens or max_model_len), or ``abort``. The end of a structured output is a ``stop``.
      stop_reason: the stop string or stop token id that ended it; None for eos. If a structured
        output met a limit of its grammar and was aborted, what limit.
    """

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None


@dataclass(frozen=True, slots=True)
class RequestTimes:
    """When things happened to a request, in seconds of ``time.monotonic()``.

    Attributes:
      arrived: it was added to the engine.
      admitted: the first of its samples began to run; None if none did.
      first_token: the first token arrived on the host; None if none did.
      finished: the last of its samples ended.
    """

    arrived: float
    admitted: float | None
    first_token: float | None
    finished: float


@dataclass(slots=True)
class RequestOutput:
    """A request's prompt and its samples.

    Attributes:
      request_id: as returned by ``add_request``.
      prompt: the text, if the prompt was text.
      prompt_token_ids: the ids that were run.
      outputs: the samples, by index; a streamed output lists only those with something new.
      finished: whether all samples have ended.
      prompt_logprobs: per token of the prompt its Logprob and the likeliest alternatives', by
        id; None for the first token, which nothing precedes. None unless asked for; of streamed
        outputs only the first with a token has it.
      num_cached_tokens: how many tokens of the prompt were found in the prefix cache.
      times: when it came, began and ended; None before it has finished.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    num_cached_tokens: int = 0
    times: RequestTimes | None = None
