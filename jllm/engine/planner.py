"""Turns a schedule into the packed plans of a step."""

from __future__ import annotations

import functools
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
from jllm.engine.scheduler import Chunk, Schedule
from jllm.engine.shared_prefix import (
    MOST_BLOCKS,
    SharedGroup,
    fill_tiles,
    neighbours,
    shared_groups,
)
from jllm.models.logit_rules import Rules
from jllm.models.sampler import GREEDY_TEMPERATURE, SamplerSpec
from jllm.sampling_params import MAX_LOGPROBS, LogitsProcessor

INT32_MAX = 2**31 - 1
LEAST_MIN_P = float(np.finfo(np.float32).tiny)  # below, the device may take it for 0
HOTTEST = 1e30  # float32 logits over this are all equal; over infinity a mask would become NaN


class Row(NamedTuple):
    """A row of a step's results."""

    row: int
    request: Request
    samples: bool  # whether its token is meant, or the prompt goes on in a later step


class Entry(NamedTuple):
    """What an admitted request writes into its slot before its first step."""

    slot: int
    tokens: Int32s | None  # (L,): all it knows, if its options need them and not all are run
    rules: Rules | None


class Processed(NamedTuple):
    """A ``logits_processor`` and the rows of a step that use it."""

    processor: LogitsProcessor
    mask: NDArray[np.bool_]  # (B,)


class ScoredChunk(NamedTuple):
    """Prompt tokens whose logprobs a step gives."""

    request: Request
    position: int  # of the first token scored, in the prompt
    offset: int  # of its score, among the step's tokens
    length: int


class PromptPlan(NamedTuple):
    """The ``prompt_logprobs`` of a step."""

    num_top: int  # likeliest alternatives to report
    targets: Int32s  # (T,): per token the one that follows it, or 0
    chunks: list[ScoredChunk]


class Plan(NamedTuple):
    """All that a step needs: two packed arrays, the static specs, whose rows they are, and the
    rarer parts."""

    spec: StepSpec
    forward: Int32s
    sampler: SamplerSpec
    sample: Int32s
    rows: list[Row]
    entries: list[Entry]
    processed: list[Processed]
    structured: list[Row]  # those whose token must follow a grammar
    prompt: PromptPlan | None
    repeats: int = 1


