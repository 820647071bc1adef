"""The one door to jax-triton: version shim, and whether kernels can run here."""

from __future__ import annotations

import functools
import importlib
from typing import Any

import jax


@functools.cache
def available() -> bool:
    """Whether kernels run: JAX's default device is an NVIDIA GPU and jax-triton is installed."""
    if jax.default_backend() != "gpu":
        return False
    try:
        _jax_triton()
    except ImportError:
        return False
    return True


@functools.cache
def _jax_triton() -> Any:
    """jax_triton, importable on triton 3.6 too: there its import of the NVIDIA backend fails on
    the missing ``TMA_TF32``, it swallows that, and every kernel fails later to lower."""
    driver = importlib.import_module("triton.backends.nvidia.driver")
    if not hasattr(driver, "TMA_TF32"):
        driver.TMA_TF32 = 11  # type: ignore[attr-defined]
    return importlib.import_module("jax_triton")


def triton_call(
    *arrays: jax.Array,
    kernel: Any,
    out_type: Any,
    grid: tuple[int, ...],
    num_warps: int,
    num_stages: int,
    compute_capability: int | None = None,
    **constants: Any,
) -> Any:
    """Launches a Triton kernel inside a jitted function.

    Args:
      arrays: the kernel's inputs; its outputs follow them as pointers, in the order of out_type.
      kernel: a function under ``triton.jit``.
      out_type: a pytree of ShapeDtypeStructs.
      grid: programs along each axis.
      num_warps, num_stages: of the launch.
      compute_capability: to compile for, 90 for an H200; the device's own unless given.
      constants: the kernel's constexprs, by name.

    Raises:
      ImportError: jax-triton is not installed; the extras cuda12 and cuda13 bring it.
    """
    options = {} if compute_capability is None else {"compute_capability": compute_capability}
    return _jax_triton().triton_call(
        *arrays,
        kernel=kernel,
        out_type=out_type,
        grid=grid,
        num_warps=num_warps,
        num_stages=num_stages,
        **options,
        **constants,
    )
