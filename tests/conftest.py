"""Tests run on the CPU, with kernels in Triton's interpreter; with JLLM_TEST_GPU=1 (make test-gpu)
on a GPU or not at all; with JLLM_TEST_AOT=1 (make test-aot) they are compiled for one."""

import gc
import os
import sys
import tempfile
from collections.abc import Iterator

import hypothesis
import pytest

ON_GPU = os.environ.get("JLLM_TEST_GPU") == "1"
AHEAD_OF_TIME = os.environ.get("JLLM_TEST_AOT") == "1"
# All read when jax and triton are imported, here and in the tests' subprocesses.
if not ON_GPU:
    os.environ["JAX_PLATFORMS"] = "cpu"
if AHEAD_OF_TIME:
    os.environ["JAX_SKIP_CUDA_CONSTRAINTS_CHECK"] = "1"
    os.environ["XLA_FLAGS"] = "--xla_gpu_autotune_level=0"  # would need the GPU
elif not ON_GPU:
    os.environ["TRITON_INTERPRET"] = "1"
    # Tests compile hundreds of tiny programs and run each for milliseconds: without LLVM's costly
    # passes they compile in half the time. Matrix products are library calls all the same.
    os.environ["XLA_FLAGS"] = (
        os.environ.get("XLA_FLAGS", "")
        + " --xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
    )
    # Engines of one model compile the same programs in file after file: the workers of a run and
    # their subprocesses, to which the environment goes, share what is compiled, until it ends.
    if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
        _compiled = tempfile.TemporaryDirectory(prefix="jllm-tests-")
        os.environ["JAX_COMPILATION_CACHE_DIR"] = _compiled.name
        os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"

if "JLLM_TEST_DEVICES" in os.environ:  # see tests/parallel/conftest.py
    os.environ["XLA_FLAGS"] += (
        f" --xla_force_host_platform_device_count={os.environ['JLLM_TEST_DEVICES']}"
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


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """First what takes minutes in one test: as the last, it would leave the other workers idle."""
    items.sort(key=lambda item: item.path.name != "test_parallel.py")


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") and not ON_GPU:
        pytest.skip("needs a GPU: run `make test-gpu`, or set JLLM_TEST_GPU=1")
    if item.get_closest_marker("aot") and not AHEAD_OF_TIME:
        pytest.skip("needs XLA's CUDA compiler: run `make test-aot`")


@pytest.fixture(autouse=True, scope="module")
def _programs_are_dropped() -> Iterator[None]:
    """A compiled program takes about ten memory mappings, of which Linux allows a process 65,530:
    over that XLA crashes, and those of all tests together are more."""
    yield
    if "jax" in sys.modules:
        sys.modules["jax"].clear_caches()
        gc.collect()
