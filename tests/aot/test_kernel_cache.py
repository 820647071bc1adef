"""Kernels compiled for an H200 are found on disk, and are the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax_triton import triton_lib

from jllm.kernels.kernel_cache import keep_kernels
from jllm.kernels.norm import add_norm
from jllm.kernels.norm_kernels import add_norm_kernel
from jllm.kernels.triton_call import compiling_for

pytestmark = pytest.mark.aot


def lowered() -> str:
    """A program with a kernel, as a new process lowers it."""
    add_norm_kernel.__dict__.pop("_jT_kernel_cache", None)
    x, weight = jnp.zeros((8, 512), jnp.bfloat16), jnp.zeros(512, jnp.bfloat16)
    with compiling_for(90):
        traced = jax.jit(lambda x, weight: add_norm(x, None, weight, 1e-5)).trace(x, weight)
        return traced.lower(lowering_platforms=("cuda",)).as_text()


def test_kernels_are_found_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[Any] = []
    compile_it = triton_lib.compile_ttir_inplace

    def counting(*args: Any) -> Any:
        compiled.append(args)
        return compile_it(*args)

    monkeypatch.setattr(triton_lib, "compile_ttir_inplace", counting)
    with compiling_for(90):
        keep_kernels(tmp_path)
    first = lowered()
    assert len(compiled) == len(list(tmp_path.iterdir())) == 1
    assert lowered() == first
    assert len(compiled) == 1
