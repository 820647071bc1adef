"""Scheduler, caches and swap space under random load, against a device that checks every read."""

from __future__ import annotations

from collections import deque

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from jllm.cache.block_pool import BlockPool
from jllm.cache.naive import NaiveCache
from jllm.cache.prefix_cache import PrefixCache
from jllm.cache.radix import RadixCache
from jllm.cache.swap import SwapSpace
from jllm.engine.queue import POLICIES
from jllm.engine.request import Request
from jllm.engine.scheduler import MustDrain, Scheduler
from jllm.sampling_params import SamplingParams
from tests.engine.fake_device import FakeDevice, next_token

BLOCK = 2


class Load:
    """A scheduler on a fake device, with one step in flight, as the engine drives it."""

    def __init__(
        self,
        cache: str = "radix",
        preemption: str = "recompute",
        policy: str = "fcfs",
        *,
        num_blocks: int = 8,
        max_num_seqs: int = 4,
        budget: int = 8,
        swap_blocks: int = 6,
    ) -> None:
        self.num_blocks = num_blocks
        self.device = FakeDevice(BLOCK)
        pool = BlockPool(num_blocks)
        self.cache: PrefixCache = RadixCache(pool, BLOCK) if cache == "radix" else NaiveCache(pool)
        swap = SwapSpace(self.device, swap_blocks) if preemption == "swap" else None
        self.scheduler = Scheduler(
            self.cache,
            POLICIES[policy],
            swap,
            block_size=BLOCK,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=budget,
            max_prefill_tokens=budget,
            table_width=num_blocks,
        )
        self.in_flight: deque[list[tuple[Request, bool, int | None]]] = deque()
        self.requests: list[Request] = []
        self.alive: list[Request] = []

    def add(
        self,
        prompt: list[int],
        new: int,
        *,
        priority: int = 0,
        salt: str | None = None,
        eos: int | None = None,
    ) -> Request:
        tokens = np.zeros(len(prompt) + new, np.int32)
        tokens[: len(prompt)] = prompt
        request = Request(
            arrival=len(self.requests),
            tokens=tokens,
            num_prompt=len(prompt),
            params=SamplingParams(stop_token_ids=[] if eos is None else [eos], priority=priority),
            cache_salt=salt,
        )
        self.requests.append(request)
        self.alive.append(request)
        self.scheduler.add(request)
        return request

    def step(self, overlap: bool = True) -> bool:
        """Plans and dispatches; collects the step before. False when nothing was left to do."""
        running = set(self.scheduler.running)
        swapped = {r for r in self.scheduler.waiting if r.computed}
        try:
            schedule = self.scheduler.schedule()
        except MustDrain:
            self.drain()
            swapped |= {r for r in self.scheduler.waiting if r.computed}
            schedule = self.scheduler.schedule()
        for request in set(self.scheduler.running) - running - swapped:
            self.device.admitted_under[request.arrival] = self.device.weights
        assert schedule.num_prefill_tokens <= self.scheduler._max_num_batched_tokens
        if schedule:
            self.in_flight.append(self.device.run(schedule, self.scheduler.block_tables))
            self.scheduler.commit(schedule)
        did = bool(schedule or self.in_flight)
        while len(self.in_flight) > (1 if schedule and overlap else 0):
            self.collect()
        self.check()
        return did

    def collect(self) -> None:
        for request, samples, token in self.in_flight.popleft():
            request.in_flight -= 1
            if samples and not request.finished:
                assert token is not None
                request.append(token)
                if token in request.params.stop_token_ids:
                    request.finish_reason = "stop"
                elif request.num_known == request.max_tokens:
                    request.finish_reason = "length"
            if request.finished:
                self.retire(request)

    def drain(self) -> None:
        while self.in_flight:
            self.collect()

    def abort(self, request: Request) -> None:
        if not request.finished:
            request.finish_reason = "abort"
            self.retire(request)
        self.check()

    def reset(self) -> None:
        self.scheduler.reset_prefix_cache()
        self.device.weights += 1
        self.check()

    def retire(self, request: Request) -> None:
        if request.in_flight == 0 and request in self.alive:
            self.scheduler.release(request)
            self.alive.remove(request)

    def check(self) -> None:
        self.cache.check_integrity(request.blocks for request in self.scheduler.running)

    def run_to_the_end(self) -> None:
        limit = 50 + 20 * sum(r.max_tokens for r in self.alive) * (1 + len(self.alive))
        for _ in range(limit):
            if not self.step():
                break
        assert not self.alive, f"{[r.arrival for r in self.alive]} never ended"
        assert self.cache.num_available == self.num_blocks, "blocks leaked"
        assert self.scheduler.num_swapped == 0, "host memory leaked"
        for request in self.requests:
            prefix = tuple(request.tokens[: request.num_prompt].tolist())
            for token in request.output.tolist():
                assert token == next_token(prefix)
                prefix = (*prefix, token)
            if request.finish_reason == "length":
                assert request.num_known == request.max_tokens


