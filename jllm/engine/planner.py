"""Turns a schedule into the packed plans of a step."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from jllm.engine.batch import (
    Buckets,
    Int32s,
    StepSpec,
    forward_fields,
    pack,
    sample_fields,
)
from jllm.engine.request import Request
from jllm.engine.scheduler import Schedule
from jllm.models.sampler import GREEDY_TEMPERATURE, SamplerSpec
from jllm.sampling_params import MAX_LOGPROBS


class Row(NamedTuple):
    """A row of a step's results."""

    row: int
    request: Request
    samples: bool  # whether its token is meant, or the prompt goes on in a later step


class Plan(NamedTuple):
    """All that a step needs: two packed arrays, the static specs, and whose rows they are."""

    spec: StepSpec
    forward: Int32s
    sampler: SamplerSpec
    sample: Int32s
    rows: list[Row]


class Planner:
    """Keeps the sampling options of each slot in arrays, so that a step gathers its rows'."""

    def __init__(self, buckets: Buckets, max_num_seqs: int) -> None:
        self._buckets = buckets
        self._scratch = max_num_seqs
        self._options = {
            field.name: np.zeros((max_num_seqs + 1, *field.shape[1:]), field.dtype)
            for field in sample_fields(max_num_seqs + 1)
            if field.name not in ("slots", "positions")
        }
        # What each slot asks of the sampler: bits for "random" and "filtered", and logprobs + 1.
        self._features = np.zeros((max_num_seqs + 1, 3), np.int32)

    def plan(self, schedule: Schedule, block_tables: NDArray[np.int32]) -> Plan:
        """Packs one step; ``block_tables`` is the scheduler's table by slot."""
        decode, prefill = schedule.decode, schedule.prefill
        spec = self._buckets.spec(len(decode), schedule.num_prefill_tokens)
        forward, views = pack(forward_fields(spec))

        slots = np.full(spec.num_rows, self._scratch, np.int32)
        slots[: len(decode)] = [request.slot for request in decode]
        lens = np.zeros(spec.num_rows, np.int32)
        lens[: len(decode)] = [request.computed + 1 for request in decode]
        rows = [Row(index, request, True) for index, request in enumerate(decode)]

        start = 0
        starts = views["query_start"]
        tokens = views["prefill_tokens"]
        for index, chunk in enumerate(prefill):
            row, request = spec.num_decode + index, chunk.request
            end = chunk.start + chunk.length
            tokens[start : start + chunk.length] = request.tokens[chunk.start : end]
            slots[row], lens[row] = request.slot, end
            start += chunk.length
            starts[index + 1] = start
            rows.append(Row(row, request, chunk.samples))
            self._set_options(request)
        starts[len(prefill) + 1 :] = start
        views["slots"][:] = slots
        views["context_lens"][:] = lens
        np.take(block_tables, slots, axis=0, out=views["block_tables"])

        sample, views = pack(sample_fields(spec.num_rows))
        for name, table in self._options.items():
            np.take(table, slots, axis=0, out=views[name])
        views["positions"][:] = lens
        sampler = self._sampler_spec(slots)
        for index, _, samples in rows[len(decode) :]:
            if not samples:
                slots[index] = self._scratch
        views["slots"][:] = slots
        return Plan(spec, forward, sampler, sample, rows)

    def _set_options(self, request: Request) -> None:
        """Enters a request's options; done with each chunk, so always after an admission."""
        p, slot = request.params, request.slot
        options = self._options
        greedy = p.temperature < GREEDY_TEMPERATURE
        options["temperature"][slot] = 0.0 if greedy else p.temperature
        options["top_k"][slot] = max(p.top_k, 0)
        options["top_p"][slot] = p.top_p
        options["min_p"][slot] = p.min_p
        seed = request.seed & (2**64 - 1)
        options["seeds"][slot] = (seed & 0xFFFFFFFF, seed >> 32)
        options["samples"][slot] = request.sample
        filtered = not greedy and (p.top_k > 0 or p.top_p < 1 or p.min_p > 0)
        logprobs = 0 if p.logprobs is None else p.logprobs + 1
        self._features[slot] = (not greedy and not filtered, filtered, logprobs)

    def _sampler_spec(self, slots: NDArray[np.int32]) -> SamplerSpec:
        random, filtered, logprobs = self._features[slots].max(axis=0)
        # 0 or the maximum: a program per requested number would be compiled in mid-service.
        count = None if logprobs == 0 else (0 if logprobs == 1 else MAX_LOGPROBS)
        return SamplerSpec(bool(random), bool(filtered), count)


def all_sampler_specs() -> list[SamplerSpec]:
    """Every spec that a plan can have."""
    return [
        SamplerSpec(random, filtered, logprobs)
        for random in (False, True)
        for filtered in (False, True)
        for logprobs in (None, 0, MAX_LOGPROBS)
    ]
