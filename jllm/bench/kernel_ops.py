"""The ops of a step on a model's real shapes: their inputs, what must move, and what is right.

Ops are the functions that the model itself calls, whatever kernel runs behind them. References
are written out here in float32, so that they stay independent of it.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jllm.bench.block_ops import enter_case, gemms, head_case, norm_case, projection
from jllm.bench.case import EXACT, Args, Case, relative_error
from jllm.config import ModelConfig
from jllm.models.attention import Chunks, Rows, attend, cut_rows, locate_tokens, rotated
from jllm.models.layers import rope_tables, total
from jllm.models.rng import gumbel_rows
from jllm.models.sampler import Sampled, SamplerSpec, SamplingRows, sample
from jllm.roofline import attention_flops

CHECKED_ROWS = 4  # of an attention's rows: the reference is slow


def step_name(batch: int, context: int) -> str:
    return f"B{batch} ctx{context}"


def attention(
    config: ModelConfig,
    dtype: Any,
    *,
    batch: int = 0,
    context: int = 0,
    chunk: int = 0,
    block_size: int = 16,
    step: str | None = None,
) -> Case:
    """``batch`` decode rows of ``context`` tokens, and a prompt's first ``chunk`` tokens: from the
    projection to what attention gives, the new keys and values written on the way."""
    c, size = config, jnp.dtype(dtype).itemsize
    k_heads, group, dim, eps = c.num_kv_heads, c.group_size, c.head_dim, c.rms_norm_eps
    lengths = [context] * batch + ([chunk] if chunk else [])
    width, tokens = -(-max(lengths) // block_size), batch + chunk
    scale, window = dim**-0.5, c.window(0)
    parts = projection(tokens, c.hidden_size, k_heads * (group + 2) * dim, dtype)

    def make(key: jax.Array) -> Args:
        a, b, d, e = jax.random.split(key, 4)
        blocks = len(lengths) * width
        kv = jax.random.normal(a, (blocks + 1, 2, k_heads, block_size, dim), dtype)
        out = jnp.zeros((tokens, k_heads, group, dim), dtype)
        qkv = jax.random.normal(b, parts.shape, parts.dtype)
        qkv = qkv.reshape(-1, tokens, k_heads, group + 2, dim)
        norms = jax.random.normal(e, (2, dim), dtype) if c.qk_norm else None
        tables = 1 + jax.random.permutation(d, blocks).reshape(len(lengths), width)
        chunks = None
        if chunk:
            starts = jnp.asarray([*range(batch + 1), tokens], jnp.int32)
            chunks = Chunks(starts, jnp.asarray([batch], jnp.int32))
        rows = Rows(tables.astype(jnp.int32), jnp.asarray(lengths, jnp.int32), chunks)
        return (kv, out), qkv, None if norms is None else (norms[0], norms[1]), rows

    def op(state: Any, qkv: jax.Array, norms: Any, rows: Rows) -> Any:
        where = locate_tokens(rows, tokens, block_size)
        cuts = cut_rows((tokens, k_heads, group, dim), dtype, rows, window)
        given = (qkv, norms, rope_tables(c, where.position), where.slot, state[0])
        options = dict(window=window, scale=scale, eps=eps)
        out, kv = attend(*given, rows.block_tables, cuts, **options)
        # Bound together: of ops in a row XLA would leave out all results but the last.
        return lax.optimization_barrier((kv, out))

    def error(args: Args, out: Any) -> float:
        _, qkv, norms, rows = args
        where = locate_tokens(rows, tokens, block_size)
        q, _, _ = rotated(total(qkv, dtype)[None], norms, rope_tables(c, where.position), eps)
        got, want = [], []
        for row in [*range(min(batch, CHECKED_ROWS)), *([batch] if chunk else [])]:
            at = slice(row, row + 1) if row < batch else slice(batch, batch + chunk)
            length = lengths[row]
            last = min(chunk, 64) if row == batch else 1  # of a chunk: its last queries
            keys = out[0][rows.block_tables[row]].astype(jnp.float32)  # (P, 2, K, S, D)
            keys = jnp.moveaxis(keys, 3, 1).reshape(-1, 2, k_heads, dim)[:length]
            queries = q[at][-last:].astype(jnp.float32)
            want.append(np.asarray(_attend(queries, keys[:, 0], keys[:, 1], window, scale)))
            got.append(np.asarray(out[1][at][-last:], np.float32))
        return relative_error(np.concatenate(got), np.concatenate(want))

    seen = [min(n, window or n) for n in lengths]
    moved = sum(seen) * 2 * k_heads * dim * size + math.prod(parts.shape) * parts.dtype.itemsize
    written = tokens * (c.num_heads + 2 * k_heads) * dim * size
    one = attention_flops(c, 1) / c.num_layers  # a query and a key, one layer
    flops = one * (sum(seen[:batch]) + chunk * (chunk + 1) / 2)
    sizes = ([f"B{batch}_ctx{context}"] if batch else []) + ([f"T{chunk}"] if chunk else [])
    which = "mixed" if batch and chunk else "decode" if batch else "prefill"
    name = f"kernel_us_attention_{which}_{'_'.join(sizes)}"
    return Case(
        name, "attention", op, make, error, moved, written, flops, c.num_layers, step, in_place=True
    )


@functools.partial(jax.jit, static_argnums=(3, 4))
def _attend(
    q: jax.Array, k: jax.Array, v: jax.Array, window: int | None, scale: float
) -> jax.Array:
    """The last len(q) queries (T, K, G, D) of a sequence over its keys and values (C, K, D)."""
    at = jnp.arange(len(k))
    mine = at[-len(q) :, None]
    seen = at <= mine
    if window is not None:
        seen &= at > mine - window
    scores = jnp.einsum("tkgd,ckd->kgtc", q, k, precision=EXACT) * scale
    weights = jax.nn.softmax(jnp.where(seen, scores, -jnp.inf), axis=-1)
    return jnp.einsum("kgtc,ckd->tkgd", weights, v, precision=EXACT)


SAMPLERS = {
    "greedy": SamplerSpec(),
    "random": SamplerSpec(random=True),
    "random_logprobs": SamplerSpec(random=True, logprobs=0),
    "topk50_topp095": SamplerSpec(filtered=True),
    "topk50_topp095_logprobs": SamplerSpec(filtered=True, logprobs=0),
}


def sampler(config: ModelConfig, variant: str, batch: int, step: str | None) -> Case:
    """Draws ``batch`` tokens; only the greedy one is counted in a step."""
    spec, vocab = SAMPLERS[variant], config.vocab_size

    def make(key: jax.Array) -> Args:
        a, b = jax.random.split(key)
        logits = jax.random.normal(a, (batch, vocab)) * 3
        filtered = spec.filtered

        def full(value: float, dtype: Any = jnp.float32) -> jax.Array:
            return jnp.full(batch, value, dtype)

        rows = SamplingRows(
            temperature=full(1.0 if spec.random or filtered else 0.0),
            top_k=full(50 if filtered else 0, jnp.int32),
            top_p=full(0.95 if filtered else 1.0),
            min_p=full(0.0),
            seeds=jax.random.bits(b, (batch, 2), jnp.uint32),
            samples=full(0, jnp.int32),
            positions=jnp.arange(batch, dtype=jnp.int32),
            processed=full(0, jnp.int32),
        )
        return logits, rows

    def op(logits: jax.Array, rows: SamplingRows) -> Sampled:
        return sample(logits, logits, rows, spec)

    def error(args: Args, out: Any) -> float:
        logits, rows = args
        tokens, values = np.asarray(out.tokens), np.asarray(logits, np.float64)
        if spec.filtered:
            values = np.stack([_kept(row) for row in values])
        if spec.random or spec.filtered:
            noise = gumbel_rows(rows.seeds, rows.samples, rows.positions, vocab)
            values = values + np.asarray(noise, np.float64)
        wrong = float(np.mean(tokens != values.argmax(-1)))
        if spec.logprobs is None:
            return wrong
        raw = np.asarray(logits, np.float64)
        chosen = raw[np.arange(batch), tokens] - np.logaddexp.reduce(raw, axis=-1)
        return max(wrong, relative_error(out.logprobs, chosen))

    name = f"kernel_us_sample_{variant}_B{batch}"
    in_step = step if variant == "greedy" else None
    return Case(name, "sampler", op, make, error, batch * vocab * 4, batch * 4, step=in_step)


def _kept(values: np.ndarray) -> np.ndarray:
    """One row (V,), -inf for all but what top-k 50 and then top-p 0.95 leave."""
    order = np.argsort(-values, kind="stable")[:50]
    weights = np.exp(values[order] - values[order[0]])
    before = np.cumsum(weights) - weights
    order = order[before < 0.95 * weights.sum()]
    kept = np.full_like(values, -np.inf)
    kept[order] = values[order]
    return kept


def all_cases(
    config: ModelConfig,
    dtype: Any,
    *,
    batches: tuple[int, ...],
    contexts: tuple[int, ...],
    chunks: tuple[int, ...],
    block_size: int = 16,
) -> Iterator[Case]:
    """Every op: of a decode step at each batch, of a prefill at each chunk, and of both at once.

    The first context is that of the steps that the report draws.
    """
    for batch in batches:
        step = step_name(batch, contexts[0])
        for context in contexts:
            yield attention(
                config,
                dtype,
                batch=batch,
                context=context,
                block_size=block_size,
                step=step if context == contexts[0] else None,
            )
        yield enter_case(config, dtype, batch, step, block_size)
        yield norm_case(config, dtype, batch, step)
        yield from gemms(config, dtype, batch, step)
        yield head_case(config, dtype, batch, step)
        for variant in SAMPLERS:
            yield sampler(config, variant, batch, step)
    for chunk in chunks:
        yield attention(config, dtype, chunk=chunk, block_size=block_size)
        yield attention(
            config,
            dtype,
            batch=batches[-1],
            context=contexts[0],
            chunk=chunk,
            block_size=block_size,
        )
        yield enter_case(config, dtype, chunk, None, block_size)
        yield norm_case(config, dtype, chunk, None)
        yield from gemms(config, dtype, chunk, None)
