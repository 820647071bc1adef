"""The roofline against numbers computed by hand and those of the prototype's file."""

import json
from pathlib import Path

import pytest

from jllm import roofline
from jllm.config import ModelConfig
from jllm.roofline import HARDWARE, Lengths

H200 = HARDWARE["h200"]
LLAMA = ModelConfig.preset("llama-3.1-8b")
QWEN = ModelConfig.preset("qwen3-0.6b")
PROTOTYPE = Path(__file__).parents[1] / "benchmarks/baselines/jax-prototype-h200.json"
LIMITS = json.loads(PROTOTYPE.read_text())["limit"]


def test_llama_8b_has_the_weights_and_kv_bytes_computed_by_hand() -> None:
    # qkv 4096 x 6144, o 4096 x 4096, gate and up 4096 x 28672, down 14336 x 4096: 218,103,808
    assert roofline.layer_weights(LLAMA) == 32 * 218_103_808
    assert roofline.head_weights(LLAMA) == 4096 * 128_256
    assert roofline.weight_bytes(LLAMA) == 15_009_316_864
    assert roofline.kv_bytes_per_token(LLAMA) == 131_072  # 32 layers x 2 x 8 heads x 128 x 2 bytes


def test_a_tied_head_is_read_once_and_an_untied_embedding_not_at_all() -> None:
    # 28 layers x (1024 x 4096 + 2048 x 1024 + 1024 x 6144 + 3072 x 1024), and 1024 x 151,936
    assert roofline.weight_bytes(QWEN) == 2 * (28 * 15_728_640 + 155_582_464)


def test_llama_8b_decode_on_an_h200_takes_the_time_computed_by_hand() -> None:
    one = 15_009_316_864 / 4.4e12 + 131_072 * 1024 / 4.4e12
    assert roofline.decode_step_s(LLAMA, H200, 1, 1024) == pytest.approx(one)
    # At 256 rows the products' 3.84 TFLOPs take longer than the weights.
    many = 2 * 7_504_658_432 * 256 / 790e12 + 256 * 131_072 * 1024 / 4.4e12
    assert roofline.decode_step_s(LLAMA, H200, 256, 1024) == pytest.approx(many)


def test_llama_8b_prefill_on_an_h200_takes_the_time_computed_by_hand() -> None:
    dense = 2 * (1024 * 6_979_321_856 + 525_336_576)
    attention = 4 * 32 * 128 * 32 * 1024 * 512.5
    expected = (dense + attention) / 790e12  # 18.4 ms
    assert roofline.prefill_s(LLAMA, H200, 1, 1024) == pytest.approx(expected)
    assert expected == pytest.approx(18.44e-3, rel=1e-3)
    half = roofline.prefill_s(LLAMA, H200, 1, 1024, cached=512)
    assert 0.4 * expected < half < 0.6 * expected


@pytest.mark.parametrize("batch", [1, 16, 64, 128, 256])
@pytest.mark.parametrize("name", ["llama-3.1-8b", "qwen3-0.6b"])
def test_decode_limits_agree_with_the_prototypes_file(name: str, batch: int) -> None:
    seconds = roofline.decode_step_s(ModelConfig.preset(name), H200, batch, 1024)
    assert seconds * 1e3 == pytest.approx(LIMITS[name][f"B{batch}"], rel=0.02)


def test_a_sliding_window_ends_what_a_query_reads() -> None:
    sizes = dict(num_heads=4, num_kv_heads=2, head_dim=16, max_position_embeddings=2048)
    config = ModelConfig(
        vocab_size=512,
        hidden_size=64,
        intermediate_size=128,
        num_layers=2,
        sliding_window=100,
        sliding_layers=(True, False),
        **sizes,
    )
    assert roofline.context_tokens(config, 50) == 100
    assert roofline.context_tokens(config, 1000) == 100 + 1000


def test_a_workload_of_one_batch_takes_its_steps_and_its_prefill() -> None:
    samples = [Lengths(1024, 0, 128)] * 16
    seconds = roofline.workload_s(LLAMA, H200, samples, 256)
    decode = 127 * roofline.decode_step_s(LLAMA, H200, 16, 1024 + 64)
    prefill = roofline.prefill_s(LLAMA, H200, 16, 1024)
    assert max(decode, prefill) < seconds < 1.02 * (decode + prefill)
    cached = [Lengths(1024, 1023, 128)] * 16
    assert roofline.workload_s(LLAMA, H200, cached, 256) == pytest.approx(decode, rel=0.02)


def test_fewer_rows_at_once_make_a_workload_longer() -> None:
    samples = [Lengths(100, 0, 100)] * 64
    narrow, wide = (roofline.workload_s(LLAMA, H200, samples, n) for n in (8, 64))
    assert narrow > 4 * wide


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("NVIDIA H200", "h200"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("NVIDIA L40S", "l40s"),
        ("NVIDIA GH200 480GB", None),
        ("cpu", None),
    ],
)
def test_a_gpu_is_found_by_the_name_that_jax_gives_it(kind: str, name: str | None) -> None:
    found = roofline.hardware(kind)
    assert (found and found.name) == name
