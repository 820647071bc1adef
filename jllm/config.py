"""What a model is and how an engine runs it: frozen, validated dataclasses."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

__all__ = ["EngineConfig", "ModelConfig", "RopeScaling"]

ROPE_TYPES = ("default", "linear", "llama3", "yarn")


def _as_tuples(owner: Any, *names: str) -> None:
    """Lists and arrays become tuples: a config is hashed, being static in compiled programs."""
    for name in names:
        value = getattr(owner, name)
        if value is not None and not isinstance(value, tuple):
            _require(
                hasattr(value, "__iter__") and not isinstance(value, str),
                f"{type(owner).__name__}.{name} must be a sequence, not {value!r}.",
            )
            items = value.tolist() if hasattr(value, "tolist") else value
            object.__setattr__(owner, name, tuple(items))


def _positive(owner: str, **fields: float) -> None:
    for name, value in fields.items():
        _require(
            isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf,
            f"{owner}.{name} must be a positive number, not {value!r}.",
        )


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)


def _positive_int(owner: str, **fields: int) -> None:
    for name, value in fields.items():
        _require(
            isinstance(value, int) and not isinstance(value, bool) and value > 0,
            f"{owner}.{name} must be a positive integer, not {value!r}.",
        )


def _one_of(name: str, value: object, allowed: tuple[str, ...]) -> None:
    _require(value in allowed, f"{name} must be one of {', '.join(allowed)}, not {value!r}.")


@dataclass(frozen=True)
class RopeScaling:
    """How rotary frequencies are stretched beyond the trained context.

    The fields are those of Hugging Face's ``rope_parameters``; a kind reads only its own:
    ``linear`` reads ``factor``; ``llama3`` also the two ``*_freq_factor`` and the original
    context (Llama 3.1 report, section 3.2); ``yarn`` the ``beta_*``, ``mscale*``,
    ``attention_factor`` and ``truncate`` (arXiv 2309.00071).
    """

    kind: Literal["linear", "llama3", "yarn"]
    factor: float
    original_max_position: int
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    attention_factor: float | None = None
    truncate: bool = True

    def __post_init__(self) -> None:
        _require(
            self.kind in ROPE_TYPES[1:],
            f"Unknown rope scaling type {self.kind!r}; known types are {', '.join(ROPE_TYPES)}.",
        )
        _positive(
            "RopeScaling",
            factor=self.factor,
            low_freq_factor=self.low_freq_factor,
            high_freq_factor=self.high_freq_factor,
            beta_fast=self.beta_fast,
            beta_slow=self.beta_slow,
        )
        _require(self.factor >= 1, f"RopeScaling.factor must be at least 1, not {self.factor!r}.")
        _require(
            self.low_freq_factor < self.high_freq_factor,
            f"RopeScaling.low_freq_factor ({self.low_freq_factor!r}) must be less than "
            f"high_freq_factor ({self.high_freq_factor!r}).",
        )
        _positive_int("RopeScaling", original_max_position=self.original_max_position)


@dataclass(frozen=True)
class ModelConfig:
    """A decoder-only transformer of the Llama kind: sizes and the flags that tell families apart.

    Attributes:
      vocab_size: V, rows of the embedding.
      hidden_size: E, width of the residual stream.
      intermediate_size: F, width of the gated MLP.
      num_layers: transformer blocks.
      num_heads: H, query heads.
      num_kv_heads: K, key/value heads; divides H.
      head_dim: D; any even number, not necessarily E / H.
      max_position_embeddings: longest context the model was made for, in tokens.
      qkv_bias, o_bias, mlp_bias: whether those projections carry biases.
      qk_norm: RMSNorm on every query and key head, before the rotation (Qwen3).
      tie_embeddings: the LM head is the embedding, transposed.
      sliding_window: tokens a query sees, itself included; None means all.
      sliding_layers: which layers use the window; empty means every layer.
      eos_token_ids: ids that end a generation: config, generation_config and tokenizer together.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    family: str = "llama"
    rope_theta: float = 10_000.0
    rope_scaling: RopeScaling | None = None
    rms_norm_eps: float = 1e-5
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    tie_embeddings: bool = False
    sliding_window: int | None = None
    sliding_layers: tuple[bool, ...] = ()
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        _positive_int(
            "ModelConfig",
            vocab_size=self.vocab_size,
            hidden_size=self.hidden_size,
            intermediate_size=self.intermediate_size,
            num_layers=self.num_layers,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            max_position_embeddings=self.max_position_embeddings,
        )
        _positive("ModelConfig", rope_theta=self.rope_theta, rms_norm_eps=self.rms_norm_eps)
        _as_tuples(self, "sliding_layers", "eos_token_ids")
        for token in self.eos_token_ids:
            _require(
                isinstance(token, int) and 0 <= token < self.vocab_size,
                f"ModelConfig.eos_token_ids has {token!r}, which is no id of a vocabulary of "
                f"{self.vocab_size}.",
            )
        _require(
            self.num_heads % self.num_kv_heads == 0,
            f"num_heads ({self.num_heads}) must be a multiple of "
            f"num_kv_heads ({self.num_kv_heads}).",
        )
        _require(self.head_dim % 2 == 0, f"head_dim must be even, not {self.head_dim}.")
        if self.sliding_window is not None:
            _positive_int("ModelConfig", sliding_window=self.sliding_window)
        _require(
            len(self.sliding_layers) in (0, self.num_layers),
            f"sliding_layers has {len(self.sliding_layers)} entries for {self.num_layers} layers.",
        )

    @property
    def group_size(self) -> int:
        """G = H / K: query heads that share one key/value head."""
        return self.num_heads // self.num_kv_heads

    def window(self, layer: int) -> int | None:
        """The sliding window of one layer, or None where it sees the whole context."""
        if self.sliding_layers and not self.sliding_layers[layer]:
            return None
        return self.sliding_window

    @classmethod
    def from_hf(cls, config: str | os.PathLike[str] | dict[str, Any]) -> ModelConfig:
        """Reads a Hugging Face ``config.json`` (a path, its folder, or the parsed dict)."""
        from jllm.models.families import config_from_hf

        if isinstance(config, dict):
            return _understood("The model config", config_from_hf, config)
        path = Path(config)
        path = path / "config.json" if path.is_dir() else path
        if not path.is_file():
            raise FileNotFoundError(f"There is no model config at {path}.")
        try:
            parsed = json.loads(path.read_text(encoding="utf-8"))
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{path} is not valid JSON: {error}.") from error
        _require(isinstance(parsed, dict), f"{path} must hold a JSON object, not {parsed!r:.50}.")
        return _understood(str(path), config_from_hf, parsed)

    @classmethod
    def preset(cls, name: str) -> ModelConfig:
        """The shape of a well-known model by name, for random weights: see presets.py."""
        from jllm.presets import PRESETS

        if name not in PRESETS:
            raise ValueError(f"Unknown preset {name!r}; presets are {', '.join(PRESETS)}.")
        return PRESETS[name]