class SchedulerMachine(RuleBasedStateMachine):
    """Random arrivals, steps, aborts and resets in pools barely large enough."""

    @initialize(
        cache=st.sampled_from(["radix", "naive"]),
        preemption=st.sampled_from(["recompute", "swap"]),
        policy=st.sampled_from(["fcfs", "priority"]),
        num_blocks=st.integers(3, 12),
        budget=st.integers(4, 9),
        swap_blocks=st.integers(0, 8),
    )
    def start(
        self,
        cache: str,
        preemption: str,
        policy: str,
        num_blocks: int,
        budget: int,
        swap_blocks: int,
    ) -> None:
        self.load = Load(
            cache,
            preemption,
            policy,
            num_blocks=num_blocks,
            budget=budget,
            swap_blocks=swap_blocks,
        )

    @rule(
        prompt=st.lists(st.integers(0, 1), min_size=1, max_size=12),
        new=st.integers(1, 8),
        priority=st.integers(0, 2),
        salt=st.sampled_from([None, None, "tenant"]),
        eos=st.sampled_from([None, 0]),
        copies=st.integers(1, 3),
    )
    def add(
        self,
        prompt: list[int],
        new: int,
        priority: int,
        salt: str | None,
        eos: int | None,
        copies: int,
    ) -> None:
        room = self.load.num_blocks * BLOCK
        prompt = prompt[: room - 1]
        for _ in range(copies):
            new = min(new, room - len(prompt))
            self.load.add(prompt, new, priority=priority, salt=salt, eos=eos)

    @rule(overlap=st.booleans())
    def step(self, overlap: bool) -> None:
        self.load.step(overlap)

    @precondition(lambda self: self.load.alive)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        self.load.abort(data.draw(st.sampled_from(self.load.alive)))

    @rule()
    def continue_a_finished_one(self) -> None:
        """Multi-turn: a prompt that is an earlier request's prompt and output."""
        done = [r for r in self.load.requests if r.finished and r.num_known < 10]
        if done:
            prompt = done[-1].tokens[: done[-1].num_known].tolist()
            room = self.load.num_blocks * BLOCK
            if len(prompt) < room:
                self.load.add(prompt, min(3, room - len(prompt)))

    @rule()
    def reset(self) -> None:
        self.load.reset()

    @invariant()
    def pool_is_whole(self) -> None:
        if hasattr(self, "load"):
            self.load.check()

    def teardown(self) -> None:
        if hasattr(self, "load"):
            self.load.run_to_the_end()


