"""Which requests run in the next step.

Requests wait in one queue and run in one list. A step takes every running request that can
decode, then fills what is left of the token budget with prefill chunks, so a long prompt never
stalls the others: a decode waits for at most one chunk, ``max_num_batched_tokens`` long.

A request is admitted only when the pool has blocks for all tokens it knows, so prefill never
stops halfway for want of blocks; only decodes grow. When one finds no block, the request admitted
last gives up its own and waits again, to be recomputed. The one admitted first always runs, and
the whole pool can hold any admitted request, so at least one finishes.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from jllm.cache.block_pool import Blocks
from jllm.cache.prefix_cache import PrefixCache
from jllm.engine.request import NO_SLOT, Request


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

    @property
    def num_prefill_tokens(self) -> int:
        return sum(chunk.length for chunk in self.prefill)

    def __bool__(self) -> bool:
        return bool(self.decode or self.prefill)


class MustDrain(Exception):
    """A request must be preempted, which needs the results of all steps in flight first."""


class Scheduler:
    """First come, first served, with continuous batching and chunked prefill."""

    def __init__(
        self,
        cache: PrefixCache,
        *,
        block_size: int,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_prefill_seqs: int,
        max_prefill_tokens: int,
        table_width: int,
    ) -> None:
        self.cache = cache
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []  # in order of admission
        self.num_preemptions = 0
        self._block_size = block_size
        self._max_num_batched_tokens = max_num_batched_tokens
        self._max_prefill_seqs = max_prefill_seqs
        self._max_prefill_tokens = max_prefill_tokens
        self._free_slots = list(range(max_num_seqs))[::-1]
        # (R + 1, P): the blocks of the request in each slot, in the form a plan sends them. The
        # last row is all scratch. Entries past a request's blocks are stale and never read.
        self.block_tables = np.zeros((max_num_seqs + 1, table_width), np.int32)

    def add(self, request: Request) -> None:
        self.waiting.append(request)

    def schedule(self) -> Schedule:
        """Plans one step and takes the blocks it needs; empty when nothing can run.

        Raises:
          MustDrain: blocks ran out while steps are in flight; collect them and call again.
            Blocks taken so far stay with their requests.
        """
        step = Schedule()
        self._schedule_decodes(step)
        budget = self._max_num_batched_tokens - len(step.decode)
        budget = min(budget, self._max_prefill_tokens)
        for request in self.running:
            if budget > 0 and not request.decoding and not self._full(step):
                budget -= self._add_chunk(step, request, budget)
        while budget > 0 and self.waiting and not self._full(step):
            if not self._admit(self.waiting[0]):
                break
            budget -= self._add_chunk(step, self.waiting.popleft(), budget)
        return step

    def commit(self, step: Schedule) -> None:
        """Counts the step's tokens as computed: it was dispatched."""
        for request in step.decode:
            self._advance(request, 1, samples=True)
        for chunk in step.prefill:
            self._advance(chunk.request, chunk.length, chunk.samples)
            request = chunk.request
            self.cache.publish(request.tokens[: request.computed], request.blocks)

    def release(self, request: Request) -> None:
        """Takes a finished request out of the running, its blocks and slot with it."""
        assert request.in_flight == 0
        if request.slot == NO_SLOT:
            self.waiting.remove(request)
            return
        self.running.remove(request)
        self._vacate(request)

    def preempt(self, request: Request) -> None:
        """Sends a running request back to the head of the queue; its KV is recomputed later."""
        assert request.in_flight == 0 and request.pending == 0
        self.running.remove(request)
        self._vacate(request)
        request.computed = 0
        self.num_preemptions += 1
        self.waiting.appendleft(request)

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
        while request.computed >= len(request.blocks) * self._block_size:
            blocks = self.cache.allocate(1)
            if blocks is not None:
                self._give_blocks(request, blocks)
                break
            if any(other.in_flight for other in self.running):
                raise MustDrain
            victim = self.running[-1]
            self.preempt(victim)
            if victim is request:
                return False
        return True

    def _admit(self, request: Request) -> bool:
        """Gives a waiting request a slot and blocks for all it knows, if there are enough."""
        if not self._free_slots:
            return False
        tokens = request.tokens[: request.num_known]
        cached = self.cache.match(tokens[:0] if request.needs_full_prefill else tokens)
        needed = -(-request.num_known // self._block_size) - len(cached)
        fresh = self.cache.allocate(needed)
        if fresh is None:
            self.cache.release(cached)
            return False
        request.slot = self._free_slots.pop()
        self._give_blocks(request, np.concatenate([cached, fresh]))
        request.computed = len(cached) * self._block_size
        request.resident = request.num_known
        self.running.append(request)
        return True

    def _give_blocks(self, request: Request, blocks: Blocks) -> None:
        held = len(request.blocks)
        self.block_tables[request.slot, held : held + len(blocks)] = blocks
        request.blocks = np.concatenate([request.blocks, blocks])

    def _add_chunk(self, step: Schedule, request: Request, budget: int) -> int:
        length = min(request.remaining, budget)
        if length > 0 and not request.finished:
            step.prefill.append(Chunk(request, request.computed, length))
            return length
        return 0

    def _full(self, step: Schedule) -> bool:
        return len(step.prefill) >= self._max_prefill_seqs

    def _advance(self, request: Request, count: int, samples: bool) -> None:
        request.computed += count
        request.in_flight += 1
        request.pending += samples

    def _vacate(self, request: Request) -> None:
        """Gives back what a running request holds:

            blocks  [0, len(blocks))   one reference each, shared prefix and own alike
            slot                       its row of the token table

        Nothing in flight may touch them.
        """
        self.cache.release(request.take_blocks())
        self._free_slots.append(request.slot)
        request.slot = NO_SLOT
