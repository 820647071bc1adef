"""The device side of one engine step: two pure functions, jitted, with donated state.

``forward`` runs the model over a mixed batch and gives one row of logits per request; ``sample``
draws the next tokens. They are two programs because their variants would multiply: every bucket
needs one forward program (seconds to compile) and every combination of sampling features one
sampling program (fractions of a second).

The state between steps is a table ``tokens (R + 1, L)``: for each request slot the token at each
position, as far as it went through or came from the device. A decode row reads its input there,
so a step can be dispatched before the host knows what the previous one drew. Row R is scratch.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jllm.engine.batch import Field, StepSpec, forward_fields, sample_fields
from jllm.models.attention import Rows, locate_tokens, paged_attention, write_kv
from jllm.models.sampler import Sampled, SamplerSpec, SamplingRows
from jllm.models.sampler import sample as draw
from jllm.models.transformer import forward as run_model
from jllm.models.transformer import head
from jllm.params import Params

Array = jax.Array
Cache = list[Array]


def unpack(plan: Array, fields: tuple[Field, ...]) -> dict[str, Array]:
    """The fields of a packed plan; the inverse of ``batch.pack``."""
    values, offset = {}, 0
    for field in fields:
        size = math.prod(field.shape)
        part = lax.slice(plan, (offset,), (offset + size,)).reshape(field.shape)
        values[field.name] = lax.bitcast_convert_type(part, field.dtype)
        offset += size
    return values


@functools.partial(jax.jit, static_argnames=("spec",), donate_argnames=("cache", "tokens"))
def forward(
    params: Params, cache: Cache, tokens: Array, plan: Array, *, spec: StepSpec
) -> tuple[Cache, Array, Array]:
    """One forward pass: writes the step's keys and values and returns logits.

    Args:
      params: the model.
      cache: per layer kv (N, 2, K, S, D); donated.
      tokens: (R + 1, L) int32, the token table; donated.
      plan: packed ``forward_fields(spec)``.
      spec: the static sizes.

    Returns:
      The cache, the token table with the prefill tokens entered, and logits (B, V) float32 of
      the last token of each row.
    """
    fields = unpack(plan, forward_fields(spec))
    rows = Rows(fields["block_tables"], fields["context_lens"], fields["query_start"])
    block_size = cache[0].shape[3]
    where = locate_tokens(rows, spec.num_decode, spec.num_prefill, block_size)
    slots = fields["slots"]

    decode_ids = tokens[slots[: spec.num_decode], where.position[: spec.num_decode]]
    ids = jnp.concatenate([decode_ids, fields["prefill_tokens"]])
    if spec.num_prefill:
        prefill = slice(spec.num_decode, None)
        real = where.slot[prefill] >= block_size  # padding tokens are in the scratch block
        entry = jnp.where(real, slots[where.row[prefill]], tokens.shape[0] - 1)
        tokens = tokens.at[entry, where.position[prefill]].set(fields["prefill_tokens"])

    config = params.config

    def attend(index: int, q: Array, k: Array, v: Array, kv: Array) -> tuple[Array, Array]:
        kv = write_kv(kv, k, v, where.slot)
        out = paged_attention(
            q,
            kv,
            rows,
            num_decode=spec.num_decode,
            window=config.window(index),
            scale=config.head_dim**-0.5,
        )
        return out, kv

    hidden, cache = run_model(params, ids, where.position, attend, cache)
    last = jnp.arange(spec.num_decode)
    if spec.num_prefill:
        ends = spec.num_decode + rows.query_start[1:] - 1
        last = jnp.concatenate([last, jnp.maximum(ends, 0)])
    return cache, tokens, head(params, hidden[last])


@jax.jit
def read_blocks(cache: Cache, blocks: Array) -> Cache:
    """Per layer the content (n, 2, K, S, D) of blocks (n,)."""
    return [kv[blocks] for kv in cache]


@functools.partial(jax.jit, donate_argnames=("cache",))
def write_blocks(cache: Cache, blocks: Array, content: Cache) -> Cache:
    """The cache, in place, with ``content`` as ``read_blocks`` gave it in these blocks."""
    return [kv.at[blocks].set(new) for kv, new in zip(cache, content, strict=True)]


@functools.partial(jax.jit, static_argnames=("spec",), donate_argnames=("tokens",))
def sample(
    tokens: Array, logits: Array, plan: Array, *, spec: SamplerSpec
) -> tuple[Array, Sampled]:
    """Draws the next token of every row and enters it into the token table.

    Args:
      tokens: (R + 1, L) int32, the token table; donated.
      logits: (B, V) float32.
      plan: packed ``sample_fields(B)``.
      spec: which features are on.
    """
    fields: dict[str, Any] = unpack(plan, sample_fields(len(logits)))
    slots = fields.pop("slots")
    sampled = draw(logits, SamplingRows(**fields), spec)
    return tokens.at[slots, fields["positions"]].set(sampled.tokens, mode="drop"), sampled
