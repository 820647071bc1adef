"""What a decode step is made of: its kernels, by name, and how long the device is busy in it.

The step is timed as it is served. Then a few steps more are traced: XLA launches their kernels one
by one meanwhile, so durations are each kernel's own, but the pauses between them are the trace's.
"""

from __future__ import annotations

import argparse
import time

from jllm.bench.arguments import int_list, positive
from jllm.bench.datasets import random_workload
from jllm.bench.latency import decode_limit_ms
from jllm.bench.models import add_engine_options, add_model_options
from jllm.bench.results import Row, add_record_options, row
from jllm.bench.rows import LatencyRow
from jllm.bench.runs import StepParts, step_times
from jllm.bench.session import Session
from jllm.bench.suite import begin
from jllm.bench.trace import by_name, traced
from jllm.engine.engine import Engine
from jllm.engine.sizing import MOST_REPEATS
from jllm.sampling_params import SamplingParams

SETTLING = 16  # steps before the clock starts
# A step is in flight when ``step`` returns: by waiting, a trace holds whole steps only.
IN_FLIGHT_S = 0.2


def add_options(parser: argparse.ArgumentParser) -> None:
    add_model_options(parser)
    add_engine_options(parser)
    parser.add_argument("--batch-sizes", type=int_list, metavar="N,N", default=(1, 64))
    parser.add_argument("--context", type=positive, default=1024, help="tokens of each prompt")
    parser.add_argument("--steps", type=positive, default=64, help="that are timed (default 64)")
    parser.add_argument("--traced", type=positive, default=8, help="steps traced (default 8)")
    parser.add_argument("--top", type=positive, default=20, help="kernel names printed")
    add_record_options(parser)


def main(options: argparse.Namespace) -> int:
    """Profiles every batch size and prints its kernels, the most expensive first."""
    result, session = begin("profile", options)
    for batch in options.batch_sizes:
        name = f"step_ms_B{batch}_ctx{options.context}"
        result.rows[name] = measured = measure(session, name, batch)
        print(table(name, measured, options.top))
        result.write(options.out)
    session.close()
    if options.out:
        result.finish(options.out)
    return 0


def measure(session: Session, name: str, batch: int) -> Row:
    """One batch size: the step's time as it is served, and its kernels in ``detail``."""
    options = session.options
    steps, count = options.steps, options.traced
    engine = session.engine(LatencyRow(name, "tpot", batch, options.context))
    assert engine.config.max_num_batched_tokens
    prefill_steps = batch * options.context // engine.config.max_num_batched_tokens + batch
    new_tokens = prefill_steps + SETTLING + steps + count + 4 * MOST_REPEATS
    params = SamplingParams(temperature=0, max_tokens=new_tokens, ignore_eos=True, detokenize=False)
    source = session.source
    requests = random_workload(
        batch, options.context, new_tokens, vocab_size=source.vocab_size, seed=source.seed
    ).requests
    for request in requests:
        engine.add_request(request.prompt, params, stream=False)
    _prefill(engine, batch)
    _steps(engine, SETTLING)
    before = engine.stats()
    start = time.perf_counter()
    steps = _steps(engine, steps)
    seconds = time.perf_counter() - start
    after = engine.stats()
    time.sleep(IN_FLIGHT_S)
    parts = StepParts(
        after.plan_s - before.plan_s,
        after.dispatch_s - before.dispatch_s,
        after.wait_s - before.wait_s,
    )

    def run() -> None:
        _steps(engine, count)
        time.sleep(IN_FLIGHT_S)

    launched = traced(run)
    kernels = by_name(launched, engine.stats().num_steps - after.num_steps)
    while engine.has_unfinished():
        engine.step()
    context = options.context + SETTLING + steps / 2
    return row(
        [seconds / steps * 1e3],
        "ms",
        "one decode step of the engine",
        num_compiles=after.num_compiles - before.num_compiles,
        roofline=decode_limit_ms(session, batch, context),
        step=step_times(seconds, steps, parts),
        detail={
            "batch": batch,
            "context": options.context,
            "kernels_per_step": sum(kernel.launches for kernel in kernels),
            "busy_ms": sum(kernel.us for kernel in kernels) / 1e3,
            "kernels": [kernel._asdict() for kernel in kernels],
        },
    )


def _prefill(engine: Engine, batch: int) -> None:
    """Steps until every row decodes: a step then has one token a row."""
    per_step = batch + 1.0
    while per_step > batch or engine.stats().waiting:
        before = engine.stats()
        engine.step()
        after = engine.stats()
        steps = after.num_steps - before.num_steps
        per_step = (after.step_tokens - before.step_tokens) / max(steps, 1)


def _steps(engine: Engine, count: int) -> int:
    """Runs so many steps or a few more, as many as the engine takes at once; returns how many."""
    before = engine.stats().num_steps
    while engine.stats().num_steps < before + count:
        engine.step()
    return engine.stats().num_steps - before


def table(name: str, measured: Row, top: int) -> str:
    """The kernels of a row as text."""
    detail, step = measured.detail, measured.step or {}
    lines = [
        f"{name}: {measured.value:.3f} ms a step; device busy {detail['busy_ms']:.3f} ms in "
        f"{detail['kernels_per_step']:.0f} kernels; host "
        + ", ".join(f"{key} {value:.3f}" for key, value in step.items())
    ]
    for kernel in detail["kernels"][:top]:
        us, launches = kernel["us"], kernel["launches"]
        lines.append(f"  {us:9.1f} us {launches:6.1f} x {us / launches:7.2f} us  {kernel['name']}")
    return "\n".join(lines)
