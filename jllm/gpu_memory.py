"""How much of each GPU's memory JAX takes: what it must be told before it starts them.

The only setting of JAX's or XLA's that jllm changes; no XLA flag has yet earned its place.
"""

from __future__ import annotations

import os
import sys

FRACTION = 0.95  # the rest is for CUDA itself, its graphs and NCCL
JAX_FRACTION = 0.75  # unless told otherwise
VARIABLES = ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION")


def take_memory() -> None:
    """Has JAX take ``FRACTION`` of each GPU's memory, unless the user chose another share, or JAX
    runs already. Called when jllm is imported: later may be too late, since as little as
    ``jax.random.key(0)`` starts JAX."""
    if not any(os.environ.get(name) for name in VARIABLES) and not _running():
        os.environ[VARIABLES[0]] = str(FRACTION)


def memory_fraction() -> float:
    """The share of each GPU's memory that JAX takes."""
    chosen = (os.environ.get(name) for name in VARIABLES)
    return next((float(share) for share in chosen if share), JAX_FRACTION)


def _running() -> bool:
    jax = sys.modules.get("jax")
    return jax is not None and jax._src.xla_bridge.backends_are_initialized()
