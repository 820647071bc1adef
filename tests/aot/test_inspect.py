"""``explain`` reads programs compiled for GPUs that are not here, by name."""

from __future__ import annotations

import pytest

import jllm
from jllm.parallel import explain
from jllm.parallel.inspect.gpus import GPUS

pytestmark = pytest.mark.aot

MODEL = jllm.ModelConfig.preset("llama-3.1-8b")
ENGINE = jllm.EngineConfig(max_num_batched_tokens=2048)


@pytest.mark.parametrize("gpu", GPUS)
def test_a_step_is_compiled_for_the_gpu_that_was_asked_for(gpu: str) -> None:
    found = explain(MODEL, 4, ENGINE, gpu=gpu, compiled_layers=2)
    assert (found.compiled_for, found.gpu.name, found.compiled_layers) == ("cuda", gpu, 2)
    sums = [one for one in found.decode.collectives if one.kind == "all-reduce"]
    assert len(sums) == 2 * MODEL.num_layers + 1
    assert {one.result for one in sums} == {"bf16[64,4096]"}
    others = [one for one in found.decode.collectives if one.kind != "all-reduce"]
    assert [(one.kind, one.result) for one in others] == [("all-gather", "s32[4,64,2]")]
    assert found.decode.temporaries > 0 and found.prefill.temporaries > 0
