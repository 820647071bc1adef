"""Tensor parallelism: a model over several devices, and a way to see what that means."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jllm.parallel.inspect.explanation import compare, explain

__all__ = ["compare", "explain"]


def __getattr__(name: str) -> Any:
    """Imported when first used: explaining stands above the engine, and the mesh below it."""
    if name not in __all__:
        raise AttributeError(f"module 'jllm.parallel' has no attribute {name!r}")
    from jllm.parallel.inspect import explanation

    return getattr(explanation, name)
