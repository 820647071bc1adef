"""Reads a GGUF file: config and tokenizer from its metadata, weights dequantized at load."""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from jllm.config import ModelConfig, RopeScaling
from jllm.models.families import FAMILIES, Family, positive_int, token_ids, yarn_context
from jllm.models.layers import rope_frequencies
from jllm.parallel.mesh import Mesh
from jllm.params import Params
from jllm.tokenizer import Tokenizer
from jllm.weights.layout import Checkpoint, TensorInfo, assemble

if TYPE_CHECKING:
    from gguf import ReaderTensor

__all__ = ["config_from_gguf", "load"]

_DTYPES = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q4_K", "Q5_K", "Q6_K")

# Mistral models are "llama" in GGUF: they differ in the sliding window, which GGUF leaves out.
_FAMILIES: dict[str, Family] = {f.name: f for f in FAMILIES.values() if f.name != "mistral"}

_TOKENS = "tokenizer.ggml.tokens"
_ROPE_KEYS = {
    "type",
    "factor",
    "original_context_length",
    "finetuned",
    "yarn_beta_fast",
    "yarn_beta_slow",
}


def load(path: Path, dtype: Any, mesh: Mesh | None = None) -> Params:
    """Loads a GGUF file.

    Raises:
      ValueError: the ``gguf`` package is not installed, the file is damaged or split, or its
        tensors do not fit its metadata.
    """
    metadata, by_name = _open(path)
    if metadata.get("split.count", 1) > 1:
        raise ValueError(f"{path} is one of {metadata['split.count']} parts; merge them first.")
    config = config_from_gguf(metadata, by_name)
    if "rope_freqs.weight" in by_name:
        scaling = _llama3_scaling(config, by_name["rope_freqs.weight"].data)
        config = replace(config, rope_scaling=scaling)
    tokenizer = None
    if _TOKENS in metadata:
        tokenizer = Tokenizer.from_gguf(metadata)
        eos = token_ids(config.eos_token_ids, tokenizer.eos_token_id)
        config = replace(config, eos_token_ids=eos)

    def read(name: str, part: tuple[slice, ...]) -> npt.NDArray[Any]:
        from gguf.quants import dequantize

        # Rows are cut first: within one, weights are packed. Of heads, whole ones are asked for.
        array = dequantize(by_name[name].data[part[0]], by_name[name].tensor_type)
        permuted = config.family == "llama" and (".attn_q." in name or ".attn_k." in name)
        array = _unpermuted(array, config.head_dim) if permuted else array
        return array[(slice(None), *part[1:])]

    tensors = {
        name: TensorInfo(tuple(map(int, tensor.shape[::-1])), tensor.tensor_type.name, path)
        for name, tensor in by_name.items()
    }
    checkpoint = Checkpoint(path, "gguf", _DTYPES, tensors, read)
    return assemble(config, checkpoint, dtype, tokenizer, mesh)


