"""Compiles and runs every program that a request could need, before one needs it.

Compiled in threads, since XLA takes seconds for each, and then run once: whatever a program does at
its first run, it does here. Runs are on padding only, which writes to the scratch block and slot.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from tqdm import tqdm

from jllm.engine import step
from jllm.engine.batch import Buckets, StepSpec, forward_fields, pack, sample_fields
from jllm.engine.grammar import all_allowed
from jllm.engine.planner import REPEATED_SAMPLERS, Entry, Plan, all_sampler_specs
from jllm.engine.runner import Runner
from jllm.models.logit_rules import Rules
from jllm.models.sampler import SamplerSpec
from jllm.parallel.sharding import LOGITS
from jllm.sampling_params import MAX_LOGPROBS


def warm_up(
    runner: Runner,
    samplers: Sequence[SamplerSpec] | None,
    specs: Sequence[StepSpec] | None,
    *,
    progress: bool,
) -> None:
    """See ``Engine.warm_up``."""
    specs = Buckets.of(runner.config).all_specs() if specs is None else specs
    everything = samplers is None
    samplers = all_sampler_specs() if samplers is None else samplers
    repeated = _repeated(runner, specs, samplers)
    _compile(runner, specs, samplers, repeated, progress=progress)
    if everything:
        for num_tokens in sorted({spec.num_tokens for spec in specs if spec.num_tokens}):
            _score_prompts(runner, num_tokens)
    rows_done: set[int] = set()
    for spec in specs:
        rows_are_new = spec.num_rows not in rows_done
        for sampler in samplers if rows_are_new else samplers[:1]:
            _run(runner, _padding(runner, spec, sampler))
        if rows_are_new and everything:
            _run(runner, _padding(runner, spec, samplers[0]), masked=True)
        rows_done.add(spec.num_rows)
    for spec, sampler in repeated:
        assert runner.config.decode_repeats
        padding = _padding(runner, spec, sampler)
        runner.collect(runner.decode(padding._replace(repeats=runner.config.decode_repeats)))
    _enter(runner)
    if runner.config.preemption == "swap":
        scratch = np.zeros(1, np.int32)
        runner.write_blocks(scratch, runner.read_blocks(scratch), 0)


def _repeated(
    runner: Runner, specs: Sequence[StepSpec], samplers: Sequence[SamplerSpec]
) -> list[tuple[StepSpec, SamplerSpec]]:
    """Those of the specs and samplers that decode steps are repeated with."""
    if runner.config.decode_repeats == 1:
        return []
    repeated = Buckets.of(runner.config).repeated_specs()
    chosen = [sampler for sampler in samplers if sampler in REPEATED_SAMPLERS]
    return [(spec, sampler) for spec in specs if spec in repeated for sampler in chosen]


def _compile(
    runner: Runner,
    specs: Sequence[StepSpec],
    samplers: Sequence[SamplerSpec],
    repeated: Sequence[tuple[StepSpec, SamplerSpec]],
    *,
    progress: bool,
) -> None:
    """Every forward pass, and every sampler for every number of rows; calling them afterwards
    compiles nothing."""
    r = runner
    jobs: list[Callable[[], Any]] = []
    for spec in reversed(specs):  # the largest takes longest
        plan, _ = pack(forward_fields(spec))
        jobs.append(
            partial(step.forward.lower, r.params, r.cache, r.tokens, plan, spec=spec, mesh=r.mesh)
        )
    sharding = r.whole if r.mesh is None else NamedSharding(r.mesh, LOGITS)
    for rows in sorted({spec.num_rows for spec in specs}):
        shape = (rows, r.params.config.vocab_size)
        logits = jax.ShapeDtypeStruct(shape, jnp.float32, sharding=sharding)
        given = (r.tokens, r.rules, logits, logits, pack(sample_fields(rows))[0])
        for sampler in samplers:
            jobs.append(partial(step.sample.lower, *given, spec=sampler, mesh=r.mesh))
    for spec, sampler in repeated:
        plans = (pack(forward_fields(spec))[0], pack(sample_fields(spec.num_rows))[0])
        whole = (r.params, r.cache, r.tokens, r.rules, *plans)
        sizes = dict(spec=spec, sampler=sampler, repeats=r.config.decode_repeats)
        jobs.append(partial(step.decode.lower, *whole, **sizes, mesh=r.mesh))

    def run(lower: Callable[[], Any]) -> None:
        with jax.set_mesh(None):  # a thread has a mesh of its own
            lower().compile()

    with r.running(), ThreadPoolExecutor(os.cpu_count()) as pool:
        done = pool.map(run, jobs)
        for _ in tqdm(done, "compiling", len(jobs), leave=False, disable=not progress):
            pass


def _padding(runner: Runner, spec: StepSpec, sampler: SamplerSpec) -> Plan:
    scratch = runner.config.max_num_seqs
    plan, views = pack(forward_fields(spec))
    views["slots"][:] = scratch
    sample_plan, views = pack(sample_fields(spec.num_rows))
    views["slots"][:] = scratch
    return Plan(spec, plan, sampler, sample_plan, [], [], [], [], None)


def _run(runner: Runner, padding: Plan, *, masked: bool = False) -> None:
    """``masked`` as for rows that follow a grammar."""
    vocab_size = runner.params.config.vocab_size
    masks = all_allowed(padding.spec.num_rows, vocab_size) if masked else None
    runner.collect(runner.sample(padding, runner.forward(padding), masks))


def _score_prompts(runner: Runner, num_tokens: int) -> None:
    """What ``prompt_logprobs`` needs for steps of so many tokens."""
    r, shape = runner, (num_tokens, runner.params.config.hidden_size)
    targets = np.zeros(num_tokens, np.int32)
    with r.running():
        # Committed to the devices, as a step gives it: for another it would be compiled again.
        hidden = jnp.zeros(shape, r.params.dtype, device=r.whole)
        for count in (0, MAX_LOGPROBS):
            step.prompt_logprobs(r.params, hidden, targets, count=count, mesh=r.mesh)


def _enter(runner: Runner) -> None:
    """What enters an admitted request's tokens and rules."""
    scratch, length = runner.tokens.shape[0] - 1, runner.tokens.shape[1]
    rules = Rules(*(np.zeros(x.shape[1:], x.dtype) for x in runner.rules))  # type: ignore[arg-type]
    with runner.running():
        runner.enter(Entry(scratch, np.zeros(length, np.int32), rules))
