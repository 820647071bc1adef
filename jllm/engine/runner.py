"""Owns what lives on the device (weights, cache, token table) and dispatches steps to it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, Sharding, SingleDeviceSharding
from numpy.typing import NDArray

from jllm.cache.block_pool import Blocks
from jllm.compilation import compiles_so_far, use_compilation_cache
from jllm.config import EngineConfig
from jllm.engine import step
from jllm.engine.planner import Entry, Plan
from jllm.engine.sizing import resolve
from jllm.models.logit_rules import Rules, empty_rules
from jllm.models.sampler import Sampled
from jllm.parallel.mesh import checked, mesh_of
from jllm.parallel.sharding import CACHE, WHOLE, place
from jllm.params import Params, check_params
from jllm.sampling_params import LogitsProcessor

BLOCKS_PER_COPY = 32  # blocks moved to or from host memory by one program


class Forwarded(NamedTuple):
    """What the first half of a step gives the second, on the device."""

    logits: jax.Array  # (B, V) float32, the model's own
    prompt: step.PromptScores | None


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

    tokens: NDArray[np.int32]  # (repeats, B)
    logprobs: TokenLogprobs | None
    prompt: TokenLogprobs | None  # one row per prefill token


class Runner:
    """The device's side of an engine. One owner of the donated arrays: they are reassigned in
    the statement that donates them.

    Args:
      params: the model.
      config: of the engine.
      mesh: the devices to run on; those that the params are split over unless given, or the first.

    Attributes:
      params, cache, tokens, rules: the arrays on the device, see step.py.
      mesh: None for one device.
      whole: the sharding of what every device has whole.
      num_compiles: programs compiled, or read from the compilation cache, by what ran here.
    """

    def __init__(self, params: Params, config: EngineConfig, mesh: Mesh | None = None) -> None:
        check_params(params)
        use_compilation_cache()
        mesh = mesh_of(params) if mesh is None else checked(mesh)
        devices = [jax.local_devices()[0]] if mesh is None else list(mesh.devices.flat)
        # A mesh of one device is none: its steps took 1.2 % longer on an H200.
        self.mesh = mesh = mesh if len(devices) > 1 else None
        self.whole, cache_sharding = _shardings(devices[0], mesh)
        self.params, self._given = self._place(params), params
        self.config = c = resolve(
            config,
            params.config,
            bytes_per_value=jnp.dtype(params.dtype).itemsize,
            memory=max(
                (device.memory_stats() for device in devices),
                key=lambda memory: memory["bytes_in_use"] if memory else 0,
            ),
            num_devices=len(devices),
        )
        assert c.num_kv_blocks and c.max_num_seqs and c.max_model_len
        kv_heads = self.params.layers[0].wqkv.shape[1]
        kv_shape = (c.num_kv_blocks + 1, 2, kv_heads, c.block_size, params.config.head_dim)
        slots = c.max_num_seqs + 1
        with jax.set_mesh(None):
            # One array per layer, the scratch block included.
            self.cache = [
                jnp.zeros(kv_shape, params.dtype, device=cache_sharding) for _ in params.layers
            ]
            self.tokens = jnp.zeros((slots, c.max_model_len), jnp.int32, device=self.whole)
            rules = empty_rules(slots, params.config.vocab_size)
            self.rules: Rules = jax.device_put(rules, self.whole)
        self.num_compiles = 0

    def free(self) -> None:
        """Drops the weights, the cache and the token table."""
        del self.params, self._given, self.cache, self.tokens, self.rules

    def update_params(self, params: Params) -> bool:
        """Replaces the weights; nothing is compiled again. False if they are the very arrays that
        it runs already.

        Raises ValueError naming the first array whose shape or dtype differs.
        """
        check_params(params)
        if _same_arrays(self._given, params):
            return False
        new = self._place(params)
        if new.config != self.params.config:
            raise ValueError("update_params needs params of the same ModelConfig as the engine's.")
        old_leaves = jax.tree_util.tree_leaves_with_path(self.params)
        for (path, old), leaf in zip(old_leaves, jax.tree.leaves(new), strict=True):
            if (old.shape, old.dtype) != (leaf.shape, leaf.dtype):
                raise ValueError(
                    f"update_params: {jax.tree_util.keystr(path)} is {leaf.dtype}{leaf.shape}, "
                    f"but the engine runs {old.dtype}{old.shape}."
                )
        self.params, self._given = new, params
        return True

    def _place(self, params: Params) -> Params:
        """The params as every step takes them, without their tokenizer: strongly typed arrays
        committed to the devices. JAX compiles a program again for arguments that differ from those
        before in one of these, and must not for a difference in tokenizers."""
        with jax.set_mesh(None):
            params = jax.tree.map(_strongly_typed, dataclasses.replace(params, tokenizer=None))
            if self.mesh is not None:
                return place(params, self.mesh)
            placed: Params = jax.device_put(params, self.whole)
            return placed

    def forward(self, plan: Plan) -> Forwarded:
        """Starts the first half of a step, which needs nothing that the step before drew, and
        returns at once."""
        prompt = None
        with self.running():
            for entry in plan.entries:
                self.enter(entry)
            self.cache, self.tokens, logits, hidden = step.forward(
                self.params,
                self.cache,
                self.tokens,
                plan.forward,
                spec=plan.spec,
                mesh=self.mesh,
            )
            if plan.prompt is not None:
                prompt = step.prompt_logprobs(
                    self.params,
                    hidden,
                    plan.prompt.targets,
                    count=plan.prompt.num_top,
                    mesh=self.mesh,
                )
        return Forwarded(logits, prompt)

    def decode(self, plan: Plan) -> Dispatched:
        """Starts ``plan.repeats`` whole decode steps and returns at once."""
        with self.running():
            self.cache, self.tokens, drawn = step.decode(
                self.params,
                self.cache,
                self.tokens,
                self.rules,
                plan.forward,
                plan.sample,
                spec=plan.spec,
                sampler=plan.sampler,
                repeats=plan.repeats,
                mesh=self.mesh,
            )
        drawn.copy_to_host_async()
        return Dispatched(Sampled(drawn, None, None, None), None)

    def sample(
        self, plan: Plan, forwarded: Forwarded, masks: NDArray[np.uint32] | None
    ) -> Dispatched:
        """Starts the second half of a step and returns at once; the results are on their way to
        the host. ``masks`` (B, V32) say what may be drawn at all, see ``step.mask_logits``."""
        raw = logits = forwarded.logits
        sampled: Sampled
        with self.running():
            for processor, rows in plan.processed:
                logits = step.process_logits(
                    self.tokens,
                    logits,
                    plan.sample,
                    rows,
                    processor=processor,
                    vocab_size=self.params.config.vocab_size,
                    mesh=self.mesh,
                )
            if masks is not None:
                logits = step.mask_logits(logits, masks, mesh=self.mesh)
            self.tokens, sampled = step.sample(
                self.tokens,
                self.rules,
                logits,
                raw,
                plan.sample,
                spec=plan.sampler,
                mesh=self.mesh,
            )
        for array in (*sampled, *(forwarded.prompt or ())):
            if array is not None:
                array.copy_to_host_async()
        return Dispatched(sampled, forwarded.prompt)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Around every program: counts what is compiled, and hides a mesh that the caller has set
        with ``jax.set_mesh``, as training loops do."""
        before = compiles_so_far()
        with jax.set_mesh(None):
            yield
        self.num_compiles += compiles_so_far() - before

    def enter(self, entry: Entry) -> None:
        """Writes what an admitted request brings along into its slot."""
        slot = np.int32(entry.slot)
        if entry.tokens is not None:
            self.tokens = step.enter_tokens(self.tokens, slot, entry.tokens, mesh=self.mesh)
        if entry.rules is not None:
            self.rules = step.enter_rules(self.rules, slot, entry.rules, mesh=self.mesh)

    def collect(self, step: Dispatched) -> Results:
        """Waits for a dispatched step."""
        tokens, *logprobs = step.sampled
        return Results(np.atleast_2d(tokens), _on_host(logprobs), _on_host(step.prompt))

    def check_processor(self, processor: LogitsProcessor) -> None:
        """Traces a ``logits_processor``, so that its faults are its user's error and not the
        engine's: raises ValueError unless it maps logits (V,) and tokens (L,) to logits (V,)."""
        logits = jax.ShapeDtypeStruct((self.params.config.vocab_size,), jnp.float32)
        history = jax.ShapeDtypeStruct((self.tokens.shape[1],), jnp.int32)
        batch = (jax.ShapeDtypeStruct((1, *x.shape), x.dtype) for x in (logits, history))
        try:
            hash(processor)
            result = jax.eval_shape(processor, logits, history)
            jax.eval_shape(jax.vmap(processor), *batch)  # as the step calls it
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
        with self.running():
            parts = [
                list(map(np.asarray, step.read_blocks(self.cache, padded, mesh=self.mesh)))
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
            with self.running():
                self.cache = step.write_blocks(self.cache, padded, parts, mesh=self.mesh)

    @property
    def block_bytes(self) -> int:
        """Bytes of one KV block, all layers."""
        return sum(kv.nbytes // len(kv) for kv in self.cache)


def _on_host(arrays: Iterable[jax.Array | None] | None) -> TokenLogprobs | None:
    on_host = [np.asarray(array) for array in arrays or () if array is not None]
    return TokenLogprobs(*on_host) if on_host else None


def _same_arrays(one: Params, other: Params) -> bool:
    leaves, others = jax.tree.leaves(one), jax.tree.leaves(other)
    return len(leaves) == len(others) and all(a is b for a, b in zip(leaves, others, strict=True))


def _in_copies(blocks: Blocks) -> list[Blocks]:
    """Cuts blocks into copies of one size, so that one program serves all; padding is scratch."""
    padded = np.pad(blocks, (0, -len(blocks) % BLOCKS_PER_COPY))
    return list(padded.reshape(-1, BLOCKS_PER_COPY))


def _shardings(device: jax.Device, mesh: Mesh | None) -> tuple[Sharding, Sharding]:
    """Of what is whole on every device, and of the cache."""
    if mesh is None:
        return SingleDeviceSharding(device), SingleDeviceSharding(device)
    return NamedSharding(mesh, WHOLE), NamedSharding(mesh, CACHE)


def _strongly_typed(leaf: Any) -> jax.Array:
    array = jnp.asarray(leaf)
    return jax.lax.convert_element_type(array, array.dtype) if array.weak_type else array
