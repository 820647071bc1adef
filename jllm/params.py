"""The model's arrays as one pytree, and how to make one: random or loaded.

Dimension letters, everywhere in jllm: V vocabulary, E hidden size, F MLP width, H query heads,
K key/value heads, G = H / K query heads per key/value head, D head dim, T tokens, B rows
(requests in a step), N blocks, S block size, P blocks in a block table.
"""

from __future__ import annotations

import functools
import os
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jllm.compilation import use_compilation_cache
from jllm.config import ModelConfig
from jllm.tokenizer import Tokenizer

__all__ = ["Layer", "Params", "init", "load", "param_shapes"]


@flax.struct.dataclass
class Layer:
    """One transformer block. Matrices are stored as (in, out): ``y = x @ w``.

    Query heads are grouped under the key/value head they share, so one slice along K holds
    everything that a device needs for its heads. Absent biases and norms are None.
    """

    attn_norm: jax.Array  # (E,)
    wqkv: jax.Array  # (E, K, G + 2, D): for each K its G queries, its key, its value
    bqkv: jax.Array | None  # (K, G + 2, D)
    q_norm: jax.Array | None  # (D,)
    k_norm: jax.Array | None  # (D,)
    wo: jax.Array  # (K, G, D, E)
    bo: jax.Array | None  # (E,)
    mlp_norm: jax.Array  # (E,)
    w_gate_up: jax.Array  # (E, 2, F): gate, then up
    b_gate_up: jax.Array | None  # (2, F)
    w_down: jax.Array  # (F, E)
    b_down: jax.Array | None  # (E,)

    @property
    def norms(self) -> tuple[jax.Array, jax.Array] | None:
        """Weights of q's and of k's RMSNorm, in models that have them."""
        if self.q_norm is None or self.k_norm is None:
            return None
        return self.q_norm, self.k_norm


@flax.struct.dataclass
class Params:
    """A model: arrays are leaves, the config and the tokenizer are static.

    Layers are separate leaves, not stacked: on a CPU a step over stacked weights takes 1.6
    (scan) to 5 times (indexing) as long, because XLA copies each layer's slice.
    """

    embed: jax.Array  # (V, E)
    layers: tuple[Layer, ...]
    final_norm: jax.Array  # (E,)
    lm_head: jax.Array | None  # (E, V); None when tied to the embedding
    config: ModelConfig = flax.struct.field(pytree_node=False)
    tokenizer: Tokenizer | None = flax.struct.field(pytree_node=False, default=None)

    @property
    def dtype(self) -> jnp.dtype[Any]:
        return self.embed.dtype

    @property
    def num_params(self) -> int:
        return sum(leaf.size for leaf in jax.tree.leaves(self))

    def __repr__(self) -> str:
        # Under a transformation, or in a tree of specs, leaves may be anything.
        dtype = getattr(self.embed, "dtype", type(self.embed).__name__)
        return f"Params({dtype}, {self.config!r}, tokenizer={self.tokenizer!r})"


def param_shapes(config: ModelConfig, dtype: Any = jnp.float32) -> Params:
    """The pytree of ``config`` with a ShapeDtypeStruct for every array: the one declaration of
    shapes that random init and checkpoint loading follow."""
    c = config
    E, F, K, G, D = c.hidden_size, c.intermediate_size, c.num_kv_heads, c.group_size, c.head_dim

    def array(*shape: int) -> Any:
        return jax.ShapeDtypeStruct(shape, dtype)

    def optional(present: bool, *shape: int) -> Any:
        return array(*shape) if present else None

    layer = Layer(
        attn_norm=array(E),
        wqkv=array(E, K, G + 2, D),
        bqkv=optional(c.qkv_bias, K, G + 2, D),
        q_norm=optional(c.qk_norm, D),
        k_norm=optional(c.qk_norm, D),
        wo=array(K, G, D, E),
        bo=optional(c.o_bias, E),
        mlp_norm=array(E),
        w_gate_up=array(E, 2, F),
        b_gate_up=optional(c.mlp_bias, 2, F),
        w_down=array(F, E),
        b_down=optional(c.mlp_bias, E),
    )
    return Params(
        embed=array(c.vocab_size, E),
        layers=(layer,) * c.num_layers,
        final_norm=array(E),
        lm_head=optional(not c.tie_embeddings, E, c.vocab_size),
        config=c,
    )


