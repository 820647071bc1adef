"""How large an engine is: the numbers that its user left open."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace

from jllm.config import EngineConfig, ModelConfig
from jllm.engine.batch import LEAST_SHARING
from jllm.engine.step import PROMPT_CHUNK
from jllm.gpu_memory import memory_fraction
from jllm.models.attention import shared_tile_rows
from jllm.models.logit_rules import bytes_per_slot
from jllm.roofline import weight_bytes

logger = logging.getLogger("jllm")

CPU_KV_BYTES = 1 << 30
WORKSPACE_BYTES = 256 << 20  # of cuBLAS, of attention's small arrays, and what lies between arrays
# Arrays of float32 logits at once. With rules, filters and logprobs the sampler has 4.3 of them
# for temporaries, and a logits processor and a grammar's mask give one each.
SAMPLER_COPIES = 6.3
PROMPT_COPIES = 3  # 3.0 of a chunk's, with prompt_logprobs

# Reading an H200's memory, and what a decode step has to take at least to hide its dispatch.
READ_BYTES_PER_S = 4e12
REPEATED_S = 4e-3
MOST_REPEATS = 8


def resolve(
    config: EngineConfig,
    model: ModelConfig,
    *,
    bytes_per_value: int,
    memory: Mapping[str, int] | None,
    num_devices: int = 1,
) -> EngineConfig:
    """Fills in every field left None, by platform and by what the KV pool can hold.

    Args:
      config: what the user asked for.
      model: the model that is to run.
      bytes_per_value: of the KV cache.
      memory: JAX's ``memory_stats`` of the fullest device, the weights already on it; None on a
        CPU.
      num_devices: that the cache is split over by key/value heads, a copy of one for each if
        there are fewer heads.

    Raises:
      ValueError: max_model_len exceeds the model's limit or the pool, or limits contradict.
    """
    cpu = not memory or "bytes_limit" not in memory
    max_num_seqs = config.max_num_seqs or (32 if cpu else 256)
    batched = config.max_num_batched_tokens or (512 if cpu else 8192)
    if config.max_model_len is not None and config.max_model_len > model.max_position_embeddings:
        raise ValueError(
            f"max_model_len is {config.max_model_len}, but the model was made for at most "
            f"{model.max_position_embeddings} tokens."
        )
    max_len = config.max_model_len or model.max_position_embeddings
    rows = _powers(1, max_num_seqs, 2)
    # From 128 rows on a product's time follows its rows.
    halfway = (3 * n // 2 for n in rows if n >= 128 and not cpu)
    decode = config.decode_buckets or tuple(
        sorted({*rows, *(n for n in halfway if n < max_num_seqs)})
    )
    if decode[-1] < max_num_seqs:
        raise ValueError(
            f"The largest of decode_buckets ({decode[-1]}) must hold max_num_seqs "
            f"({max_num_seqs}) rows."
        )
    largest = config.prefill_buckets[-1] if config.prefill_buckets else batched
    prefill = config.prefill_buckets
    if prefill is None and cpu:
        prefill = _powers(min(32, largest), largest, 4)
    elif prefill is None:
        # On a GPU a token of padding costs as much as any other once there are hundreds.
        sizes = _powers(128, largest, 2)
        prefill = tuple(sorted({*sizes, *(3 * n // 2 for n in sizes if 1024 <= n < largest)}))
    config = replace(
        config,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=batched,
        decode_buckets=decode,
        prefill_buckets=prefill,
        decode_repeats=config.decode_repeats
        or (1 if cpu else _repeats(model, bytes_per_value, num_devices)),
        shared_attention=_shares(config, model, cpu),
    )
    one_block = block_bytes(config, model, bytes_per_value, num_devices)
    usable = max_num_seqs * -(-max_len // config.block_size)
    working = 0 if cpu else working_bytes(config, model, bytes_per_value, num_devices)
    num_blocks = config.num_kv_blocks or min(
        usable, _kv_bytes(config, memory, working, num_devices) // one_block
    )
    if num_blocks < 1:
        raise ValueError(
            f"No memory is left for the KV cache: one block takes {one_block / 2**20:.1f} MiB."
        )
    capacity = num_blocks * config.block_size
    if config.max_model_len is not None and config.max_model_len > capacity:
        raise ValueError(
            f"max_model_len is {config.max_model_len}, but the KV pool of {num_blocks} blocks "
            f"holds {capacity} tokens; raise num_kv_blocks or lower max_model_len."
        )
    return replace(config, max_model_len=min(max_len, capacity), num_kv_blocks=num_blocks)


def working_bytes(
    config: EngineConfig, model: ModelConfig, bytes_per_value: int, num_devices: int = 1
) -> int:
    """Bytes that each device of a GPU needs besides weights and cache: for the engine's tables and
    for the largest step, or a little more.

    By formula, since XLA says so only of a compiled program: that of the largest step takes the
    longest to compile, and would have to be compiled again once the cache's size is known. The
    tests compare it with what XLA says (tests/aot/test_sizing.py).

    Args:
      config: with every limit on batches resolved.
      model: the model that is to run.
      bytes_per_value: of weights and activations.
      num_devices: that the model is split over.
    """
    c, m = config, model
    assert c.max_num_seqs and c.decode_buckets and c.prefill_buckets
    rows = c.decode_buckets[-1]
    tokens = rows + c.prefill_buckets[-1]
    # Of a token, at the widest place of a layer: x, what is added to it, its norm; and the MLP's
    # inner values, before and after the gate, or what attention reads and gives.
    kv_heads = max(m.num_kv_heads, num_devices)
    attention = kv_heads * (2 * m.group_size + 2) * m.head_dim
    inner = max(3 * m.intermediate_size, attention) // num_devices
    activations = tokens * (3 * m.hidden_size + inner) * bytes_per_value
    row = -(-m.vocab_size // num_devices) * 4  # of logits
    sampling = int(SAMPLER_COPIES * rows * row)
    prompt = PROMPT_COPIES * PROMPT_CHUNK * row
    # Two steps are in flight, and what the first half of each gave: logits and hidden states.
    given = 2 * (rows * row + tokens * m.hidden_size * bytes_per_value)
    slot = bytes_per_slot(m.vocab_size) + 4 * (c.max_model_len or m.max_position_embeddings)
    tables = (c.max_num_seqs + 1) * slot
    return max(activations, sampling, prompt) + given + tables + WORKSPACE_BYTES


def block_bytes(
    config: EngineConfig, model: ModelConfig, bytes_per_value: int, num_devices: int = 1
) -> int:
    """Bytes of one KV block: all layers, on all devices together."""
    kv_heads = max(model.num_kv_heads, num_devices)
    values = model.num_layers * 2 * kv_heads * config.block_size * model.head_dim
    return values * bytes_per_value


def _repeats(model: ModelConfig, bytes_per_value: int, num_devices: int) -> int:
    """Decode steps in a program that together take ``REPEATED_S``, if that is several."""
    step_s = weight_bytes(model, bytes_per_value) / num_devices / READ_BYTES_PER_S
    return int(min(MOST_REPEATS, max(1, REPEATED_S // step_s)))


def _shares(config: EngineConfig, model: ModelConfig, cpu: bool) -> bool:
    """Whether decode steps look for prefixes that rows share."""
    windows = any(model.window(index) is not None for index in range(model.num_layers))
    if config.shared_attention and windows:
        raise ValueError("shared_attention is for models without sliding windows.")
    if config.shared_attention is not None:
        return config.shared_attention
    fits = shared_tile_rows(model.group_size) >= LEAST_SHARING
    return not cpu and not windows and fits and config.prefix_cache == "radix"


def _powers(low: int, high: int, factor: int) -> tuple[int, ...]:
    """low, low * factor, ... below high, and high."""
    sizes = []
    while low < high:
        sizes.append(low)
        low *= factor
    return (*sizes, high)


def usable_bytes(config: EngineConfig, limit: int) -> int:
    """What an engine may use of each GPU: its share of all the memory, of which JAX takes
    ``limit`` bytes."""
    asked, share = config.gpu_memory_utilization, memory_fraction()
    if asked > share:
        logger.warning(
            "gpu_memory_utilization is %g, but JAX takes only %g of each GPU's memory: import "
            "jllm before anything starts JAX, or set XLA_CLIENT_MEM_FRACTION to more.",
            asked,
            share,
        )
    return int(limit * min(1.0, asked / share))


def _kv_bytes(
    config: EngineConfig, memory: Mapping[str, int] | None, working: int, num_devices: int
) -> int:
    """Bytes that the KV cache may take, on all devices. Those of a CPU share its memory."""
    if not memory or "bytes_limit" not in memory:
        return CPU_KV_BYTES
    usable = usable_bytes(config, memory["bytes_limit"])
    return num_devices * (usable - memory["bytes_in_use"] - working)
