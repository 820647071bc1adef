"""Runs a list of requests on an engine against the clock."""

from __future__ import annotations

import gc
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from tqdm import tqdm

from jllm.bench.datasets import Request
from jllm.engine.engine import Engine
from jllm.sampling_params import SamplingParams


class TimeLimitReached(Exception):
    """The deadline passed in the middle of a run; the run gives no number."""


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn; eos never ends a request, and no text is made."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    n: int = 1
    logprobs: int | None = None

    def params(self, max_tokens: int, *, n: int | None = None) -> SamplingParams:
        return SamplingParams(
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            n=self.n if n is None else n,
            logprobs=self.logprobs,
            max_tokens=max_tokens,
            ignore_eos=True,
            detokenize=False,
        )


class StepParts(NamedTuple):
    """Seconds that the host spent on each part of the steps, see ``EngineStats``."""

    plan: float
    dispatch: float
    wait: float


class Run(NamedTuple):
    """What one run took.

    Attributes:
      seconds: from before the first ``add_request`` to the last token.
      latencies: per request, seconds until it was finished.
      prompt_tokens: of all prompts, each counted once.
      output_tokens: of all samples.
      steps, num_compiles, preemptions, prefix_hits: by the engine's counters; the last in tokens.
      step: see ``step_times``.
    """

    seconds: float
    latencies: list[float]
    prompt_tokens: int
    output_tokens: int
    steps: int
    num_compiles: int
    preemptions: int
    prefix_hits: int
    step: dict[str, float]


def run(
    engine: Engine,
    requests: Sequence[Request],
    sampling: Sampling,
    *,
    deadline: float | None = None,
    label: str = "",
) -> Run:
    """Sends all requests at once and steps until the last is finished.

    Args:
      deadline: of ``time.monotonic()``.
      label: of the progress bar; empty for none.

    Raises:
      TimeLimitReached: the deadline passed; the engine is empty again.
      RuntimeError: some output has not as many tokens as were asked for.
    """
    gc.collect()
    before = engine.stats()
    wanted: dict[str, int] = {}
    latencies: list[float] = []
    tokens = 0
    prompt_tokens = sum(len(request.prompt) for request in requests)
    bar = tqdm(total=len(requests), unit="request", desc=label, leave=False, disable=not label)
    with bar:
        start = time.perf_counter()
        for prompt, output_len in requests:
            name = engine.add_request(prompt, sampling.params(output_len), stream=False)
            wanted[name] = output_len
        while engine.has_unfinished():
            for output in engine.step():
                latencies.append(time.perf_counter() - start)
                counts = [len(sample.token_ids) for sample in output.outputs]
                if counts != [wanted[output.request_id]] * sampling.n:
                    raise RuntimeError(
                        f"{output.request_id} has {counts} tokens, but {sampling.n} samples of "
                        f"{wanted[output.request_id]} were asked for."
                    )
                tokens += sum(counts)
                bar.update()
                bar.set_postfix_str(_rates(prompt_tokens, tokens, latencies[-1]), refresh=False)
            if deadline is not None and time.monotonic() > deadline:
                _abort(engine, wanted)
                raise TimeLimitReached
        seconds = time.perf_counter() - start
    after = engine.stats()
    steps = after.num_steps - before.num_steps
    split = StepParts(
        after.plan_s - before.plan_s,
        after.dispatch_s - before.dispatch_s,
        after.wait_s - before.wait_s,
    )
    return Run(
        seconds=seconds,
        latencies=latencies,
        prompt_tokens=prompt_tokens,
        output_tokens=tokens,
        steps=steps,
        num_compiles=after.num_compiles - before.num_compiles,
        preemptions=after.num_preemptions - before.num_preemptions,
        prefix_hits=after.prefix_hits - before.prefix_hits,
        step=step_times(seconds, steps, split),
    )


def step_times(seconds: float, steps: int, parts: StepParts) -> dict[str, float]:
    """Milliseconds per step.

    ``step_ms`` is wall time; ``plan_ms``, ``dispatch_ms`` and ``wait_ms`` are the host's time by
    part; ``host_gap_ms`` is all but the waiting: the most that the device can have idled because
    of the host.
    """
    if steps == 0:
        return {}
    times = {"step_ms": seconds, **{f"{part}_ms": s for part, s in parts._asdict().items()}}
    times["host_gap_ms"] = max(0.0, seconds - parts.wait)
    return {name: value / steps * 1e3 for name, value in times.items()}


def _rates(prompt_tokens: int, output_tokens: int, seconds: float) -> str:
    both = (prompt_tokens + output_tokens) / seconds
    return f"{output_tokens / seconds:.0f} out tok/s, {both:.0f} in+out tok/s"


def _abort(engine: Engine, names: dict[str, int]) -> None:
    for name in names:
        engine.abort(name)
    while engine.has_unfinished():
        engine.step()
