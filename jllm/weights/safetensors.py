"""Reads a Hugging Face model folder: ``config.json``, tokenizer files, safetensors."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy.typing as npt
from safetensors import SafetensorError, safe_open

from jllm.config import ModelConfig
from jllm.models.families import token_ids
from jllm.parallel.mesh import Mesh
from jllm.params import Params
from jllm.tokenizer import Tokenizer
from jllm.weights.layout import Checkpoint, TensorInfo, assemble, is_junk, some

__all__ = ["load"]

_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_DTYPES = ("F32", "F16", "BF16")


def load(folder: Path, dtype: Any, mesh: Mesh | None = None) -> Params:
    """Loads a model folder.

    The ids that end a generation are the union of what config.json, generation_config.json and
    the tokenizer say: chat models often list their end-of-turn token in only one of them.

    Raises:
      FileNotFoundError: there is no config.json, no weights, or a shard is missing.
      ValueError: a file is damaged, or the tensors do not fit the config.
    """
    config = ModelConfig.from_hf(folder)
    checkpoint = _open(folder)
    generation = folder / "generation_config.json"
    stop = _read_json(generation).get("eos_token_id") if generation.is_file() else None
    tokenizer = Tokenizer.from_folder(folder)
    known = tokenizer.eos_token_id if tokenizer is not None else None
    config = replace(config, eos_token_ids=token_ids(config.eos_token_ids, stop, known))
    return assemble(config, checkpoint, dtype, tokenizer, mesh)


def _open(folder: Path) -> Checkpoint:
    """Reads the headers of all shards, and holds them against the index if there is one."""
    tensors: dict[str, TensorInfo] = {}
    if (folder / _SINGLE).is_file() or not (folder / _INDEX).is_file():
        tensors.update(_header(_only_file(folder)))
    else:
        for shard, promised in _shards(folder).items():
            held = _header(shard)
            if lacking := promised - held.keys():
                raise ValueError(f"{shard} lacks {some(lacking)}, which {_INDEX} places in it.")
            if extra := {name for name in held.keys() - promised if not is_junk(name)}:
                raise ValueError(
                    f"{shard} holds {some(extra)}, which {_INDEX} does not place in it."
                )
            tensors.update(held)

    def read(name: str, part: tuple[slice, ...]) -> npt.NDArray[Any]:
        # Opened anew each time: a mapping that stays open keeps every page ever read resident.
        with safe_open(tensors[name].file, framework="numpy") as file:
            array: npt.NDArray[Any] = file.get_slice(name)[part]
        return array

    return Checkpoint(folder, "hf", _DTYPES, tensors, read)


def _header(file: Path) -> dict[str, TensorInfo]:
    try:
        with safe_open(file, framework="numpy") as opened:
            names: list[str] = opened.keys()
            slices = [opened.get_slice(name) for name in names]
            infos = [TensorInfo(tuple(s.get_shape()), s.get_dtype(), file) for s in slices]
            return dict(zip(names, infos, strict=True))
    except SafetensorError as error:
        raise ValueError(f"{file} is damaged or no safetensors file: {error}.") from error


def _only_file(folder: Path) -> Path:
    """``model.safetensors``, or the one file of another name that there is."""
    files = [folder / _SINGLE] if (folder / _SINGLE).is_file() else []
    files = files or sorted(folder.glob("*.safetensors"))
    if not files:
        raise FileNotFoundError(f"{folder} has neither {_SINGLE} nor {_INDEX}.")
    if len(files) > 1:
        raise ValueError(
            f"{folder} has {len(files)} safetensors files, but no {_INDEX} that says what is where."
        )
    return files[0]


def _shards(folder: Path) -> dict[Path, set[str]]:
    """Every shard that the index names, all present, with the tensors it should hold."""
    weight_map = _read_json(folder / _INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ValueError(f"{folder / _INDEX} has no weight_map.")
    shards: dict[Path, set[str]] = {}
    for name, file in weight_map.items():
        shards.setdefault(folder / file, set()).add(name)
    for shard, names in shards.items():
        if not shard.is_file():
            raise FileNotFoundError(
                f"{_INDEX} names {shard}, which does not exist; it should hold {some(names)}."
            )
    return shards


def _read_json(file: Path) -> dict[str, Any]:
    try:
        parsed = json.loads(file.read_text())
    except ValueError as error:
        raise ValueError(f"{file} is not valid JSON: {error}.") from error
    if not isinstance(parsed, dict):
        raise ValueError(f"{file} must hold a JSON object, not {type(parsed).__name__}.")
    return parsed
