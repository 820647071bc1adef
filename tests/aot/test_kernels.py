"""Every kernel lowers and compiles for an H200, in every dtype and every head size."""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jllm.kernels import triton_call
from jllm.kernels.decode import attend_rows, cut_decode
from jllm.kernels.prefill import attend_chunks, cut_prefill
from jllm.kernels.tiles import SharedTiles
from jllm.models.sampler import SamplerSpec, sample
from tests.aot.compiler import compile_for_h200
from tests.kernels.sampling_problems import mixed_rows

pytestmark = pytest.mark.aot

SIZES = [(dim, t) for dim in (64, 80, 96, 128, 256) for t in ("bfloat16", "float16", "float32")]
# For options of a kernel: other dtypes differ from bfloat16 in what fits, so in the largest size,
# and in reading one that is no power of two.
FEWER = [(dim, dtype) for dim, dtype in SIZES if dtype == "bfloat16" or dim in (80, 256)]


def spec(*shape: int, dtype: str = "int32") -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))


@pytest.mark.parametrize(
    ("window", "parts", "normed", "shares", "dim", "dtype"),
    [
        *((None, 4, False, False, *size) for size in SIZES),
        *((None, 1, True, True, *size) for size in FEWER),
        (100, 1, True, False, 128, "bfloat16"),
        (100, 1, True, False, 80, "float32"),
    ],
)
def test_decode(
    window: int | None, parts: int, normed: bool, shares: bool, dim: int, dtype: str
) -> None:
    """The cache is written in place."""
    q, kv, tables, lens = inputs(64, dim, dtype)
    rows, heads, group, _ = q.shape
    qkv = spec(parts, rows, heads, group + 2, dim, dtype="float32" if parts > 1 else dtype)
    norms = (spec(dim, dtype=dtype),) * 2 if normed else None
    angles = spec(rows, dim // 2, dtype="float32")

    shared = SharedTiles(spec(32), spec(32), spec(32), spec(64)) if shares else None

    def op(qkv: Any, norms: Any, rope: Any, kv: Any, tables: Any, lens: Any, shared: Any) -> Any:
        cut = cut_decode(q.shape, kv.dtype, lens, window, shared_tiles=shared)
        options = dict(window=window, scale=dim**-0.5, eps=1e-6)
        return attend_rows(qkv, norms, rope, lens, kv, tables, cut, **options)

    compiled = compile_for_h200(
        jax.jit(op, donate_argnums=3), qkv, norms, (angles, angles), kv, tables, lens, shared
    )
    cache_bytes = math.prod(kv.shape) * kv.dtype.itemsize
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes == cache_bytes
    assert memory.temp_size_in_bytes < cache_bytes


@pytest.mark.parametrize(
    ("tokens", "dim", "dtype"),
    [*((32, *size) for size in SIZES), *((4096, *size) for size in FEWER)],
)
def test_prefill(tokens: int, dim: int, dtype: str) -> None:
    """Few tokens are cut into parts, which a kernel merges."""
    q, kv, tables, lens = inputs(4, dim, dtype)
    q = spec(tokens, *q.shape[1:], dtype=dtype)

    def op(q: Any, kv: Any, tables: Any, starts: Any, lens: Any, out: Any) -> Any:
        cut = cut_prefill(q.shape, q.dtype, starts, lens, None)
        return attend_chunks(q, kv, tables, cut, out, window=None, scale=dim**-0.5)

    op = jax.jit(op, donate_argnums=5)
    memory = compile_for_h200(op, q, kv, tables, spec(5), lens, q).memory_analysis()
    assert memory.alias_size_in_bytes == math.prod(q.shape) * q.dtype.itemsize


@pytest.mark.parametrize("vocab", [128_256, 50_257])
@pytest.mark.parametrize(
    "sampler",
    [
        SamplerSpec(),
        SamplerSpec(random=True, logprobs=0),
        SamplerSpec(random=True, filtered=True, processed=True, logprobs=0),
    ],
    ids=["greedy", "random", "filtered"],
)
def test_sampler(sampler: SamplerSpec, vocab: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_call, "available", lambda: True)
    logits = spec(256, vocab, dtype="float32")
    op = jax.jit(functools.partial(sample, spec=sampler))
    text = compile_for_h200(op, logits, logits, mixed_rows(256)).as_text()
    assert "triton_kernel_call" in text
    # A sort would take milliseconds, and a condition would make the host wait for its outcome.
    for op_name in ("sort", "top-k", "conditional", "while"):
        assert f" {op_name}(" not in text


def inputs(rows: int, dim: int, dtype: str) -> tuple[jax.ShapeDtypeStruct, ...]:
    heads, group, block = 8, 4, 16
    return (
        spec(rows, heads, group, dim, dtype=dtype),
        spec(1000, 2, heads, block, dim, dtype=dtype),
        spec(rows, 64),
        spec(rows),
    )
