"""The engine: requests in, tokens out, one ``step()`` at a time.

While the device runs step N the host plans and dispatches step N + 1, then collects N. The host
therefore plans before it knows what N drew: lengths are known without it, and a request that N
turns out to have ended costs one wasted row of N + 1. Its blocks and slot return to the pool only
when every step that holds a row of it was collected.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import NamedTuple

import numpy as np

from jllm.cache.block_pool import BlockPool
from jllm.cache.naive import NaiveCache
from jllm.config import EngineConfig
from jllm.engine.batch import Buckets, StepSpec
from jllm.engine.completion import Completion
from jllm.engine.planner import Planner, Row, all_sampler_specs
from jllm.engine.request import Request
from jllm.engine.runner import Results, Runner
from jllm.engine.scheduler import MustDrain, Schedule, Scheduler
from jllm.models.sampler import Sampled, SamplerSpec
from jllm.outputs import Logprob, RequestOutput
from jllm.params import Params
from jllm.sampling_params import SamplingParams

Prompt = str | Sequence[int]


class InFlight(NamedTuple):
    """A dispatched step."""

    sampled: Sampled
    rows: list[Row]


@dataclass(slots=True)
class Group:
    """A prompt and its n samples, as the caller sees them."""

    request_id: str
    prompt: str | None
    prompt_ids: list[int]
    completions: list[Completion]
    stream: bool


@dataclass(frozen=True)
class EngineStats:
    """A snapshot of an engine.

    Attributes:
      running, waiting: requests (samples counted one by one) now.
      kv_usage: share of the KV blocks in use, 0 to 1.
      num_preemptions: requests sent back to the queue since the start.
      num_steps: steps dispatched since the start.
      num_compiles: programs compiled (or read from the compilation cache) by steps.
    """

    running: int
    waiting: int
    kv_usage: float
    num_preemptions: int
    num_steps: int
    num_compiles: int


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

    Raises:
      ValueError: the config asks for more than the model or the memory allows.
    """

    def __init__(self, params: Params, config: EngineConfig | None = None) -> None:
        self._runner = Runner(params, config or EngineConfig())
        self.config = c = self._runner.config
        assert c.num_kv_blocks and c.max_num_seqs and c.max_num_batched_tokens
        assert c.max_prefill_seqs and c.prefill_buckets
        self.model_config = params.config
        self.tokenizer = params.tokenizer
        self._buckets = Buckets.of(c)
        self._cache = NaiveCache(BlockPool(c.num_kv_blocks))
        self._scheduler = Scheduler(
            self._cache,
            block_size=c.block_size,
            max_num_seqs=c.max_num_seqs,
            max_num_batched_tokens=c.max_num_batched_tokens,
            max_prefill_seqs=c.max_prefill_seqs,
            max_prefill_tokens=c.prefill_buckets[-1],
            table_width=self._buckets.table_width,
        )
        self._planner = Planner(self._buckets, c.max_num_seqs)
        self._groups: dict[str, Group] = {}
        self._of_request: dict[str, tuple[Group, Completion]] = {}
        self._in_flight: deque[InFlight] = deque()
        self._aborted: list[Group] = []
        self._arrivals = 0
        self._steps = 0
        self._seeds = np.random.default_rng()

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
        """Aborts what is unfinished and frees the device memory; the engine is then unusable."""
        for request_id in list(self._groups):
            self.abort(request_id)
        self._drain()
        del self._runner

    def add_request(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        stream: bool = True,
    ) -> str:
        """Queues a prompt and returns its id.

        Args:
          prompt: text, or token ids as they are (no BOS is added to ids).
          sampling_params: ``SamplingParams()`` unless given.
          request_id: a name for it; made up unless given, and made unique if it is taken.
          stream: ``step`` reports what is new as it comes; if False, only the whole at the end.

        Raises:
          ValueError: the request could never run: an empty prompt, an id outside the vocabulary,
            text without a tokenizer, a prompt that leaves no room for a token, or too many
            blocks for the whole pool. Nothing is queued then.
        """
        params = sampling_params or SamplingParams()
        params.check_vocab(self.model_config.vocab_size)
        if params.stop and self.tokenizer is None:
            raise ValueError("SamplingParams.stop needs text, but the model has no tokenizer.")
        prompt_ids = self._prompt_ids(prompt)
        length = self._total_length(len(prompt_ids), params.max_tokens)
        name = request_id or f"request-{self._arrivals}"
        if name in self._groups:
            name = f"{name}#{self._arrivals}"
        seed = params.seed
        if seed is None:
            seed = int(self._seeds.integers(-(2**63), 2**63 - 1))
        completions = []
        for sample in range(params.n):
            tokens = np.empty(length, np.int32)
            tokens[: len(prompt_ids)] = prompt_ids
            request = Request(
                id=f"{name}/{sample}",
                arrival=self._arrivals,
                tokens=tokens,
                num_prompt=len(prompt_ids),
                params=params,
                sample=sample,
                seed=seed,
            )
            self._arrivals += 1
            completions.append(Completion(request, self.tokenizer, self.model_config.eos_token_ids))
            self._scheduler.add(request)
        text = prompt if isinstance(prompt, str) else None
        group = Group(name, text, prompt_ids, completions, stream)
        self._groups[name] = group
        for completion in completions:
            self._of_request[completion.request.id] = group, completion
        return name

    def has_unfinished(self) -> bool:
        """Whether ``step`` has something left to do or to report."""
        return bool(self._groups or self._in_flight or self._aborted)

    def step(self) -> list[RequestOutput]:
        """Dispatches one step, collects the one before, and reports what is new."""
        try:
            schedule = self._scheduler.schedule()
            updated = {}
        except MustDrain:
            updated = self._drain()
            schedule = self._scheduler.schedule()
        if schedule:
            self._dispatch(schedule)
        # The step just dispatched stays in flight; without one there is nothing to overlap.
        while len(self._in_flight) > (1 if schedule else 0):
            updated |= self._collect()
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
                request.finish_reason = "abort"
                self._retire(request)
        self._aborted.append(group)

    def update_params(self, params: Params) -> None:
        """Replaces the weights by others of the same shapes; compiles nothing. Steps dispatched
        from now on use them; cached prefixes of the old weights are forgotten.

        Raises ValueError if shapes or dtypes differ.
        """
        self._runner.update_params(params)
        self.reset_prefix_cache()

    def reset_prefix_cache(self) -> None:
        """Forgets cached prefixes that no running request holds."""
        self._cache.reset()

    def warm_up(
        self,
        samplers: Sequence[SamplerSpec] | None = None,
        specs: Sequence[StepSpec] | None = None,
    ) -> int:
        """Compiles and runs every program a request could need, so that none is compiled later.

        Args:
          samplers: only these combinations of sampling features.
          specs: only these step sizes.

        Returns how many programs were compiled or read from the compilation cache.
        """
        before = self._runner.num_compiles
        samplers = all_sampler_specs() if samplers is None else samplers
        specs = self._buckets.all_specs() if specs is None else specs
        rows_done: set[int] = set()
        for spec in specs:
            for sampler in samplers if spec.num_rows not in rows_done else samplers[:1]:
                self._runner.warm_up(spec, sampler)
            rows_done.add(spec.num_rows)
        return self._runner.num_compiles - before

    def stats(self) -> EngineStats:
        """Counters and gauges; costs nothing on the device."""
        blocks = self.config.num_kv_blocks
        assert blocks
        return EngineStats(
            running=len(self._scheduler.running),
            waiting=len(self._scheduler.waiting),
            kv_usage=1 - self._cache.num_available / blocks,
            num_preemptions=self._scheduler.num_preemptions,
            num_steps=self._steps,
            num_compiles=self._runner.num_compiles,
        )

    def check_integrity(self) -> None:
        """Raises AssertionError unless every KV block is accounted for."""
        self._cache.check_integrity(request.blocks for request in self._scheduler.running)

    def _prompt_ids(self, prompt: Prompt) -> list[int]:
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise ValueError("The prompt is text, but the model has no tokenizer; give ids.")
            ids = self.tokenizer.encode(prompt)
        else:
            ids = [int(token) for token in prompt]
        if not ids:
            raise ValueError("The prompt is empty: it must hold at least one token.")
        vocab_size = self.model_config.vocab_size
        for token in ids:
            if not 0 <= token < vocab_size:
                raise ValueError(
                    f"The prompt has token id {token}, outside the vocabulary of {vocab_size}."
                )
        return ids

    def _total_length(self, num_prompt: int, max_tokens: int | None) -> int:
        """Prompt plus output, in tokens."""
        limit = self.config.max_model_len
        assert limit
        if num_prompt >= limit:
            raise ValueError(
                f"The prompt has {num_prompt} tokens and needs room for one more, but "
                f"max_model_len is {limit}."
            )
        if max_tokens is None:
            return limit
        if num_prompt + max_tokens > limit:
            raise ValueError(
                f"The prompt has {num_prompt} tokens and max_tokens is {max_tokens}: together "
                f"more than max_model_len, {limit}."
            )
        return num_prompt + max_tokens

    def _dispatch(self, schedule: Schedule) -> None:
        plan = self._planner.plan(schedule, self._scheduler.block_tables)
        sampled = self._runner.dispatch(plan.forward, plan.spec, plan.sample, plan.sampler)
        self._scheduler.commit(schedule)
        self._in_flight.append(InFlight(sampled, plan.rows))
        self._steps += 1

    def _drain(self) -> dict[str, Group]:
        updated: dict[str, Group] = {}
        while self._in_flight:
            updated |= self._collect()
        return updated

    def _collect(self) -> dict[str, Group]:
        """Waits for the oldest step in flight; returns the groups with news, by id."""
        step = self._in_flight.popleft()
        results = self._runner.collect(step.sampled)
        tokens = results.tokens.tolist()
        updated = {}
        for index, request, samples in step.rows:
            request.in_flight -= 1
            if samples:
                group, completion = self._of_request[request.id]
                was_finished = request.finished
                logprobs = self._logprobs(results, index, tokens[index], request.params.logprobs)
                completion.push(tokens[index], logprobs)
                if not was_finished:
                    updated[group.request_id] = group
            if request.finished:
                self._retire(request)
        return updated

    def _retire(self, request: Request) -> None:
        """Frees what a finished request holds, once no step in flight touches it."""
        if request.in_flight == 0:
            self._scheduler.release(request)
            self._of_request.pop(request.id)

    def _logprobs(
        self, results: Results, row: int, token: int, count: int | None
    ) -> dict[int, Logprob] | None:
        if count is None or results.logprobs is None:
            return None
        found = {token: self._logprob(token, float(results.logprobs[row]))}
        if count and results.top_ids is not None and results.top_logprobs is not None:
            ids, values = results.top_ids[row, :count], results.top_logprobs[row, :count]
            for other, value in zip(ids.tolist(), values.tolist(), strict=True):
                found.setdefault(other, self._logprob(other, value))
        return found

    def _logprob(self, token: int, value: float) -> Logprob:
        text = None if self.tokenizer is None else self.tokenizer.token_string(token)
        return Logprob(value, text)

    def _report(self, updated: dict[str, Group]) -> list[RequestOutput]:
        outputs = []
        for group in (*updated.values(), *self._aborted):
            completions = group.completions
            finished = all(completion.request.finished for completion in completions)
            if finished:
                self._groups.pop(group.request_id, None)
            if group.stream:
                parts = [c.news() for c in completions if c.has_news]
            elif finished:
                parts = [completion.whole() for completion in completions]
            else:
                continue
            outputs.append(
                RequestOutput(group.request_id, group.prompt, group.prompt_ids, parts, finished)
            )
        self._aborted.clear()
        return outputs
