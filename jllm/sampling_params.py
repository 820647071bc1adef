"""How a request's tokens are chosen and when it ends: a frozen, validated dataclass."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from numbers import Integral, Real
from typing import Any, Literal

from jllm.structured import Structured

__all__ = ["SamplingParams"]

MAX_LOGPROBS = 20
MAX_N = 10_000  # more is a typing error, not a wish
LARGEST = float(2**127)  # what float32 holds, with room to spare
MAX_LOGIT_BIAS = 1024
MAX_BAD_WORDS = 1024

# (logits (V,) float32, tokens so far (L,) int32) -> logits (V,): arrays of JAX.
LogitsProcessor = Callable[[Any, Any], Any]


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Options of one request. Every field has an effect; the order in which those that shape
    the distribution apply is documented in ``jllm/models/sampler.py``.

    ``SamplingParams()`` draws from the model's own distribution until eos or 16 tokens;
    ``SamplingParams(temperature=0, max_tokens=64)`` is greedy;
    ``SamplingParams(n=4, seed=7)`` gives four different texts, the same four every time;
    ``SamplingParams(allowed_token_ids=yes_or_no, max_tokens=1)`` chooses among given tokens.

    Attributes:
      n: how many samples of the prompt.
      temperature: 0 (or below 1e-5) is greedy.
      top_k: draw among the k likeliest; 0 or -1 is off, more than the vocabulary is all of it.
      top_p: draw among the likeliest tokens that together reach this probability, in (0, 1].
      min_p: draw among tokens at least this fraction as likely as the likeliest, in [0, 1].
      seed: any 64-bit integer; the same seed gives the same tokens whatever runs beside the
        request. None draws a fresh one.
      max_tokens: most tokens to generate; None means as many as max_model_len leaves.
      min_tokens: until so many tokens are generated no eos and no stop token can be drawn, and
        stop strings are not looked for.
      stop: a string or several; generation ends where the first one appears, and the text
        ends before it.
      stop_token_ids: ids that end generation like eos, also when ``ignore_eos``.
      include_stop_str_in_output: keep the stop string at the end of the text.
      ignore_eos: do not end at the model's eos ids.
      presence_penalty: subtracted from the logit of every token generated so far, in [-2, 2].
      frequency_penalty: likewise, once for each time it was generated, in [-2, 2].
      repetition_penalty: logits of tokens in the prompt or the output are divided by it if
        positive and multiplied if negative (arXiv 1909.05858), in [0.01, 100]; 1 is off.
      logit_bias: token id -> what is added to its logit, in [-100, 100]; at most 1024 ids.
      allowed_token_ids: the only tokens that can be drawn; None allows all.
      bad_words: at most 1024 words that must not appear. A text is tokenised as it is and with
        a space before it (other tokenisations of it are not covered); a sequence of token ids
        is taken as it is. At most 16 tokens each. The last token of a word cannot be drawn
        right after its others, whether these are of the prompt or generated. Where a word of
        several tokens and ``allowed_token_ids`` together leave nothing to draw, the word gives
        way.
      logprobs: None, or how many likeliest alternatives (0 to 20) to report with each token,
        besides the token itself; -1 reports the whole vocabulary, which is slow: its program is
        compiled when it is first asked for.
      prompt_logprobs: None, or how many alternatives (0 to 20) to report with each token of the
        prompt; always of the raw distribution.
      logprobs_mode: ``raw`` reports the model's own distribution, before everything else here;
        ``processed`` the one the token was drawn from (greedy: after bias, masks and penalties),
        in which tokens that cannot be drawn are left out.
      logits_processor: a pure JAX function ``(logits, tokens_so_far) -> logits`` that changes
        the model's logits (V,) before anything else does. ``tokens_so_far`` (max_model_len,)
        int32 holds the prompt and the output, then -1. It becomes part of the compiled step:
        each distinct function object is compiled when it is first used, so define it once, not
        in a loop. -inf and NaN count as -1e30: drawn only if all else is forbidden.
      structured: the form that the text must have (``jllm.Structured``): only tokens after which
        it can still come to have it are drawn, and generation ends, as ``stop``, when it has it
        and nothing may follow. The end wins over ``min_tokens``, and where the other masks here
        leave none of the tokens that the form allows, they give way. Text that ``max_tokens`` or
        ``stop`` cuts short is only the beginning of that form. Needs the package extra
        ``structured``.
      skip_special_tokens: leave special tokens out of the text.
      spaces_between_special_tokens: put a space between adjacent special tokens in the text.
      detokenize: make text at all; without it outputs have token ids only.
      priority: where the engine schedules by priority, lower numbers come first.

    Raises:
      ValueError: a value is of the wrong type, not finite, out of range, or contradicts another;
        the message names field, value and range.
    """

    n: int = 1
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    max_tokens: int | None = 16
    min_tokens: int = 0
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] | None = field(default=None, hash=False)  # kept as a dict
    allowed_token_ids: Sequence[int] | None = None
    bad_words: Sequence[str | Sequence[int]] = ()
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logprobs_mode: Literal["raw", "processed"] = "raw"
    logits_processor: LogitsProcessor | None = None
    structured: Structured | None = None
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    detokenize: bool = True
    priority: int = 0

    def __post_init__(self) -> None:
        for name in ("stop", "stop_token_ids", "bad_words"):
            if getattr(self, name) is None:
                self._set(name, ())
        for spec in fields(self):  # numpy's numbers, as sweeps have them
            value = getattr(self, spec.name)
            if type(value) in (int, float):  # asking an abstract class takes a microsecond each
                continue
            if isinstance(value, Integral) and not isinstance(value, bool):
                self._set(spec.name, int(value))
            elif isinstance(value, Real) and not isinstance(value, Integral):
                self._set(spec.name, float(value))
        stop = (self.stop,) if isinstance(self.stop, str) else self.stop
        self._set("stop", _tuple_of("stop", stop, str))
        self._set("stop_token_ids", _token_ids("stop_token_ids", self.stop_token_ids))
        if self.allowed_token_ids is not None:
            allowed = _token_ids("allowed_token_ids", self.allowed_token_ids)
            if not allowed:
                raise ValueError(
                    "SamplingParams.allowed_token_ids is empty, so nothing could be drawn; None "
                    "allows every token."
                )
            self._set("allowed_token_ids", allowed)
        self._set("bad_words", _bad_words(self.bad_words))
        if self.logit_bias is not None:
            self._set("logit_bias", _logit_bias(self.logit_bias))
        _integer("n", self.n, 1, MAX_N)
        _number("temperature", self.temperature, 0.0, math.inf)
        _integer("top_k", self.top_k, -1, None)
        _number("top_p", self.top_p, 0.0, 1.0, open_low=True)
        _number("min_p", self.min_p, 0.0, 1.0)
        _number("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _number("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _number("repetition_penalty", self.repetition_penalty, 0.01, 100.0)
        if self.seed is not None:
            _integer("seed", self.seed, -(2**63), 2**63 - 1)
        if self.max_tokens is not None:
            _integer("max_tokens", self.max_tokens, 1, None)
        _integer("min_tokens", self.min_tokens, 0, None)
        if self.logprobs is not None:
            _integer("logprobs", self.logprobs, -1, MAX_LOGPROBS)
        if self.prompt_logprobs is not None:
            _integer("prompt_logprobs", self.prompt_logprobs, 0, MAX_LOGPROBS)
        _integer("priority", self.priority, -(2**63), 2**63 - 1)
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
        if self.logprobs_mode not in ("raw", "processed"):
            raise ValueError(
                "SamplingParams.logprobs_mode must be 'raw' or 'processed', "
                f"not {self.logprobs_mode!r}."
            )
        processor = self.logits_processor
        if processor is not None and not (callable(processor) and isinstance(processor, Hashable)):
            raise ValueError(
                "SamplingParams.logits_processor must be a function (logits, tokens_so_far) -> "
                f"logits, not {processor!r}."
            )
        if self.structured is not None and not isinstance(self.structured, Structured):
            raise ValueError(
                f"SamplingParams.structured must be a Structured or None, not {self.structured!r}."
            )
        self._check_contradictions()

    def _check_contradictions(self) -> None:
        if "" in self.stop:
            raise ValueError("SamplingParams.stop must not contain an empty string.")
        if self.stop and not self.detokenize:
            raise ValueError("SamplingParams.stop needs text: it cannot go with detokenize=False.")
        if self.structured is not None and self.ignore_eos:
            raise ValueError(
                "SamplingParams.structured cannot go with ignore_eos: text that has the form must "
                "be able to end."
            )
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(
                f"SamplingParams.min_tokens is {self.min_tokens}, more than max_tokens, "
                f"{self.max_tokens}."
            )

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)

    @property
    def has_penalties(self) -> bool:
        """Whether tokens so far change the logits."""
        additive = self.presence_penalty != 0 or self.frequency_penalty != 0
        return additive or self.repetition_penalty != 1

    def check_vocab(self, vocab_size: int) -> None:
        """Raises ValueError for ids that the model does not have."""
        ids: dict[str, Sequence[int]] = {
            "stop_token_ids": self.stop_token_ids,
            "allowed_token_ids": self.allowed_token_ids or (),
            "logit_bias": tuple(self.logit_bias or ()),
            "bad_words": [
                id for word in self.bad_words if not isinstance(word, str) for id in word
            ],
        }
        for name, tokens in ids.items():
            largest = max(tokens, default=0)
            if largest >= vocab_size:
                raise ValueError(
                    f"SamplingParams.{name} has {largest}, outside the vocabulary "
                    f"of {vocab_size} tokens."
                )


