"""How kernels are launched: by rule, or as measured on this very GPU for this very shape.

``configs/<gpu>.json`` holds what ``python -m jllm.bench kernels --tune`` measured; a shape or a GPU
that is not in it is launched by the rules here, which come from an H200. Nothing is tuned while an
engine runs: a launch never depends on the load of the moment.
"""

from __future__ import annotations

import functools
import json
import re
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

CONFIGS = Path(__file__).parent / "configs"

MAX_ROWS = 64  # of a product; beyond, XLA's keep the tensor cores busier
LOG2_E = 1.4426950408889634  # kernels take powers of two
FILLED = 130  # programs that fill a GPU, one for each of its processors


class AttentionLaunch(NamedTuple):
    """How an attention kernel is launched.

    Attributes:
      rows: of a tile's matrix products, Q * G of them used.
      context: context tokens per iteration.
      num_warps, num_stages: of Triton.
      programs: to fill the GPU, all KV heads together; contexts are cut into parts up to there.
      least: iterations of a part, but for short contexts.
    """

    rows: int
    context: int
    num_warps: int
    num_stages: int
    programs: int
    least: int = 1


class MatmulLaunch(NamedTuple):
    """How a product of few rows is launched.

    Attributes:
      columns: outputs of a program.
      depth: inputs of an iteration.
      split: parts that the inputs are cut into.
      num_warps, num_stages: of Triton.
    """

    columns: int
    depth: int
    split: int
    num_warps: int
    num_stages: int


PREFILL = AttentionLaunch(
    rows=128, context=64, num_warps=4, num_stages=3, programs=132 * 2, least=4
)
# Rows that share a prefix: a group may be small, so the tile is; its context is cut until tiles of
# a few groups fill the GPU.
SHARED = AttentionLaunch(rows=64, context=64, num_warps=4, num_stages=3, programs=132 * 4, least=2)
# float32 is multiplied outside the tensor cores, in code that grows with the tile.
FLOAT32 = AttentionLaunch(rows=16, context=16, num_warps=4, num_stages=2, programs=132 * 4)
# Decode waits for memory: one warp a program, many programs, each with loads under way. Few rows
# are cut up to what runs at once. Of many rows more parts than that: the last to finish are short.
FEW = AttentionLaunch(rows=16, context=32, num_warps=1, num_stages=5, programs=132 * 2)
MANY = FEW._replace(programs=132 * 16)


def decode_launch(shape: tuple[int, ...], dtype: Any) -> AttentionLaunch:
    """Of attention for q (B, K, G, D)."""
    if dtype == jnp.float32:
        return FLOAT32
    rows, heads, group, dim = shape
    measured = _measured().get(f"decode {rows}x{heads}x{group}x{dim}")
    if measured:
        return AttentionLaunch(**measured)
    return FEW if rows * heads < 1024 else MANY


def prefill_launch(dtype: Any) -> AttentionLaunch:
    """Of attention for chunks of prompts."""
    return FLOAT32 if dtype == jnp.float32 else PREFILL


def shared_launch(dtype: Any) -> AttentionLaunch:
    """Of attention to a prefix that rows share."""
    return SHARED._replace(context=16, num_stages=2) if dtype == jnp.float32 else SHARED


def shared_tile_rows(group: int) -> int:
    """Rows of a tile that shares a prefix, each with ``group`` queries for a KV head."""
    return max(1, SHARED.rows // group)


def matmul_launch(rows: int, inputs: int, outputs: int) -> MatmulLaunch:
    """Of ``x (T, I) @ w (I, O)``: as many parts as fill the GPU."""
    measured = _measured().get(f"matmul {row_tile(rows)}x{inputs}x{outputs}")
    if measured:
        return MatmulLaunch(**measured)
    columns = 64 if 8 * outputs >= 64 * FILLED else 32
    depth, split = 64, 1
    while split * -(-outputs // columns) < FILLED and inputs >= 4 * split * depth:
        split *= 2
    return MatmulLaunch(columns, depth, split, num_warps=4, num_stages=6)


def gated_launch(rows: int, inputs: int, outputs: int) -> MatmulLaunch:
    """Of ``silu(x @ gate) * (x @ up)``, x (T, I), gate and up (I, O)."""
    measured = _measured().get(f"gated {row_tile(rows)}x{inputs}x{outputs}")
    if measured:
        return MatmulLaunch(**measured)
    columns = 64 if -(-outputs // 64) >= FILLED else 32
    return MatmulLaunch(columns, 64, 1, num_warps=4, num_stages=6)


def row_tile(rows: int) -> int:
    """Rows of a product's tile: a tensor core's 16 at least."""
    return next(size for size in (16, 32, MAX_ROWS) if size >= min(rows, MAX_ROWS))


def config_file(device_kind: str) -> Path:
    """Where what was measured on a GPU is kept."""
    return CONFIGS / (re.sub(r"\W+", "-", device_kind).lower() + ".json")


@functools.cache
def _measured() -> dict[str, dict[str, int]]:
    path = config_file(jax.local_devices()[0].device_kind)
    if not path.is_file():
        return {}
    launches: dict[str, dict[str, int]] = json.loads(path.read_text())["launches"]
    return launches