def _understood(
    where: str, parse: Callable[[dict[str, Any]], ModelConfig], config: dict[str, Any]
) -> ModelConfig:
    """Parses a config that somebody else wrote: a value of a type that nobody foresaw is their
    mistake, not a bug here."""
    try:
        return parse(config)
    except (TypeError, AttributeError, KeyError, IndexError) as error:
        raise ValueError(f"{where} has a value of a wrong type or shape: {error}.") from error


@dataclass(frozen=True)
class EngineConfig:
    """How an engine batches and how much memory it uses. ``None`` means: chosen at start.

    Attributes:
      max_num_seqs: requests that run at once (32 on a CPU, 256 on a GPU).
      max_num_batched_tokens: prompt tokens one step may process, beside the one token of each
        running request (512 on a CPU, 8192 on a GPU). Longer prompts are prefilled in chunks.
      max_model_len: longest prompt plus output, in tokens (the model's own limit, capped by
        what the KV pool can hold for one request).
      block_size: tokens in one KV block.
      num_kv_blocks: KV blocks in the pool, the scratch block not counted (on a GPU: what fits
        in ``gpu_memory_utilization`` of the memory; on a CPU: 1 GiB, or less if less can be used).
      gpu_memory_utilization: share of the GPU's whole memory for weights, cache and temporaries.
        Of a GPU JAX takes 0.95, or 0.75 if it was started before jllm was imported, or what
        ``XLA_CLIENT_MEM_FRACTION`` says; no more than that is used.
      decode_buckets: row counts that decode steps are padded to, ascending.
      prefill_buckets: token counts that steps with prompts, or chunks of them, are padded to,
        ascending. The one token of each running request counts too, but that the prompts' may
        fill the largest.
      prefix_cache: ``radix`` shares the KV of equal prefixes between requests, running and past;
        ``naive`` shares nothing.
      preemption: what becomes of the KV of a request that must give way when blocks run out:
        ``recompute`` it later, or ``swap`` it to host memory and back.
      swap_space_gib: host memory for swapped KV; what does not fit is recomputed.
      scheduling_policy: ``fcfs``, or ``priority`` (see ``SamplingParams.priority``).
      decode_repeats: decode steps in one dispatch while no request waits: their tokens arrive
        together. For models whose step is shorter than its dispatch (1 on a CPU; on a GPU as many
        as take 4 ms or more, at most 8, so 1 for models over 8 GB).
      shared_attention: decode steps read once what many of their rows share: the samples of one
        prompt, or requests with one system prompt. Found in the ``radix`` cache only. (On a GPU,
        for models without sliding windows.)
      overlap: plan and dispatch step N + 1 while step N runs. Off, every step is waited for.
      stats_interval_s: seconds between lines of statistics in the log ``jllm`` (level INFO);
        None for none.
    """

    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    max_model_len: int | None = None
    block_size: int = 16
    num_kv_blocks: int | None = None
    gpu_memory_utilization: float = 0.9
    decode_buckets: tuple[int, ...] | None = None
    prefill_buckets: tuple[int, ...] | None = None
    prefix_cache: Literal["radix", "naive"] = "radix"
    preemption: Literal["recompute", "swap"] = "recompute"
    swap_space_gib: float = 4.0
    scheduling_policy: Literal["fcfs", "priority"] = "fcfs"
    decode_repeats: int | None = None
    shared_attention: bool | None = None
    overlap: bool = True
    stats_interval_s: float | None = 10.0

    def __post_init__(self) -> None:
        optional = ("max_num_seqs", "max_num_batched_tokens", "max_model_len", "num_kv_blocks")
        for name in (*optional, "decode_repeats"):
            if getattr(self, name) is not None:
                _positive_int("EngineConfig", **{name: getattr(self, name)})
        _positive_int("EngineConfig", block_size=self.block_size)
        _positive("EngineConfig", gpu_memory_utilization=self.gpu_memory_utilization)
        _require(
            self.gpu_memory_utilization <= 1,
            "EngineConfig.gpu_memory_utilization must be in (0, 1], "
            f"not {self.gpu_memory_utilization!r}.",
        )
        _one_of("EngineConfig.prefix_cache", self.prefix_cache, ("radix", "naive"))
        _one_of("EngineConfig.preemption", self.preemption, ("recompute", "swap"))
        _one_of("EngineConfig.scheduling_policy", self.scheduling_policy, ("fcfs", "priority"))
        _require(
            0 <= self.swap_space_gib < math.inf,
            f"EngineConfig.swap_space_gib must be at least 0, not {self.swap_space_gib!r}.",
        )
        _require(
            self.stats_interval_s is None or self.stats_interval_s > 0,
            "EngineConfig.stats_interval_s must be positive or None, "
            f"not {self.stats_interval_s!r}.",
        )
        _as_tuples(self, "decode_buckets", "prefill_buckets")
        for name in ("decode_buckets", "prefill_buckets"):
            buckets = getattr(self, name)
            if buckets is not None:
                _require(
                    len(buckets) > 0
                    and all(type(size) is int and size > 0 for size in buckets)
                    and list(buckets) == sorted(set(buckets)),
                    f"EngineConfig.{name} must be ascending positive integers, not {buckets!r}.",
                )
