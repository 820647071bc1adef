"""How large an engine makes itself on GPUs of a given memory."""

from __future__ import annotations

import pytest

import jllm
from jllm.engine.sizing import resolve

H200 = {"bytes_limit": 140 << 30, "bytes_in_use": 17 << 30}
LLAMA_70B = jllm.ModelConfig.preset("llama-3.1-70b")
TOKEN_BYTES = 2 * 80 * 8 * 128 * 2  # keys and values, layers, heads, head dim, bfloat16


@pytest.mark.parametrize(
    ("num_devices", "copies"),
    [pytest.param(8, 1, id="a-head-each"), pytest.param(16, 2, id="copies-of-heads")],
)
def test_the_cache_fills_what_weights_leave_on_every_device(num_devices: int, copies: int) -> None:
    config = resolve(
        jllm.EngineConfig(), LLAMA_70B, bytes_per_value=2, memory=H200, num_devices=num_devices
    )
    assert config.num_kv_blocks is not None
    used = config.num_kv_blocks * config.block_size * TOKEN_BYTES * copies / num_devices
    assert 0.99 < used / ((0.9 * 140 - 17 - 3) * 2**30) <= 1


def test_devices_of_a_cpu_share_its_memory() -> None:
    options = dict(bytes_per_value=2, memory=None)
    one, eight = (
        resolve(jllm.EngineConfig(), LLAMA_70B, num_devices=n, **options).num_kv_blocks
        for n in (1, 8)
    )
    assert one == eight
