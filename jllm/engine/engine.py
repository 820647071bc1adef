"""The engine: requests in, tokens out, one ``step()`` at a time.

While the device runs step N the host plans and dispatches step N + 1, then collects N. The host
therefore plans before it knows what N drew: lengths are known without it, and a request that N
turns out to have ended costs one wasted row of N + 1. Its blocks and slot return to the pool only
when every step that holds a row of it was collected.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from types import TracebackType
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from jllm.cache.block_pool import BlockPool
from jllm.cache.naive import NaiveCache
from jllm.cache.prefix_cache import PrefixCache
from jllm.cache.radix import RadixCache
from jllm.cache.swap import SwapSpace
from jllm.config import EngineConfig
from jllm.engine.batch import Buckets, StepSpec
from jllm.engine.completion import Completion
from jllm.engine.grammar import Grammars
from jllm.engine.group import Group
from jllm.engine.intake import Intake, Prompt
from jllm.engine.logprobs import logprobs_of
from jllm.engine.planner import Plan, Planner
from jllm.engine.queue import POLICIES
from jllm.engine.request import Request
from jllm.engine.runner import Dispatched, Results, Runner
from jllm.engine.scheduler import MustDrain, Schedule, Scheduler
from jllm.engine.stats import EngineStats, PeriodicLog, StepClock
from jllm.engine.warm_up import warm_up
from jllm.models.attention import shared_tile_rows
from jllm.models.sampler import SamplerSpec
from jllm.outputs import RequestOutput
from jllm.parallel.mesh import Mesh
from jllm.params import Params
from jllm.sampling_params import SamplingParams
from jllm.structured import Structured


class InFlight(NamedTuple):
    """A dispatched step."""

    results: Dispatched
    plan: Plan


class Engine:
    """Runs many requests at once on one model.

        with jllm.Engine(params) as engine:
            engine.add_request("Once upon a time", jllm.SamplingParams(max_tokens=32))
            while engine.has_unfinished():
                for output in engine.step():
                    print(output.outputs[0].text, end="")

    Not thread-safe: one thread owns an engine.

    Args:
      params: the model; its tokenizer, if it has one, turns text prompts into ids and ids to text.
      config: how to batch and how much memory to use.
      mesh: the devices to split the model over, from ``jllm.make_mesh``. Unless given, those that
        the params are split over, whatever their own mesh calls its axes, or the first device.

    Raises:
      ValueError: the config asks for more than the model or the memory allows, or the model
        cannot be split over so many devices.
    """

    def __init__(
        self, params: Params, config: EngineConfig | None = None, *, mesh: Mesh | None = None
    ) -> None:
        self._runner = Runner(params, config or EngineConfig(), mesh)
        self.config = c = self._runner.config
        assert c.num_kv_blocks and c.max_num_seqs and c.max_num_batched_tokens
        assert c.prefill_buckets and c.max_model_len and c.decode_repeats
        self.model_config = params.config
        self.tokenizer = params.tokenizer
        self._buckets = Buckets.of(c)
        pool = BlockPool(c.num_kv_blocks)
        self._cache: PrefixCache = (
            RadixCache(pool, c.block_size) if c.prefix_cache == "radix" else NaiveCache(pool)
        )
        swap_space = None
        if c.preemption == "swap":
            budget = int(c.swap_space_gib * 2**30)
            swap_space = SwapSpace(self._runner, budget // self._runner.block_bytes)
        self._scheduler = Scheduler(
            self._cache,
            POLICIES[c.scheduling_policy],
            swap_space,
            block_size=c.block_size,
            max_num_seqs=c.max_num_seqs,
            max_num_batched_tokens=c.max_num_batched_tokens,
            max_prefill_tokens=c.prefill_buckets[-1],
            table_width=self._buckets.table_width,
            decode_repeats=c.decode_repeats,
        )
        model = params.config
        self._grammars = Grammars(params.tokenizer, model.vocab_size, model.eos_token_ids)
        self._intake = Intake(model, params.tokenizer, self._grammars, c.max_model_len)
        self._planner = Planner(
            self._buckets,
            c.max_num_seqs,
            c.max_model_len,
            block_size=c.block_size,
            tile_rows=shared_tile_rows(model.group_size),
        )
        self._groups: dict[str, Group] = {}
        self._of_request: dict[Request, tuple[Group, Completion]] = {}
        self._in_flight: deque[InFlight] = deque()
        self._aborted: list[Group] = []
        self._closed = False
        self._clock = StepClock()
        self._log = PeriodicLog(c.stats_interval_s)
        self._steps = 0
        self._step_tokens = 0
        self._prompt_tokens = 0
        self._generated_tokens = 0

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Aborts what is unfinished and frees the device memory. Closing again does nothing;
        new requests, steps and weights then raise RuntimeError."""
        if self._closed:
            return
        for request_id in list(self._groups):
            self.abort(request_id)
        self._drain()
        self._aborted.clear()
        self._closed = True
        self._runner.free()

    def _check_open(self) -> None:
        if self._closed:
            raise RuntimeError("This engine is closed; make a new one.")

    def add_request(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        cache_salt: str | None = None,
        stream: bool = True,
    ) -> str:
        """Queues a prompt and returns its id.

        Args:
          prompt: text, or token ids as they are (no BOS is added to ids).
          sampling_params: ``SamplingParams()`` unless given.
          request_id: a name for it; made up unless given, and made unique if it is taken.
          cache_salt: prefixes are shared only among requests of the same salt.
          stream: ``step`` reports what is new as it comes; if False, only the whole at the end.

        Raises:
          ValueError: the request could never run: an empty prompt, an id outside the vocabulary,
            text without a tokenizer, a prompt that leaves no room for a token, too many blocks
            for the whole pool, options that forbid every token, a logits_processor that JAX
            cannot trace, or a form of ``structured`` that cannot be used. Nothing is queued then.
        """
        self._check_open()
        group = self._intake.make_group(
            prompt,
            SamplingParams() if sampling_params is None else sampling_params,
            request_id=request_id,
            taken=self._groups,
            cache_salt=cache_salt,
            stream=stream,
        )
        processor = group.completions[0].request.params.logits_processor
        if processor is not None:
            self._runner.check_processor(processor)
        self._groups[group.request_id] = group
        self._prompt_tokens += len(group.prompt_ids)
        for completion in group.completions:
            self._of_request[completion.request] = group, completion
            self._scheduler.add(completion.request)
        return group.request_id

    def prepare_structured(self, form: Structured) -> None:
        """Compiles a form now, so that ``add_request`` finds it ready. Unlike everything else here
        it may be called by any thread.

        Raises ValueError: the form cannot be used.
        """
        self._grammars.matcher(form)

    def has_unfinished(self) -> bool:
        """Whether ``step`` has something left to do or to report."""
        return bool(self._groups or self._in_flight or self._aborted)

    def step(self) -> list[RequestOutput]:
        """Dispatches one step, collects the one before, and reports what is new."""
        self._check_open()
        updated: dict[str, Group] = {}
        try:
            plan = self._plan()
        except MustDrain:
            updated = self._drain()
            plan = self._plan()
        if plan is not None:
            updated |= self._dispatch(*plan)
        # The step just dispatched stays in flight; without one there is nothing to overlap.
        while len(self._in_flight) > (1 if plan is not None and self.config.overlap else 0):
            updated |= self._collect()
        if self._log.due:
            self._log.write(self.stats())
        return self._report(updated)

    def abort(self, request_id: str) -> None:
        """Ends a request at once, all its samples; ``step`` reports it as aborted.

        Unknown and finished ids are ignored: a request may end while its abort is on the way.
        """
        group = self._groups.pop(request_id, None)
        if group is None:
            return
        for completion in group.completions:
            request = completion.request
            if not request.finished:
                completion.abort()
                self._retire(request)
        self._aborted.append(group)

    def update_params(self, params: Params) -> None:
        """Replaces the weights by others of the same shapes; compiles nothing. Steps dispatched
        from now on use them; cached prefixes of the old weights are forgotten. The very arrays that
        the engine runs already change nothing.

        Raises ValueError if shapes or dtypes differ.
        """
        self._check_open()
        if self._runner.update_params(params):
            self.reset_prefix_cache()

    def reset_prefix_cache(self) -> None:
        """Forgets all cached prefixes; running requests keep what they hold, unshared."""
        self._scheduler.reset_prefix_cache()

    def warm_up(
        self,
        samplers: Sequence[SamplerSpec] | None = None,
        specs: Sequence[StepSpec] | None = None,
        *,
        progress: bool = False,
    ) -> int:
        """Compiles and runs every program a request could need, so that none is compiled later,
        except for those of ``logprobs=-1`` and of a ``logits_processor``.

        Args:
          samplers: only these combinations of sampling features, no prompt logprobs and no
            structured outputs.
          specs: only these step sizes.
          progress: show a bar.

        Returns how many programs were compiled or read from the compilation cache.
        """
        self._check_open()
        before = self._runner.num_compiles
        if samplers is None:
            self._grammars.prepare()
        warm_up(self._runner, samplers, specs, progress=progress)
        return self._runner.num_compiles - before

    def stats(self) -> EngineStats:
        """Counters and gauges; costs nothing on the device."""
        blocks = self.config.num_kv_blocks
        assert blocks
        counters = self._scheduler.counters
        return EngineStats(
            running=len(self._scheduler.running),
            waiting=len(self._scheduler.waiting),
            swapped=self._scheduler.num_swapped,
            kv_usage=1 - self._cache.num_available / blocks,
            num_preemptions=counters.preemptions,
            num_swaps=counters.swaps,
            prefix_queries=counters.prefix_queries,
            prefix_hits=counters.prefix_hits,
            num_steps=self._steps,
            step_tokens=self._step_tokens,
            prompt_tokens=self._prompt_tokens,
            generated_tokens=self._generated_tokens,
            num_compiles=self._runner.num_compiles,
            plan_s=self._clock.plan,
            dispatch_s=self._clock.dispatch,
            wait_s=self._clock.wait,
        )

    def check_integrity(self) -> None:
        """Raises AssertionError unless every KV block is accounted for."""
        self._cache.check_integrity(request.blocks for request in self._scheduler.running)

    def _plan(self) -> tuple[Schedule, Plan] | None:
        with self._clock.measure("plan"):
            schedule = self._scheduler.schedule()
            if not schedule:
                return None
            return schedule, self._planner.plan(schedule, self._scheduler.block_tables)

    def _dispatch(self, schedule: Schedule, plan: Plan) -> dict[str, Group]:
        """Starts a step. Where rows must follow a grammar, what they may draw depends on the token
        before: the steps in flight are collected, while the device runs the model already.
        Returns the groups that have news by that."""
        self._steps += plan.repeats
        self._step_tokens += len(schedule.decode) * plan.repeats + schedule.num_prefill_tokens
        if plan.repeats > 1:
            with self._clock.measure("dispatch"):
                self._in_flight.append(InFlight(self._runner.decode(plan), plan))
            with self._clock.measure("plan"):
                self._scheduler.commit(schedule)
            return {}
        with self._clock.measure("dispatch"):
            forwarded = self._runner.forward(plan)
        with self._clock.measure("plan"):
            self._scheduler.commit(schedule)
        updated, masks = {}, None
        if plan.structured:
            updated = self._drain()
            with self._clock.measure("plan"):
                masks = self._masks(plan)
        with self._clock.measure("dispatch"):
            results = self._runner.sample(plan, forwarded, masks)
        self._in_flight.append(InFlight(results, plan))
        return updated

    def _masks(self, plan: Plan) -> NDArray[np.uint32] | None:
        """What each row may draw: anything, if the token before turned out to end its request."""
        rows = [
            (row, request.matcher)
            for row, request, _ in plan.structured
            if request.matcher is not None and not request.finished
        ]
        return self._grammars.masks(plan.spec.num_rows, rows) if rows else None

    def _drain(self) -> dict[str, Group]:
        updated: dict[str, Group] = {}
        while self._in_flight:
            updated |= self._collect()
        return updated

    def _collect(self) -> dict[str, Group]:
        """Waits for the oldest step in flight; returns the groups with news, by id."""
        dispatched, plan = self._in_flight.popleft()
        with self._clock.measure("wait"):
            results = self._runner.collect(dispatched)
        self._note_prompt_logprobs(results, plan)
        drawn = results.tokens.tolist()
        now = time.monotonic()
        updated = {}
        for index, request, samples in plan.rows:
            request.in_flight -= 1
            if samples:
                group, completion = self._of_request[request]
                for tokens in drawn:
                    if request.finished:
                        break  # drawn before the host knew of the end
                    logprobs = None
                    if request.params.logprobs is not None and results.logprobs is not None:
                        count, token = request.params.logprobs, tokens[index]
                        logprobs = logprobs_of(
                            results.logprobs, index, token, count, self.tokenizer
                        )
                    completion.push(tokens[index], logprobs)
                    self._generated_tokens += 1
                    if group.first_token is None:
                        group.first_token = now
                    updated[group.request_id] = group
            if request.finished:
                self._retire(request)
        return updated

    def _retire(self, request: Request) -> None:
        """Frees what a finished request holds, once no step in flight touches it."""
        if request.in_flight == 0:
            self._scheduler.release(request)
            self._of_request.pop(request)

    def _note_prompt_logprobs(self, results: Results, plan: Plan) -> None:
        if plan.prompt is None or results.prompt is None:
            return
        for request, position, offset, length in plan.prompt.chunks:
            group, _ = self._of_request[request]
            if group.prompt_logprobs is not None:
                group.prompt_logprobs.add(results.prompt, position, offset, length)

    def _report(self, updated: dict[str, Group]) -> list[RequestOutput]:
        outputs = []
        for group in (*updated.values(), *self._aborted):
            if group.finished:
                self._groups.pop(group.request_id, None)
            output = group.report()
            if output is not None:
                outputs.append(output)
        self._aborted.clear()
        return outputs
