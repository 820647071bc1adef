"""Attention of a mixed batch: decode rows by one kernel, chunks of prompts by others.

Where the chunks' tokens begin is known on the device only, so that steps of any mixture are one
program: both see all tokens and rows, and leave the other's alone.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax

from jllm.kernels.decode import DecodeCut, attend_rows
from jllm.kernels.prefill import PrefillCut, attend_chunks
from jllm.kernels.rope import enter_qkv

Array = jax.Array


class Cuts(NamedTuple):
    """How a step's rows are cut.

    Attributes:
      decode: of the decode rows; to it other rows are padding.
      prefill: of the chunks; None in a step without.
      first: (1,) int32, the first token of a chunk; None in a step without.
    """

    decode: DecodeCut
    prefill: PrefillCut | None
    first: Array | None


def attend(
    qkv: Array,
    norms: tuple[Array, Array] | None,
    rope: tuple[Array, Array],
    slots: Array,
    kv: Array,
    tables: Array,
    cuts: Cuts,
    *,
    window: int | None,
    scale: float,
    eps: float,
) -> tuple[Array, Array]:
    """``models.attention.attend`` with block tables (B, P) and the cuts for them."""
    options: dict[str, Any] = dict(window=window, scale=scale)
    out, kv = attend_rows(qkv, norms, rope, slots, kv, tables, cuts.decode, **options, eps=eps)
    if cuts.prefill is not None:
        q, kv = enter_qkv(qkv, norms, rope, slots, kv, eps, cuts.first)
        out = attend_chunks(q, kv, tables, cuts.prefill, out, **options)
    return out, kv
