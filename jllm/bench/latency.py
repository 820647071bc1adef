"""Fixed batches: time to the first token, and time per output token by difference.

    tpot = (time with 129 new tokens - time with 1 new token) / 128

so prefill, scheduling of the prompts and the last steps' draining cancel out.
"""

from __future__ import annotations

import statistics
from typing import NamedTuple

from jllm import roofline
from jllm.bench.results import Row, row
from jllm.bench.rows import LatencyRow, requests_of
from jllm.bench.runs import Run, Sampling
from jllm.bench.session import Repeated, Session


class Key(NamedTuple):
    """What a repeated run depends on; rows of one batch share its runs."""

    max_model_len: int
    batch: int
    context: int
    new_tokens: int
    sampling: Sampling


def measure(session: Session, spec: LatencyRow) -> Row:
    """Measures one row.

    Raises ValueError if the batch does not fit the engine.
    """
    engine = session.engine(spec)
    assert engine.config.max_num_seqs and engine.config.max_model_len
    if spec.batch > engine.config.max_num_seqs:
        raise ValueError(
            f"{spec.name} needs {spec.batch} rows at once, but max_num_seqs is "
            f"{engine.config.max_num_seqs}."
        )
    new_tokens = spec.new_tokens if spec.measure == "tpot" else 1
    if spec.context + new_tokens > engine.config.max_model_len:
        raise ValueError(
            f"{spec.name} needs {spec.context + new_tokens} tokens, but max_model_len is "
            f"{engine.config.max_model_len}."
        )
    # The longer run first: all that the shorter compiles, it compiles too.
    long = _runs(session, spec, spec.new_tokens) if spec.measure == "tpot" else None
    short = _runs(session, spec, 1)
    detail = {
        "batch": spec.batch,
        "context": spec.context,
        "ttft_ms": _ttft(short.runs),
        "warm_up_runs": short.discarded + (long.discarded if long else 0),
        "preemptions": max(r.preemptions for r in (*short.runs, *(long.runs if long else ()))),
    }
    seconds = [r.seconds for r in short.runs]
    if long is not None:
        extra = spec.new_tokens - 1
        pairs = zip(long.runs, short.runs, strict=False)
        values = [(a.seconds - b.seconds) / extra * 1e3 for a, b in pairs]
        limit = decode_limit_ms(session, spec.batch, spec.context + spec.new_tokens / 2)
        detail |= {
            "new_tokens": spec.new_tokens,
            "seconds_with_new_tokens": statistics.median(r.seconds for r in long.runs),
            "seconds_with_1": statistics.median(seconds),
            "out_tok_s": spec.batch / statistics.median(values) * 1e3,
        }
        what, unit = "time per output token of each of the batch", "ms"
    else:
        limit = None
        if gpu := session.hardware:
            config, itemsize = session.model_config, session.itemsize
            limit = roofline.prefill_s(config, gpu, spec.batch, spec.context, itemsize=itemsize)
        tokens = spec.batch * spec.context
        what, unit, values = "all prompts prefilled, one token drawn for each", "s", seconds
        if spec.measure == "prefill_rate":
            values = [tokens / s for s in seconds]
            limit = limit and tokens / limit
            what, unit = "prompt tokens per second", "tok/s"
    runs = [*(long.runs if long else ()), *short.runs]
    compiles = sum(r.num_compiles for r in runs)
    return row(
        values,
        unit,
        what,
        num_compiles=compiles,
        valid=compiles == 0 and statistics.median(values) > 0,
        roofline=limit,
        step=(long or short).runs[0].step,
        detail=detail,
    )


def decode_limit_ms(session: Session, batch: int, context: float) -> float | None:
    """The hardware's limit for a decode step, if the hardware is known."""
    if session.hardware is None:
        return None
    itemsize = session.itemsize
    limit = roofline.decode_step_s(session.model_config, session.hardware, batch, context, itemsize)
    return limit * 1e3


def _runs(session: Session, spec: LatencyRow, new_tokens: int) -> Repeated:
    key = Key(spec.max_model_len, spec.batch, spec.context, new_tokens, spec.sampling)
    if key not in session.done:
        session.done[key] = session.repeat(
            spec,
            lambda source: requests_of(spec, source, new_tokens),
            spec.sampling,
            f"{spec.batch} x {spec.context} + {new_tokens}",
        )
    return session.done[key]


def _ttft(runs: list[Run]) -> dict[str, float]:
    """Of the requests of all runs with one new token: when each had it, in ms."""
    times = sorted(latency * 1e3 for run in runs for latency in run.latencies)
    return {
        "mean": statistics.fmean(times),
        "median": statistics.median(times),
        "p99": times[min(len(times) - 1, int(len(times) * 0.99))],
    }
