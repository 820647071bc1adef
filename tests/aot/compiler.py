"""Compiles for an H200 on a machine without one: XLA's CUDA compiler needs only a description."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, SingleDeviceSharding

from jllm.kernels.triton_call import compiling_for
from jllm.parallel.inspect.gpus import GPUS, compile_only
from jllm.parallel.mesh import AXIS

H200 = GPUS["h200"]


@cache
def h200s(count: int) -> list[jax.Device]:
    """So many H200s of one host to compile for."""
    devices = compile_only(H200, count)
    assert devices is not None, "the plugin is not there: run `make test-aot`"
    return devices


def h200_mesh(tp: int) -> Mesh:
    """A mesh of H200s, as ``jllm.make_mesh`` makes one of what is there."""
    return Mesh(np.array(h200s(tp)), (AXIS,), axis_types=(AxisType.Auto,))


def compile_for_h200(function: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """The compiled program of a jitted function, for arguments given by their shapes."""
    sharding = SingleDeviceSharding(h200s(1)[0])

    def on_device(x: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

    return compiled(function, *jax.tree.map(on_device, args), **options)


def compiled(function: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """The same for arguments whose shapes say on which H200s they lie."""
    with compiling_for(H200.compute_capability):
        traced = function.trace(*args, **options)  # type: ignore[attr-defined]
        return traced.lower(lowering_platforms=("cuda",)).compile()
