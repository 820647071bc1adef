"""config.json to ModelConfig, held against the config classes of transformers."""

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from jllm.config import ModelConfig, RopeScaling
from jllm.models.families import FAMILIES, config_from_hf, token_ids

SIZES = dict(
    vocab_size=11,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=3,
    num_attention_heads=32,
    max_position_embeddings=1024,
)
ARCHITECTURES = list(FAMILIES)


def config(architecture: str = "LlamaForCausalLM", **keys: Any) -> ModelConfig:
    return config_from_hf({"architectures": [architecture], **SIZES, **keys})


def transformers_config(architecture: str, **keys: Any) -> Any:
    return AutoConfig.for_model(FAMILIES[architecture].name, **keys)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_absent_keys_mean_what_transformers_takes_them_to_mean(architecture: str) -> None:
    given = {k: v for k, v in SIZES.items() if k != "max_position_embeddings"}
    ours = config_from_hf({"architectures": [architecture], **given})
    theirs = transformers_config(architecture, **given)
    assert ours.num_kv_heads == theirs.num_key_value_heads
    assert ours.head_dim == getattr(theirs, "head_dim", 64 // 32)
    assert ours.max_position_embeddings == theirs.max_position_embeddings
    assert ours.rms_norm_eps == theirs.rms_norm_eps
    assert ours.rope_theta == theirs.rope_parameters["rope_theta"]
    assert ours.rope_scaling is None
    assert ours.tie_embeddings == theirs.tie_word_embeddings
    assert ours.sliding_window == getattr(theirs, "sliding_window", None)
    assert ours.bos_token_id == theirs.bos_token_id
    assert ours.eos_token_ids == token_ids(theirs.eos_token_id)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize(
    "keys",
    [
        pytest.param({}, id="plain"),
        pytest.param(dict(tie_word_embeddings=True, eos_token_id=[3, 4]), id="tied"),
        pytest.param(dict(attention_bias=True, mlp_bias=True), id="biases"),
        pytest.param(dict(num_key_value_heads=4, head_dim=16, rms_norm_eps=1e-5), id="sizes"),
        pytest.param(
            dict(sliding_window=7, use_sliding_window=True, max_window_layers=2), id="swa"
        ),
        pytest.param(
            dict(rope_theta=5e5, rope_scaling=dict(type="linear", factor=2.0)), id="linear"
        ),
        pytest.param(
            dict(
                rope_theta=5e5,
                rope_scaling=dict(
                    rope_type="llama3",
                    factor=8.0,
                    low_freq_factor=1.0,
                    high_freq_factor=4.0,
                    original_max_position_embeddings=512,
                ),
            ),
            id="llama3",
        ),
        pytest.param(dict(rope_scaling=dict(type="yarn", factor=4.0, beta_fast=16)), id="yarn"),
    ],
)
def test_a_config_means_the_same_before_and_after_transformers_5_saves_it(
    architecture: str, keys: dict[str, Any]
) -> None:
    old = {**SIZES, **json.loads(json.dumps(keys))}
    ours = config_from_hf({"architectures": [architecture], **old})
    new = transformers_config(architecture, **json.loads(json.dumps(old))).to_dict()
    assert "rope_parameters" in new and "rope_scaling" not in new
    theirs = config_from_hf({**new, "architectures": [architecture]})
    for field in fields(ModelConfig):
        # Saving makes yarn's implied original context explicit, which lets us stretch it.
        if field.name != "max_position_embeddings":
            assert getattr(ours, field.name) == getattr(theirs, field.name), field.name


@pytest.mark.parametrize(
    ("architecture", "qkv", "o", "mlp"),
    [
        ("LlamaForCausalLM", True, True, True),
        ("MistralForCausalLM", False, False, False),
        ("Qwen2ForCausalLM", True, False, False),
        ("Qwen3ForCausalLM", True, True, False),
    ],
)
def test_bias_keys_apply_to_the_projections_that_have_them(
    architecture: str, qkv: bool, o: bool, mlp: bool
) -> None:
    ours = config(architecture, attention_bias=True, mlp_bias=True)
    assert (ours.qkv_bias, ours.o_bias, ours.mlp_bias) == (qkv, o, mlp)
    ours = config(architecture)
    is_qwen2 = architecture == "Qwen2ForCausalLM"
    assert (ours.qkv_bias, ours.o_bias, ours.mlp_bias) == (is_qwen2, False, False)
    assert ours.qk_norm == (architecture == "Qwen3ForCausalLM")


def test_a_null_head_dim_or_kv_head_count_is_derived_from_the_heads() -> None:
    ours = config("Qwen3ForCausalLM", head_dim=None, num_key_value_heads=None)
    assert (ours.head_dim, ours.num_kv_heads) == (2, 32)


@pytest.mark.parametrize(
    ("architecture", "keys", "window", "layers"),
    [
        ("LlamaForCausalLM", dict(sliding_window=5), None, ()),
        ("MistralForCausalLM", dict(sliding_window=5), 5, ()),
        ("MistralForCausalLM", dict(sliding_window=None), None, ()),
        ("Qwen2ForCausalLM", dict(sliding_window=5), None, ()),
        (
            "Qwen2ForCausalLM",
            dict(sliding_window=5, use_sliding_window=True, max_window_layers=1),
            5,
            (False, True, True),
        ),
        (
            "Qwen3ForCausalLM",
            dict(sliding_window=5, use_sliding_window=True, max_window_layers=0),
            5,
            (),
        ),
        (
            "Qwen3ForCausalLM",
            dict(sliding_window=5, use_sliding_window=True, max_window_layers=3),
            None,
            (),
        ),
        (
            "Qwen3ForCausalLM",
            dict(
                sliding_window=5,
                use_sliding_window=True,
                max_window_layers=0,
                layer_types=["sliding_attention", "full_attention", "full_attention"],
            ),
            5,
            (True, False, False),
        ),
        (
            "Qwen2ForCausalLM",
            dict(sliding_window=5, layer_types=["full_attention"] * 3),
            None,
            (),
        ),
    ],
)
def test_the_sliding_window_reaches_the_layers_its_family_means(
    architecture: str, keys: dict[str, Any], window: int | None, layers: tuple[bool, ...]
) -> None:
    ours = config(architecture, **keys)
    assert (ours.sliding_window, ours.sliding_layers) == (window, layers)


def test_rope_scaling_keeps_every_parameter_of_its_kind() -> None:
    yarn = dict(
        rope_type="yarn",
        rope_theta=1e6,
        factor=4.0,
        original_max_position_embeddings=256,
        beta_fast=16.0,
        beta_slow=2.0,
        mscale=0.7,
        mscale_all_dim=0.5,
        attention_factor=1.5,
        truncate=False,
    )
    ours = config(rope_parameters=yarn)
    assert ours.rope_theta == 1e6
    assert ours.rope_scaling == RopeScaling(
        "yarn",
        4.0,
        256,
        beta_fast=16.0,
        beta_slow=2.0,
        mscale=0.7,
        mscale_all_dim=0.5,
        attention_factor=1.5,
        truncate=False,
    )
    llama3 = dict(type="llama3", factor=32.0, low_freq_factor=2.0, high_freq_factor=8.0)
    scaling = config(rope_scaling={**llama3, "original_max_position_embeddings": 99}).rope_scaling
    assert scaling == RopeScaling("llama3", 32.0, 99, low_freq_factor=2.0, high_freq_factor=8.0)
    assert config(rope_scaling=llama3).rope_scaling == RopeScaling("llama3", 32.0, 1024, 2.0, 8.0)


def test_an_outer_original_context_wins_as_in_transformers() -> None:
    keys = dict(
        original_max_position_embeddings=128,
        rope_scaling=dict(rope_type="yarn", factor=8.0, original_max_position_embeddings=512),
    )
    theirs = transformers_config("LlamaForCausalLM", **SIZES, **json.loads(json.dumps(keys)))
    theirs.standardize_rope_params()  # which transformers' rope functions begin with
    assert theirs.rope_parameters["original_max_position_embeddings"] == 128
    assert config(**keys).rope_scaling == RopeScaling("yarn", 8.0, 128)


def test_yarn_without_a_factor_takes_the_ratio_of_the_contexts() -> None:
    yarn = dict(rope_type="yarn", factor=None, original_max_position_embeddings=256)
    assert config(rope_parameters=yarn).rope_scaling == RopeScaling("yarn", 4.0, 256)


def test_yarn_with_a_stated_original_context_stretches_the_longest_context() -> None:
    yarn = dict(type="yarn", factor=4.0, original_max_position_embeddings=1024)
    assert config(rope_scaling=yarn).max_position_embeddings == 4096
    assert config(rope_scaling=dict(type="yarn", factor=4.0)).max_position_embeddings == 1024


def test_end_of_sequence_may_be_one_id_several_or_none() -> None:
    assert config(eos_token_id=0).eos_token_ids == (0,)
    assert config(eos_token_id=[5, 3, 5]).eos_token_ids == (5, 3)
    assert config(eos_token_id=None).eos_token_ids == ()
    assert token_ids(7, [5, 7], None, (2, 5)) == (7, 5, 2)


def test_a_config_without_architectures_is_known_by_its_model_type() -> None:
    assert config_from_hf({"model_type": "qwen3", **SIZES}).family == "qwen3"


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (
            dict(architectures=["GPT2LMHeadModel"]),
            r"Unknown architecture 'GPT2LMHeadModel'; known are LlamaForCausalLM, Mistral",
        ),
        (dict(architectures=None), r"Unknown architecture None; known are LlamaForCausalLM"),
        (dict(hidden_act="gelu"), r"hidden_act must be 'silu', not 'gelu'"),
        (dict(partial_rotary_factor=0.5), r"partial_rotary_factor must be 1, not 0\.5"),
        (
            dict(rope_parameters=dict(rope_type="default", partial_rotary_factor=0.25)),
            r"partial_rotary_factor must be 1, not 0\.25",
        ),
        (
            dict(quantization_config=dict(quant_method="awq")),
            r"Quantized safetensors are not supported \(quantization_config: awq\)",
        ),
        (
            dict(rope_scaling=dict(type="dynamic", factor=2.0)),
            r"Unknown rope scaling type 'dynamic'; known are default, linear, llama3, yarn",
        ),
        (
            dict(rope_scaling=dict(rope_type="longrope", factor=2.0)),
            r"Unknown rope scaling type 'longrope'",
        ),
        (
            dict(rope_parameters=dict(full_attention=dict(rope_type="default"))),
            r"rope_parameters that differ between layers are not supported",
        ),
        (
            dict(rope_scaling=dict(rope_type="llama3", factor=8.0, low_freq_factor=1.0)),
            r"Rope scaling of type 'llama3' needs high_freq_factor",
        ),
        (dict(rope_scaling=dict(type="linear")), r"Rope scaling of type 'linear' needs factor"),
        (dict(hidden_size=None), r"The model's config has no hidden_size"),
        (dict(vocab_size="11"), r"has vocab_size '11'; it must be a positive integer"),
        (dict(hidden_size=65), r"hidden_size 65 is not a multiple of num_attention_heads 32"),
        (
            dict(architectures=["Qwen2ForCausalLM"], layer_types=["full_attention"] * 2),
            r"layer_types has 2 entries for 3 layers",
        ),
        (
            dict(architectures=["Qwen2ForCausalLM"], layer_types=["linear_attention"] * 3),
            r"layer_types has 'linear_attention'; known are full_attention and sliding_attention",
        ),
        (
            dict(architectures=["Qwen2ForCausalLM"], layer_types=["sliding_attention"] * 3),
            r"layer_types has sliding_attention, but no sliding_window is in use",
        ),
    ],
)
def test_what_jllm_does_not_have_is_refused_by_name(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        config_from_hf({"architectures": ["LlamaForCausalLM"], **SIZES, **keys})


@pytest.mark.parametrize(
    "change",
    [
        {"rope_scaling": "foo"},
        {"rope_scaling": {"type": "linear", "factor": "8"}},
        {"rope_theta": None},
        {"rope_theta": 0},
        {"rms_norm_eps": -1},
        {"architectures": [["x"]]},
        {"architectures": {"a": 1}},
        {"quantization_config": True},
        {"eos_token_id": [[1]]},
        {"eos_token_id": 10**6},
        {"layer_types": 3},
    ],
    ids=str,
)
def test_a_config_with_nonsense_in_it_is_refused_in_a_sentence(change: dict[str, object]) -> None:
    config = {
        "architectures": ["MistralForCausalLM"],
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 256,
    }
    ModelConfig.from_hf(dict(config))
    with pytest.raises(ValueError):
        ModelConfig.from_hf({**config, **change})


@pytest.mark.parametrize("text", ["[]", "null", "3", "[" * 100_000, "{"], ids=lambda t: t[:4])
def test_a_config_file_that_is_no_object_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ValueError, match=r"config\.json"):
        ModelConfig.from_hf(tmp_path)
