"""What the hardware allows: pure functions from a model's config and a GPU's two rates to times.

A time here is a lower bound. Two kinds of work follow each other in a step and neither hides the
other, so their bounds add up:

    matrix products   weights read once, or their FLOPs, whichever takes longer
    attention         keys and values read once per row, or its FLOPs, whichever takes longer

Norms, rotations, sampling, activations and launches are left out: they are what an engine loses.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from jllm.config import ModelConfig

# What is reached of a datasheet's rates, as measured on the H200: 4.4 of 4.8 TB/s and 790 of 989
# TFLOP/s. Taken for GPUs that were not measured.
BANDWIDTH_DERATE = 0.92
FLOPS_DERATE = 0.80


@dataclass(frozen=True)
class Hardware:
    """A GPU's reachable rates.

    Attributes:
      name: as ``HARDWARE`` knows it.
      read_bytes_per_s: device memory, read only.
      copy_bytes_per_s: device memory, bytes read and written together.
      flops_per_s: dense bfloat16 matrix products.
      source: where the numbers come from.
    """

    name: str
    read_bytes_per_s: float
    copy_bytes_per_s: float
    flops_per_s: float
    source: str

    def times(self, count: int) -> Hardware:
        """So many of these GPUs that share all work evenly and say nothing to each other."""
        if count == 1:
            return self
        return Hardware(
            f"{count} x {self.name}",
            self.read_bytes_per_s * count,
            self.copy_bytes_per_s * count,
            self.flops_per_s * count,
            self.source,
        )

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def _derated(name: str, terabytes: float, teraflops: float) -> Hardware:
    read = terabytes * 1e12 * BANDWIDTH_DERATE
    source = f"datasheet x {BANDWIDTH_DERATE} (bandwidth), x {FLOPS_DERATE} (bf16 FLOPs)"
    return Hardware(name, read, read, teraflops * 1e12 * FLOPS_DERATE, source)


HARDWARE = {
    "h200": Hardware("h200", 4.4e12, 4.3e12, 790e12, "measured (benchmarks/README.md)"),
    "h100": _derated("h100", 3.35, 989),  # SXM
    "a100": _derated("a100", 2.039, 312),  # 80 GB SXM
    "l40s": _derated("l40s", 0.864, 362),
}


def hardware(device_kind: str) -> Hardware | None:
    """The record of a GPU by its name or by JAX's ``device_kind``; None if it is not known."""
    words = re.findall(r"[a-z0-9]+", device_kind.lower())  # "gh200" is another machine than "h200"
    return next((record for name, record in HARDWARE.items() if name in words), None)


class Shape(NamedTuple):
    """A matrix product ``(M, inner) @ (inner, outer)`` and how often a step runs it."""

    name: str
    inner: int
    outer: int
    per_step: int


def matmul_shapes(config: ModelConfig) -> tuple[Shape, ...]:
    """The five products of a step: four per layer, and the head."""
    c = config
    heads = (c.num_heads + 2 * c.num_kv_heads) * c.head_dim
    return (
        Shape("qkv", c.hidden_size, heads, c.num_layers),
        Shape("o", c.num_heads * c.head_dim, c.hidden_size, c.num_layers),
        Shape("gate_up", c.hidden_size, 2 * c.intermediate_size, c.num_layers),
        Shape("down", c.intermediate_size, c.hidden_size, c.num_layers),
        Shape("head", c.hidden_size, c.vocab_size, 1),
    )


def layer_weights(config: ModelConfig) -> int:
    """Matrix weights of all layers, without embedding and head."""
    return sum(s.inner * s.outer * s.per_step for s in matmul_shapes(config) if s.name != "head")


def head_weights(config: ModelConfig) -> int:
    return config.hidden_size * config.vocab_size


def weight_bytes(config: ModelConfig, itemsize: int = 2) -> int:
    """Bytes of weights that one step reads: the layers and the head. Of an untied embedding it
    reads a row per token, which is nothing; norms and biases are left out too."""
    return (layer_weights(config) + head_weights(config)) * itemsize


def kv_bytes_per_token(config: ModelConfig, itemsize: int = 2) -> int:
    """Bytes of keys and values that one token takes in the cache, over all layers."""
    return config.num_layers * 2 * config.num_kv_heads * config.head_dim * itemsize


def context_tokens(config: ModelConfig, context: float) -> float:
    """Tokens that a query sees, summed over the layers: less than ``layers x context`` where a
    sliding window ends the view."""
    windows = [config.window(layer) or math.inf for layer in range(config.num_layers)]
    return sum(min(context, window) for window in windows)


def flops_per_token(config: ModelConfig, context: float, *, sampled: bool = True) -> float:
    """FLOPs of one token that sees ``context`` tokens, itself included; the head runs only for
    tokens that are sampled."""
    dense = 2.0 * (layer_weights(config) + (head_weights(config) if sampled else 0))
    return dense + attention_flops(config, context)


