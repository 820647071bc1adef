"""Tests run on the CPU; with JLLM_TEST_GPU=1 (`make test-gpu`) on a GPU, or not at all."""

import os

import hypothesis
import pytest

ON_GPU = os.environ.get("JLLM_TEST_GPU") == "1"
if not ON_GPU:
    # Read when jax is imported, here and in the tests' subprocesses.
    os.environ["JAX_PLATFORMS"] = "cpu"
    # Tests compile hundreds of tiny programs and run each for milliseconds: without LLVM's costly
    # passes they compile in half the time. Matrix products are library calls all the same.
    os.environ["XLA_FLAGS"] = (
        os.environ.get("XLA_FLAGS", "")
        + " --xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
    )

# The first example of a property compiles and so takes far longer than the default limit.
hypothesis.settings.register_profile("jllm", hypothesis.settings(), deadline=None)
hypothesis.settings.load_profile("jllm")


def pytest_sessionstart() -> None:
    if ON_GPU:
        import jax

        if jax.default_backend() != "gpu":
            pytest.exit(
                "JLLM_TEST_GPU=1, but JAX sees no GPU: is jllm[cuda13] or [cuda12] installed?", 1
            )


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") and not ON_GPU:
        pytest.skip("needs a GPU: run `make test-gpu`, or set JLLM_TEST_GPU=1")
