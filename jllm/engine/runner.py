"""Owns what lives on the device (weights, cache, token table) and dispatches steps to it."""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from jllm.cache.block_pool import Blocks
from jllm.config import EngineConfig, ModelConfig
from jllm.engine import step
from jllm.engine.batch import StepSpec, forward_fields, pack, sample_fields
from jllm.engine.planner import Entry, Plan
from jllm.models.logit_rules import Rules, empty_rules
from jllm.models.sampler import Sampled, SamplerSpec
from jllm.params import Params
from jllm.sampling_params import MAX_LOGPROBS, LogitsProcessor

BLOCKS_PER_COPY = 32  # blocks moved to or from host memory by one program
CPU_KV_BYTES = 1 << 30
GPU_KV_SLACK_BYTES = 3 << 30  # temporaries of the largest step, CUDA graphs, cuBLAS workspaces


class Dispatched(NamedTuple):
    """What a step in flight will give."""

    sampled: Sampled
    prompt: step.PromptScores | None


class TokenLogprobs(NamedTuple):
    """Logprobs on the host: of each row's token, and of the likeliest ones, likeliest first."""

    chosen: NDArray[np.float32]  # (B,)
    top_ids: NDArray[np.int32]  # (B, n)
    top: NDArray[np.float32]  # (B, n); -inf for what cannot be drawn


class Results(NamedTuple):
    """What a step gave, on the host."""

    tokens: NDArray[np.int32]
    logprobs: TokenLogprobs | None
    prompt: TokenLogprobs | None  # one row per prefill token


