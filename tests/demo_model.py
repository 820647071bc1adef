"""The real model that tests run on."""

import functools

import pytest

import jllm


@functools.cache
def load_demo_model() -> jllm.Params:
    """SmolLM2-135M-Instruct in float32, loaded once; tests that need it are skipped without it."""
    try:
        return jllm.load("smollm2-135m-instruct", dtype="float32")
    except FileNotFoundError as error:
        pytest.skip(str(error))
