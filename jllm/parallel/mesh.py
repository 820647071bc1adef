"""The devices a model is split over: a mesh of one axis, ``tp``."""

from __future__ import annotations

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding

from jllm.params import Params

__all__ = ["AXIS", "Mesh", "checked", "make_mesh", "mesh_of"]

AXIS = "tp"


def make_mesh(tp: int) -> Mesh:
    """A mesh over this process's first ``tp`` devices, for ``load``, ``init`` and ``Engine``.

        mesh = jllm.make_mesh(tp=8)
        params = jllm.load("meta-llama/Llama-3.1-70B", mesh=mesh)

    Raises ValueError if there are fewer devices.
    """
    devices = jax.local_devices()
    if not isinstance(tp, int) or isinstance(tp, bool) or not 0 < tp <= len(devices):
        raise ValueError(
            f"tp must be between 1 and the number of devices, {len(devices)} "
            f"({devices[0].platform}), not {tp!r}."
        )
    return _flat(np.array(devices[:tp]))


def checked(mesh: object) -> Mesh:
    """A user's mesh as ``make_mesh`` would make it, whose axis may be Explicit, JAX's default.

    Raises ValueError for what is no mesh of the one axis ``tp``.
    """
    if not isinstance(mesh, Mesh) or mesh.axis_names != (AXIS,):
        raise ValueError(
            f"mesh must have the one axis {AXIS!r}, as jllm.make_mesh makes it, not {mesh!r}."
        )
    return _flat(mesh.devices)


def mesh_of(params: Params) -> Mesh | None:
    """The mesh that an engine of these params runs on: all devices they are split over, whatever
    their own mesh calls its axes. None for params that are whole on some device.

    All devices, not just an axis that happens to be called ``tp``: of params that a training mesh
    splits over (fsdp 4, tp 2), a device then holds an eighth before and after.
    """
    for leaf in jax.tree.leaves(params):
        sharding = getattr(leaf, "sharding", None)
        if isinstance(sharding, NamedSharding) and not sharding.is_fully_replicated:
            mesh = sharding.mesh
            assert isinstance(mesh, Mesh)
            return _flat(mesh.devices)
    return None


def _flat(devices: np.ndarray) -> Mesh:
    # Auto: with an Explicit axis shardings are types, and code that does not know them fails.
    return Mesh(devices.reshape(-1), (AXIS,), axis_types=(AxisType.Auto,))
