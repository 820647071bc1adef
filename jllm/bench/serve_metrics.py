"""What the outcomes of many requests say of a server: rates, percentiles, goodput."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from jllm.bench.client import Outcome
from jllm.bench.results import Row, row

SLOS = ("ttft", "tpot", "e2el")


def parse_goodput(limits: Sequence[str]) -> dict[str, float]:
    """``["ttft:500"]`` -> seconds by SLO. Raises ValueError for anything else."""
    slos = {}
    for limit in limits:
        name, _, value = limit.partition(":")
        try:
            slos[name] = float(value) / 1e3
        except ValueError:
            raise ValueError(f"--goodput takes SLO:milliseconds, not {limit!r}.") from None
        if name not in SLOS or slos[name] <= 0:
            raise ValueError(f"--goodput knows {', '.join(SLOS)}, each above 0; not {limit!r}.")
    return slos


class Metrics(NamedTuple):
    """Rows by name, and how often each reason of failure occurred."""

    rows: dict[str, Row]
    failures: dict[str, int]


def summarize(outcomes: Sequence[Outcome], seconds: float, slos: dict[str, float]) -> Metrics:
    """The metrics over the requests that succeeded; rates are over the whole time."""
    good = [outcome for outcome in outcomes if outcome.failure is None]
    failures = Counter(outcome.failure for outcome in outcomes if outcome.failure is not None)
    valid = not failures
    output, prompt = sum(o.output_tokens for o in good), sum(o.prompt_tokens for o in good)
    detail = {
        "seconds": seconds,
        "requests": len(outcomes),
        "failed": len(outcomes) - len(good),
        "shorter_than_asked": sum(o.output_tokens < o.asked for o in good),
        "prompt_tokens": prompt,
        "output_tokens": output,
        "tokens_counted_by": dict(Counter(o.counted_by for o in good)),
    }
    rows: dict[str, Row] = {}

    def add(name: str, value: float, unit: str, what: str) -> None:
        rows[name] = row([value], unit, what, num_compiles=None, valid=valid, detail=detail)

    add("req_s", len(good) / seconds, "req/s", "requests answered per second")
    add("out_tok_s", output / seconds, "tok/s", "output tokens per second")
    if prompt:  # a server without usage does not tell
        both = (output + prompt) / seconds
        add("total_tok_s", both, "tok/s", "input and output tokens per second")
    for name, what, values in (
        ("ttft_ms", "time to the first token", [o.ttft for o in good]),
        ("tpot_ms", "time per token after the first", [o.tpot for o in good if o.tpot is not None]),
        ("itl_ms", "gap between chunks", [gap for o in good for gap in o.itl]),
        ("e2el_ms", "time to the last token", [o.e2e for o in good]),
    ):
        if values:
            add(f"{name}_mean", statistics.fmean(values) * 1e3, "ms", f"{what}, mean")
            add(f"{name}_median", statistics.median(values) * 1e3, "ms", f"{what}, median")
            add(f"{name}_p99", percentile(values, 99) * 1e3, "ms", f"{what}, 99th percentile")
    if slos:
        met = sum(_meets(outcome, slos) for outcome in good)
        limits = " ".join(f"{name}:{limit * 1e3:g}" for name, limit in slos.items())
        add("goodput_req_s", met / seconds, "req/s", f"requests per second that meet {limits}")
    return Metrics(rows, dict(failures))


def percentile(values: Sequence[float], percent: float) -> float:
    """Linear interpolation between the two nearest ranks, as numpy does."""
    ordered = sorted(values)
    at = (len(ordered) - 1) * percent / 100
    low = math.floor(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (at - low)


def _meets(outcome: Outcome, slos: dict[str, float]) -> bool:
    # A single token has no time per token, and so meets any.
    measured = {"ttft": outcome.ttft, "tpot": outcome.tpot or 0.0, "e2el": outcome.e2e}
    return all(measured[name] <= limit for name, limit in slos.items())
