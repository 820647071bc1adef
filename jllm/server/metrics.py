"""Prometheus metrics, under vLLM's names so that its dashboards and load generators work."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from jllm.compilation import compile_seconds_so_far, compiles_so_far
from jllm.engine.stats import EngineStats
from jllm.outputs import RequestTimes
from jllm.sampling_params import SamplingParams

LABELS = ("model_name", "engine")
MILLISECONDS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000)
GAPS = tuple(ms / 1000 for ms in MILLISECONDS)
SECONDS = (*GAPS, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0)
COUNTS = tuple(float(digit * 10**power) for power in range(6) for digit in (1, 2, 5))

# Name, the stat it shows, help.
GAUGES = (
    ("vllm:num_requests_running", "running", "Samples in the batch."),
    ("vllm:num_requests_waiting", "waiting", "Samples that wait for a place in the batch."),
    ("vllm:kv_cache_usage_perc", "kv_usage", "Share of the KV blocks in use, 0 to 1."),
)
COUNTERS = (
    ("vllm:prefix_cache_queries", "prefix_queries", "Prompt tokens looked up in the cache."),
    ("vllm:prefix_cache_hits", "prefix_hits", "Prompt tokens found in the cache."),
    ("vllm:num_preemptions", "num_preemptions", "Times a sample was sent back to the queue."),
    ("vllm:prompt_tokens", "prompt_tokens", "Tokens of prompts that the engine took."),
    ("vllm:generation_tokens", "generated_tokens", "Tokens generated."),
)


class Metrics:
    """What a server has done. Written by the engine's thread, read by whoever scrapes.

    Args:
      model_name: the label of every metric.
    """

    def __init__(self, model_name: str) -> None:
        self._labels = (model_name, "0")
        self._stats: EngineStats | None = None
        self._registry = CollectorRegistry()
        self._registry.register(_EngineCollector(self))
        self._success = Counter(
            "vllm:request_success",
            "Samples that came to their end.",
            (*LABELS, "finished_reason"),
            registry=self._registry,
        )

        def histogram(name: str, help: str, buckets: tuple[float, ...]) -> Histogram:
            made = Histogram("vllm:" + name, help, LABELS, registry=self._registry, buckets=buckets)
            return made.labels(*self._labels)

        self._gaps = _Gaps(self._labels)
        self._registry.register(self._gaps)
        self._step = histogram("iteration_tokens_total", "Tokens run in one step.", COUNTS)
        self._ttft = histogram(
            "time_to_first_token_seconds", "From a request's arrival to its first token.", SECONDS
        )
        self._tpot = histogram(
            "request_time_per_output_token_seconds", "Mean gap between a request's tokens.", GAPS
        )
        self._e2e = histogram(
            "e2e_request_latency_seconds", "From a request's arrival to its end.", SECONDS
        )
        self._queue = histogram("request_queue_time_seconds", "Waiting to be run.", SECONDS)
        self._prefill = histogram(
            "request_prefill_time_seconds", "From the first step to the first token.", SECONDS
        )
        self._decode = histogram(
            "request_decode_time_seconds", "From the first token to the last.", SECONDS
        )
        self._prompt = histogram("request_prompt_tokens", "Tokens of a prompt.", COUNTS)
        self._generated = histogram("request_generation_tokens", "Tokens of a sample.", COUNTS)
        self._n = histogram("request_params_n", "Samples asked for of a prompt.", COUNTS)
        self._max_tokens = histogram(
            "request_params_max_tokens", "Most tokens asked for of a sample.", COUNTS
        )

    @property
    def labels(self) -> tuple[str, str]:
        return self._labels

    @property
    def stats(self) -> EngineStats | None:
        """The engine's, as of its last step; None before it is ready."""
        return self._stats

    def scrape(self) -> bytes:
        """All of it in Prometheus' text format."""
        return generate_latest(self._registry)

    def engine_stats(self, stats: EngineStats) -> None:
        """Takes the engine's stats after a step."""
        before, self._stats = self._stats, stats
        tokens = stats.step_tokens - (before.step_tokens if before else 0)
        if tokens:
            self._step.observe(tokens)

    def token_gaps(self, gaps: Mapping[float, int]) -> None:
        """How often so many seconds lay between two tokens of a streamed request."""
        self._gaps.add(gaps)

    def request_finished(
        self,
        params: SamplingParams,
        num_prompt: int,
        counts: Sequence[int],
        reasons: Sequence[str],
        times: RequestTimes,
    ) -> None:
        """Takes what became of a request: its options, the tokens of its prompt and of each
        sample, why each sample ended, and when things happened."""
        self._n.observe(params.n)
        if params.max_tokens is not None:
            self._max_tokens.observe(params.max_tokens)
        self._prompt.observe(num_prompt)
        for count, reason in zip(counts, reasons, strict=True):
            self._generated.observe(count)
            self._success.labels(*self._labels, reason).inc()
        if times.admitted is None or times.first_token is None:
            return
        decode = times.finished - times.first_token
        self._queue.observe(times.admitted - times.arrived)
        self._prefill.observe(times.first_token - times.admitted)
        self._ttft.observe(times.first_token - times.arrived)
        self._decode.observe(decode)
        self._e2e.observe(times.finished - times.arrived)
        if max(counts) > 1:
            self._tpot.observe(decode / (max(counts) - 1))


class _EngineCollector(Collector):
    """Reads gauges and counters off the engine's stats at the moment of the scrape."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics

    def collect(self) -> Iterator[Metric]:
        labels, stats = self._metrics.labels, self._metrics.stats
        for name, field, help in GAUGES:
            gauge = GaugeMetricFamily(name, help, labels=LABELS)
            gauge.add_metric(labels, getattr(stats, field, 0))
            yield gauge
        totals = [(name, help, getattr(stats, field, 0)) for name, field, help in COUNTERS]
        compiled = "Programs compiled or read from the compilation cache."
        totals.append(("jllm:xla_compilations", compiled, compiles_so_far()))
        totals.append(("jllm:compile_seconds", "Time that took.", compile_seconds_so_far()))
        for name, help, value in totals:
            counter = CounterMetricFamily(name, help, labels=LABELS)
            counter.add_metric(labels, value)
            yield counter


class _Gaps(Collector):
    """A histogram that takes many equal values at once: the requests of a batch get their tokens at
    the same time, and one observation by ``Histogram`` costs more than all else that the server
    does for a token in the engine's thread."""

    def __init__(self, labels: Sequence[str]) -> None:
        self._labels = labels
        self._counts = [0] * (len(GAPS) + 1)
        self._sum = 0.0

    def add(self, gaps: Mapping[float, int]) -> None:
        for seconds, count in gaps.items():
            self._counts[bisect_left(GAPS, seconds)] += count
            self._sum += seconds * count

    def collect(self) -> Iterator[Metric]:
        bounds = [*map(str, GAPS), "+Inf"]
        family = HistogramMetricFamily(
            "vllm:inter_token_latency_seconds",
            "Between tokens of a streamed request.",
            labels=LABELS,
        )
        counts = zip(bounds, accumulate(self._counts), strict=True)
        family.add_metric(self._labels, list(counts), self._sum)
        yield family
