"""Whole workloads sent at once: how many tokens per second come out."""

from __future__ import annotations

import statistics

from jllm import roofline
from jllm.bench.datasets import Request, Source, Workload
from jllm.bench.results import Row, row
from jllm.bench.rows import ThroughputRow
from jllm.bench.runs import Sampling, run
from jllm.bench.session import Session


def measure(session: Session, spec: ThroughputRow) -> Row:
    """Measures one row.

    Raises ValueError if a request of the workload could never run.
    """
    engine = session.engine(spec)
    workload = spec.make(session.source)

    def prepare(source: Source) -> list[Request]:
        again = spec.make(source)
        engine.reset_prefix_cache()
        if again.prefix:
            run(engine, [Request(again.prefix, 1)], Sampling())
        return again.requests

    repeated = session.repeat(spec, prepare, spec.sampling, spec.name)
    runs = repeated.runs
    out = [r.output_tokens / r.seconds for r in runs]
    prompt_tokens = runs[0].prompt_tokens
    both = [(r.prompt_tokens + r.output_tokens) / r.seconds for r in runs]
    seconds = statistics.median(r.seconds for r in runs)
    detail = {
        "workload": workload.what,
        "requests": len(workload.requests),
        "prompt_tokens": prompt_tokens,
        "output_tokens": runs[0].output_tokens,
        "seconds": seconds,
        "out_tok_s": statistics.median(out),
        "in_and_out_tok_s": statistics.median(both),
        "requests_per_s": len(workload.requests) / seconds,
        "steps": runs[0].steps,
        "preemptions": max(r.preemptions for r in runs),
        "prefix_hit_tokens": runs[0].prefix_hits,
        "warm_up_runs": repeated.discarded,
        "temperature": spec.sampling.temperature,
        "n": spec.sampling.n,
    }
    compiles = sum(r.num_compiles for r in runs)
    return row(
        both if spec.total else out,
        "tok/s",
        "input and output tokens per second" if spec.total else "output tokens per second",
        num_compiles=compiles,
        valid=compiles == 0,
        roofline=_limit(session, spec, workload),
        step=runs[0].step,
        detail=detail,
    )


def _limit(session: Session, spec: ThroughputRow, workload: Workload) -> float | None:
    """Tokens per second at the hardware's limit, with every shared prefix computed once."""
    if session.hardware is None:
        return None
    samples = []
    for prompt, output_len in workload.requests:
        own = len(prompt) - len(workload.prefix)
        for sample in range(spec.sampling.n):
            # A prompt's last token is run for every sample: its logits are wanted.
            cached = len(workload.prefix) if sample == 0 else len(prompt) - 1
            cached = cached if own else len(prompt) - 1
            samples.append(roofline.Lengths(len(prompt), cached, output_len))
    max_num_seqs = session.engine(spec).config.max_num_seqs
    assert max_num_seqs
    seconds = roofline.workload_s(
        session.model_config, session.hardware, samples, max_num_seqs, session.itemsize
    )
    tokens = sum(s.output for s in samples)
    if spec.total:
        tokens += sum(len(request.prompt) for request in workload.requests)
    return tokens / seconds
