"""The ops of a step on a model's real shapes: their inputs, what must move, and what is right.

Ops are the functions that the model itself calls, whatever kernel runs behind them. References
are written out here in float32, so that they stay independent of it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jllm.config import ModelConfig
from jllm.models.attention import Rows, paged_attention, write_kv
from jllm.models.layers import apply_rope, matmul, rms_norm, rope_tables
from jllm.models.rng import gumbel_rows
from jllm.models.sampler import Sampled, SamplerSpec, SamplingRows, sample
from jllm.models.transformer import head
from jllm.params import Params
from jllm.roofline import attention_flops, matmul_shapes

Args = tuple[Any, ...]
Error = Callable[[Args, Any], float]

EXACT = lax.Precision.HIGHEST
CHECKED_ROWS = 4  # of an attention's rows: the reference is slow


@dataclass(frozen=True)
class Case:
    """One op at one size.

    Attributes:
      name: of its result row.
      kind: gemm, attention, kv write, norm and rope, or sampler: a colour in the report.
      op: called with the inputs.
      make: key -> inputs; the first is the one that later ops wait for.
      error: (inputs, output) -> relative error against float32, or share of wrong tokens.
      bytes_read, bytes_written: that must move, each input read once.
      flops: of its matrix products.
      per_step: how often a step runs it.
      step: the decode step it is part of, if it is.
      in_place: the first input is donated and updated.
    """

    name: str
    kind: str
    op: Callable[..., Any]
    make: Callable[[jax.Array], Args]
    error: Error
    bytes_read: float
    bytes_written: float
    flops: float = 0.0
    per_step: int = 1
    step: str | None = None
    in_place: bool = False


def relative_error(out: Any, reference: Any) -> float:
    """||out - reference|| / ||reference||, in float64; NaN if either has one."""
    a, b = np.asarray(out, np.float64), np.asarray(reference, np.float64)
    return float(np.linalg.norm(a - b) / max(np.linalg.norm(b), 1e-30))


def step_name(batch: int, context: int) -> str:
    return f"B{batch} ctx{context}"


def gemms(config: ModelConfig, dtype: Any, m: int, step: str | None) -> Iterator[Case]:
    """The model's matrix products with ``m`` tokens."""
    size = jnp.dtype(dtype).itemsize
    for shape in matmul_shapes(config):
        if shape.name == "head":
            continue

        def make(key: jax.Array, inner: int = shape.inner, outer: int = shape.outer) -> Args:
            a, b = jax.random.split(key)
            x = jax.random.normal(a, (m, inner), dtype)
            return x, jax.random.normal(b, (inner, outer), dtype) * jnp.asarray(0.02, dtype)

        def error(args: Args, out: Any) -> float:
            x, w = (array.astype(jnp.float32) for array in args)
            return relative_error(out, jnp.dot(x, w, precision=EXACT))

        yield Case(
            f"kernel_us_{shape.name}_M{m}",
            "gemm",
            matmul,
            make,
            error,
            (m * shape.inner + shape.inner * shape.outer) * size,
            m * shape.outer * size,
            2.0 * m * shape.inner * shape.outer,
            shape.per_step,
            step,
        )


def head_case(config: ModelConfig, dtype: Any, m: int, step: str | None) -> Case:
    """The head of ``m`` rows; its logits are float32."""
    size, e, v = jnp.dtype(dtype).itemsize, config.hidden_size, config.vocab_size

    def make(key: jax.Array) -> Args:
        a, b = jax.random.split(key)
        w = jax.random.normal(b, (v, e) if config.tie_embeddings else (e, v), dtype)
        return jax.random.normal(a, (m, e), dtype), w * jnp.asarray(0.02, dtype)

    def op(hidden: jax.Array, w: jax.Array) -> jax.Array:
        embed, lm_head = (w, None) if config.tie_embeddings else (hidden, w)
        return head(Params(embed, (), hidden[0], lm_head, config), hidden)

    def error(args: Args, out: Any) -> float:
        x, w = (array.astype(jnp.float32) for array in args)
        return relative_error(out, jnp.dot(x, w.T if config.tie_embeddings else w, precision=EXACT))

    moved = (m * e + e * v) * size
    flops = 2.0 * m * e * v
    return Case(f"kernel_us_head_M{m}", "gemm", op, make, error, moved, m * v * 4, flops, 1, step)


