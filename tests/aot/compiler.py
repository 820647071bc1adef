"""Compiles for an H200 on a machine without one: XLA's CUDA compiler needs only a description."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh, SingleDeviceSharding

from jllm.parallel.mesh import AXIS


@cache
def h200s(count: int) -> list[jax.Device]:
    """So many H200s of one host to compile for."""
    description = (Path(__file__).parent / "h200.textproto").read_text()
    topology = topologies.get_topology_desc(
        "", platform="cuda", target_config=description, topology=f"1x1x{count}"
    )
    return list(topology.devices)


def h200_mesh(tp: int) -> Mesh:
    """A mesh of H200s, as ``jllm.make_mesh`` makes one of what is there."""
    return Mesh(np.array(h200s(tp)), (AXIS,), axis_types=(AxisType.Auto,))


def compile_for_h200(function: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """The compiled program of a jitted function, for arguments given by their shapes."""
    sharding = SingleDeviceSharding(h200s(1)[0])

    def on_device(x: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

    traced = function.trace(*jax.tree.map(on_device, args), **options)
    return traced.lower(lowering_platforms=("cuda",)).compile()
