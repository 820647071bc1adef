"""Where and how a benchmark ran: versions, GPU, driver, flags, command, commit."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def environment(command: Sequence[str], commit: str | None, *, device: bool) -> dict[str, Any]:
    """Versions, GPU, driver, flags, command and commit.

    Args:
      command: the arguments after ``python -m jllm.bench``.
      commit: instead of the checkout's, where that does not say.
      device: ask JAX which device it uses; False leaves the GPU to the processes that need it.
    """
    env: dict[str, Any] = {
        package: _version(package)
        for package in ("jllm", "jax", "jaxlib", "jax-triton", "triton", "numpy")
    }
    env["python"] = platform.python_version()
    gpu, driver = _nvidia_smi()
    if device:
        import jax

        first = jax.local_devices()[0]
        env["backend"] = jax.default_backend()
        env["num_devices"] = jax.local_device_count()
        gpu = first.device_kind if first.platform == "gpu" else None
    env |= {
        "gpu": gpu,
        "driver": driver,
        "cpu": _cpu_name(),
        "cpu_cores": os.cpu_count(),
        "xla_flags": os.environ.get("XLA_FLAGS", ""),
        "variables": {k: v for k, v in sorted(os.environ.items()) if _matters(k)},
        "command": shlex.join(["python", "-m", "jllm.bench", *command]),
        "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }
    head = None if commit else _output("git", "rev-parse", "HEAD")
    env["commit"] = commit or head
    env["dirty"] = bool(_output("git", "status", "--porcelain", "-uno")) if head else None
    return env


def _matters(variable: str) -> bool:
    return variable.startswith(("JAX_", "XLA_PYTHON_", "JLLM_", "TF_GPU_", "CUDA_VISIBLE"))


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        # Imported from a bare checkout.
        return getattr(sys.modules.get(package), "__version__", None)


def _nvidia_smi() -> tuple[str | None, str | None]:
    """Name of the first GPU, and the driver's version."""
    line = _output("nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader")
    parts = [part.strip() for part in line.splitlines()[0].split(",")] if line else []
    return (parts[0], parts[1]) if len(parts) == 2 else (None, None)


def _output(*command: str) -> str:
    """What a program prints, or nothing if it fails or does not exist."""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=20, cwd=Path(__file__).parent
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def _cpu_name() -> str:
    try:
        info = Path("/proc/cpuinfo").read_text()
    except OSError:
        return platform.processor()
    found = re.search(r"model name\s*:\s*(.+)", info)
    return found.group(1) if found else platform.processor()
