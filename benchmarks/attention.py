"""Times paged attention, as it is launched, on a GPU.

    python benchmarks/attention.py --out attention.json

Time is that of the kernels (jllm/bench/trace.py), against a copy timed in the same run. Every op
reads keys and values of its own, together more than L2 holds, in blocks scattered over the cache.
Timed is all from the projection on: QK-norm would be, rotation, the write of new keys and values,
attention. How contexts are cut is worked out once per call, as a model does for all its layers.
"""

from __future__ import annotations

import argparse
import functools
import json
import re
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jllm.bench.block_ops import projection
from jllm.bench.environment import environment
from jllm.bench.trace import kernel_seconds
from jllm.bench.tune import scattered_tables, updating
from jllm.engine.batch import SHARED_FIELDS
from jllm.engine.shared_prefix import SharedGroup, fill_tiles
from jllm.kernels.launches import shared_tile_rows
from jllm.kernels.tiles import SharedTiles
from jllm.models.attention import Chunks, Rows, attend, cut_rows, locate_tokens

EMBED, HEADS, GROUP, DIM, BLOCK = 4096, 8, 4, 128, 16
NUM_BLOCKS = 33_000  # 2.2 GB of keys and values
TOKEN_BYTES = 2 * HEADS * DIM * 2
ROTATE_BYTES = 160e6
REPEATS = 7


class Case(NamedTuple):
    """Rows of these contexts; the last ``prefill`` of them process ``queries`` new tokens each,
    the others one. With ``sharing`` what they
    have in common is read once."""

    name: str
    lens: list[int]
    prefill: int = 0
    queries: int = 0
    shared: int = 0  # context tokens that all rows have in common
    sharing: bool = False

    @property
    def num_decode(self) -> int:
        return len(self.lens) - self.prefill

    @property
    def num_queries(self) -> int:
        return self.num_decode + self.prefill * self.queries

    @property
    def flops(self) -> float:
        seen = sum(self.lens[: self.num_decode])
        chunks = self.lens[self.num_decode :]
        seen += sum(self.queries * (2 * n - self.queries + 1) / 2 for n in chunks)
        return seen * 4.0 * HEADS * GROUP * DIM


def ragged(count: int, rng: np.random.Generator) -> list[int]:
    """Lengths log-uniform in 64..32768 that fit the cache together."""
    while True:
        lens = np.exp(rng.uniform(np.log(64), np.log(32768), count)).astype(int)
        if np.ceil(lens / BLOCK).sum() < NUM_BLOCKS - 1:
            found: list[int] = lens.tolist()
            return found


def cases(rng: np.random.Generator) -> list[Case]:
    sizes = [(64, 8192), (256, 1024), (64, 1024), (16, 4096), (16, 1024)]
    sizes += [(1, 32768), (1, 4096), (1, 1024)]
    found = [Case(f"decode {b} x {n}", [n] * b) for b, n in sizes]
    found.append(Case("decode 128 ragged", ragged(128, rng)))
    found += [Case(f"prefill {b} x {n}", [n] * b, b, n) for b, n in ((8, 8192), (16, 1024))]
    found.append(Case("prefill 1 x 1024", [1024], 1, 1024))
    for sharing in (False, True):
        name = f"decode 256 x (2048 shared + 128), {'read once' if sharing else 'read by each'}"
        found.append(Case(name, [2048 + 128] * 256, shared=2048, sharing=sharing))
    found.append(Case("decode 240 x 1024", [1024] * 240))
    found.append(Case("decode 240 x 1024 + prefill 1 x 1024", [1024] * 241, 1, 1024))
    return found


