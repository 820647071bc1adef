"""What lies in the memory of one device: weights, KV blocks, and the engine's tables."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, NamedSharding

from jllm.config import EngineConfig, ModelConfig
from jllm.engine.sizing import block_bytes, resolve, usable_bytes, working_bytes
from jllm.models.logit_rules import Rules, empty_rules
from jllm.parallel.inspect.gpus import GPU
from jllm.parallel.mesh import AXIS
from jllm.parallel.sharding import SPECS, laid_out
from jllm.params import param_shapes

DTYPE = jnp.bfloat16  # of weights and cache on a GPU


class Weight(NamedTuple):
    """An array of the model, or the same one of all layers.

    Attributes:
      name: its field in Params or Layer.
      shape: as laid out over all devices.
      local: of the part that each device holds.
      arrays: how many of them the model has.
      local_bytes: that all of them take on each device.
    """

    name: str
    shape: tuple[int, ...]
    local: tuple[int, ...]
    arrays: int
    local_bytes: int


def weights(config: ModelConfig, tp: int) -> tuple[Weight, ...]:
    """Every array of a model over ``tp`` devices.

    Raises ValueError naming the sizes that cannot be split.
    """
    shapes = param_shapes(laid_out(config, tp) if tp > 1 else config, DTYPE)
    mesh = AbstractMesh((tp,), (AXIS,))
    found: dict[str, Weight] = {}
    for path, array in jax.tree.leaves_with_path(shapes):
        name = path[-1].name
        local = NamedSharding(mesh, SPECS[name]).shard_shape(array.shape)
        size = math.prod(local) * array.dtype.itemsize
        before = found.get(name, Weight(name, array.shape, local, 0, 0))
        found[name] = before._replace(
            arrays=before.arrays + 1, local_bytes=before.local_bytes + size
        )
    return tuple(found.values())


@dataclass(frozen=True)
class Memory:
    """One device's memory, in bytes.

    Attributes:
      total: of the GPU.
      limit: what JAX takes of it.
      usable: what the engine uses of that.
      weights: of the model.
      tables: known tokens and sampling rules of every request.
      slack: kept free for temporaries and tables.
      block: of one KV block, all layers.
      num_blocks: KV blocks in the pool, each with a part on every device.
      block_size: tokens in a block.
      copies: devices that hold the same key/value head.
    """

    total: int
    limit: int
    usable: int
    weights: int
    tables: int
    slack: int
    block: int
    num_blocks: int
    block_size: int
    copies: int

    @property
    def kv(self) -> int:
        """The pool, without its scratch block."""
        return self.num_blocks * self.block

    @property
    def tokens(self) -> int:
        """Tokens whose keys and values fit."""
        return self.num_blocks * self.block_size

    @property
    def token(self) -> float:
        """Bytes that one token takes on each device."""
        return self.block / self.block_size


def sized(
    config: ModelConfig, tp: int, engine_config: EngineConfig, gpu: GPU
) -> tuple[Memory, EngineConfig]:
    """What an engine on ``tp`` of these GPUs makes of their memory, and of its config.

    Raises ValueError if the weights leave no room, or the config cannot be.
    """
    itemsize = jnp.dtype(DTYPE).itemsize
    held = sum(weight.local_bytes for weight in weights(config, tp))
    usable = usable_bytes(engine_config, gpu.limit_bytes)
    if engine_config.num_kv_blocks is None and held >= usable:
        raise ValueError(
            f"The weights do not fit: {held / 1e9:.1f} GB on each of {tp} {gpu.name}, of which an "
            f"engine uses {usable / 1e9:.1f} GB."
        )
    resolved = resolve(
        engine_config,
        config,
        bytes_per_value=itemsize,
        memory={"bytes_limit": gpu.limit_bytes, "bytes_in_use": held},
        num_devices=tp,
    )
    assert resolved.num_kv_blocks
    memory = Memory(
        total=gpu.memory_bytes,
        limit=gpu.limit_bytes,
        usable=usable,
        weights=held,
        tables=sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tables(config, resolved))),
        slack=working_bytes(
            replace(resolved, max_model_len=engine_config.max_model_len), config, itemsize, tp
        ),
        block=block_bytes(resolved, config, itemsize, tp) // tp,
        num_blocks=resolved.num_kv_blocks,
        block_size=resolved.block_size,
        copies=max(1, tp // config.num_kv_heads),
    )
    return memory, resolved


def tables(config: ModelConfig, resolved: EngineConfig) -> tuple[jax.ShapeDtypeStruct, Rules]:
    """The shapes of the token table (R + 1, L) and of the rules table."""
    assert resolved.max_num_seqs and resolved.max_model_len
    slots = resolved.max_num_seqs + 1
    rules: Rules = jax.eval_shape(lambda: empty_rules(slots, config.vocab_size))
    return jax.ShapeDtypeStruct((slots, resolved.max_model_len), jnp.int32), rules
