"""A function that runs on one device, or on each device of a mesh."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import jax

from jllm.parallel.mesh import AXIS

__all__ = ["program"]


def program(
    *,
    takes: Sequence[Any],
    gives: Any,
    static: Sequence[str] = (),
    donate: Sequence[int] = (),
) -> Callable[[Callable[..., Any]], Any]:
    """Decorates a function so that it is jitted, and may be given a ``mesh``.

    Without one it is what ``jax.jit`` makes of it. With one, each device runs it on its own part
    of every array; if it takes ``axis``, that is the name by which it reaches the others' parts.

    Args:
      takes: of each positional argument, how it is split: a PartitionSpec, or what gives a tree of
        them for the argument.
      gives: the PartitionSpecs of the result.
      static: keywords that are static. ``mesh`` is one too.
      donate: places of the arguments whose memory the result may take.
    """

    def decorate(function: Callable[..., Any]) -> Any:
        signature = inspect.signature(function)
        axis = {"axis": AXIS} if "axis" in signature.parameters else {}

        def run(*args: Any, mesh: jax.sharding.Mesh | None = None, **options: Any) -> Any:
            if mesh is None:
                return function(*args, **options)
            split = jax.shard_map(
                functools.partial(function, **options, **axis),
                mesh=mesh,
                in_specs=tuple(
                    spec(arg) if callable(spec) else spec
                    for spec, arg in zip(takes, args, strict=True)
                ),
                out_specs=gives,
                check_vma=False,  # it cannot see through a Triton kernel
            )
            return split(*args)

        run.__name__, run.__doc__ = function.__name__, function.__doc__
        # Profiles name arrays by the signature.
        keyword = inspect.Parameter("mesh", inspect.Parameter.KEYWORD_ONLY, default=None)
        own = [p for name, p in signature.parameters.items() if name != "axis"]
        run.__signature__ = signature.replace(parameters=[*own, keyword])  # type: ignore[attr-defined]
        return jax.jit(run, static_argnames=(*static, "mesh"), donate_argnums=tuple(donate))

    return decorate
