"""One process and one loaded model for many rows: engines are built as rows need them, and
workloads are repeated until nothing compiles any more."""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Callable, Hashable
from typing import NamedTuple

from jllm.bench.arguments import positive
from jllm.bench.datasets import Request, Source
from jllm.bench.models import Model, chosen_hardware, engine_config
from jllm.bench.rows import BenchRow, LatencyRow
from jllm.bench.runs import Run, Sampling, TimeLimitReached, run
from jllm.config import EngineConfig
from jllm.engine.engine import Engine
from jllm.engine.planner import LOGPROBS_LEVELS, sampler_spec
from jllm.models.sampler import GREEDY_TEMPERATURE, SamplerSpec
from jllm.sampling_params import MAX_LOGPROBS

# A first run that compiled nothing is counted if it was long: its warm-up effects are small in it.
LONG_RUN_S = 10.0
MAX_WARM_UPS = 3

Prepare = Callable[[Source], list[Request]]


class Repeated(NamedTuple):
    """The counted runs of a workload, and how many went before them."""

    runs: list[Run]
    discarded: int


class Session:
    """A loaded model and the engine that the current rows need.

    Args:
      options: of the command line, see ``add_session_options``.
      model: the loaded model.
      device_kind: of JAX's first device.
      deadline: of ``time.monotonic()``, or None.
    """

    def __init__(
        self,
        options: argparse.Namespace,
        model: Model,
        device_kind: str | None,
        deadline: float | None = None,
    ) -> None:
        self.options = options
        self.model = model
        self.model_config = model.params.config
        self.itemsize = int(model.params.dtype.itemsize)
        self.hardware = chosen_hardware(options, device_kind, options.tp)
        self.deadline = deadline
        self.done: dict[Hashable, Repeated] = {}
        self._engine: tuple[EngineConfig, Engine] | None = None
        self._warm: set[SamplerSpec] = set()

    def engine(self, row: BenchRow) -> Engine:
        """The engine of a row: the one there is, if it has the same config."""
        config = engine_config(
            self.options,
            self.model_config,
            max_model_len=row.max_model_len,
            share_prefixes=row.share_prefixes,
        )
        if self._engine is None or self._engine[0] != config:
            self.close()
            self._engine = config, Engine(self.model.params, config)
        return self._engine[1]

    @property
    def source(self) -> Source:
        """What workloads are drawn from."""
        tokenizer = self.model.params.tokenizer
        encode = None if tokenizer is None else tokenizer.encode
        return Source(self.model_config.vocab_size, self.options.seed, encode)

    def close(self) -> None:
        """Frees the engine's memory."""
        if self._engine is not None:
            self._engine[1].close()
            self.abandon()

    def abandon(self) -> None:
        """Drops an engine without asking it anything: it failed."""
        self._engine = None
        self._warm.clear()
        gc.collect()  # the next engine takes what memory is free

    def repeat(self, row: BenchRow, prepare: Prepare, sampling: Sampling, label: str) -> Repeated:
        """Runs a workload until nothing compiles, then several times more.

        Args:
          prepare: draws the requests, the same each time, and empties caches; called before each
            run, off the clock.

        Raises TimeLimitReached.
        """
        engine, options = self.engine(row), self.options
        label = "" if options.quiet else label
        buckets = options.warm_up == "buckets" or (
            options.warm_up == "auto" and not isinstance(row, LatencyRow)
        )
        if buckets:
            self._warm_up_buckets(engine, sampling)
        runs: list[Run] = []
        discarded, spent = 0, 0.0
        while len(runs) < options.repeats and (not runs or spent < options.row_budget_s):
            requests = prepare(self.source)
            try:
                done = run(engine, requests, sampling, deadline=self.deadline, label=label)
            except TimeLimitReached:
                if runs:
                    break
                raise
            first = discarded == 0 and not runs and not buckets and done.seconds < LONG_RUN_S
            if (done.num_compiles or first) and not runs and discarded < MAX_WARM_UPS:
                discarded += 1
                continue
            spent += done.seconds
            runs.append(done)
        return Repeated(runs, discarded)

    def _warm_up_buckets(self, engine: Engine, sampling: Sampling) -> None:
        sampler = spec_of(sampling)
        if sampler in self._warm:
            return
        if self.deadline is not None and time.monotonic() > self.deadline:
            raise TimeLimitReached
        engine.warm_up([sampler], progress=not self.options.quiet)
        self._warm.add(sampler)


def spec_of(sampling: Sampling) -> SamplerSpec:
    """The sampler's program that requests of these options run."""
    greedy = sampling.temperature < GREEDY_TEMPERATURE
    filtered = sampling.top_k > 0 or sampling.top_p < 1 or sampling.min_p > 0
    logprobs = sampling.logprobs
    level = LOGPROBS_LEVELS.index(logprobs if logprobs is None or logprobs < 1 else MAX_LOGPROBS)
    return sampler_spec(not greedy and not filtered, not greedy and filtered, False, False, level)


def add_session_options(parser: argparse.ArgumentParser) -> None:
    """How often and how long to measure."""
    group = parser.add_argument_group("measuring")
    group.add_argument(
        "--repeats", type=positive, default=3, help="runs per row (default 3), if cheap"
    )
    group.add_argument(
        "--row-budget-s",
        type=float,
        default=30.0,
        help="begin no further repetition of a row after so long (default 30)",
    )
    group.add_argument(
        "--time-limit-s",
        type=float,
        help="from the start of the program; rows that are not done by then are skipped",
    )
    group.add_argument(
        "--warm-up",
        choices=("auto", "buckets", "run"),
        default="auto",
        help="before the clock: compile every bucket, or run the row's own workload; auto is "
        "buckets for throughput and run for latency",
    )