def test_random_load_reads_no_stale_block_leaks_none_and_always_ends() -> None:
    run_state_machine_as_test(
        SchedulerMachine,
        settings=settings(
            max_examples=300,
            stateful_step_count=40,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )


def test_a_long_prompt_does_not_stall_running_decodes() -> None:
    load = Load("naive", num_blocks=100, budget=8)
    short = load.add([0, 1], 20)
    load.step(overlap=False)
    load.add([1] * 90, 5)
    for _ in range(10):
        known = short.num_known
        load.step(overlap=False)
        assert short.num_known == known + 1


def test_identical_prompts_admitted_together_compute_the_shared_part_once() -> None:
    load = Load(num_blocks=40, budget=64)
    for _ in range(3):
        load.add([0, 1, 1, 0, 1, 1, 0, 0, 1], 2)
    load.run_to_the_end()
    counters = load.scheduler.counters
    assert (counters.prefix_queries, counters.prefix_hits) == (27, 16)


def test_a_fully_cached_prompt_still_runs_one_token() -> None:
    load = Load(num_blocks=20)
    first = load.add([0, 1, 1, 0], 3)
    load.run_to_the_end()
    second = load.add([0, 1, 1, 0], 3)
    load.run_to_the_end()
    assert second.num_cached == 2
    assert second.output.tolist() == first.output.tolist()


def test_generated_tokens_are_found_by_the_next_turn() -> None:
    load = Load(num_blocks=20)
    first = load.add([0, 1, 1, 0], 6)
    load.run_to_the_end()
    second = load.add([*first.tokens.tolist(), 1], 2)
    load.run_to_the_end()
    assert second.num_cached == 8  # positions 0 to 8 were run, the last token never was


def test_recomputed_tokens_are_no_prefix_hits() -> None:
    load = Load("radix", num_blocks=6, max_num_seqs=3, budget=16)
    load.add([0, 1], 9)
    load.add([1, 0, 0], 9)
    load.run_to_the_end()
    assert load.scheduler.counters.preemptions > 0
    assert load.scheduler.counters.prefix_queries == 5
    assert load.scheduler.counters.prefix_hits == 0


def test_salts_do_not_share() -> None:
    load = Load(num_blocks=40)
    load.add([0, 1, 1, 0, 1], 1, salt="a")
    load.run_to_the_end()
    other, same = load.add([0, 1, 1, 0, 1], 1, salt="b"), load.add([0, 1, 1, 0, 1], 1, salt="a")
    load.run_to_the_end()
    assert (other.num_cached, same.num_cached) == (0, 4)


def test_nothing_matches_after_a_reset_not_even_what_runs() -> None:
    load = Load(num_blocks=40)
    load.add([0, 1, 1, 0, 1], 8)
    load.step()
    load.reset()
    beside = load.add([0, 1, 1, 0, 1], 1)
    load.step()
    load.reset()  # what ``beside`` published is gone again
    load.run_to_the_end()
    after = load.add([0, 1, 1, 0, 1], 8)
    load.run_to_the_end()
    assert (beside.num_cached, after.num_cached) == (0, 0)


def test_priority_admits_the_more_urgent_first_and_preempts_it_last() -> None:
    load = Load("naive", policy="priority", num_blocks=9, max_num_seqs=2, budget=16)
    low = load.add([0, 1], 12, priority=5)
    high = load.add([1, 1], 12, priority=-1)
    middle = load.add([1, 0], 12, priority=0)
    load.step()
    assert load.scheduler.running == [high, middle]
    load.run_to_the_end()
    assert not high.preempted
    assert middle.preempted or low.preempted


def test_swapped_requests_are_not_recomputed() -> None:
    load = Load("naive", "swap", num_blocks=8, max_num_seqs=3, budget=16, swap_blocks=50)
    for prompt in ([0, 1], [1, 0, 0], [1, 1, 1]):
        load.add(prompt, 10)
    while load.alive:
        running = {r.arrival for r in load.scheduler.running}
        load.step()
        for request in load.scheduler.running:
            if request.preempted and request.arrival not in running:  # it has just come back
                assert request.computed >= request.num_prompt
    counters = load.scheduler.counters
    assert counters.swaps == counters.preemptions > 0
    assert load.scheduler.num_swapped == 0


def test_a_full_swap_space_falls_back_to_recomputing() -> None:
    load = Load("naive", "swap", num_blocks=8, max_num_seqs=3, budget=16, swap_blocks=0)
    for prompt in ([0, 1], [1, 0, 0], [1, 1, 1]):
        load.add(prompt, 10)
    load.run_to_the_end()
    assert load.scheduler.counters.preemptions > 0
    assert load.scheduler.counters.swaps == 0


@pytest.mark.parametrize("steps", range(6))
def test_abort_between_chunks_gives_every_block_back(steps: int) -> None:
    load = Load(num_blocks=30, budget=4)
    request = load.add([0, 1] * 10, 4)
    for _ in range(steps):
        load.step()
    load.abort(request)
    load.run_to_the_end()


def test_an_aborted_request_leaves_the_swap_space() -> None:
    load = Load("naive", "swap", num_blocks=8, max_num_seqs=3, budget=16, swap_blocks=50)
    for prompt in ([0, 1], [1, 0, 0], [1, 1, 1]):
        load.add(prompt, 10)
    while not load.scheduler.num_swapped:
        load.step()
    load.abort(next(r for r in load.alive if r.preempted))
    assert load.scheduler.num_swapped == 0


def test_kv_in_host_memory_is_not_shared_after_a_reset() -> None:
    load = Load("radix", "swap", num_blocks=8, max_num_seqs=3, budget=16, swap_blocks=50)
    for prompt in ([0, 1], [1, 0, 0], [1, 1, 1]):
        load.add(prompt, 10)
    while not load.scheduler.num_swapped:
        load.step()
    load.reset()
    assert load.scheduler.num_swapped == 0
    load.run_to_the_end()


def test_prompts_that_are_not_looked_up_are_no_queries() -> None:
    load = Load("naive", num_blocks=20)
    load.add([0, 1, 1, 0], 3)
    load.run_to_the_end()
    assert load.scheduler.counters.prefix_queries == 0


def test_a_newcomer_is_not_admitted_only_to_be_pushed_out() -> None:
    load = Load("naive", num_blocks=6, max_num_seqs=2, budget=16)
    load.add([0, 1, 0, 1, 1], 4)  # holds 3 blocks and will need a fourth after one more token
    load.step()
    load.add([1, 1, 1, 1, 1], 3)  # could have the last 3
    load.run_to_the_end()
    assert load.scheduler.counters.preemptions == 0


def test_a_prompt_that_fills_the_pool_is_not_pushed_out_by_its_own_growth() -> None:
    load = Load("naive", num_blocks=4, budget=4)
    load.add([0, 1, 0, 1, 0, 1, 1], 1)
    load.add([0], 7)
    load.run_to_the_end()