def norms(config: ModelConfig, dtype: Any, m: int, step: str | None) -> Iterator[Case]:
    """RMSNorm of ``m`` tokens, of their heads where the model does that, and the rotation."""
    size, eps = jnp.dtype(dtype).itemsize, config.rms_norm_eps
    heads = (m, config.num_heads + config.num_kv_heads, config.head_dim)

    def norm(x: jax.Array, weight: jax.Array) -> jax.Array:
        return rms_norm(x, weight, eps)

    def norm_error(args: Args, out: Any) -> float:
        x, weight = (np.asarray(array, np.float64) for array in args)
        return relative_error(out, x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * weight)

    def case(name: str, shape: tuple[int, ...], per_step: int) -> Case:
        def make(key: jax.Array) -> Args:
            a, b = jax.random.split(key)
            return jax.random.normal(a, shape, dtype), jax.random.normal(b, shape[-1:], dtype)

        moved = int(np.prod(shape)) * size
        full = f"kernel_us_{name}_M{m}"
        kind = "norm and rope"
        return Case(full, kind, norm, make, norm_error, moved, moved, 0.0, per_step, step)

    yield case("rms_norm", (m, config.hidden_size), 2 * config.num_layers + 1)
    if config.qk_norm:
        yield case("qk_norm", heads, config.num_layers)

    def rope_make(key: jax.Array) -> Args:
        a, b = jax.random.split(key)
        positions = jax.random.randint(a, (m,), 0, config.max_position_embeddings)
        return jax.random.normal(b, heads, dtype), *rope_tables(config, positions)

    def rope_error(args: Args, out: Any) -> float:
        x, cos, sin = (np.asarray(array, np.float64) for array in args)
        one, two = np.split(x, 2, axis=-1)
        cos, sin = cos[:, None], sin[:, None]
        turned = np.concatenate([one * cos - two * sin, two * cos + one * sin], -1)
        return relative_error(out, turned)

    moved = int(np.prod(heads)) * size
    yield Case(
        f"kernel_us_rope_M{m}",
        "norm and rope",
        apply_rope,
        rope_make,
        rope_error,
        moved,
        moved,
        per_step=config.num_layers,
        step=step,
    )


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
    """``batch`` decode rows of ``context`` tokens, and a prompt's first ``chunk`` tokens."""
    c, size = config, jnp.dtype(dtype).itemsize
    k_heads, group, dim = c.num_kv_heads, c.group_size, c.head_dim
    lengths = [context] * batch + ([chunk] if chunk else [])
    width = -(-max(lengths) // block_size)
    scale, window = dim**-0.5, c.window(0)

    def make(key: jax.Array) -> Args:
        a, b, d = jax.random.split(key, 3)
        blocks = len(lengths) * width
        q = jax.random.normal(a, (batch + chunk, k_heads, group, dim), dtype)
        kv = jax.random.normal(b, (blocks + 1, 2, k_heads, block_size, dim), dtype)
        tables = 1 + jax.random.permutation(d, blocks).reshape(len(lengths), width)
        starts = jnp.asarray([0, chunk] if chunk else [0], jnp.int32)
        rows = Rows(tables.astype(jnp.int32), jnp.asarray(lengths, jnp.int32), starts)
        return q, kv, rows

    def op(q: jax.Array, kv: jax.Array, rows: Rows) -> jax.Array:
        return paged_attention(q, kv, rows, num_decode=batch, window=window, scale=scale)

    def error(args: Args, out: Any) -> float:
        q, kv, rows = args
        got, want = [], []
        for row in [*range(min(batch, CHECKED_ROWS)), *([batch] if chunk else [])]:
            at = slice(row, row + 1) if row < batch else slice(batch, batch + chunk)
            length = lengths[row]
            last = min(chunk, 64) if row == batch else 1  # of a chunk: its last queries
            keys = kv[rows.block_tables[row]].astype(jnp.float32)  # (P, 2, K, S, D)
            keys = jnp.moveaxis(keys, 3, 1).reshape(-1, 2, k_heads, dim)[:length]
            queries = q[at][-last:].astype(jnp.float32)
            want.append(np.asarray(_attend(queries, keys[:, 0], keys[:, 1], window, scale)))
            got.append(np.asarray(out[at][-last:], np.float32))
        return relative_error(np.concatenate(got), np.concatenate(want))

    seen = [min(n, window or n) for n in lengths]
    moved = sum(seen) * 2 * k_heads * dim * size
    queries = (batch + chunk) * c.num_heads * dim * size
    one = attention_flops(c, 1) / c.num_layers  # a query and a key, one layer
    flops = one * (sum(seen[:batch]) + chunk * (chunk + 1) / 2)
    parts = ([f"B{batch}_ctx{context}"] if batch else []) + ([f"T{chunk}"] if chunk else [])
    which = "mixed" if batch and chunk else "decode" if batch else "prefill"
    name = f"kernel_us_attention_{which}_{'_'.join(parts)}"
    return Case(
        name, "attention", op, make, error, moved + queries, queries, flops, c.num_layers, step
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


def kv_write(
    config: ModelConfig, dtype: Any, m: int, step: str | None, block_size: int = 16
) -> Case:
    """Writes the keys and values of ``m`` tokens into scattered slots of a cache."""
    size, k_heads, dim = jnp.dtype(dtype).itemsize, config.num_kv_heads, config.head_dim
    blocks = max(64, 2 * m // block_size)

    def make(key: jax.Array) -> Args:
        a, b, d, e = jax.random.split(key, 4)
        kv = jax.random.normal(a, (blocks + 1, 2, k_heads, block_size, dim), dtype)
        k = jax.random.normal(b, (m, k_heads, dim), dtype)
        v = jax.random.normal(d, (m, k_heads, dim), dtype)
        slots = block_size + jax.random.permutation(e, blocks * block_size)[:m]
        return kv, k, v, slots.astype(jnp.int32)

    def error(args: Args, out: Any) -> float:
        kv, k, v, slots = (np.asarray(array, np.float32) for array in args)
        at = slots.astype(np.int64)
        expected = kv.copy()
        for index in range(m):
            block, offset = divmod(int(at[index]), block_size)
            expected[block, 0, :, offset], expected[block, 1, :, offset] = k[index], v[index]
        return relative_error(np.asarray(out, np.float32), expected)

    moved = 2 * m * k_heads * dim * size
    return Case(
        f"kernel_us_write_kv_T{m}",
        "kv write",
        write_kv,
        make,
        error,
        moved,
        moved,
        per_step=config.num_layers,
        step=step,
        in_place=True,
    )


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
        yield kv_write(config, dtype, batch, step, block_size)
        yield from norms(config, dtype, batch, step)
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
        yield kv_write(config, dtype, chunk, None, block_size)
        yield from norms(config, dtype, chunk, None)
        yield from gemms(config, dtype, chunk, None)