def _bad_words(words: Any) -> tuple[str | tuple[int, ...], ...]:
    if isinstance(words, str | bytes) or not isinstance(words, Sequence):
        raise ValueError(f"SamplingParams.bad_words must be a sequence, not {words!r}.")
    if len(words) > MAX_BAD_WORDS:
        raise ValueError(
            f"SamplingParams.bad_words has {len(words)} words; at most {MAX_BAD_WORDS} are allowed."
        )
    checked: list[str | tuple[int, ...]] = []
    for word in words:
        one = word if isinstance(word, str) else _token_ids("bad_words", word)
        if not (one.strip() if isinstance(one, str) else one):
            raise ValueError(f"SamplingParams.bad_words must not contain an empty word: {word!r}.")
        checked.append(one)
    return tuple(checked)


def _logit_bias(bias: Any) -> dict[int, float]:
    if not isinstance(bias, Mapping):
        raise ValueError(
            f"SamplingParams.logit_bias must map token ids to numbers, not be {bias!r}."
        )
    if len(bias) > MAX_LOGIT_BIAS:
        raise ValueError(
            f"SamplingParams.logit_bias has {len(bias)} ids; at most {MAX_LOGIT_BIAS} are allowed."
        )
    _token_ids("logit_bias", tuple(bias))
    for token, value in bias.items():
        _number(f"logit_bias[{token}]", value, -100.0, 100.0)
    return {token: float(value) for token, value in bias.items()}


def _token_ids(name: str, values: Any) -> tuple[int, ...]:
    ids = _tuple_of(name, values, int)
    if ids and min(ids) < 0:
        raise ValueError(
            f"SamplingParams.{name} must not be negative token ids, but there is {min(ids)}."
        )
    return ids


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
    inside = (low < value if open_low else low <= value) and value <= min(high, LARGEST)
    if not inside:  # NaN is in no range
        left = "(" if open_low else "["
        right = "inf)" if high == math.inf else f"{high:g}]"
        raise ValueError(
            f"SamplingParams.{name} must be in {left}{low:g}, {right} and finite, not {value!r}."
        )
