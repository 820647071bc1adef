"""Compiles for an H200 on a machine without one: XLA's CUDA compiler needs only a description."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import jax
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding


@cache
def h200() -> jax.Device:
    """An H200 to compile for."""
    description = (Path(__file__).parent / "h200.textproto").read_text()
    topology = topologies.get_topology_desc(
        "", platform="cuda", target_config=description, topology="1x1x1"
    )
    device: jax.Device = topology.devices[0]
    return device


def compile_for_h200(function: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """The compiled program of a jitted function, for arguments given by their shapes."""
    sharding = SingleDeviceSharding(h200())

    def on_device(x: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

    traced = function.trace(*jax.tree.map(on_device, args), **options)
    return traced.lower(lowering_platforms=("cuda",)).compile()
