"""XLA's programs: how many were compiled, and where they are kept."""

from __future__ import annotations

import functools
import os
import threading
from pathlib import Path

import jax

from jllm.kernels.kernel_cache import keep_kernels

_compiles = 0
_compile_s = 0.0
_lock = threading.Lock()  # programs are compiled in several threads


def compiles_so_far() -> int:
    """Programs that this process has compiled or read from the compilation cache."""
    _listen_for_compiles()
    return _compiles


def compile_seconds_so_far() -> float:
    """How long that took, in seconds. Counting begins with the first question."""
    _listen_for_compiles()
    return _compile_s


@functools.cache
def _listen_for_compiles() -> None:
    def listener(event: str, duration_secs: float, **kwargs: str | int) -> None:
        global _compiles, _compile_s
        if event == "/jax/core/compile/backend_compile_duration":
            with _lock:
                _compiles += 1
                _compile_s += duration_secs

    jax.monitoring.register_event_duration_secs_listener(listener)


@functools.cache
def use_compilation_cache() -> None:
    """Keeps compiled programs on disk, and the Triton kernels in them, so that a second start
    compiles nothing: in ``$XDG_CACHE_HOME/jllm`` (``~/.cache/jllm``), unless the user configured
    JAX's compilation cache, or turned it off (``JAX_ENABLE_COMPILATION_CACHE=0``)."""
    if not jax.config.jax_enable_compilation_cache:
        return
    if not jax.config.jax_compilation_cache_dir:
        root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        jax.config.update("jax_compilation_cache_dir", str(Path(root) / "jllm" / "xla"))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    folder = jax.config.jax_compilation_cache_dir
    if "://" not in folder:  # JAX also writes to buckets
        keep_kernels(Path(folder) / "triton")
