"""Keeps compiled Triton kernels on disk.

jax-triton compiles every kernel in every process, and must have, before XLA can look whether it
knows the program that the kernel is in: the 32 kernels of the steps of an 8B model take 19 s on one
core. What is kept is found by its Triton IR, which takes Python 30 ms a kernel to write.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import os
import tempfile
import threading
from collections import defaultdict
from collections.abc import Callable
from importlib import import_module, metadata
from pathlib import Path
from typing import Any

from jllm.kernels import triton_call

logger = logging.getLogger("jllm")

Compile = Callable[[Any, Any, Any, Any], Any]  # (Triton IR, backend, options, GPU) -> kernel


def keep_kernels(folder: Path) -> None:
    """Kernels that this process compiles from now on are kept in ``folder``, or found there.

    Does nothing where kernels do not run.
    """
    if not triton_call.available():
        return
    library: Any = import_module("jax_triton.triton_lib")
    compiled = getattr(library.compile_ttir_inplace, "__wrapped__", library.compile_ttir_inplace)
    library.compile_ttir_inplace = kept(compiled, library.CompilationResult, folder)


def kept(compiled: Compile, result: Callable[..., Any], folder: Path) -> Compile:
    """``compiled``, whose results are dataclasses ``result`` of what JSON can hold, with a file in
    ``folder`` for each."""
    locks: defaultdict[str, threading.Lock] = defaultdict(threading.Lock)

    def find(ttir: Any, backend: Any, options: Any, target: Any) -> Any:
        versions = [metadata.version(name) for name in ("triton", "jax-triton")]
        key = "\n".join((*versions, repr(target), repr(options), _environment(), str(ttir)))
        name = hashlib.sha256(key.encode()).hexdigest()
        path = folder / f"{name}.json"
        with locks[name]:  # programs with the same kernels are compiled in several threads
            try:
                return result(**json.loads(path.read_text()))
            except FileNotFoundError:
                pass
            except (OSError, ValueError, TypeError) as error:
                logger.warning("The compiled kernel %s cannot be read: %s", path, error)
            kernel = compiled(ttir, backend, options, target)
            try:
                _write(path, json.dumps(dataclasses.asdict(kernel)))
            except OSError as error:
                logger.warning("A compiled kernel cannot be kept in %s: %s", folder, error)
            return kernel

    find.__wrapped__ = compiled  # type: ignore[attr-defined]
    return find


def _environment() -> str:
    """What else Triton's compiler heeds."""
    library = import_module("triton._C.libtriton")
    return repr(sorted(library.get_cache_invalidating_env_vars().items()))


def _write(path: Path, text: str) -> None:
    """All of it or nothing: other processes read at any time."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as file:
        file.write(text)
    os.replace(file.name, path)
