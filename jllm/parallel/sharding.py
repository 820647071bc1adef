"""How a model is laid out over the devices of a mesh: tensor parallelism.

Projections into heads and MLP columns are split by output, those back into the residual stream by
input, so a block needs two sums over devices and nothing else (Megatron-LM, arXiv 1909.08053).
Embedding and head are split by vocabulary.

Two sizes of the model change where they do not divide:

- V is padded to V', a multiple of 32 tp, so that a device's ids begin at a whole word of the
  bit masks in ``models.logit_rules`` and at a whole counter of ``models.rng``;
- with more devices than key/value heads each device holds a copy of one of these, with its share
  of the query heads: K' = tp. With K = 2 heads (G = 2) on 4 devices:

      heads of the model    k0: q0 q1         k1: q2 q3
      laid out, K' = 4      k0: q0   k0: q1   k1: q2   k1: q3

A layout is recognised by the shapes of its arrays. Model code takes head counts from there, so it
runs either; gradients of copies would be those of independent heads.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, Mesh, NamedSharding, Sharding
from jax.sharding import PartitionSpec as P

from jllm.config import ModelConfig
from jllm.parallel.mesh import AXIS, checked
from jllm.params import Params

__all__ = [
    "CACHE",
    "LOGITS",
    "SPECS",
    "WHOLE",
    "laid_out",
    "param_specs",
    "place",
    "place_array",
    "share",
]

Array = jax.Array

WHOLE = P()
SPECS = {
    "embed": P(AXIS),  # (V, E)
    "final_norm": WHOLE,
    "lm_head": P(None, AXIS),  # (E, V)
    "attn_norm": WHOLE,
    "wqkv": P(None, AXIS),  # (E, K, G + 2, D)
    "bqkv": P(AXIS),  # (K, G + 2, D)
    "q_norm": WHOLE,
    "k_norm": WHOLE,
    "wo": P(AXIS),  # (K, G, D, E)
    "bo": WHOLE,
    "mlp_norm": WHOLE,
    "w_gate_up": P(None, None, AXIS),  # (E, 2, F)
    "b_gate_up": P(None, AXIS),  # (2, F)
    "w_down": P(AXIS),  # (F, E)
    "b_down": WHOLE,
}
CACHE = P(None, None, AXIS)  # (N, 2, K, S, D)
LOGITS = P(None, AXIS)  # (B, V)

VOCAB_MULTIPLE = 32


def param_specs(params: Params) -> Params:
    """The same tree with each array's PartitionSpec in its place."""
    specs: Params = jax.tree_util.tree_map_with_path(lambda path, _: SPECS[_name(path)], params)
    return specs


