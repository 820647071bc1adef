"""One op at one size: its inputs, what must move, and how wrong its result is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax import lax

Args = tuple[Any, ...]
Error = Callable[[Args, Any], float]

EXACT = lax.Precision.HIGHEST


@dataclass(frozen=True)
class Case:
    """One op at one size.

    Attributes:
      name: of its result row.
      kind: gemm, attention, norm, rope and write, or sampler: a colour in the report.
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
