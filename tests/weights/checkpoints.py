"""Tiny checkpoints in Hugging Face's layout, and the leaves they must become."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors.numpy import save_file

from jllm.config import ModelConfig
from jllm.params import Params

Array = npt.NDArray[Any]
Tensors = dict[str, Array]

# No two sizes are equal, H * D is not E, and F needs a second column block of the transposition.
SIZES = dict(
    vocab_size=11,
    hidden_size=10,
    intermediate_size=150,
    num_hidden_layers=2,
    num_attention_heads=6,
    num_key_value_heads=2,
    head_dim=4,
    max_position_embeddings=64,
    tie_word_embeddings=False,
)


def hf_config(architecture: str = "LlamaForCausalLM", **keys: Any) -> dict[str, Any]:
    return {"architectures": [architecture], **SIZES, **keys}


def hf_tensors(config: dict[str, Any], seed: int = 0) -> Tensors:
    """Random float32 tensors of everything the config asks for."""
    c = ModelConfig.from_hf(config)
    draw = np.random.default_rng(seed)
    E, F, D = c.hidden_size, c.intermediate_size, c.head_dim
    H, K = c.num_heads, c.num_kv_heads
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (c.vocab_size, E),
        "model.norm.weight": (E,),
    }
    if not c.tie_embeddings:
        shapes["lm_head.weight"] = (c.vocab_size, E)
    projections = {
        "self_attn.q_proj": ((H * D, E), c.qkv_bias),
        "self_attn.k_proj": ((K * D, E), c.qkv_bias),
        "self_attn.v_proj": ((K * D, E), c.qkv_bias),
        "self_attn.o_proj": ((E, H * D), c.o_bias),
        "mlp.gate_proj": ((F, E), c.mlp_bias),
        "mlp.up_proj": ((F, E), c.mlp_bias),
        "mlp.down_proj": ((E, F), c.mlp_bias),
    }
    for i in range(c.num_layers):
        layer = f"model.layers.{i}."
        shapes[layer + "input_layernorm.weight"] = (E,)
        shapes[layer + "post_attention_layernorm.weight"] = (E,)
        for name, (shape, has_bias) in projections.items():
            shapes[layer + name + ".weight"] = shape
            if has_bias:
                shapes[layer + name + ".bias"] = shape[:1]
        if c.qk_norm:
            shapes[layer + "self_attn.q_norm.weight"] = (D,)
            shapes[layer + "self_attn.k_norm.weight"] = (D,)
    return {name: draw.standard_normal(shape, np.float32) for name, shape in shapes.items()}


def write_folder(folder: Path, config: dict[str, Any], tensors: Tensors, shards: int = 1) -> Path:
    """A model folder; with several shards, tensors are dealt out in turn and indexed."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if shards == 1:
        save_file(tensors, folder / "model.safetensors")
        return folder
    weight_map = {}
    for i in range(shards):
        file = f"model-{i + 1:05}-of-{shards:05}.safetensors"
        part = {name: tensors[name] for name in sorted(tensors)[i::shards]}
        weight_map |= dict.fromkeys(part, file)
        save_file(part, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


def assert_holds(params: Params, tensors: Tensors) -> None:
    """Every leaf, element by element group, against Hugging Face's layout.

    Query head h is the g-th of key/value head k where h = k * G + g.
    """
    c = params.config
    D, G = c.head_dim, c.group_size

    def same(ours: Any, theirs: Array) -> None:
        assert ours is not None
        np.testing.assert_array_equal(np.asarray(ours, np.float32), theirs.astype(np.float32))

    def rows(tensor: Array, head: int) -> Array:
        return tensor[head * D : (head + 1) * D]

    same(params.embed, tensors["model.embed_tokens.weight"])
    same(params.final_norm, tensors["model.norm.weight"])
    if c.tie_embeddings:
        assert params.lm_head is None
    else:
        same(params.lm_head, tensors["lm_head.weight"].T)
    assert len(params.layers) == c.num_layers
    for i, layer in enumerate(params.layers):
        t = {
            name.removeprefix(f"model.layers.{i}."): tensor
            for name, tensor in tensors.items()
            if name.startswith(f"model.layers.{i}.")
        }
        same(layer.attn_norm, t["input_layernorm.weight"])
        same(layer.mlp_norm, t["post_attention_layernorm.weight"])
        same(layer.w_gate_up[:, 0], t["mlp.gate_proj.weight"].T)
        same(layer.w_gate_up[:, 1], t["mlp.up_proj.weight"].T)
        same(layer.w_down, t["mlp.down_proj.weight"].T)
        for k in range(c.num_kv_heads):
            for g in range(G):
                head = k * G + g
                same(layer.wqkv[:, k, g], rows(t["self_attn.q_proj.weight"], head).T)
                same(layer.wo[k, g], rows(t["self_attn.o_proj.weight"].T, head))
            same(layer.wqkv[:, k, G], rows(t["self_attn.k_proj.weight"], k).T)
            same(layer.wqkv[:, k, G + 1], rows(t["self_attn.v_proj.weight"], k).T)
        if c.qkv_bias:
            assert layer.bqkv is not None
            for k in range(c.num_kv_heads):
                for g in range(G):
                    same(layer.bqkv[k, g], rows(t["self_attn.q_proj.bias"], k * G + g))
                same(layer.bqkv[k, G], rows(t["self_attn.k_proj.bias"], k))
                same(layer.bqkv[k, G + 1], rows(t["self_attn.v_proj.bias"], k))
        if c.o_bias:
            same(layer.bo, t["self_attn.o_proj.bias"])
        if c.mlp_bias:
            assert layer.b_gate_up is not None
            same(layer.b_gate_up[0], t["mlp.gate_proj.bias"])
            same(layer.b_gate_up[1], t["mlp.up_proj.bias"])
            same(layer.b_down, t["mlp.down_proj.bias"])
        if c.qk_norm:
            same(layer.q_norm, t["self_attn.q_norm.weight"])
            same(layer.k_norm, t["self_attn.k_norm.weight"])
        absent = {
            "bqkv": not c.qkv_bias,
            "bo": not c.o_bias,
            "b_gate_up": not c.mlp_bias,
            "b_down": not c.mlp_bias,
            "q_norm": not c.qk_norm,
            "k_norm": not c.qk_norm,
        }
        for leaf, is_absent in absent.items():
            assert (getattr(layer, leaf) is None) == is_absent, leaf
