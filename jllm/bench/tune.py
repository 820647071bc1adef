"""``python -m jllm.bench kernels --tune``: which launch of a kernel is fastest on this GPU.

Every candidate is compiled first, in threads, then timed by its kernels' own time, and the fastest
of each shape goes into ``kernels/configs/<gpu>.json``, where kernels/launches.py finds it.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import statistics
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

from jllm.bench.block_ops import projection
from jllm.bench.environment import environment
from jllm.bench.models import config_of
from jllm.bench.trace import kernel_seconds
from jllm.config import ModelConfig
from jllm.kernels import triton_call
from jllm.models.layers import rope_tables

ROTATE_BYTES = 160e6  # inputs of the ops of a call: more than L2
SHARED_BYTES = 220_000  # of a program, at most
DECODE_CONTEXTS, LONG_CONTEXT = (1024, 4096), 32768  # the latter where rows are few
# More rows are launched by rule: those of a server differ more in length than these do.
DECODE_ROWS = (1, 2, 4, 8, 16, 32, 64)
ROW_TILES = (16, 32, 64)
REPEATS = 5

Op = Callable[..., Any]


class Problem(NamedTuple):
    """One shape: its launches are compared on the same inputs, on each set of ``inputs``."""

    name: str  # as launches.py looks it up
    launches: Sequence[Any]
    op: Callable[..., Any]  # op(launch, *inputs): several ops in a row, on weights of their own
    inputs: Sequence[tuple[Any, ...]]
    state: list[Any] | None = None  # of one array that the op updates: op(launch, array, *inputs)


def main(options: argparse.Namespace) -> int:
    """Tunes for one model on the GPU that is here."""
    from jllm.kernels.launches import config_file

    if not triton_call.available():
        raise ValueError("--tune needs an NVIDIA GPU and jax-triton.")
    _, config = config_of(options)
    gpu = jax.local_devices()[0].device_kind
    path = config_file(gpu)
    record = json.loads(path.read_text()) if path.is_file() else {"launches": {}}
    record |= {
        "gpu": gpu,
        "environment": environment(options.arguments, options.commit, device=True),
    }
    for problem in tqdm(problems(config, options.seed), disable=options.quiet, leave=False):
        launch, us = best(problem)
        record["launches"][problem.name] = launch._asdict()
        tqdm.write(f"{problem.name:32} {us:8.2f} us  {launch}", file=sys.stderr)
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(record, indent=1, sort_keys=True) + "\n")
    print(path)
    return 0


def problems(config: ModelConfig, seed: int) -> list[Problem]:
    """Decode attention of several numbers of rows, and the products of few rows of a layer."""
    from jllm.kernels import matmul

    c = config
    key = jax.random.key(seed)
    found = [_decode(c, rows, key) for rows in DECODE_ROWS]
    wide = (c.num_heads + 2 * c.num_kv_heads) * c.head_dim
    shapes = [
        (c.hidden_size, wide),
        (c.num_heads * c.head_dim, c.hidden_size),
        (c.intermediate_size, c.hidden_size),
    ]
    for rows, (inputs, outputs) in itertools.product(ROW_TILES, sorted(set(shapes))):
        found.append(_product("matmul", matmul.matmul_parts, rows, (inputs, outputs), key))
    for rows in ROW_TILES:
        shape = (c.hidden_size, 2, c.intermediate_size)
        found.append(_product("gated", matmul.gated, rows, shape, key))
    return found


def best(problem: Problem) -> tuple[Any, float]:
    """The launch whose kernels are fastest, the geometric mean over the inputs, in us."""
    work = list(itertools.product(problem.launches, problem.inputs))

    def compiled(item: tuple[Any, tuple[Any, ...]]) -> Callable[[], Any]:
        launch, inputs = item
        op, state = functools.partial(problem.op, launch), problem.state
        if state is None:
            return functools.partial(jax.jit(op).lower(*inputs).compile(), *inputs)
        return updating(
            jax.jit(op, donate_argnums=0).lower(state[0], *inputs).compile(), state, inputs
        )

    with ThreadPoolExecutor() as pool:
        calls = list(pool.map(compiled, work))
    for call in calls:
        jax.block_until_ready(call())
    times: dict[Any, list[float]] = {}
    for (launch, _), seconds in zip(work, kernel_seconds(calls, REPEATS), strict=True):
        times.setdefault(launch, []).append(statistics.median(seconds))
    means = {launch: statistics.geometric_mean(found) for launch, found in times.items()}
    fastest = min(means, key=lambda launch: means[launch])
    return fastest, means[fastest] * 1e6


def updating(program: Op, state: list[Any], inputs: tuple[Any, ...]) -> Callable[[], Any]:
    """Calls of a program that takes ``state``'s array and gives it back, then its results."""

    def call() -> Any:
        state[0], results = program(state[0], *inputs)
        return results

    return call


