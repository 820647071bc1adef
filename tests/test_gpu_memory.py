"""Importing jllm lets JAX take nearly all of a GPU's memory, if that can still be said."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from jllm.gpu_memory import FRACTION, JAX_FRACTION, VARIABLES

SHOW = "; import jllm; from jllm.gpu_memory import memory_fraction; print(memory_fraction())"


@pytest.mark.parametrize(
    ("before", "variables", "fraction"),
    [
        pytest.param("import jax", {}, FRACTION, id="in-time"),
        pytest.param("import jax; jax.random.key(0)", {}, JAX_FRACTION, id="too-late"),
        pytest.param("import jax", {VARIABLES[0]: "0.5"}, 0.5, id="users-own"),
        pytest.param("import jax", {VARIABLES[1]: "0.4"}, 0.4, id="users-own-old-name"),
    ],
)
def test_memory_that_jax_takes(before: str, variables: dict[str, str], fraction: float) -> None:
    rest = {name: value for name, value in os.environ.items() if name not in VARIABLES}
    command = [sys.executable, "-c", before + SHOW]
    done = subprocess.run(
        command, env={**rest, **variables}, capture_output=True, text=True, check=True
    )
    assert float(done.stdout) == fraction
