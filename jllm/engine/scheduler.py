"""Which requests run in the next step.

Requests wait in one queue and run in one list, both in the order of a policy. A step takes every
running request that can decode, and up to ``max_num_batched_tokens`` tokens of prefill chunks. So a
long prompt never stalls the others: between two tokens of a running request lies one step, whatever
waits.

A request is admitted only when the pool has blocks for all tokens it knows and one to spare for
each running request, so prefill never stops halfway for want of blocks; only decodes grow. When
one finds no block, the last of the running gives up its own and waits again, its KV copied to host
memory or recomputed later. The first of the running is never the one to go while another is there,
and the whole pool can hold any request, so the first always comes to its end.
"""

from __future__ import annotations

import bisect
import time
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from jllm.cache.block_pool import Blocks
from jllm.cache.prefix_cache import PrefixCache
from jllm.cache.swap import SwapSpace
from jllm.engine.batch import MOST_REPEATED_ROWS
from jllm.engine.queue import Policy, WaitingQueue
from jllm.engine.request import NO_SLOT, Request

NO_TOKENS = np.empty(0, np.int32)
MOST_DEFERRED = 64  # requests that a step passes over; each is compared with those being prefilled


class Chunk(NamedTuple):
    """A stretch of a request's known tokens to prefill in one step."""

    request: Request
    start: int
    length: int

    @property
    def samples(self) -> bool:
        """The chunk ends the known tokens, so its last logits give the next one."""
        return self.start + self.length == self.request.num_tokens


@dataclass(slots=True)
class Schedule:
    """The rows of one step."""

    decode: list[Request] = field(default_factory=list)
    prefill: list[Chunk] = field(default_factory=list)
    repeats: int = 1  # decode steps in a row, with nothing between them

    @property
    def num_prefill_tokens(self) -> int:
        return sum(chunk.length for chunk in self.prefill)

    def __bool__(self) -> bool:
        return bool(self.decode or self.prefill)


class MustDrain(Exception):
    """A request must be preempted, which needs the results of all steps in flight first."""


@dataclass(slots=True)
class SchedulerCounters:
    """Totals since the start. Requests that come back after a preemption are counted in
    ``preemptions`` and ``swaps`` only: what they recompute or find again is no prefix hit."""

    preemptions: int = 0
    swaps: int = 0
    prefix_queries: int = 0  # prompt tokens that were looked up
    prefix_hits: int = 0  # those found in the cache