def scattered_tables(
    lens: Sequence[int], block_size: int, num_blocks: int, rng: np.random.Generator
) -> jax.Array:
    """Block tables (B, P) of rows of these lengths, over blocks in random order."""
    counts = [-(-n // block_size) for n in lens]
    blocks = 1 + rng.permutation(num_blocks - 1)
    tables = np.zeros((len(counts), -(-max(counts) // 4) * 4), np.int32)
    for row, (end, count) in enumerate(zip(np.cumsum(counts), counts, strict=True)):
        tables[row, :count] = blocks[end - count : end]
    return jnp.asarray(tables)


def chained_decode(
    launch: Any,
    kv: jax.Array,
    qkv: jax.Array,
    rope: tuple[jax.Array, jax.Array],
    tables: list[jax.Array],
    lens: jax.Array,
) -> tuple[jax.Array, list[jax.Array]]:
    """Decode attention of qkv (P, B, K, G + 2, D) over several sets of tables, in place."""
    from jllm.kernels.decode import attend_rows, cut_decode

    _, rows, heads, wide, dim = qkv.shape
    cut = cut_decode((rows, heads, wide - 2, dim), kv.dtype, lens, None, launch)
    options = dict(window=None, scale=dim**-0.5, eps=1e-6)
    found = []
    for table in tables:
        out, kv = attend_rows(qkv, None, rope, lens - 1, kv, table, cut, **options)
        found.append(out)
    return kv, found


def _decode(config: ModelConfig, rows: int, key: jax.Array) -> Problem:
    from jllm.kernels.launches import FEW

    heads, dim, block_size = config.num_kv_heads, config.head_dim, 16
    group = config.num_heads // heads
    rng = np.random.default_rng(0)
    token_bytes = 2 * heads * dim * 2
    # Contexts a little different, as those of a server are.
    contexts = (*DECODE_CONTEXTS, LONG_CONTEXT) if rows <= 2 else DECODE_CONTEXTS
    lens = [[int(c * f) for f in rng.uniform(0.9, 1.1, rows)] for c in contexts]
    num_blocks = 1 + max(int(sum(max(lens)) // block_size), int(3e8 / token_bytes / block_size))
    num_blocks += rows
    shape = (num_blocks, 2, heads, block_size, dim)
    kv = jax.jit(jax.random.normal, static_argnums=(1, 2))(key, shape, jnp.bfloat16)
    parts = projection(rows, config.hidden_size, heads * (group + 2) * dim, jnp.bfloat16)
    qkv = jax.random.normal(key, parts.shape, parts.dtype)
    qkv = qkv.reshape(-1, rows, heads, group + 2, dim)
    inputs = []
    for found in lens:
        count = int(np.clip(ROTATE_BYTES // (sum(found) * token_bytes), 2, 12))
        tables = [scattered_tables(found, block_size, num_blocks, rng) for _ in range(count)]
        positions = jnp.asarray(found, jnp.int32) - 1
        inputs.append((qkv, rope_tables(config, positions), tables, positions + 1))
    tiles = ((16, 1, 3), (32, 1, 3), (32, 1, 5), (32, 2, 5), (64, 2, 3), (64, 4, 3))
    launches = [
        FEW._replace(context=context, num_warps=warps, num_stages=stages, programs=132 * n)
        for (context, warps, stages), n in itertools.product(
            tiles, (1, 2, 3, 4) if rows * heads <= 64 else (2, 8, 16)
        )
    ]
    name = f"decode {rows}x{heads}x{group}x{dim}"
    return Problem(name, launches, chained_decode, inputs, state=[kv])


def _product(kind: str, product: Op, rows: int, shape: tuple[int, ...], key: jax.Array) -> Problem:
    from jllm.kernels.launches import MatmulLaunch
    from jllm.kernels.norm import add_norm

    inputs, *_, outputs = shape
    gated = len(shape) == 3
    values = int(np.prod(shape))
    count = int(np.clip(ROTATE_BYTES // (values * 2), 2, 12))
    weights = [jax.random.normal(k, shape, jnp.bfloat16) for k in jax.random.split(key, count)]
    launches = []
    for columns, (depth, stages) in itertools.product((32, 64), ((64, 6), (128, 4))):
        shared = stages * depth * 2 * (columns * (2 if gated else 1) + rows)
        if shared > SHARED_BYTES:
            continue
        tiles = -(-outputs // columns)
        splits = (1,) if gated else (1, 2, 4, 8, 16)
        launches += [
            MatmulLaunch(columns, depth, split, num_warps=4, num_stages=stages)
            for split in splits
            if split == 1 or (tiles * split <= 600 and inputs >= 2 * split * depth)
        ]

    def op(launch: Any, x: jax.Array, weights: list[jax.Array]) -> list[Any]:
        found = [product(x, w, launch) for w in weights]
        if gated:
            return found
        # With the kernel that adds the parts up: it pays for their number.
        residual, norm = jnp.zeros((rows, outputs), x.dtype), jnp.ones(outputs, x.dtype)
        return [add_norm(residual, parts, norm, 1e-5) for parts in found]

    x = jax.random.normal(key, (rows, inputs), jnp.bfloat16)
    return Problem(f"{kind} {rows}x{inputs}x{outputs}", launches, op, [(x, weights)])
