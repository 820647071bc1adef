"""What the sampler must do, in float64 and one row at a time."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

# Probabilities that differ by less than this are equal at a boundary of min-p or top-p.
CLOSE = 1e-5

Floats = NDArray[np.float64]


def distribution(
    logits: Sequence[float] | Floats,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
) -> Floats:
    """The probabilities (V,) that a token is drawn from."""
    logits = np.asarray(logits, np.float64)
    order = sorted(range(len(logits)), key=lambda i: (-logits[i], i))
    if temperature < 1e-5:
        return np.eye(len(logits))[order[0]]
    scaled = logits / temperature
    p = np.exp(scaled - scaled.max())
    p /= p.sum()
    keep = [i for i in order if p[i] > 0 and p[i] >= p[order[0]] * min_p * (1 - CLOSE)]
    if top_k > 0:
        keep = keep[:top_k]
    if top_p < 1:
        mass = p[keep].sum()
        before, kept = 0.0, []
        for i in keep:
            if kept and before >= top_p * mass * (1 - CLOSE):
                break
            kept.append(i)
            before += p[i]
        keep = kept
    result = np.zeros_like(p)
    result[keep] = p[keep] / p[keep].sum()
    return result


def penalised(
    logits: Sequence[float] | Floats,
    prompt: Sequence[int],
    output: Sequence[int],
    presence: float = 0.0,
    frequency: float = 0.0,
    repetition: float = 1.0,
) -> Floats:
    """Logits (V,) after the penalties."""
    result = np.array(logits, np.float64)
    for token in {*prompt, *output}:
        result[token] *= 1 / repetition if result[token] > 0 else repetition
    for token in set(output):
        result[token] -= frequency * list(output).count(token) + presence
    return result
