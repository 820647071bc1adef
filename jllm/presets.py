"""Shapes of well-known models, for random weights: ``ModelConfig.preset(name)``."""

from __future__ import annotations

from typing import Any

from jllm.config import ModelConfig, RopeScaling

_LLAMA3 = dict(
    vocab_size=128_256,
    rope_theta=500_000.0,
    max_position_embeddings=131_072,
    bos_token_id=128_000,
    eos_token_ids=(128_001, 128_008, 128_009),
)
_QWEN3 = dict(
    family="qwen3",
    vocab_size=151_936,
    max_position_embeddings=40_960,
    rope_theta=1e6,
    rms_norm_eps=1e-6,
    qk_norm=True,
    bos_token_id=151_643,
    eos_token_ids=(151_643, 151_645),
)


def _sizes(
    hidden: int, intermediate: int, layers: int, heads: int, kv_heads: int, head_dim: int
) -> dict[str, int]:
    return dict(
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
    )


def _llama3_scaling(factor: float) -> RopeScaling:
    return RopeScaling("llama3", factor, 8192, low_freq_factor=1.0, high_freq_factor=4.0)


def _presets() -> dict[str, ModelConfig]:
    make: Any = ModelConfig  # the dicts below are checked by ModelConfig itself
    return {
        "tiny": make(
            **_sizes(64, 128, 2, 4, 2, 16),
            vocab_size=512,
            max_position_embeddings=2048,
            tie_embeddings=True,
            eos_token_ids=(2,),
        ),
        "smollm2-135m": make(
            **_sizes(576, 1536, 30, 9, 3, 64),
            vocab_size=49_152,
            max_position_embeddings=8192,
            rope_theta=100_000.0,
            tie_embeddings=True,
            bos_token_id=1,
            eos_token_ids=(2,),
        ),
        "qwen3-0.6b": make(**_sizes(1024, 3072, 28, 16, 8, 128), **_QWEN3, tie_embeddings=True),
        "qwen3-8b": make(**_sizes(4096, 12_288, 36, 32, 8, 128), **_QWEN3),
        "llama-3.2-1b": make(
            **_sizes(2048, 8192, 16, 32, 8, 64),
            **_LLAMA3,
            rope_scaling=_llama3_scaling(32.0),
            tie_embeddings=True,
        ),
        "llama-3.1-8b": make(
            **_sizes(4096, 14_336, 32, 32, 8, 128), **_LLAMA3, rope_scaling=_llama3_scaling(8.0)
        ),
        "llama-3.1-70b": make(
            **_sizes(8192, 28_672, 80, 64, 8, 128), **_LLAMA3, rope_scaling=_llama3_scaling(8.0)
        ),
    }


PRESETS = _presets()
