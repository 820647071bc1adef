"""What an engine is doing, in numbers."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

logger = logging.getLogger("jllm")


@dataclass(frozen=True)
class EngineStats:
    """A snapshot of an engine. Samples of one prompt count one by one.

    Attributes:
      running, waiting: requests now; ``swapped`` of the waiting have their KV in host memory.
      kv_usage: share of the KV blocks that requests hold, 0 to 1; cached prefixes that nobody
        holds can be had any time and do not count.
      num_preemptions: times a request was sent back to the queue, since the start.
      num_swaps: those whose KV was copied to host memory rather than recomputed.
      prefix_queries, prefix_hits: prompt tokens looked up in the prefix cache, and found there.
        What a preempted request recomputes or finds again counts as neither.
      num_steps: steps dispatched.
      step_tokens: tokens that they ran: of prompts, recomputed ones too, and one per decode row.
      prompt_tokens: prompt tokens of requests that were started.
      generated_tokens: tokens that arrived on the host.
      num_compiles: programs compiled (or read from the compilation cache) by steps.
      plan_s, dispatch_s, wait_s: seconds the host spent planning steps, handing them to the
        device, and waiting for results.
    """

    running: int
    waiting: int
    swapped: int
    kv_usage: float
    num_preemptions: int
    num_swaps: int
    prefix_queries: int
    prefix_hits: int
    num_steps: int
    step_tokens: int
    prompt_tokens: int
    generated_tokens: int
    num_compiles: int
    plan_s: float
    dispatch_s: float
    wait_s: float

    @property
    def prefix_hit_rate(self) -> float:
        """Share of looked-up prompt tokens that were found, 0 to 1."""
        return self.prefix_hits / self.prefix_queries if self.prefix_queries else 0.0

    def line(self, previous: EngineStats | None, seconds: float) -> str:
        """One line for a log, with rates since ``previous``, ``seconds`` ago."""
        generated = self.generated_tokens - (previous.generated_tokens if previous else 0)
        prompt = self.prompt_tokens - (previous.prompt_tokens if previous else 0)
        return (
            f"prompt {prompt / seconds:.0f} tokens/s, "
            f"generation {generated / seconds:.0f} tokens/s, "
            f"running {self.running}, waiting {self.waiting}, swapped {self.swapped}, "
            f"KV {self.kv_usage:.1%}, prefix hits {self.prefix_hit_rate:.1%}, "
            f"preemptions {self.num_preemptions}"
        )


class StepClock:
    """Adds up the host's time by phase."""

    def __init__(self) -> None:
        self.plan = self.dispatch = self.wait = 0.0

    @contextmanager
    def measure(self, phase: Literal["plan", "dispatch", "wait"]) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            setattr(self, phase, getattr(self, phase) + time.perf_counter() - start)


class PeriodicLog:
    """Logs a line of stats at most every ``interval_s`` seconds, at level INFO of ``jllm``."""

    def __init__(self, interval_s: float | None) -> None:
        self._interval_s = interval_s
        self._last = time.monotonic()
        self._previous: EngineStats | None = None

    @property
    def due(self) -> bool:
        return self._interval_s is not None and time.monotonic() - self._last >= self._interval_s

    def write(self, stats: EngineStats) -> None:
        now = time.monotonic()
        logger.info(stats.line(self._previous, now - self._last))
        self._last, self._previous = now, stats
