"""jllm: an LLM inference engine in JAX. Params go in, tokens come out.

    import jllm
    params = jllm.load("smollm2-135m-instruct")
    print(jllm.generate(params, "The capital of France is")[0].outputs[0].text)

Names are imported when they are first used: what ``import jllm`` costs is little more than JAX.
"""

import importlib
from typing import TYPE_CHECKING, Any

from jllm.gpu_memory import take_memory

if TYPE_CHECKING:
    from jllm import parallel as parallel
    from jllm.api import chat, generate, release, stream
    from jllm.config import EngineConfig, ModelConfig, RopeScaling
    from jllm.engine.engine import Engine
    from jllm.models.transformer import logprobs
    from jllm.outputs import CompletionOutput, Logprob, RequestOutput
    from jllm.parallel.mesh import make_mesh
    from jllm.params import Params, init, load
    from jllm.sampling_params import SamplingParams
    from jllm.structured import Structured
    from jllm.tokenizer import Tokenizer

__version__ = "0.1.0"

_HOME = {
    "CompletionOutput": "jllm.outputs",
    "Engine": "jllm.engine.engine",
    "EngineConfig": "jllm.config",
    "Logprob": "jllm.outputs",
    "ModelConfig": "jllm.config",
    "Params": "jllm.params",
    "RequestOutput": "jllm.outputs",
    "RopeScaling": "jllm.config",
    "SamplingParams": "jllm.sampling_params",
    "Structured": "jllm.structured",
    "Tokenizer": "jllm.tokenizer",
    "chat": "jllm.api",
    "generate": "jllm.api",
    "init": "jllm.params",
    "load": "jllm.params",
    "logprobs": "jllm.models.transformer",
    "make_mesh": "jllm.parallel.mesh",
    "release": "jllm.api",
    "stream": "jllm.api",
}

__all__ = [
    "CompletionOutput",
    "Engine",
    "EngineConfig",
    "Logprob",
    "ModelConfig",
    "Params",
    "RequestOutput",
    "RopeScaling",
    "SamplingParams",
    "Structured",
    "Tokenizer",
    "chat",
    "generate",
    "init",
    "load",
    "logprobs",
    "make_mesh",
    "release",
    "stream",
]


take_memory()


def __getattr__(name: str) -> Any:
    if name == "parallel":  # a package, for jllm.parallel.explain
        return importlib.import_module("jllm.parallel")
    if name not in _HOME:
        raise AttributeError(f"module 'jllm' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