class Runner:
    """The device's side of an engine. One owner of the donated arrays: they are reassigned in
    the statement that donates them."""

    def __init__(self, params: Params, config: EngineConfig) -> None:
        use_compilation_cache()
        self.config = resolve(config, params)
        self.params = arrays_of(params)
        c = self.config
        assert c.num_kv_blocks and c.max_num_seqs and c.max_model_len
        self._cache = _zeros_cache(params.config, c.num_kv_blocks, c.block_size, params.dtype)
        self._tokens = jnp.zeros((c.max_num_seqs + 1, c.max_model_len), jnp.int32)
        self._rules = empty_rules(c.max_num_seqs + 1, params.config.vocab_size)
        self.num_compiles = 0  # programs compiled, or read from the compilation cache, by steps

    def free(self) -> None:
        """Drops the weights, the cache and the token table."""
        del self.params, self._cache, self._tokens

    def update_params(self, params: Params) -> None:
        """Replaces the weights; nothing is compiled again.

        Raises ValueError naming the first array whose shape or dtype differs.
        """
        new = arrays_of(params)
        if new.config != self.params.config:
            raise ValueError("update_params needs params of the same ModelConfig as the engine's.")
        old_leaves = jax.tree_util.tree_leaves_with_path(self.params)
        for (path, old), leaf in zip(old_leaves, jax.tree.leaves(new), strict=True):
            if (old.shape, old.dtype) != (leaf.shape, leaf.dtype):
                raise ValueError(
                    f"update_params: {jax.tree_util.keystr(path)} is {leaf.dtype}{leaf.shape}, "
                    f"but the engine runs {old.dtype}{old.shape}."
                )
        self.params = new

    def dispatch(self, plan: Plan) -> Dispatched:
        """Starts a step and returns at once; the results are on their way to the host."""
        before = compiles_so_far()
        for entry in plan.entries:
            self._enter(entry)
        self._cache, self._tokens, raw, hidden = step.forward(
            self.params, self._cache, self._tokens, plan.forward, spec=plan.spec
        )
        logits = raw
        for processor, mask in plan.processed:
            logits = step.process_logits(
                self._tokens, logits, plan.sample, mask, processor=processor
            )
        sampled: Sampled
        self._tokens, sampled = step.sample(
            self._tokens, self._rules, logits, raw, plan.sample, spec=plan.sampler
        )
        prompt = None
        if plan.prompt is not None:
            prompt = step.prompt_logprobs(
                self.params, hidden, plan.prompt.targets, count=plan.prompt.num_top
            )
        self.num_compiles += compiles_so_far() - before
        for array in (*sampled, *(prompt or ())):
            if array is not None:
                array.copy_to_host_async()
        return Dispatched(sampled, prompt)

    def _enter(self, entry: Entry) -> None:
        slot = np.int32(entry.slot)
        if entry.tokens is not None:
            self._tokens = step.enter_tokens(self._tokens, slot, entry.tokens)
        if entry.rules is not None:
            self._rules = step.enter_rules(self._rules, slot, entry.rules)

    def collect(self, step: Dispatched) -> Results:
        """Waits for a dispatched step."""
        tokens, *logprobs = step.sampled
        return Results(np.asarray(tokens), _on_host(logprobs), _on_host(step.prompt))

    def warm_up(self, spec: StepSpec, sampler: SamplerSpec) -> None:
        """Compiles and runs one spec on padding only: it writes to the scratch block and row."""
        assert self.config.max_num_seqs
        plan, views = pack(forward_fields(spec))
        views["slots"][:] = self.config.max_num_seqs
        sample_plan, views = pack(sample_fields(spec.num_rows))
        views["slots"][:] = self.config.max_num_seqs
        self.collect(self.dispatch(Plan(spec, plan, sampler, sample_plan, [], [], [], None)))

    def warm_up_prompt_logprobs(self, num_prefill: int) -> None:
        """Compiles and runs what ``prompt_logprobs`` needs for steps of this prefill size."""
        before = compiles_so_far()
        hidden = np.zeros((num_prefill, self.params.config.hidden_size), self.params.dtype)
        targets = np.zeros(num_prefill, np.int32)
        for count in (0, MAX_LOGPROBS):
            step.prompt_logprobs(self.params, hidden, targets, count=count)
        self.num_compiles += compiles_so_far() - before

    def warm_up_entries(self) -> None:
        """Compiles and runs what enters an admitted request's tokens and rules."""
        before = compiles_so_far()
        scratch = self._tokens.shape[0] - 1
        rules = Rules(*(np.zeros(x.shape[1:], x.dtype) for x in self._rules))  # type: ignore[arg-type]
        self._enter(Entry(scratch, np.zeros(self._tokens.shape[1], np.int32), rules))
        self.num_compiles += compiles_so_far() - before

    def check_processor(self, processor: LogitsProcessor) -> None:
        """Traces a ``logits_processor``, so that its faults are its user's error and not the
        engine's: raises ValueError unless it maps logits (V,) and tokens (L,) to logits (V,)."""
        logits = jax.ShapeDtypeStruct((self.params.config.vocab_size,), jnp.float32)
        history = jax.ShapeDtypeStruct((self._tokens.shape[1],), jnp.int32)
        try:
            result = jax.eval_shape(processor, logits, history)
        except Exception as error:
            raise ValueError(
                f"SamplingParams.logits_processor cannot be traced by JAX: {error}"
            ) from error
        shape = getattr(result, "shape", None)
        if shape != logits.shape or not jnp.issubdtype(result.dtype, jnp.floating):
            raise ValueError(
                "SamplingParams.logits_processor must return floating-point logits of shape "
                f"{logits.shape}, not {result}."
            )

    def read_blocks(self, blocks: Blocks) -> list[NDArray[Any]]:
        """Per layer the content (n, 2, K, S, D) of blocks (n,), on the host."""
        parts = [
            [np.asarray(array) for array in step.read_blocks(self._cache, padded)]
            for padded in _in_copies(blocks)
        ]
        return [np.concatenate(layer)[: len(blocks)] for layer in zip(*parts, strict=True)]

    def write_blocks(self, blocks: Blocks, content: list[NDArray[Any]], first: int) -> None:
        """Puts ``content`` from its block ``first`` on into blocks (n,)."""
        for index, padded in enumerate(_in_copies(blocks)):
            start = first + index * BLOCKS_PER_COPY
            parts = [layer[start : start + BLOCKS_PER_COPY] for layer in content]
            missing = BLOCKS_PER_COPY - len(parts[0])
            if missing:
                widths = [(0, missing)] + [(0, 0)] * (parts[0].ndim - 1)
                parts = [np.pad(part, widths) for part in parts]
            self._cache = step.write_blocks(self._cache, padded, parts)

    def warm_up_copies(self) -> None:
        """Compiles the two programs that swapping needs."""
        before = compiles_so_far()
        scratch = np.zeros(1, np.int32)
        self.write_blocks(scratch, self.read_blocks(scratch), 0)
        self.num_compiles += compiles_so_far() - before

    @property
    def block_bytes(self) -> int:
        """Bytes of one KV block, all layers."""
        return sum(kv.nbytes // len(kv) for kv in self._cache)

    def memory_bytes(self) -> int:
        """Bytes of weights, cache and per-request tables."""
        leaves = jax.tree.leaves((self.params, self._cache, self._tokens, self._rules))
        return sum(leaf.nbytes for leaf in leaves)


def _on_host(arrays: Iterable[jax.Array | None] | None) -> TokenLogprobs | None:
    on_host = [np.asarray(array) for array in arrays or () if array is not None]
    return TokenLogprobs(*on_host) if on_host else None


def _in_copies(blocks: Blocks) -> list[Blocks]:
    """Cuts blocks into copies of one size, so that one program serves all; padding is scratch."""
    padded = np.pad(blocks, (0, -len(blocks) % BLOCKS_PER_COPY))
    return list(padded.reshape(-1, BLOCKS_PER_COPY))


def arrays_of(params: Params) -> Params:
    """The params without their tokenizer: it is no business of the compiled step, whose programs
    must not depend on it."""
    return dataclasses.replace(params, tokenizer=None)


def resolve(config: EngineConfig, params: Params) -> EngineConfig:
    """Fills in every field left None, by platform and by what the KV pool can hold.

    Raises ValueError when max_model_len exceeds the model's limit or the pool.
    """
    model = params.config
    cpu = jax.default_backend() == "cpu"
    max_num_seqs = config.max_num_seqs or (32 if cpu else 256)
    if config.max_num_seqs is None and config.max_num_batched_tokens is not None:
        max_num_seqs = min(max_num_seqs, config.max_num_batched_tokens)
    batched = config.max_num_batched_tokens or max(512 if cpu else 8192, max_num_seqs)
    if batched < max_num_seqs:
        raise ValueError(
            f"max_num_batched_tokens ({batched}) must be at least max_num_seqs ({max_num_seqs}): "
            "every running request decodes one token a step."
        )
    if config.max_model_len is not None and config.max_model_len > model.max_position_embeddings:
        raise ValueError(
            f"max_model_len is {config.max_model_len}, but the model was made for at most "
            f"{model.max_position_embeddings} tokens."
        )
    max_len = config.max_model_len or model.max_position_embeddings
    block_bytes = _block_bytes(model, config.block_size, params.dtype)
    usable = max_num_seqs * -(-max_len // config.block_size)
    num_blocks = config.num_kv_blocks or min(usable, _kv_bytes(config) // block_bytes)
    if num_blocks < 1:
        raise ValueError(
            f"No memory is left for the KV cache: one block takes {block_bytes / 2**20:.1f} MiB."
        )
    capacity = num_blocks * config.block_size
    if config.max_model_len is not None and config.max_model_len > capacity:
        raise ValueError(
            f"max_model_len is {config.max_model_len}, but the KV pool of {num_blocks} blocks "
            f"holds {capacity} tokens; raise num_kv_blocks or lower max_model_len."
        )
    decode = config.decode_buckets or _powers(1, max_num_seqs, 2)
    largest = config.prefill_buckets[-1] if config.prefill_buckets else batched
    prefill = config.prefill_buckets or _powers(min(32, largest), largest, 4)
    if decode[-1] < max_num_seqs:
        raise ValueError(
            f"The largest of decode_buckets ({decode[-1]}) must hold max_num_seqs "
            f"({max_num_seqs}) rows."
        )
    return config.with_limits(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=batched,
        max_model_len=min(max_len, capacity),
        num_kv_blocks=num_blocks,
        decode_buckets=decode,
        prefill_buckets=prefill,
        max_prefill_seqs=min(config.max_prefill_seqs or (8 if cpu else 64), max_num_seqs),
    )


def _powers(low: int, high: int, factor: int) -> tuple[int, ...]:
    """low, low * factor, ... below high, and high."""
    sizes = []
    while low < high:
        sizes.append(low)
        low *= factor
    return (*sizes, high)


def _block_bytes(model: ModelConfig, block_size: int, dtype: Any) -> int:
    values = model.num_layers * 2 * model.num_kv_heads * block_size * model.head_dim
    return values * int(jnp.dtype(dtype).itemsize)


def _kv_bytes(config: EngineConfig) -> int:
    """Bytes that the KV cache may take."""
    stats = jax.local_devices()[0].memory_stats()
    if not stats or "bytes_limit" not in stats:  # a CPU
        return CPU_KV_BYTES
    usable = int(stats["bytes_limit"] * config.gpu_memory_utilization)
    return usable - int(stats["bytes_in_use"]) - GPU_KV_SLACK_BYTES


def _zeros_cache(
    model: ModelConfig, num_blocks: int, block_size: int, dtype: Any
) -> list[jax.Array]:
    """One array per layer, the scratch block included."""
    shape = (num_blocks + 1, 2, model.num_kv_heads, block_size, model.head_dim)
    return [jnp.zeros(shape, dtype) for _ in range(model.num_layers)]


_compiles = 0


def compiles_so_far() -> int:
    """Programs that this process has compiled or read from the compilation cache."""
    _listen_for_compiles()
    return _compiles


@functools.cache
def _listen_for_compiles() -> None:
    def listener(event: str, duration_secs: float, **kwargs: str | int) -> None:
        global _compiles
        _compiles += event == "/jax/core/compile/backend_compile_duration"

    jax.monitoring.register_event_duration_secs_listener(listener)


@functools.cache
def use_compilation_cache() -> None:
    """Keeps compiled programs on disk, in ``$XDG_CACHE_HOME/jllm`` (``~/.cache/jllm``), unless
    the user configured JAX's compilation cache: a second start then compiles nothing."""
    if jax.config.jax_compilation_cache_dir or not jax.config.jax_enable_compilation_cache:
        return
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    jax.config.update("jax_compilation_cache_dir", str(Path(root) / "jllm" / "xla"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
