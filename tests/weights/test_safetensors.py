"""Model folders: what loads, where every tensor lands, and what is refused by name."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from jllm.config import ModelConfig
from jllm.params import Params, param_shapes
from jllm.tokenizer import Tokenizer
from jllm.weights import layout, safetensors
from tests.weights.checkpoints import assert_holds, hf_config, hf_tensors, write_folder

CONFIGS = {
    "llama": hf_config(),
    "llama-tied": hf_config(tie_word_embeddings=True),
    "llama-with-all-biases": hf_config(attention_bias=True, mlp_bias=True),
    "llama-multi-head": hf_config(num_key_value_heads=6),
    "llama-multi-query": hf_config(num_key_value_heads=1),
    "mistral": hf_config("MistralForCausalLM", sliding_window=8),
    "qwen2": hf_config("Qwen2ForCausalLM"),
    "qwen3": hf_config("Qwen3ForCausalLM", tie_word_embeddings=True),
}
INDEX = "model.safetensors.index.json"


def load(folder: Path, dtype: Any = jnp.float32) -> Params:
    return safetensors.load(folder, dtype)


def edit_index(folder: Path, **weight_map: str) -> None:
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"] |= weight_map
    (folder / INDEX).write_text(json.dumps(index))


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_every_tensor_lands_where_the_layout_says(tmp_path: Path, config: dict[str, Any]) -> None:
    tensors = hf_tensors(config)
    params = load(write_folder(tmp_path, config, tensors))
    assert_holds(params, tensors)
    assert params.config == ModelConfig.from_hf(config)
    assert params.tokenizer is None
    shapes = param_shapes(params.config)
    assert jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), params).layers == (
        jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), shapes).layers
    )


@pytest.mark.parametrize("stored", [np.float32, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("wanted", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_dtypes_convert_by_rounding_each_element(tmp_path: Path, stored: Any, wanted: Any) -> None:
    config = hf_config(num_hidden_layers=1)
    tensors = {name: t.astype(stored) for name, t in hf_tensors(config).items()}
    params = load(write_folder(tmp_path, config, tensors), wanted)
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {jnp.dtype(wanted)}
    assert_holds(params, {name: t.astype(jnp.dtype(wanted)) for name, t in tensors.items()})


def test_shards_load_as_one(tmp_path: Path) -> None:
    tensors = hf_tensors(hf_config())
    assert_holds(load(write_folder(tmp_path, hf_config(), tensors, shards=3)), tensors)


def test_a_single_file_of_another_name_loads(tmp_path: Path) -> None:
    tensors = hf_tensors(hf_config())
    write_folder(tmp_path, hf_config(), tensors)
    (tmp_path / "model.safetensors").rename(tmp_path / "weights.safetensors")
    assert_holds(load(tmp_path), tensors)


def test_a_tied_model_ignores_a_stored_head_and_old_rotary_tables(tmp_path: Path) -> None:
    config = CONFIGS["llama-tied"]
    tensors = hf_tensors(config)
    extra = {
        "lm_head.weight": tensors["model.embed_tokens.weight"].copy(),
        "model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(2, np.float32),
    }
    assert_holds(load(write_folder(tmp_path, config, tensors | extra)), tensors)


def test_end_ids_are_the_union_of_config_generation_config_and_tokenizer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = hf_config(eos_token_id=7)
    write_folder(tmp_path, config, hf_tensors(config))
    assert load(tmp_path).config.eos_token_ids == (7,)
    generation = tmp_path / "generation_config.json"
    generation.write_text(json.dumps({"eos_token_id": 5}))
    assert load(tmp_path).config.eos_token_ids == (7, 5)
    generation.write_text(json.dumps({"eos_token_id": [5, 7, 0]}))
    tokenizer = SimpleNamespace(eos_token_id=3)
    monkeypatch.setattr(Tokenizer, "from_folder", lambda path: tokenizer)
    params = load(tmp_path)
    assert params.config.eos_token_ids == (7, 5, 0, 3)
    assert params.tokenizer is tokenizer


def test_nothing_is_read_before_all_headers_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = hf_tensors(hf_config())
    tensors["model.layers.1.mlp.down_proj.weight"] = np.ones((10, 149), np.float32)
    write_folder(tmp_path, hf_config(), tensors, shards=2)
    monkeypatch.setattr(layout._Reader, "leaf", lambda *args: pytest.fail("read a tensor"))
    with pytest.raises(ValueError, match="down_proj"):
        load(tmp_path)


def test_a_missing_shard_is_named_with_tensors_it_should_hold(tmp_path: Path) -> None:
    write_folder(tmp_path, hf_config(), hf_tensors(hf_config()), shards=2)
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    message = r"model-00002-of-00002\.safetensors, which does not exist; it should hold model\."
    with pytest.raises(FileNotFoundError, match=message):
        load(tmp_path)


@pytest.mark.parametrize("keep", [0, 5, 100, -1])
def test_a_truncated_shard_is_named(tmp_path: Path, keep: int) -> None:
    write_folder(tmp_path, hf_config(), hf_tensors(hf_config()), shards=2)
    shard = tmp_path / "model-00001-of-00002.safetensors"
    shard.write_bytes(shard.read_bytes()[:keep])
    message = r"model-00001-of-00002\.safetensors is damaged or no safetensors file"
    with pytest.raises(ValueError, match=message):
        load(tmp_path)


def test_a_git_lfs_pointer_is_no_safetensors_file(tmp_path: Path) -> None:
    write_folder(tmp_path, hf_config(), {})
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"
    (tmp_path / "model.safetensors").write_text(pointer)
    with pytest.raises(ValueError, match=r"model\.safetensors is damaged or no safetensors file"):
        load(tmp_path)


def test_missing_tensors_are_named(tmp_path: Path) -> None:
    tensors = hf_tensors(hf_config())
    del tensors["model.layers.1.self_attn.k_proj.weight"]
    write_folder(tmp_path, hf_config(), tensors)
    with pytest.raises(ValueError, match=r"lacks model\.layers\.1\.self_attn\.k_proj\.weight, whi"):
        load(tmp_path)
    write_folder(tmp_path, hf_config(num_hidden_layers=3), tensors)
    with pytest.raises(ValueError, match=r"lacks model\.layers\.1\..*, model.* and 7 more, which"):
        load(tmp_path)


def test_an_untied_model_without_a_head_is_refused(tmp_path: Path) -> None:
    tensors = hf_tensors(CONFIGS["llama-tied"])
    write_folder(tmp_path, hf_config(), tensors)
    with pytest.raises(ValueError, match=r"has no lm_head\.weight, but its config does not tie"):
        load(tmp_path)


def test_left_over_tensors_are_named_with_their_file(tmp_path: Path) -> None:
    tensors = hf_tensors(CONFIGS["qwen2"])
    write_folder(tmp_path, hf_config("MistralForCausalLM"), tensors)
    message = r"model\.safetensors holds model\.layers\.0\.self_attn\.k_proj\.bias, .* a mistral"
    with pytest.raises(ValueError, match=message):
        load(tmp_path)


def test_a_wrong_shape_is_named_with_both_shapes(tmp_path: Path) -> None:
    tensors = hf_tensors(hf_config())
    tensors["model.layers.0.self_attn.v_proj.weight"] = np.ones((10, 8), np.float32)
    write_folder(tmp_path, hf_config(), tensors)
    message = (
        r"model\.layers\.0\.self_attn\.v_proj\.weight in .*model\.safetensors has shape \(10, 8\), "
        r"but the config asks for \(8, 10\)"
    )
    with pytest.raises(ValueError, match=message):
        load(tmp_path)


def test_a_dtype_that_is_no_float_is_refused(tmp_path: Path) -> None:
    tensors = hf_tensors(hf_config())
    tensors["model.norm.weight"] = np.ones(10, np.int8)
    write_folder(tmp_path, hf_config(), tensors)
    message = r"model\.norm\.weight in .* is of type I8; jllm reads F32, F16, BF16"
    with pytest.raises(ValueError, match=message):
        load(tmp_path)


def test_an_index_that_is_wrong_about_a_shard_is_refused(tmp_path: Path) -> None:
    write_folder(tmp_path, hf_config(), hf_tensors(hf_config()), shards=2)
    first, second = (f"model-0000{i}-of-00002.safetensors" for i in (1, 2))
    edit_index(tmp_path, **{"model.extra.weight": second})
    with pytest.raises(ValueError, match=rf"{second} lacks model\.extra\.weight, which {INDEX}"):
        load(tmp_path)
    index = json.loads((tmp_path / INDEX).read_text())["weight_map"]
    del index["model.extra.weight"]
    name = next(name for name, file in index.items() if file == first)
    del index[name]
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": index}))
    with pytest.raises(ValueError, match=rf"{first} holds {name}, which {INDEX} does not place"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is not valid JSON"),
        ("[]", "must hold a JSON object, not list"),
        ("{}", "has no weight_map"),
        ('{"weight_map": {}}', "has no weight_map"),
    ],
)
def test_a_damaged_index_is_named(tmp_path: Path, text: str, message: str) -> None:
    write_folder(tmp_path, hf_config(), hf_tensors(hf_config()), shards=2)
    (tmp_path / INDEX).write_text(text)
    with pytest.raises(ValueError, match=rf"{INDEX} {message}"):
        load(tmp_path)


def test_a_folder_without_weights_or_with_too_many_says_so(tmp_path: Path) -> None:
    write_folder(tmp_path, hf_config(), {})
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=rf"has neither model\.safetensors nor {INDEX}"):
        load(tmp_path)
    for name in "ab":
        save_file({"x": np.ones(1)}, tmp_path / f"{name}.safetensors")
    with pytest.raises(ValueError, match=rf"has 2 safetensors files, but no {INDEX}"):
        load(tmp_path)


def test_a_damaged_generation_config_is_named(tmp_path: Path) -> None:
    write_folder(tmp_path, hf_config(), hf_tensors(hf_config()))
    (tmp_path / "generation_config.json").write_text("{")
    with pytest.raises(ValueError, match=r"generation_config\.json is not valid JSON"):
        load(tmp_path)