class Planner:
    """Keeps the sampling options of each slot in arrays, so that a step gathers its rows'."""

    def __init__(
        self,
        buckets: Buckets,
        max_num_seqs: int,
        max_model_len: int,
        *,
        block_size: int,
        tile_rows: int,
    ) -> None:
        self._buckets = buckets
        self._block_size = block_size
        self._tile_rows = tile_rows
        self._scratch = max_num_seqs
        self._max_model_len = max_model_len
        self._options = {
            field.name: np.zeros((max_num_seqs + 1, *field.shape[1:]), field.dtype)
            for field in sample_fields(max_num_seqs + 1)
            if field.name not in ("slots", "positions")
        }
        self._options["repetition_penalty"][:] = 1  # off, in the scratch row too
        # What each slot asks of the sampler: the flags of a SamplerSpec, a level of logprobs, and
        # whether it must follow a grammar.
        self._features = np.zeros((max_num_seqs + 1, 6), np.int32)
        self._owners = [-1] * max_num_seqs  # arrival of the request whose options a slot has
        self._filled = [0] * max_num_seqs  # leading tokens that its chunks brought to the device
        self._processors: dict[int, LogitsProcessor] = {}  # by slot

    def plan(self, schedule: Schedule, block_tables: NDArray[np.int32]) -> Plan:
        """Packs one step; ``block_tables`` is the scheduler's table by slot."""
        decode, prefill = schedule.decode, schedule.prefill
        groups: list[SharedGroup] = []
        if not prefill and schedule.repeats == 1:
            decode, groups = self._shared(decode, block_tables)
        if groups:
            spec = self._buckets.shared_spec(len(decode))
        elif prefill:
            spec = self._buckets.mixed_spec(len(decode) + schedule.num_prefill_tokens)
        else:
            spec = self._buckets.decode_spec(len(decode))
        forward, views = pack(forward_fields(spec))
        if groups:
            fill_tiles(views, groups, self._tile_rows, self._block_size)

        slots = np.full(spec.num_rows, self._scratch, np.int32)
        slots[: len(decode)] = [request.slot for request in decode]
        lens = np.zeros(spec.num_rows, np.int32)
        lens[: len(decode)] = [request.computed + 1 for request in decode]
        rows = [Row(index, request, True) for index, request in enumerate(decode)]
        entries: list[Entry] = []

        if prefill:
            _fill_chunks(views, len(decode), prefill)
        for row, chunk in enumerate(prefill, len(decode)):
            slots[row], lens[row] = chunk.request.slot, chunk.start + chunk.length
            rows.append(Row(row, chunk.request, chunk.samples))
            entry = self._enter(chunk)
            if entry is not None:
                entries.append(entry)
        views["slots"][:] = slots
        views["context_lens"][:] = lens
        np.take(block_tables, slots, axis=0, out=views["block_tables"])

        sample, views = pack(sample_fields(spec.num_rows))
        for name, table in self._options.items():
            np.take(table, slots, axis=0, out=views[name])
        views["positions"][:] = lens
        *features, structured = self._features[slots].max(axis=0).tolist()
        for index, _, samples in rows[len(decode) :]:
            if not samples:
                slots[index] = self._scratch
        views["slots"][:] = slots
        return Plan(
            spec,
            forward,
            sampler_spec(*features),
            sample,
            rows,
            entries,
            self._processed(slots),
            [row for row in rows if row.samples and row.request.matcher] if structured else [],
            _prompt_plan(len(decode), prefill, spec.num_tokens),
            schedule.repeats,
        )

    def _shared(
        self, decode: list[Request], block_tables: Int32s
    ) -> tuple[list[Request], list[SharedGroup]]:
        """The rows, those that share the start of their contexts together, and the groups of them
        that are worth reading once."""
        buckets = self._buckets.shared
        if not buckets or self._buckets.decode_spec(len(decode)).num_rows < buckets[0]:
            return decode, []
        slots = np.array([request.slot for request in decode])
        order = neighbours(block_tables[slots, 0])
        if order is None:
            return decode, []
        found = [decode[index] for index in order.tolist()]
        # The block that a step writes is its row's own.
        full = np.array([request.computed // self._block_size for request in found], np.int32)
        groups = shared_groups(block_tables[slots[order], : min(full.max(), MOST_BLOCKS)], full)
        return (found, groups) if groups else (decode, [])

    def _enter(self, chunk: Chunk) -> Entry | None:
        """Notes the options of a request that is new in its slot, and says what the device must
        be told before it runs this chunk. One that comes back to the slot it had before finds
        its options there, on the device too."""
        request, slot = chunk.request, chunk.request.slot
        rules, tokens = None, None
        if self._owners[slot] != request.arrival:
            self._owners[slot] = request.arrival
            self._filled[slot] = 0
            self._set_options(request)
            rules = request.rules
        # Tokens that are skipped, since their KV was found in the prefix cache or swapped in.
        if request.needs_history and chunk.start > self._filled[slot]:
            tokens = np.zeros(self._max_model_len, np.int32)
            tokens[: request.num_known] = request.tokens[: request.num_known]
        self._filled[slot] = chunk.start + chunk.length
        return None if tokens is None and rules is None else Entry(slot, tokens, rules)

    def _set_options(self, request: Request) -> None:
        p, slot = request.params, request.slot
        options = self._options
        greedy = p.temperature < GREEDY_TEMPERATURE
        options["temperature"][slot] = 0.0 if greedy else min(p.temperature, HOTTEST)
        options["top_k"][slot] = min(max(p.top_k, 0), INT32_MAX)
        # As float32 sees them: the device and the features below must agree on what is off.
        top_p = options["top_p"][slot] = np.float32(p.top_p)
        min_p = options["min_p"][slot] = np.float32(p.min_p if p.min_p >= LEAST_MIN_P else 0)
        seed = request.seed & (2**64 - 1)
        options["seeds"][slot] = (seed & 0xFFFFFFFF, seed >> 32)
        options["samples"][slot] = request.sample
        options["num_prompt"][slot] = request.num_prompt
        options["ruled"][slot] = ruled = request.rules is not None
        options["min_tokens"][slot] = p.min_tokens
        options["presence_penalty"][slot] = p.presence_penalty
        options["frequency_penalty"][slot] = p.frequency_penalty
        options["repetition_penalty"][slot] = p.repetition_penalty
        options["processed"][slot] = p.logprobs_mode == "processed"
        processed = p.logprobs is not None and p.logprobs_mode == "processed"
        filtered = not greedy and (p.top_k > 0 or top_p < 1 or min_p > 0)
        random = not greedy and not filtered
        level = LOGPROBS_LEVELS.index(
            None if p.logprobs is None else p.logprobs if p.logprobs < 1 else MAX_LOGPROBS
        )
        rules, structured = ruled or p.has_penalties, p.structured is not None
        self._features[slot] = (random, filtered, rules, processed, level, structured)
        self._processors.pop(slot, None)
        if p.logits_processor is not None:
            self._processors[slot] = p.logits_processor

    def _processed(self, slots: NDArray[np.int32]) -> list[Processed]:
        if not self._processors:
            return []
        masks: dict[LogitsProcessor, NDArray[np.bool_]] = {}
        for row, slot in enumerate(slots.tolist()):
            processor = self._processors.get(slot)
            if processor is not None:
                masks.setdefault(processor, np.zeros(len(slots), bool))[row] = True
        return [Processed(processor, mask) for processor, mask in masks.items()]


def _fill_chunks(views: dict[str, Int32s], num_decode: int, prefill: list[Chunk]) -> None:
    """Writes the chunks' tokens into a plan, and where each row's begin."""
    starts, at = views["query_start"], num_decode
    starts[:num_decode] = np.arange(num_decode)
    for row, (request, start, length) in enumerate(prefill, num_decode):
        starts[row] = at
        views["tokens"][at : at + length] = request.tokens[start : start + length]
        at += length
    starts[num_decode + len(prefill) :] = at
    views["num_decode"][:] = num_decode


def _prompt_plan(
    num_decode: int, prefill: list[Chunk], num_tokens: int | None
) -> PromptPlan | None:
    """Which prompt tokens this step's hidden states predict, for requests that want to know."""
    if not any(chunk.request.scores_prompt for chunk in prefill):
        return None
    assert num_tokens is not None
    targets = np.zeros(num_tokens, np.int32)
    chunks, offset, count = [], num_decode, 0
    for request, start, length in prefill:
        # The hidden state of position t gives token t + 1; the prompt's last gives no prompt token.
        end = min(start + length, request.num_prompt - 1)
        if request.scores_prompt and start < end:
            targets[offset : offset + end - start] = request.tokens[start + 1 : end + 1]
            chunks.append(ScoredChunk(request, start + 1, offset, end - start))
            count = max(count, request.params.prompt_logprobs or 0)
        offset += length
    return PromptPlan(MAX_LOGPROBS if count else 0, targets, chunks) if chunks else None


# In ascending order of what they report, as in the planner's features.
LOGPROBS_LEVELS = (None, 0, MAX_LOGPROBS, -1)

# The sampling programs that are compiled before serving, cheapest first. All combinations of
# features would be 80 for every number of rows; a batch takes the first that covers its rows',
# and a row never notices a feature that only others use.
_COMPILED = (
    *(
        SamplerSpec(random=random, filtered=filtered, logprobs=logprobs)
        for logprobs in (None, 0, MAX_LOGPROBS)
        for filtered in (False, True)
        for random in (False, True)
    ),
    # Logprobs of the drawn distribution at a temperature: what reinforcement learning asks for.
    SamplerSpec(random=True, processed=True, logprobs=0),
    *(
        SamplerSpec(random=draws, filtered=draws, rules=True, logprobs=logprobs)
        for logprobs in (None, MAX_LOGPROBS)
        for draws in (False, True)
    ),
    SamplerSpec(random=True, filtered=True, rules=True, processed=True, logprobs=MAX_LOGPROBS),
)
# All logprobs: compiled when first asked for.
_GENERAL = SamplerSpec(random=True, filtered=True, rules=True, processed=True, logprobs=-1)


# Those that decode steps are repeated with, see ``Request.repeatable``.
REPEATED_SAMPLERS = tuple(s for s in _COMPILED if s.logprobs is None and not s.rules)


def all_sampler_specs() -> list[SamplerSpec]:
    """Every spec that a plan can have, but for that of ``logprobs=-1``."""
    return list(_COMPILED)


@functools.cache
def sampler_spec(random: int, filtered: int, rules: int, processed: int, level: int) -> SamplerSpec:
    """The cheapest compiled spec that has these features."""
    logprobs = LOGPROBS_LEVELS[level]
    needed = SamplerSpec(bool(random), bool(filtered), bool(rules), bool(processed), logprobs)
    return next(spec for spec in (*_COMPILED, _GENERAL) if spec.covers(needed))
