"""The one door to jax-triton: version shim, launch, and whether kernels can run here."""

from __future__ import annotations

import functools
import importlib
import os
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import jax

BACKEND_OPTIONS = {
    # Triton writes the newest PTX that its own assembler reads; XLA's may be older. CUDA 12.7's:
    "ptx_version": 86,
    "enable_fp_fusion": True,  # the default, said aloud: Triton 3.9 warns that it will change
}

# A context that jit's caches heed: what was traced for one GPU is not taken for another.
_target = jax.make_user_context(default_value=None)


def compiling_for(compute_capability: int) -> AbstractContextManager[None]:
    """Inside, functions are traced for an NVIDIA GPU of this compute capability (90 is 9.0), which
    need not be here."""
    context: AbstractContextManager[None] = _target(compute_capability)
    return context


def available() -> bool:
    """Whether kernels run: JAX's default device is an NVIDIA GPU, or one is compiled for, and
    jax-triton is installed."""
    return (_target.value is not None or jax.default_backend() == "gpu") and _installed()


@functools.cache
def _installed() -> bool:
    try:
        _jax_triton()
    except ImportError:
        return False
    return True


@functools.cache
def _jax_triton() -> Any:
    """jax_triton, importable on triton 3.6 too: there its import of the NVIDIA backend fails on
    the missing ``TMA_TF32``, it swallows that, and every kernel fails later to lower."""
    try:
        driver = importlib.import_module("triton.backends.nvidia.driver")
        if not hasattr(driver, "TMA_TF32"):
            driver.TMA_TF32 = 11  # type: ignore[attr-defined]
        return importlib.import_module("jax_triton")
    except ImportError as error:
        raise ImportError(
            "Triton kernels need jax-triton: install jllm[cuda13] or jllm[cuda12]."
        ) from error


def triton_call(
    *arguments: jax.Array | int,
    kernel: Any,
    out_type: Any,
    grid: tuple[int, ...],
    num_warps: int,
    num_stages: int,
    in_place: Sequence[int] = (),
    **constants: Any,
) -> Any:
    """Launches a Triton kernel inside a jitted function.

    Args:
      arguments: the kernel's operands, and integers; its outputs follow them as pointers, in the
        order of out_type. A kernel is compiled once for all integers, but for 1 and for whether
        16 divides them: sizes that differ from one step to the next are better no constants.
      kernel: a function under ``triton.jit``.
      out_type: a pytree of ShapeDtypeStructs.
      grid: programs along each axis.
      num_warps, num_stages: of the launch.
      in_place: places in ``arguments`` of arrays that the kernel updates; nothing is copied if the
        array is donated or a temporary.
      constants: the kernel's constexprs, by name.

    Returns:
      The outputs as in ``out_type``; with ``in_place`` a pair of these and the updated arrays.

    Raises:
      ImportError: jax-triton is not installed; the extras cuda12 and cuda13 bring it.
    """
    if os.environ.get("TRITON_INTERPRET") == "1":
        from jllm.kernels.interpreter import interpret

        outputs, updated = interpret(arguments, kernel, out_type, grid, tuple(in_place), constants)
        return (outputs, updated) if in_place else outputs
    options: dict[str, Any] = {"backend_options": BACKEND_OPTIONS}
    if _target.value is not None:
        options["compute_capability"] = _target.value
    refs = {index: jax.new_ref(arguments[index]) for index in in_place}
    outputs = _jax_triton().triton_call(
        *(refs.get(index, argument) for index, argument in enumerate(arguments)),
        kernel=kernel,
        out_type=out_type,
        grid=grid,
        num_warps=num_warps,
        num_stages=num_stages,
        **options,
        **constants,
    )
    return (outputs, [ref[...] for ref in refs.values()]) if in_place else outputs
