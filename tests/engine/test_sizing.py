"""How large an engine makes itself on GPUs of a given memory."""

from __future__ import annotations

import logging
from typing import Any

import pytest

import jllm
from jllm.engine.sizing import resolve, working_bytes
from jllm.gpu_memory import VARIABLES

H200_BYTES = 140 << 30
H200 = {"bytes_limit": H200_BYTES // 4 * 3, "bytes_in_use": 17 << 30}
LLAMA_70B = jllm.ModelConfig.preset("llama-3.1-70b")
TOKEN_BYTES = 2 * 80 * 8 * 128 * 2  # keys and values, layers, heads, head dim, bfloat16


@pytest.fixture(autouse=True)
def _share_that_jax_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLES[0], "0.75")


@pytest.mark.parametrize(
    ("num_devices", "copies"),
    [pytest.param(8, 1, id="a-head-each"), pytest.param(16, 2, id="copies-of-heads")],
)
def test_the_cache_fills_what_weights_leave_on_every_device(num_devices: int, copies: int) -> None:
    asked = jllm.EngineConfig(gpu_memory_utilization=0.6)
    config = resolve(asked, LLAMA_70B, bytes_per_value=2, memory=H200, num_devices=num_devices)
    assert config.num_kv_blocks is not None
    used = config.num_kv_blocks * config.block_size * TOKEN_BYTES * copies / num_devices
    kept = working_bytes(config, LLAMA_70B, 2, num_devices)
    assert 0.5 * 2**30 < kept < 3 * 2**30
    assert 0.99 < used / (0.6 * H200_BYTES - H200["bytes_in_use"] - kept) <= 1


def blocks(**options: Any) -> int:
    config = jllm.EngineConfig(**options)
    found = resolve(config, LLAMA_70B, bytes_per_value=2, memory=H200).num_kv_blocks
    assert found is not None
    return found


def test_larger_steps_leave_less_for_the_cache() -> None:
    small, large = (blocks(max_num_batched_tokens=n, max_num_seqs=256) for n in (8192, 16384))
    token = (3 * 8192 + 3 * 28672 + 2 * 8192) * 2  # activations, and hidden states of two steps
    assert small - large == pytest.approx((16384 - 8192) * token / 16 / TOKEN_BYTES, abs=1)


def test_more_than_jax_takes_is_said_and_not_used(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("jllm"), "propagate", True)
    all_of_it = blocks(gpu_memory_utilization=0.75)
    assert not caplog.records
    assert blocks(gpu_memory_utilization=0.9) == all_of_it
    (record,) = caplog.records
    assert "0.9, but JAX takes only 0.75" in record.getMessage()


def test_devices_of_a_cpu_share_its_memory() -> None:
    options = dict(bytes_per_value=2, memory=None)
    one, eight = (
        resolve(jllm.EngineConfig(), LLAMA_70B, num_devices=n, **options).num_kv_blocks
        for n in (1, 8)
    )
    assert one == eight
