"""The device side of one engine step: pure functions, jitted, with donated state.

``forward`` runs the model over a mixed batch and gives one row of logits per request; ``sample``
draws the next tokens. They are two programs because their variants would multiply: every bucket
needs one forward program (seconds to compile) and every combination of sampling features one
sampling program (fractions of a second). Between them ``process_logits`` runs once per distinct
``logits_processor`` in the batch, and ``mask_logits`` if some row must follow a grammar;
``prompt_logprobs`` scores prompts that ask for it.

The state between steps is a table ``tokens (R + 1, L)``: for each request slot the token at each
position, as far as it went through or came from the device. A decode row reads its input there,
so a step can be dispatched before the host knows what the previous one drew, and so do the
penalties. Row R is scratch. ``enter_tokens`` and ``enter_rules`` write what an admitted request
brings along into its slot.

Given a ``mesh`` each device runs these programs on its part of the weights, of the cache and of the
logits; plans, tokens and what is drawn are whole on all of them (parallel/program.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jllm.engine.batch import (
    SHARED_FIELDS,
    Field,
    StepSpec,
    forward_fields,
    offsets,
    sample_fields,
)
from jllm.models import attention, vocab
from jllm.models.attention import Chunks, Rows, SharedTiles, cut_rows, locate_tokens
from jllm.models.logit_rules import NO_TOKEN, RuleRows, Rules, apply_rules, unpack_bits
from jllm.models.ops import serving_ops
from jllm.models.sampler import Sampled, SamplerSpec, SamplingRows, token_logprobs
from jllm.models.sampler import sample as draw
from jllm.models.transformer import Rope, head
from jllm.models.transformer import forward as run_model
from jllm.parallel.program import program
from jllm.parallel.sharding import CACHE, LOGITS, WHOLE, param_specs
from jllm.params import Layer, Params

Array = jax.Array
Cache = list[Array]

# What a logits_processor may set a logit to: -inf and NaN become the least of these, so that a
# row always has something to draw, and dividing by the least temperature stays finite.
LOGIT_LIMIT = 1e30
PROMPT_CHUNK = 256


def unpack(plan: Array, fields: tuple[Field, ...]) -> dict[str, Array]:
    """The fields of a packed plan; the inverse of ``batch.pack``."""
    values = {}
    for field, start in zip(fields, offsets(fields)[0], strict=True):
        part = lax.slice(plan, (start,), (start + math.prod(field.shape),))
        values[field.name] = lax.bitcast_convert_type(part.reshape(field.shape), field.dtype)
    return values


@program(
    takes=(param_specs, CACHE, WHOLE, WHOLE),
    gives=(CACHE, WHOLE, LOGITS, WHOLE),
    static=("spec",),
    donate=(1, 2),
)
def forward(
    params: Params,
    cache: Cache,
    tokens: Array,
    plan: Array,
    *,
    spec: StepSpec,
    axis: str | None = None,
) -> tuple[Cache, Array, Array, Array]:
    """One forward pass: writes the step's keys and values and returns logits.

    Args:
      params: the model.
      cache: per layer kv (N, 2, K, S, D); donated.
      tokens: (R + 1, L) int32, the token table; donated.
      plan: packed ``forward_fields(spec)``.
      spec: the static sizes.
      axis: the mesh axis that V, K and F are split over, if any; set by ``program``.

    Returns:
      The cache, the token table with the chunks' tokens entered, logits (B, V) float32 of the
      last token of each row, and the final hidden states (T, E). The latter are for
      ``prompt_logprobs``; they are there anyway, and a variant without them would be a second
      program for every bucket.
    """
    # Behind a barrier: else XLA wraps each layer's attention in a fusion that slices the plan.
    fields = lax.optimization_barrier(unpack(plan, forward_fields(spec)))
    return _forward(params, cache, tokens, fields, spec, axis)


def _forward(
    params: Params,
    cache: Cache,
    tokens: Array,
    fields: dict[str, Array],
    spec: StepSpec,
    axis: str | None,
) -> tuple[Cache, Array, Array, Array]:
    shared = SharedTiles(*(fields[name] for name in SHARED_FIELDS)) if spec.shared_tiles else None
    chunks = None
    if spec.num_tokens is not None:
        chunks = Chunks(fields["query_start"], fields["num_decode"])
    rows = Rows(fields["block_tables"], fields["context_lens"], chunks, shared)
    block_size = cache[0].shape[3]
    where = locate_tokens(rows, spec.num_tokens or spec.num_rows, block_size)

    entry = fields["slots"][where.row]
    ids = tokens[entry, where.position]
    if chunks is not None:
        ids = jnp.where(jnp.arange(len(ids)) < chunks.num_decode, ids, fields["tokens"])
        # Read before the table is written: else XLA writes into a copy of all of it.
        ids, tokens = lax.optimization_barrier((ids, tokens))
        real = where.slot >= block_size  # padding tokens are in the scratch block
        entry = jnp.where(real, entry, tokens.shape[0] - 1)
        tokens = tokens.at[entry, where.position].set(ids)

    config = params.config
    _, heads, wide, dim = params.layers[0].wqkv.shape  # (E, K, G + 2, D)
    queries = (len(ids), heads, wide - 2, dim)

    windows = {config.window(index) for index in range(config.num_layers)}
    cuts = {window: cut_rows(queries, cache[0].dtype, rows, window) for window in windows}

    def attend(
        window: int | None, layer: Layer, qkv: Array, rope: Rope, kv: Array
    ) -> tuple[Array, Array]:
        return attention.attend(
            qkv,
            layer.norms,
            rope,
            where.slot,
            kv,
            rows.block_tables,
            cuts[window],
            window=window,
            scale=config.head_dim**-0.5,
            eps=config.rms_norm_eps,
        )

    hidden, cache = run_model(params, ids, where.position, attend, cache, axis, serving_ops())
    last = hidden
    if chunks is not None:
        last = hidden[jnp.maximum(chunks.query_start[1:] - 1, 0)]
    return cache, tokens, head(params, last, axis), hidden


@program(takes=(CACHE, WHOLE), gives=CACHE)
def read_blocks(cache: Cache, blocks: Array) -> Cache:
    """Per layer the content (n, 2, K, S, D) of blocks (n,)."""
    return [kv[blocks] for kv in cache]


@program(takes=(CACHE, WHOLE, CACHE), gives=CACHE, donate=(0,))
def write_blocks(cache: Cache, blocks: Array, content: Cache) -> Cache:
    """The cache, in place, with ``content`` as ``read_blocks`` gave it in these blocks."""
    return [kv.at[blocks].set(new) for kv, new in zip(cache, content, strict=True)]


@program(takes=(WHOLE, WHOLE, LOGITS, LOGITS, WHOLE), gives=WHOLE, static=("spec",), donate=(0,))
def sample(
    tokens: Array,
    rules: Rules,
    logits: Array,
    raw: Array,
    plan: Array,
    *,
    spec: SamplerSpec,
    axis: str | None = None,
) -> tuple[Array, Sampled]:
    """Draws the next token of every row and enters it into the token table.

    Args:
      tokens: (R + 1, L) int32, the token table; donated.
      rules: one entry per slot.
      logits: (B, V) float32.
      raw: (B, V) float32, the same before any ``process_logits``.
      plan: packed ``sample_fields(B)``.
      spec: which features are on.
    """
    fields = unpack(plan, sample_fields(len(logits)))
    return _sample(tokens, rules, logits, raw, fields, spec, axis)


def _sample(
    tokens: Array,
    rules: Rules,
    logits: Array,
    raw: Array,
    fields: dict[str, Array],
    spec: SamplerSpec,
    axis: str | None,
) -> tuple[Array, Sampled]:
    slots = fields["slots"]
    if spec.rules:
        rows = RuleRows(*(fields[name] for name in RuleRows._fields))
        logits = apply_rules(logits, tokens, slots, rules, rows, axis)
    options = SamplingRows(*(fields[name] for name in SamplingRows._fields))
    sampled = draw(logits, raw, options, spec, axis)
    return tokens.at[slots, fields["positions"]].set(sampled.tokens, mode="drop"), sampled


@program(
    takes=(param_specs, CACHE, WHOLE, WHOLE, WHOLE, WHOLE),
    gives=(CACHE, WHOLE, WHOLE),
    static=("spec", "sampler", "repeats"),
    donate=(1, 2),
)
def decode(
    params: Params,
    cache: Cache,
    tokens: Array,
    rules: Rules,
    plan: Array,
    sample_plan: Array,
    *,
    spec: StepSpec,
    sampler: SamplerSpec,
    repeats: int,
    axis: str | None = None,
) -> tuple[Cache, Array, Array]:
    """``forward`` and ``sample`` of decode rows, ``repeats`` times in one program: each row's next
    tokens, one after the other, while the host waits. For models whose step is shorter than the
    host takes to dispatch one.

    Args:
      plan, sample_plan: of the first of the steps; the blocks for all of them are in its tables.
      sampler: without logprobs.

    Returns:
      The cache, the token table, and the tokens drawn (repeats, B).
    """
    fields = lax.optimization_barrier(unpack(plan, forward_fields(spec)))
    drawing = unpack(sample_plan, sample_fields(spec.num_rows))
    lens, positions = fields["context_lens"], drawing["positions"]

    def one(carry: tuple[Cache, Array], index: Array) -> tuple[tuple[Cache, Array], Array]:
        cache, tokens = carry
        now = fields | {"context_lens": jnp.where(lens > 0, lens + index, 0)}
        cache, tokens, logits, _ = _forward(params, cache, tokens, now, spec, axis)
        now = drawing | {"positions": positions + index}
        tokens, sampled = _sample(tokens, rules, logits, logits, now, sampler, axis)
        return (cache, tokens), sampled.tokens

    (cache, tokens), drawn = lax.scan(one, (cache, tokens), jnp.arange(repeats, dtype=jnp.int32))
    return cache, tokens, drawn


@program(takes=(WHOLE, LOGITS, WHOLE, WHOLE), gives=LOGITS, static=("processor", "vocab_size"))
def process_logits(
    tokens: Array,
    logits: Array,
    plan: Array,
    mask: Array,
    *,
    processor: Callable[[Array, Array], Array],
    vocab_size: int,
    axis: str | None = None,
) -> Array:
    """Logits (B, V) with those of the rows in ``mask`` (B,) bool changed by the user's function,
    which each device of a mesh runs on all of them.

    A program of its own, so that a distinct function is compiled once per number of rows and not
    once for each combination of sampling features.
    """
    fields = unpack(plan, sample_fields(len(logits)))
    known = jnp.arange(tokens.shape[-1]) < fields["positions"][:, None]
    history = jnp.where(known, tokens[fields["slots"]], NO_TOKEN)  # (B, L)
    whole = vocab.gather(logits, vocab_size, axis)
    changed = jax.vmap(processor)(whole, history).astype(jnp.float32)
    changed = jnp.where(jnp.isnan(changed), -LOGIT_LIMIT, changed)
    changed = jnp.clip(changed, -LOGIT_LIMIT, LOGIT_LIMIT)
    return jnp.where(mask[:, None], vocab.split(changed, logits.shape[-1], axis), logits)


@program(takes=(LOGITS, WHOLE), gives=LOGITS)
def mask_logits(logits: Array, masks: Array, *, axis: str | None = None) -> Array:
    """Logits (B, V), -inf where ``masks`` (B, V32) uint32 has no bit for the token, see ``Rules``.

    A program of its own, so that it is compiled once per number of rows.
    """
    width = logits.shape[-1]
    allowed = unpack_bits(masks, width, vocab.first_id(width, axis))
    return jnp.where(allowed, logits, -jnp.inf)


class PromptScores(NamedTuple):
    """``token_logprobs`` at the T tokens of a step, each of the token that follows it."""

    logprobs: Array  # (T,) float32
    top_ids: Array  # (T, n) int32
    top_logprobs: Array  # (T, n) float32


@program(takes=(param_specs, WHOLE, WHOLE), gives=WHOLE, static=("count",))
def prompt_logprobs(
    params: Params, hidden: Array, targets: Array, *, count: int, axis: str | None = None
) -> PromptScores:
    """Logprobs of prompt tokens, a chunk of positions at a time, so that memory does not grow
    with the prompt by a vocabulary per token.

    Args:
      params: the model.
      hidden: (T, E), from ``forward``.
      targets: (T,) int32, the token that follows each; any id where none is wanted.
      count: how many of the likeliest to report.
    """
    size, chunk = len(targets), min(PROMPT_CHUNK, len(targets))
    padding = -size % chunk
    hidden = jnp.pad(hidden, ((0, padding), (0, 0))).reshape(-1, chunk, hidden.shape[-1])
    targets = jnp.pad(targets, (0, padding)).reshape(-1, chunk)

    def score(chunk: tuple[Array, Array]) -> tuple[Array, Array, Array]:
        return token_logprobs(head(params, chunk[0], axis), chunk[1], count, axis)

    scores = lax.map(score, (hidden, targets))
    return PromptScores(*(x.reshape(size + padding, *x.shape[2:])[:size] for x in scores))


@program(takes=(WHOLE, WHOLE, WHOLE), gives=WHOLE, donate=(0,))
def enter_tokens(tokens: Array, slot: Array, ids: Array) -> Array:
    """The token table with ``ids`` (L,) as its row ``slot``: what a request already knows,
    for those whose options look back at tokens that do not go through the device again."""
    return tokens.at[slot].set(ids)


@program(takes=(WHOLE, WHOLE, WHOLE), gives=WHOLE, donate=(0,))
def enter_rules(rules: Rules, slot: Array, entry: Rules) -> Rules:
    """The rules table with a request's rules at ``slot``."""
    return Rules(*(table.at[slot].set(new) for table, new in zip(rules, entry, strict=True)))
