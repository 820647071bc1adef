"""One sequence being generated, on the host."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from jllm.engine.grammar import Matcher
from jllm.models.logit_rules import Rules
from jllm.outputs import FinishReason
from jllm.sampling_params import SamplingParams

NO_SLOT = -1


@dataclass(eq=False, slots=True)
class Request:
    """A prompt and one of its samples, described by three lengths:

        0 ........ computed ........ num_tokens ........ max_tokens
        KV written or being written | known or on its way | may yet come

    ``num_tokens`` counts ``pending`` tokens too: sampled by a step in flight, on the device
    already, not on the host yet.

    Attributes:
      arrival: order of arrival: unique, and the tie-break of every policy.
      tokens: prompt, then output as far as the host knows it; (max_tokens,) allocated once.
      num_prompt: length of the prompt.
      max_tokens: length at which the request ends.
      cache_salt: prefixes are shared only among requests of the same salt.
      sample: which of the prompt's n samples this is.
      seed: 64-bit seed of its random draws.
      rules: what the device must know of its bias and masks, if it has any.
      matcher: follows its output, if that must have a form.
      num_known: tokens that the host knows.
      pending: tokens that the device has sampled, or is sampling, and the host does not know.
      computed: leading tokens whose KV is in the cache, steps in flight included.
      resident: tokens from here on were sampled since the request was last admitted, so the
        device has them even while they are pending.
      slot: row of the device's and the host's per-request tables, while running; else NO_SLOT.
      blocks: KV blocks in order of position, while running.
      shareable: its blocks may enter the prefix cache; False once the cache was reset while the
        request was running, since its KV may be of older weights.
      preempted: it has been sent back to the queue before.
      num_cached: prompt tokens found in the prefix cache when it was first admitted.
      admitted: when that was, in seconds of ``time.monotonic()``; None before.
      in_flight: dispatched steps that hold a row of this request.
      finish_reason, stop_reason: why it ended; set once, blocks are freed when in_flight is 0.
    """

    arrival: int
    tokens: NDArray[np.int32]
    num_prompt: int
    params: SamplingParams
    cache_salt: str | None = None
    sample: int = 0
    seed: int = 0
    rules: Rules | None = None
    matcher: Matcher | None = None
    num_known: int = 0
    pending: int = 0
    computed: int = 0
    resident: int = 0
    slot: int = NO_SLOT
    blocks: NDArray[np.int32] = field(default_factory=lambda: np.empty(0, np.int32))
    shareable: bool = True
    preempted: bool = False
    num_cached: int = 0
    admitted: float | None = None
    in_flight: int = 0
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None

    def __post_init__(self) -> None:
        self.num_known = self.num_known or self.num_prompt

    @property
    def max_tokens(self) -> int:
        return len(self.tokens)

    @property
    def num_tokens(self) -> int:
        return self.num_known + self.pending

    @property
    def remaining(self) -> int:
        """Tokens that could be run now; 0 once the last token that may come is on its way."""
        return 0 if self.num_tokens >= self.max_tokens else self.num_tokens - self.computed

    @property
    def decoding(self) -> bool:
        """The next token to run was sampled on the device, so it is not sent from here."""
        return self.computed >= self.resident

    @property
    def scores_prompt(self) -> bool:
        """Prompt logprobs are computed once per prompt, by its first sample."""
        return self.params.prompt_logprobs is not None and self.sample == 0

    @property
    def needs_full_prefill(self) -> bool:
        """Every token must be run: a cached prefix has keys and values, but no logits."""
        return self.scores_prompt

    @property
    def needs_history(self) -> bool:
        """Its options look at all earlier tokens, so the token table must hold them even where
        a cached prefix spares the device running them."""
        p = self.params
        return p.has_penalties or bool(p.bad_words) or p.logits_processor is not None

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    @property
    def repeatable(self) -> bool:
        """Its tokens are drawn by the device alone and nothing is reported of them, so several can
        be drawn in one program."""
        p = self.params
        looks_back = self.needs_history or self.rules is not None
        return p.logprobs is None and self.matcher is None and not looks_back

    def advance(self, count: int, samples: int) -> None:
        """A program with ``count`` tokens of this request was dispatched, which draws ``samples``
        tokens of it."""
        self.computed += count
        self.in_flight += 1
        self.pending += samples

    def append(self, token: int) -> None:
        """A token sampled on the device has arrived."""
        assert self.pending > 0
        self.tokens[self.num_known] = token
        self.num_known += 1
        self.pending -= 1
        assert self.computed <= self.num_tokens <= self.max_tokens

    def take_blocks(self) -> NDArray[np.int32]:
        """The request's blocks, which are no longer its own."""
        blocks, self.blocks = self.blocks, np.empty(0, np.int32)
        return blocks

    @property
    def output(self) -> NDArray[np.int32]:
        return self.tokens[self.num_prompt : self.num_known]