class Scheduler:
    """Continuous batching with chunked prefill over a paged cache."""

    def __init__(
        self,
        cache: PrefixCache,
        policy: Policy,
        swap_space: SwapSpace | None,
        *,
        block_size: int,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_prefill_tokens: int,
        table_width: int,
        decode_repeats: int = 1,
    ) -> None:
        self.cache = cache
        self.waiting = WaitingQueue(policy)
        self.running: list[Request] = []  # by rank
        self.counters = SchedulerCounters()
        # (R + 1, P): the blocks of the request in each slot, in the form a plan sends them. The
        # last row is all scratch. Entries past a request's blocks are stale and never read.
        self.block_tables = np.zeros((max_num_seqs + 1, table_width), np.int32)
        self._policy = policy
        self._swap_space = swap_space
        self._block_size = block_size
        self._max_num_batched_tokens = max_num_batched_tokens
        self._max_prefill_tokens = max_prefill_tokens
        self._decode_repeats = decode_repeats
        self._free_slots = list(range(max_num_seqs))[::-1]

    @property
    def num_swapped(self) -> int:
        """Waiting requests whose KV is in host memory."""
        return 0 if self._swap_space is None else len(self._swap_space)

    def add(self, request: Request) -> None:
        self.waiting.push(request)

    def schedule(self) -> Schedule:
        """Plans one step and takes the blocks it needs; empty when nothing can run.

        Raises:
          MustDrain: blocks ran out while steps are in flight; collect them and call again.
            Blocks taken so far stay with their requests.
        """
        step = Schedule()
        self._schedule_decodes(step)
        # Decode rows come on top: else prompts of a size that divides the budget would be cut, and
        # their last bits cost a step more.
        budget = min(self._max_num_batched_tokens, self._max_prefill_tokens)
        if len(step.decode) < len(self.running):
            for request in self.running:
                if budget > 0 and not request.decoding:
                    budget -= self._add_chunk(step, request, budget)
        self._schedule_waiting(step, budget)
        if not step.prefill and not len(self.waiting):
            step.repeats = self._repeats(step.decode)
        return step

    def commit(self, step: Schedule) -> None:
        """Counts the step's tokens as computed: it was dispatched."""
        for request in step.decode:
            request.advance(step.repeats, samples=step.repeats)
        for chunk in step.prefill:
            request = chunk.request
            request.advance(chunk.length, samples=int(chunk.samples))
            if request.shareable:
                known = request.tokens[: request.computed]
                self.cache.publish(known, request.blocks, request.cache_salt)

    def release(self, request: Request) -> None:
        """Takes a finished request out; its blocks and slot are free again."""
        assert request.in_flight == 0
        if request.slot != NO_SLOT:
            self._vacate(request)
        elif request in self.waiting:
            self.waiting.remove(request)
            if self._swap_space is not None:
                self._swap_space.discard(request.arrival)

    def preempt(self, request: Request) -> None:
        """Sends a running request back to the queue; its KV is swapped out or given up."""
        assert request.in_flight == 0 and request.pending == 0
        self.counters.preemptions += 1
        filled = request.blocks[: -(-request.computed // self._block_size)]
        if self._swap_space is not None and self._swap_space.store(request.arrival, filled):
            self.counters.swaps += 1
        self._vacate(request)
        if self._swap_space is None or request.arrival not in self._swap_space:
            request.computed = 0
        request.preempted = True
        self.waiting.push(request)

    def reset_prefix_cache(self) -> None:
        """Forgets all prefixes, those that requests are still computing and those in host memory
        included: what is admitted from now on computes its KV with the weights of now."""
        self.cache.reset()
        for request in self.running:
            request.shareable = False
        if self._swap_space is not None:
            for request in self.waiting:
                if request.arrival in self._swap_space:
                    self._swap_space.discard(request.arrival)
                    request.computed = 0

    def _schedule_decodes(self, step: Schedule) -> None:
        for request in list(self.running):
            # A request preempted for an earlier one in this loop has no slot any more.
            if request.slot == NO_SLOT or request.finished or not request.decoding:
                continue
            if request.remaining and self._grow(request):
                step.decode.append(request)

    def _grow(self, request: Request) -> bool:
        """Gets the block that the request's next token needs, by preemption if need be; False
        when the request itself had to give way."""
        if request.computed < len(request.blocks) * self._block_size:
            return True
        while (blocks := self.cache.acquire(NO_TOKENS, 1)) is None:
            if any(other.in_flight for other in self.running):
                raise MustDrain
            victim = self.running[-1]
            self.preempt(victim)
            if victim is request:
                return False
        self._give_blocks(request, blocks)
        return True

    def _repeats(self, decode: list[Request]) -> int:
        """How many steps these rows can decode without the host, taking the blocks for them."""
        count = self._decode_repeats
        if count == 1 or not 0 < len(decode) <= MOST_REPEATED_ROWS:
            return 1
        for request in decode:
            if not request.repeatable or request.num_tokens + count > request.max_tokens:
                return 1
        for request in decode:
            held = len(request.blocks)
            needed = -(-(request.computed + count) // self._block_size) - held
            if needed > 0:
                blocks = self.cache.acquire(NO_TOKENS, needed)
                if blocks is None:  # those taken stay with their requests, which will need them
                    return 1
                self._give_blocks(request, blocks)
        return count

    def _schedule_waiting(self, step: Schedule, budget: int) -> None:
        """Admits waiting requests in order, until one finds no slot or no blocks. One that should
        wait for a prefix that another is computing is passed over for this step."""
        deferred: list[Request] = []
        while budget > 0 and self._free_slots and len(deferred) < MOST_DEFERRED:
            request = self.waiting.first()
            if request is None:
                break
            cached = self._match(request)
            if self._is_being_computed(request, len(cached)):
                deferred.append(self.waiting.pop())
            elif self._admit(request, cached):
                self.waiting.pop()
                budget -= self._add_chunk(step, request, budget)
            else:
                break
        for request in deferred:
            self.waiting.push(request)

    def _match(self, request: Request) -> Blocks:
        if request.needs_full_prefill:
            return NO_TOKENS
        return self.cache.match(request.tokens[: request.num_known], request.cache_salt)

    def _is_being_computed(self, request: Request, num_cached: int) -> bool:
        """Whether a running request is about to compute the next block that this one needs: then
        it pays to wait until that is published, and read it."""
        if not self.cache.shares or request.needs_full_prefill:
            return False
        end = (num_cached + 1) * self._block_size
        if end >= request.num_known:
            return False
        tokens = request.tokens[:end]
        return any(
            other.computed < end
            and end <= other.num_known
            and other.shareable
            and other.cache_salt == request.cache_salt
            and np.array_equal(other.tokens[:end], tokens)
            for other in self.running
            if not other.decoding and not other.finished
        )

    def _admit(self, request: Request, cached: Blocks) -> bool:
        """Gives a waiting request a slot and blocks for all it knows, if there are enough."""
        needed = -(-request.num_known // self._block_size) - len(cached)
        spare = len(self.running)  # the next block of each, lest the newcomer is pushed out at once
        if self.running and needed + spare > self.cache.num_available:
            return False
        blocks = self.cache.acquire(cached, needed)
        if blocks is None:
            return False
        request.slot = self._free_slots.pop()
        self._give_blocks(request, blocks)
        found = len(cached) * self._block_size
        if self._swap_space is not None and request.arrival in self._swap_space:
            filled = -(-request.computed // self._block_size)
            self._swap_space.restore(request.arrival, blocks[len(cached) : filled], len(cached))
        else:
            request.shareable = True  # all its KV is of now, not from before a reset
        request.computed = max(request.computed, found)
        if not request.preempted and self.cache.shares and not request.needs_full_prefill:
            self.counters.prefix_queries += request.num_known
            self.counters.prefix_hits += found
            request.num_cached = found
        if request.admitted is None:
            request.admitted = time.monotonic()
        request.resident = request.num_known
        bisect.insort(self.running, request, key=self._policy)
        return True

    def _add_chunk(self, step: Schedule, request: Request, budget: int) -> int:
        length = min(request.remaining, budget)
        if length > 0 and not request.finished:
            step.prefill.append(Chunk(request, request.computed, length))
            return length
        return 0

    def _give_blocks(self, request: Request, blocks: Blocks) -> None:
        held = len(request.blocks)
        self.block_tables[request.slot, held : held + len(blocks)] = blocks
        request.blocks = np.concatenate([request.blocks, blocks])

    def _vacate(self, request: Request) -> None:
        """Takes a request out of the running and gives back what it holds:

            blocks  [0, computed)               full ones: to the cache, if it may share them
                    [computed, len(blocks) * S)  to the pool
            slot                                its row of the token table

        Tokens drawn after the end of the request are not among the known: not shared.
        """
        self.running.remove(request)
        count = min(request.computed, request.num_known) if request.shareable else 0
        known = request.tokens[:count]
        self.cache.release(request.take_blocks(), known, request.cache_salt)
        self._free_slots.append(request.slot)
        request.slot = NO_SLOT