def call_of(
    case: Case, kv: list[jax.Array], rng: np.random.Generator
) -> tuple[Callable[[], Any], int]:
    """A compiled call, and how many ops it runs."""
    # At least as many as make the cut, which a model works out for all its layers, cheap.
    least = 2 if case.prefill else 12
    count = int(np.clip(ROTATE_BYTES // (sum(case.lens) * TOKEN_BYTES), least, 16))
    lens = jnp.asarray(case.lens, jnp.int32)
    own = [n - case.shared for n in case.lens]
    common = case.shared // BLOCK
    tables = []
    for _ in range(count):
        table = np.array(scattered_tables([case.shared, *own], BLOCK, NUM_BLOCKS, rng))
        width = max(-(-n // BLOCK) for n in own)
        same = np.repeat(table[:1, :common], len(own), axis=0)
        tables.append(jnp.asarray(np.concatenate([same, table[1:, :width]], axis=1)))
    shared = shared_tiles(len(own), common) if case.sharing else None
    num_queries, chunks = case.num_queries, None
    if case.prefill:
        starts = np.cumsum([0] + [1] * case.num_decode + [case.queries] * case.prefill)
        chunks = Chunks(jnp.asarray(starts, jnp.int32), jnp.asarray([case.num_decode], jnp.int32))
    parts = projection(num_queries, EMBED, HEADS * (GROUP + 2) * DIM, jnp.bfloat16)
    qkv = jax.random.normal(jax.random.key(0), parts.shape, parts.dtype)
    qkv = qkv.reshape(-1, num_queries, HEADS, GROUP + 2, DIM)
    angles = jax.random.uniform(jax.random.key(1), (num_queries, DIM // 2), maxval=6)

    def run(
        kv: jax.Array, qkv: jax.Array, angles: jax.Array, tables: list[jax.Array], lens: jax.Array
    ) -> tuple[jax.Array, list[jax.Array]]:
        rope = jnp.cos(angles), jnp.sin(angles)
        shape, found = (num_queries, HEADS, GROUP, DIM), []
        cuts = cut_rows(shape, kv.dtype, Rows(tables[0], lens, chunks, shared), None)
        options = dict(window=None, scale=DIM**-0.5, eps=1e-6)
        for table in tables:
            slots = locate_tokens(Rows(table, lens, chunks), num_queries, BLOCK).slot
            out, kv = attend(qkv, None, rope, slots, kv, table, cuts, **options)
            found.append(out)
        return kv, found

    inputs = (qkv, angles, tables, lens)
    compiled = jax.jit(run, donate_argnums=0).lower(kv[0], *inputs).compile()
    return updating(compiled, kv, inputs), count


def shared_tiles(rows: int, num_blocks: int) -> SharedTiles:
    """All rows as one group."""
    sizes = (rows // 2,) * 3 + (rows,)
    views = {n: np.zeros(s, np.int32) for n, s in zip(SHARED_FIELDS, sizes, strict=True)}
    fill_tiles(views, [SharedGroup(0, rows, num_blocks)], shared_tile_rows(GROUP), BLOCK)
    return SharedTiles(*(jnp.asarray(views[name]) for name in SHARED_FIELDS))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--cases", default="", metavar="REGEX", help="only those of such a name")
    parser.add_argument("--commit", help="of the record, where there is no git checkout")
    options = parser.parse_args()
    rng = np.random.default_rng(0)
    key = jax.random.key(0)
    kv = jax.jit(jax.random.normal, static_argnums=(1, 2))(
        key, (NUM_BLOCKS, 2, HEADS, BLOCK, DIM), jnp.bfloat16
    )
    copied = jax.random.bits(key, (512, 1024, 1024), jnp.uint32)
    copy = jax.jit(lambda x: x ^ jnp.uint32(1))
    found = [case for case in cases(rng) if re.search(options.cases, case.name)]
    state = [kv]
    calls = [call_of(case, state, rng) for case in found]
    calls.append((functools.partial(copy, copied), 1))
    for call, _ in calls:
        jax.block_until_ready(call())
    times = kernel_seconds([call for call, _ in calls], REPEATS)
    seconds = [statistics.median(t) / count for t, (_, count) in zip(times, calls, strict=True)]
    env = environment([], options.commit, device=True) | {"command": " ".join(sys.argv)}
    copy_s = seconds.pop()
    record: dict[str, Any] = {
        "environment": env,
        "copy_tb_s": 2 * copied.nbytes / copy_s / 1e12,
        "rows": {
            case.name: {
                "us": once * 1e6,
                "tb_s": sum(case.lens) * TOKEN_BYTES / once / 1e12,
                "tflop_s": case.flops / once / 1e12,
            }
            for case, once in zip(found, seconds, strict=True)
        },
    }
    print(f"copy {record['copy_tb_s']:.2f} TB/s")
    for name, row in record["rows"].items():
        print(
            f"{name:38} {row['us']:9.1f} us {row['tb_s']:6.2f} TB/s {row['tflop_s']:7.1f} TFLOP/s"
        )
    options.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