def attention_flops(config: ModelConfig, context: float) -> float:
    """FLOPs of one query's attention: scores and weighted sum, 2 each per head and dimension."""
    return 4.0 * config.num_heads * config.head_dim * context_tokens(config, context)


def _kv_read_bytes(config: ModelConfig, context: float, itemsize: int) -> float:
    per_layer = 2 * config.num_kv_heads * config.head_dim * itemsize
    return per_layer * context_tokens(config, context)


class StepTime(NamedTuple):
    """Seconds that a step's two kinds of work take at least."""

    matmuls: float
    attention: float


def decode_step(
    config: ModelConfig, gpu: Hardware, batch: int, context: float, itemsize: int = 2
) -> StepTime:
    """One step that draws a token for each of ``batch`` rows of ``context`` tokens."""
    dense = 2.0 * batch * (layer_weights(config) + head_weights(config))
    matmuls = max(
        weight_bytes(config, itemsize) / gpu.read_bytes_per_s,
        dense / gpu.flops_per_s,
    )
    attention = max(
        batch * _kv_read_bytes(config, context, itemsize) / gpu.read_bytes_per_s,
        batch * attention_flops(config, context) / gpu.flops_per_s,
    )
    return StepTime(matmuls, attention)


def decode_step_s(
    config: ModelConfig, gpu: Hardware, batch: int, context: float, itemsize: int = 2
) -> float:
    """Seconds of a ``decode_step``."""
    return sum(decode_step(config, gpu, batch, context, itemsize))


def prefill(
    config: ModelConfig,
    gpu: Hardware,
    prompts: int,
    length: int,
    *,
    cached: int = 0,
    chunk: int = 8192,
    itemsize: int = 2,
) -> StepTime:
    """The prefill of ``prompts`` of ``length`` tokens and one token drawn for each, when the first
    ``cached`` tokens are in the cache already.

    Weights are read once per ``chunk`` tokens; the causal mask halves the attention.
    """
    fresh = length - cached
    tokens = prompts * fresh
    dense = 2.0 * (tokens * layer_weights(config) + prompts * head_weights(config))
    steps = -(-tokens // chunk)
    matmuls = max(
        steps * weight_bytes(config, itemsize) / gpu.read_bytes_per_s, dense / gpu.flops_per_s
    )
    attention = prompts * _prefill_attention_flops(config, cached, length) / gpu.flops_per_s
    return StepTime(matmuls, attention)


def prefill_s(
    config: ModelConfig, gpu: Hardware, prompts: int, length: int, **options: int
) -> float:
    """Seconds of a ``prefill``, whose options these are."""
    return sum(prefill(config, gpu, prompts, length, **options))


def _prefill_attention_flops(config: ModelConfig, cached: int, length: int) -> float:
    """Sum over the fresh tokens of what each sees; the mean view stands for all (exact without
    a window, a slight overcount with one)."""
    return (length - cached) * attention_flops(config, (cached + length + 1) / 2)


class Lengths(NamedTuple):
    """One sample of a workload: tokens of its prompt, those of them that need no prefill (cached,
    or prefilled by a sibling sample), and new tokens."""

    prompt: int
    cached: int
    output: int


def workload_s(
    config: ModelConfig,
    gpu: Hardware,
    samples: Sequence[Lengths],
    max_num_seqs: int,
    itemsize: int = 2,
) -> float:
    """Seconds for a whole workload under ideal continuous batching.

    The weights are read in every step, and there are at least as many steps as the longest output
    has tokens, and as ``max_num_seqs`` rows a step need for all of them; or the FLOPs of all
    matrix products, where those take longer. Every row reads its own keys and values each step.
    """
    drawn = sum(s.output for s in samples)
    fresh = sum(s.prompt - s.cached for s in samples)
    steps = max(max(s.output for s in samples), -(-drawn // max_num_seqs))
    # The last output token is drawn but never run; the first comes from the prefill.
    run = fresh + drawn - len(samples)
    dense = 2.0 * (run * layer_weights(config) + drawn * head_weights(config))
    matmuls = max(
        steps * weight_bytes(config, itemsize) / gpu.read_bytes_per_s, dense / gpu.flops_per_s
    )
    decode_bytes = decode_flops = prefill_flops = 0.0
    for prompt, cached, output in samples:
        mean = prompt + output / 2  # context of the decode steps, output - 1 of them
        decode_bytes += (output - 1) * _kv_read_bytes(config, mean, itemsize)
        decode_flops += (output - 1) * attention_flops(config, mean)
        prefill_flops += _prefill_attention_flops(config, cached, prompt)
    attention = max(decode_bytes / gpu.read_bytes_per_s, decode_flops / gpu.flops_per_s)
    return matmuls + attention + prefill_flops / gpu.flops_per_s