def config_from_gguf(metadata: Mapping[str, Any], tensors: Container[str]) -> ModelConfig:
    """The ModelConfig of a GGUF file, all but the Llama 3 rope scaling (a tensor there).

    Args:
      metadata: the file's key-value pairs.
      tensors: the names of its tensors. GGUF says nothing of biases and tied embeddings: a
        tensor is there, or it is not.

    Raises:
      ValueError: an unknown architecture, a missing key, or a feature that jllm does not have.
    """
    arch = metadata.get("general.architecture")
    if arch not in _FAMILIES:
        raise ValueError(f"Unknown GGUF architecture {arch!r}; known are {', '.join(_FAMILIES)}.")
    m = {
        key.removeprefix(f"{arch}."): value
        for key, value in metadata.items()
        if key.startswith(f"{arch}.")
    }
    hidden, heads = positive_int(m, "embedding_length"), positive_int(m, "attention.head_count")
    head_dim = positive_int(m, "attention.key_length", hidden // heads)
    for key in ("attention.value_length", "rope.dimension_count"):
        if m.get(key, head_dim) != head_dim:
            raise ValueError(f"{arch}.{key} must be the head size {head_dim}, not {m[key]!r}.")
    context = positive_int(m, "context_length")
    if m.get("expert_count"):
        raise ValueError(f"{arch}.expert_count is {m['expert_count']}; jllm has no experts.")
    if (m.get("attention.sliding_window") or context) < context:
        raise ValueError(
            f"{arch}.attention.sliding_window is {m['attention.sliding_window']}, and GGUF does "
            "not say in which layers; load the model's safetensors."
        )
    scaling = _rope_scaling(m, context)
    if scaling is not None and scaling.kind == "yarn":
        stated = m.get("rope.scaling.original_context_length")
        context = yarn_context(context, stated, scaling.factor)
    ends = ("eos_token_id", "eot_token_id", "eom_token_id")
    return ModelConfig(
        family=arch,
        vocab_size=positive_int(m, "vocab_size", len(metadata.get(_TOKENS, ())) or None),
        hidden_size=hidden,
        intermediate_size=positive_int(m, "feed_forward_length"),
        num_layers=positive_int(m, "block_count"),
        num_heads=heads,
        num_kv_heads=positive_int(m, "attention.head_count_kv", heads),
        head_dim=head_dim,
        max_position_embeddings=context,
        rope_theta=_decimal(m.get("rope.freq_base", 10_000.0)),
        rope_scaling=scaling,
        rms_norm_eps=_decimal(m.get("attention.layer_norm_rms_epsilon", 1e-6)),
        qkv_bias="blk.0.attn_q.bias" in tensors,
        o_bias="blk.0.attn_output.bias" in tensors,
        mlp_bias="blk.0.ffn_up.bias" in tensors,
        qk_norm=_FAMILIES[arch].qk_norm,
        tie_embeddings="output.weight" not in tensors,
        bos_token_id=metadata.get("tokenizer.ggml.bos_token_id"),
        eos_token_ids=token_ids(*(metadata.get(f"tokenizer.ggml.{end}") for end in ends)),
    )


def _decimal(value: float) -> float:
    """The number that was written: 1e-05 for its float32 in the file, 9.999999747e-06."""
    return float(str(np.float32(value)))


def _open(path: Path) -> tuple[dict[str, Any], dict[str, ReaderTensor]]:
    """Metadata and tensors by name, the latter mapped and not read.

    The reader itself goes: it holds 100 MB of small arrays for a vocabulary of 49152.
    """
    try:
        from gguf import GGUFReader
    except ImportError as error:
        raise ValueError(
            f"Reading {path} needs the gguf package: pip install jllm[gguf]"
        ) from error
    try:
        reader = GGUFReader(path)
        metadata = {key: field.contents() for key, field in reader.fields.items()}
    except Exception as error:  # of no type in particular: what numpy says of a short file
        raise ValueError(f"{path} is damaged or no GGUF file: {error}.") from error
    if reader.byte_order != "I":
        raise ValueError(f"{path} has the byte order of another machine; convert it first.")
    return metadata, {tensor.name: tensor for tensor in reader.tensors}


def _rope_scaling(m: Mapping[str, Any], context: int) -> RopeScaling | None:
    """From the ``rope.scaling.*`` keys, as llama.cpp reads them."""
    prefix = "rope.scaling."
    rope = {key.removeprefix(prefix): m[key] for key in m if key.startswith(prefix)}
    if unknown := sorted(rope.keys() - _ROPE_KEYS):
        raise ValueError(
            f"GGUF key {prefix}{unknown[0]} is not supported; known are {', '.join(_ROPE_KEYS)}."
        )
    factor = rope.get("factor", m.get("rope.scale_linear"))
    kind = rope.get("type", "linear")  # llama.cpp's default, which needs a factor to count
    if kind not in ("none", "linear", "yarn"):
        raise ValueError(f"Unknown GGUF rope scaling type {kind!r}; known are none, linear, yarn.")
    if kind == "none" or not factor:
        return None
    original = rope.get("original_context_length") or context
    if kind == "linear":
        return RopeScaling("linear", float(factor), context)
    return RopeScaling(
        "yarn",
        float(factor),
        original,
        beta_fast=float(rope.get("yarn_beta_fast", 32.0)),
        beta_slow=float(rope.get("yarn_beta_slow", 1.0)),
    )


def _llama3_scaling(config: ModelConfig, divisors: npt.NDArray[Any]) -> RopeScaling | None:
    """The Llama 3 scaling that ``rope_freqs.weight`` spells out.

    The tensor holds by what each rotary frequency is divided. Its largest value is the factor;
    the other three parameters are those of every Llama 3, and must reproduce the tensor.
    """
    found = np.asarray(divisors, np.float32)
    if np.all(found == 1):
        return config.rope_scaling
    scaling = RopeScaling("llama3", float(found.max()), 8192, 1.0, 4.0)
    base, _ = rope_frequencies(replace(config, rope_scaling=None))
    scaled, _ = rope_frequencies(replace(config, rope_scaling=scaling))
    fits = found.shape == base.shape and np.allclose(found, base / scaled, rtol=1e-3, atol=0)
    if config.rope_scaling is not None or not fits:
        raise ValueError(
            "rope_freqs.weight does not hold the rope scaling of a Llama 3 (factor "
            f"{scaling.factor:g}, low_freq_factor 1, high_freq_factor 4, original context 8192)."
        )
    return scaling


def _unpermuted(array: npt.NDArray[Any], head_dim: int) -> npt.NDArray[Any]:
    """Puts the rows of a query or key matrix back into Hugging Face's order.

    llama.cpp rotates neighbours where Hugging Face rotates halves, so its converter interleaves
    the two halves of every head: rows 0 1 2 3 become 0 2 1 3 for a head of four.
    """
    halves = array.reshape(-1, head_dim // 2, 2, *array.shape[1:])
    return halves.swapaxes(1, 2).reshape(array.shape)
