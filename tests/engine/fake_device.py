"""A device that runs schedules without a model and notices every wrong block.

What a KV block holds is the prefix that led to it: after a step writes position p of a request,
that place of its block holds the tuple of its tokens 0 to p. A row may run only if every earlier
position of it holds just the right prefix. The next token is a function of the prefix, so equal
prompts say equal things, as greedy requests do.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from jllm.engine.request import Request
from jllm.engine.scheduler import Schedule

Prefix = tuple[int, ...]
VOCAB = 3


def next_token(prefix: Prefix) -> int:
    return hash(prefix) % VOCAB


class FakeDevice:
    """Implements ``BlockCopier`` too."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.kv: dict[tuple[int, int], Prefix | None] = {}
        # Weights are numbered by the resets of the prefix cache. A request may read KV of the
        # weights it was admitted under and of newer ones, never of older.
        self.weights = 0
        self.written_by: dict[tuple[int, int], int] = {}
        self.admitted_under: dict[int, int] = {}  # by arrival
        self.tables: dict[int, dict[int, int]] = {}  # slot -> position -> token, as in step.py

    def run(
        self, step: Schedule, block_tables: np.ndarray
    ) -> list[tuple[Request, bool, int | None]]:
        """Runs the rows in the order of a real step: all writes first, then all reads."""
        rows: list[tuple[Request, int, int, bool]] = []
        for request in step.decode:
            rows.append((request, request.computed, 1, True))
        for chunk in step.prefill:
            table = self.tables.setdefault(chunk.request.slot, {})
            for position in range(chunk.start, chunk.start + chunk.length):
                assert position < chunk.request.num_known, "prefill of a token nobody knows"
                table[position] = int(chunk.request.tokens[position])
            rows.append((chunk.request, chunk.start, chunk.length, chunk.samples))
        written = set()
        for request, start, length, _ in rows:
            for position in range(start, start + length):
                place = self._place(request, block_tables, position)
                assert place not in written, "two rows of a step write one place"
                written.add(place)
                self.kv[place] = self._prefix(request, position)
                self.written_by[place] = self.weights
        results: list[tuple[Request, bool, int | None]] = []
        for request, start, length, samples in rows:
            for position in range(start + length):
                place = self._place(request, block_tables, position)
                assert self.kv.get(place) == self._prefix(request, position), (
                    f"request {request.arrival} reads stale KV at {position}, block {place[0]}"
                )
                assert self.written_by[place] >= self.admitted_under[request.arrival], (
                    f"request {request.arrival} reads KV of older weights at {position}"
                )
            token = None
            if samples:
                token = next_token(self._prefix(request, start + length - 1))
                self.tables[request.slot][start + length] = token
            results.append((request, samples, token))
        return results

    def read_blocks(self, blocks: np.ndarray) -> list[np.ndarray]:
        content = np.empty((len(blocks), self.block_size), object)
        for i, block in enumerate(blocks.tolist()):
            for offset in range(self.block_size):
                place = block, offset
                content[i, offset] = self.kv.get(place), self.written_by.get(place, 0)
        return [content]

    def write_blocks(self, blocks: np.ndarray, content: Sequence[np.ndarray], first: int) -> None:
        for i, block in enumerate(blocks.tolist()):
            for offset in range(self.block_size):
                place = block, offset
                self.kv[place], self.written_by[place] = content[0][first + i, offset]

    def _prefix(self, request: Request, position: int) -> Prefix:
        """The tokens up to a position: those the host knows, then those only the device has."""
        known = request.tokens[: min(position + 1, request.num_known)].tolist()
        table = self.tables[request.slot]
        return (*known, *(table[p] for p in range(len(known), position + 1)))

    def _place(self, request: Request, tables: np.ndarray, position: int) -> tuple[int, int]:
        block = int(tables[request.slot, position // self.block_size])
        assert block == request.blocks[position // self.block_size], "the table is out of date"
        assert block != 0, "a real token in the scratch block"
        return block, position % self.block_size
