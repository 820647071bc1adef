"""How a request's tokens are chosen and when it ends: a frozen, validated dataclass."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["SamplingParams"]

MAX_LOGPROBS = 20


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Options of one request. Every field has an effect; the order in which those that shape
    the distribution apply is documented in ``jllm/models/sampler.py``.

    ``SamplingParams()`` draws from the model's own distribution until eos or 16 tokens;
    ``SamplingParams(temperature=0, max_tokens=64)`` is greedy;
    ``SamplingParams(n=4, seed=7)`` gives four different texts, the same four every time.

    Attributes:
      n: how many samples of the prompt.
      temperature: 0 (or below 1e-5) is greedy.
      top_k: draw among the k likeliest; 0 or -1 is off, more than the vocabulary is all of it.
      top_p: draw among the likeliest tokens that together reach this probability, in (0, 1].
      min_p: draw among tokens at least this fraction as likely as the likeliest, in [0, 1].
      seed: any 64-bit integer; the same seed gives the same tokens whatever runs beside the
        request. None draws a fresh one.
      max_tokens: most tokens to generate; None means as many as max_model_len leaves.
      stop: a string or several; generation ends where the first one appears, and the text
        ends before it.
      stop_token_ids: ids that end generation like eos, also when ``ignore_eos``.
      include_stop_str_in_output: keep the stop string at the end of the text.
      ignore_eos: do not end at the model's eos ids.
      logprobs: None, or how many likeliest alternatives (0 to 20) to report with each token,
        besides the token itself; of the raw distribution, before temperature and filters.
      skip_special_tokens: leave special tokens out of the text.
      spaces_between_special_tokens: put a space between adjacent special tokens in the text.
      detokenize: make text at all; without it outputs have token ids only.
    """

    n: int = 1
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    max_tokens: int | None = 16
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    logprobs: int | None = None
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    detokenize: bool = True

    def __post_init__(self) -> None:
        stop = (self.stop,) if isinstance(self.stop, str) else self.stop
        object.__setattr__(self, "stop", _tuple_of("stop", stop, str))
        object.__setattr__(
            self, "stop_token_ids", _tuple_of("stop_token_ids", self.stop_token_ids, int)
        )
        _integer("n", self.n, 1, None)
        _number("temperature", self.temperature, 0.0, math.inf)
        _integer("top_k", self.top_k, -1, None)
        _number("top_p", self.top_p, 0.0, 1.0, open_low=True)
        _number("min_p", self.min_p, 0.0, 1.0)
        if self.seed is not None:
            _integer("seed", self.seed, -(2**63), 2**63 - 1)
        if self.max_tokens is not None:
            _integer("max_tokens", self.max_tokens, 1, None)
        if self.logprobs is not None:
            _integer("logprobs", self.logprobs, 0, MAX_LOGPROBS)
        if "" in self.stop:
            raise ValueError("SamplingParams.stop must not contain an empty string.")
        if self.stop and not self.detokenize:
            raise ValueError("SamplingParams.stop needs text: it cannot go with detokenize=False.")
        if any(token < 0 for token in self.stop_token_ids):
            raise ValueError(
                "SamplingParams.stop_token_ids must not be negative, "
                f"but there is {min(self.stop_token_ids)}."
            )
        for name in (
            "include_stop_str_in_output",
            "ignore_eos",
            "skip_special_tokens",
            "spaces_between_special_tokens",
            "detokenize",
        ):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(
                    f"SamplingParams.{name} must be True or False, not {getattr(self, name)!r}."
                )

    def check_vocab(self, vocab_size: int) -> None:
        """Raises ValueError for ids that the model does not have."""
        for token in self.stop_token_ids:
            if token >= vocab_size:
                raise ValueError(
                    f"SamplingParams.stop_token_ids has {token}, outside the vocabulary "
                    f"of {vocab_size} tokens."
                )


def _tuple_of(name: str, values: Any, kind: type) -> tuple[Any, ...]:
    if isinstance(values, str | bytes) or not isinstance(values, Sequence):
        raise ValueError(f"SamplingParams.{name} must be a sequence, not {values!r}.")
    for value in values:
        if not isinstance(value, kind) or isinstance(value, bool):
            raise ValueError(
                f"SamplingParams.{name} must hold {kind.__name__} values, not {value!r}."
            )
    return tuple(values)


def _integer(name: str, value: Any, low: int, high: int | None) -> None:
    if not isinstance(value, int) or isinstance(value, bool):
        raise ValueError(f"SamplingParams.{name} must be an integer, not {value!r}.")
    if value < low or (high is not None and value > high):
        allowed = f"at least {low}" if high is None else f"between {low} and {high}"
        raise ValueError(f"SamplingParams.{name} must be {allowed}, not {value}.")


def _number(name: str, value: Any, low: float, high: float, open_low: bool = False) -> None:
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise ValueError(f"SamplingParams.{name} must be a number, not {value!r}.")
    inside = (low < value if open_low else low <= value) and value <= high
    if not math.isfinite(value) or not inside:
        left = "(" if open_low else "["
        right = "inf)" if high == math.inf else f"{high:g}]"
        raise ValueError(
            f"SamplingParams.{name} must be in {left}{low:g}, {right} and finite, not {value!r}."
        )
