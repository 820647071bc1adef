"""Attention of a mixed batch: decode rows by one kernel, chunks of prompts by others."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax

from jllm.kernels.decode import DecodeCut, attend_rows
from jllm.kernels.prefill import PrefillCut, attend_chunks
from jllm.kernels.rope import enter_qkv

Array = jax.Array


class Cuts(NamedTuple):
    """How a step's decode rows and chunks are cut; None where there are none."""

    decode: DecodeCut | None
    prefill: PrefillCut | None


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
    out, num_decode = None, 0
    options: dict[str, Any] = dict(window=window, scale=scale)
    if cuts.decode is not None:
        num_decode = len(cuts.decode.context_lens)
        out, kv = attend_rows(
            qkv, norms, rope, slots, kv, tables[:num_decode], cuts.decode, **options, eps=eps
        )
    if cuts.prefill is not None:
        q, kv = enter_qkv(qkv, norms, rope, slots, kv, eps, first=num_decode)
        out = attend_chunks(q, kv, tables[num_decode:], cuts.prefill, out, **options)
    assert out is not None
    return out, kv