def laid_out(config: ModelConfig, tp: int) -> ModelConfig:
    """The config with the sizes V' and K' that ``tp`` devices need: of their arrays, not of the
    model.

    Raises ValueError naming the sizes that cannot be split.
    """
    c = config
    for name, size in (("num_heads", c.num_heads), ("intermediate_size", c.intermediate_size)):
        if size % tp:
            raise ValueError(f"tp={tp} must divide {name}, {size}.")
    if c.num_kv_heads % tp and tp % c.num_kv_heads:
        raise ValueError(
            f"tp={tp} must divide num_kv_heads, {c.num_kv_heads}, or be a multiple of it."
        )
    multiple = VOCAB_MULTIPLE * tp
    return replace(
        c,
        vocab_size=-(-c.vocab_size // multiple) * multiple,
        num_kv_heads=max(c.num_kv_heads, tp),
    )


def share(axis: str, config: ModelConfig, tp: int, index: int) -> slice:
    """Which entries of a checkpoint tensor's axis go to device ``index`` of ``tp``.

    Args:
      axis: its dimension letters, such as ``KGD``. V, K and F are split, each as the first letter.
    """
    c, d = config, config.head_dim
    if axis == "V":
        width = laid_out(c, tp).vocab_size // tp
        first, last = index * width, (index + 1) * width
        return slice(min(first, c.vocab_size), min(last, c.vocab_size))
    if axis == "KD":
        head = index * c.num_kv_heads // tp
        return slice(head * d, (head + max(1, c.num_kv_heads // tp)) * d)
    size = {"KGD": c.num_heads * d, "F": c.intermediate_size}.get(axis)
    if size is not None:
        return slice(index * size // tp, (index + 1) * size // tp)
    return slice(0, {"E": c.hidden_size, "D": d}[axis])


def lay_out(name: str, array: Array, config: ModelConfig, tp: int) -> Array:
    """One array of a model, by its name, in the layout of ``tp`` devices.

    Raises ValueError for one that is in the layout of another number of devices.
    """
    target = laid_out(config, tp)
    if name in ("embed", "lm_head"):
        axis = 0 if name == "embed" else 1
        missing = target.vocab_size - config.vocab_size
        array = jax.lax.slice_in_dim(array, 0, config.vocab_size, axis=axis)
        return jnp.pad(array, [(0, missing if i == axis else 0) for i in range(2)])
    if name not in ("wqkv", "bqkv", "wo"):
        return array
    heads, group = target.num_kv_heads, target.group_size
    held = array.shape[0 if name == "wo" else -3]
    if held == heads:
        return array
    if held != config.num_kv_heads:
        raise ValueError(
            f"These params are laid out for {held} devices, with copies of their "
            f"{config.num_kv_heads} key/value heads; tp={tp} needs params as loaded without a mesh."
        )
    if name == "wo":
        return array.reshape(heads, group, *array.shape[2:])
    *before, _, _, dim = array.shape
    queries = array[..., :-2, :].reshape(*before, heads, group, dim)
    keys_values = jnp.repeat(array[..., -2:, :], heads // held, axis=-3)
    return jnp.concatenate([queries, keys_values], axis=-2)


def place(params: Params, mesh: Mesh) -> Params:
    """The params laid out and split over a mesh, array by array; those that are so already are not
    copied.

    Raises ValueError if a size cannot be split.
    """

    def move(path: Any, array: Array) -> Array:
        return place_array(_name(path), array, params.config, mesh)

    placed: Params = jax.tree_util.tree_map_with_path(move, params)
    pairs = zip(jax.tree.leaves(params), jax.tree.leaves(placed), strict=True)
    moved = sum(old.nbytes for old, new in pairs if new is not old)
    if moved:
        logging.getLogger("jllm").info(
            "Resharded %.2f GB of params on the devices to tp=%d.", moved / 1e9, mesh.size
        )
    return placed


def place_array(name: str, array: Array, config: ModelConfig, mesh: Mesh) -> Array:
    """One array of a model, by its name, laid out and split over a mesh. It moves between devices
    and never through the host; one device may hold it whole meanwhile.

    Raises ValueError if the model cannot be split over so many devices.
    """
    mesh = checked(mesh)
    sharding = NamedSharding(mesh, SPECS[name])
    program = _program(name, config, mesh.size, sharding)
    array = _without_types(array)
    with jax.set_mesh(None):  # the caller's own, which may be of other devices, counts for nothing
        shape = jax.eval_shape(program, array).shape
        if array.shape == shape and array.sharding.is_equivalent_to(sharding, array.ndim):
            return array
        if _devices(array.sharding) == list(mesh.devices.flat):
            return program(array)
        # From one device device_put cuts there; from several it would go through the host.
        whole = _program(name, config, mesh.size, None)(_on_one_device(array))
        placed: Array = jax.device_put(whole, sharding)
        return placed


@functools.cache
def _program(
    name: str, config: ModelConfig, tp: int, sharding: NamedSharding | None
) -> Callable[[Array], Array]:
    lay_out_one = functools.partial(lay_out, name, config=config, tp=tp)
    program: Callable[[Array], Array] = jax.jit(lay_out_one, out_shardings=sharding)
    return program


def _without_types(array: Array) -> Array:
    """The same buffers over a mesh of Auto axes: arrays over Explicit ones carry their sharding as
    a type, which not every operation has a rule for."""
    sharding = array.sharding
    if not isinstance(sharding, NamedSharding):
        return array
    mesh = sharding.mesh
    if all(kind == AxisType.Auto for kind in mesh.axis_types):
        return array
    auto = Mesh(mesh.devices, mesh.axis_names, axis_types=(AxisType.Auto,) * mesh.devices.ndim)
    same: Array = jax.device_put(array, NamedSharding(auto, sharding.spec))
    return same


def _devices(sharding: Sharding) -> list[jax.Device]:
    """In the order of the array's parts, where that is known."""
    if isinstance(sharding, NamedSharding):
        assert isinstance(sharding.mesh, Mesh)
        return list(sharding.mesh.devices.flat)
    return list(sharding.device_set)


def _on_one_device(array: Array) -> Array:
    sharding = array.sharding
    if not sharding.is_fully_replicated:
        if not isinstance(sharding, NamedSharding):
            raise ValueError(f"Params must have NamedShardings, not {sharding!r}.")
        whole = NamedSharding(sharding.mesh, WHOLE)
        array = jax.jit(lambda x: x, out_shardings=whole)(array)
    return array.addressable_data(0)


def _name(path: Any) -> str:
    """The field of Params or Layer that a tree path leads to."""
    name: str = path[-1].name
    return name