def default_dtype() -> Any:
    """bfloat16 where there is a GPU, float32 on a CPU (which has no fast bfloat16)."""
    return jnp.float32 if jax.default_backend() == "cpu" else jnp.bfloat16


def check_params(params: object) -> None:
    """Raises ValueError for what is no Params, such as a model's name."""
    if not isinstance(params, Params):
        raise ValueError(f"params must be jllm.Params, as jllm.load makes them, not {params!r}.")


DTYPES = ("float32", "bfloat16", "float16")


def check_dtype(dtype: Any) -> Any:
    """The dtype asked for, or the platform's own for None.

    Raises ValueError for one that weights cannot have.
    """
    if dtype is None:
        return default_dtype()
    try:
        name = jnp.dtype(dtype).name
    except TypeError:
        name = None
    if name not in DTYPES:
        raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, not {dtype!r}.")
    return jnp.dtype(dtype)


def init(
    config: ModelConfig, key: jax.Array, *, dtype: Any = None, mesh: Mesh | None = None
) -> Params:
    """Random weights of a model's shape, made on the device or on those of a mesh.

    Norms are one, everything else normal with standard deviation 0.02 (biases too, so that a
    missing bias shows). The same key gives the same weights on every platform and mesh.

    Args:
      config: the shape; ``ModelConfig.preset(name)`` has the well-known ones.
      key: a JAX random key.
      dtype: of the weights; bfloat16 on a GPU and float32 on a CPU unless given.
      mesh: from ``jllm.make_mesh``: devices to split the weights over.

    Raises ValueError if the model cannot be split over so many devices.
    """
    if not isinstance(config, ModelConfig):
        raise ValueError(f"init needs a ModelConfig, such as a preset's, not {config!r}.")
    use_compilation_cache()
    shapes = param_shapes(config, check_dtype(dtype))
    leaves, treedef = jax.tree.flatten_with_path(shapes)

    keys = jax.random.split(key, len(leaves))

    def make(i: int, name: str, shape: jax.ShapeDtypeStruct) -> jax.Array:
        if "norm" in name:
            array = jnp.ones(shape.shape, shape.dtype)
        else:
            array = _normal(keys[i], shape.shape, shape.dtype)
        if mesh is None:
            return array
        from jllm.parallel.sharding import place_array

        # Waited for, so that the first device never holds two of them.
        return place_array(name, array, config, mesh).block_until_ready()

    arrays = [make(i, path[-1].name, shape) for i, (path, shape) in enumerate(leaves)]
    params: Params = jax.tree.unflatten(treedef, arrays)
    return params


@functools.partial(jax.jit, static_argnums=(1, 2))
def _normal(key: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    # Layers share shapes, so a model compiles about eight of these small programs.
    return jnp.asarray(0.02, dtype) * jax.random.normal(key, shape, dtype)


def load(
    name_or_path: str | os.PathLike[str], *, dtype: Any = None, mesh: Mesh | None = None
) -> Params:
    """Loads a model: a folder of safetensors, a ``.gguf`` file, a Hugging Face hub name, or a
    packaged demo model (``smollm2-135m-instruct``).

    Args:
      name_or_path: where the model is. A path that exists wins over a name.
      dtype: of the weights in memory; bfloat16 on a GPU and float32 on a CPU unless given.
      mesh: from ``jllm.make_mesh``: devices to split the weights over; each reads its own part.

    Raises:
      FileNotFoundError: nothing is there, or a file that the checkpoint names is missing.
      ValueError: the checkpoint is damaged, of an unknown architecture, or does not fit its
        own config, the message naming the file and the tensors; or the model cannot be split over
        so many devices.
    """
    from jllm.weights import hub

    if not isinstance(name_or_path, str | os.PathLike):
        raise ValueError(f"load needs a name or a path, not {name_or_path!r}.")
    use_compilation_cache()
    return hub.load(name_or_path, check_dtype(dtype), mesh)
