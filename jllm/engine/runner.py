"""Owns what lives on the device (weights, cache, token table) and dispatches steps to it."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, Sharding, SingleDeviceSharding
from numpy.typing import NDArray
from tqdm import tqdm

from jllm.cache.block_pool import Blocks
from jllm.compilation import compiles_so_far, use_compilation_cache
from jllm.config import EngineConfig
from jllm.engine import step
from jllm.engine.batch import Buckets, StepSpec, forward_fields, pack, sample_fields
from jllm.engine.grammar import all_allowed
from jllm.engine.planner import REPEATED_SAMPLERS, Entry, Plan
from jllm.engine.sizing import resolve
from jllm.models.logit_rules import Rules, empty_rules
from jllm.models.sampler import Sampled, SamplerSpec
from jllm.parallel.mesh import checked, mesh_of
from jllm.parallel.sharding import CACHE, LOGITS, WHOLE, place
from jllm.params import Params, check_params
from jllm.sampling_params import MAX_LOGPROBS, LogitsProcessor

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
    """

    def __init__(self, params: Params, config: EngineConfig, mesh: Mesh | None = None) -> None:
        check_params(params)
        use_compilation_cache()
        self._mesh = mesh = mesh_of(params) if mesh is None else checked(mesh)
        devices = [jax.local_devices()[0]] if mesh is None else list(mesh.devices.flat)
        self._whole, cache_sharding = _shardings(devices[0], mesh)
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
            self._cache = [
                jnp.zeros(kv_shape, params.dtype, device=cache_sharding) for _ in params.layers
            ]
            self._tokens = jnp.zeros((slots, c.max_model_len), jnp.int32, device=self._whole)
            rules = empty_rules(slots, params.config.vocab_size)
            self._rules: Rules = jax.device_put(rules, self._whole)
        self.num_compiles = 0  # programs compiled, or read from the compilation cache, by steps

    def free(self) -> None:
        """Drops the weights, the cache and the token table."""
        del self.params, self._given, self._cache, self._tokens, self._rules

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
            if self._mesh is not None:
                return place(params, self._mesh)
            placed: Params = jax.device_put(params, self._whole)
            return placed

    def forward(self, plan: Plan) -> Forwarded:
        """Starts the first half of a step, which needs nothing that the step before drew, and
        returns at once."""
        prompt = None
        with self._running():
            for entry in plan.entries:
                self._enter(entry)
            self._cache, self._tokens, logits, hidden = step.forward(
                self.params,
                self._cache,
                self._tokens,
                plan.forward,
                spec=plan.spec,
                mesh=self._mesh,
            )
            if plan.prompt is not None:
                prompt = step.prompt_logprobs(
                    self.params,
                    hidden,
                    plan.prompt.targets,
                    count=plan.prompt.num_top,
                    mesh=self._mesh,
                )
        return Forwarded(logits, prompt)

    def decode(self, plan: Plan) -> Dispatched:
        """Starts ``plan.repeats`` whole decode steps and returns at once."""
        with self._running():
            self._cache, self._tokens, drawn = step.decode(
                self.params,
                self._cache,
                self._tokens,
                self._rules,
                plan.forward,
                plan.sample,
                spec=plan.spec,
                sampler=plan.sampler,
                repeats=plan.repeats,
                mesh=self._mesh,
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
        with self._running():
            for processor, rows in plan.processed:
                logits = step.process_logits(
                    self._tokens,
                    logits,
                    plan.sample,
                    rows,
                    processor=processor,
                    vocab_size=self.params.config.vocab_size,
                    mesh=self._mesh,
                )
            if masks is not None:
                logits = step.mask_logits(logits, masks, mesh=self._mesh)
            self._tokens, sampled = step.sample(
                self._tokens,
                self._rules,
                logits,
                raw,
                plan.sample,
                spec=plan.sampler,
                mesh=self._mesh,
            )
        for array in (*sampled, *(forwarded.prompt or ())):
            if array is not None:
                array.copy_to_host_async()
        return Dispatched(sampled, forwarded.prompt)

    @contextmanager
    def _running(self) -> Iterator[None]:
        """Around every program: counts what is compiled, and hides a mesh that the caller has set
        with ``jax.set_mesh``, as training loops do."""
        before = compiles_so_far()
        with jax.set_mesh(None):
            yield
        self.num_compiles += compiles_so_far() - before

    def _enter(self, entry: Entry) -> None:
        slot = np.int32(entry.slot)
        if entry.tokens is not None:
            self._tokens = step.enter_tokens(self._tokens, slot, entry.tokens, mesh=self._mesh)
        if entry.rules is not None:
            self._rules = step.enter_rules(self._rules, slot, entry.rules, mesh=self._mesh)

    def collect(self, step: Dispatched) -> Results:
        """Waits for a dispatched step."""
        tokens, *logprobs = step.sampled
        return Results(np.atleast_2d(tokens), _on_host(logprobs), _on_host(step.prompt))

    def compile(
        self, specs: Sequence[StepSpec], samplers: Sequence[SamplerSpec], *, progress: bool = False
    ) -> None:
        """Compiles every forward pass, and every sampler for every number of rows, in threads:
        XLA takes seconds for each. Calling them afterwards compiles nothing."""
        jobs: list[Callable[[], Any]] = []
        for spec in reversed(specs):  # the largest takes longest
            plan, _ = pack(forward_fields(spec))
            model = (self.params, self._cache, self._tokens, plan)
            jobs.append(partial(step.forward.lower, *model, spec=spec, mesh=self._mesh))
        logits_sharding = self._whole if self._mesh is None else NamedSharding(self._mesh, LOGITS)
        for rows in sorted({spec.num_rows for spec in specs}):
            shape = (rows, self.params.config.vocab_size)
            logits = jax.ShapeDtypeStruct(shape, jnp.float32, sharding=logits_sharding)
            plan, _ = pack(sample_fields(rows))
            given = (self._tokens, self._rules, logits, logits, plan)
            for sampler in samplers:
                jobs.append(partial(step.sample.lower, *given, spec=sampler, mesh=self._mesh))
        for spec, sampler in self._repeated(specs, samplers):
            plans = (pack(forward_fields(spec))[0], pack(sample_fields(spec.num_rows))[0])
            whole = (self.params, self._cache, self._tokens, self._rules, *plans)
            sizes = dict(spec=spec, sampler=sampler, repeats=self.config.decode_repeats)
            jobs.append(partial(step.decode.lower, *whole, **sizes, mesh=self._mesh))

        def run(lower: Callable[[], Any]) -> None:
            with jax.set_mesh(None):
                lower().compile()

        with self._running(), ThreadPoolExecutor(os.cpu_count()) as pool:
            done = pool.map(run, jobs)
            for _ in tqdm(done, "compiling", len(jobs), leave=False, disable=not progress):
                pass

    def _repeated(
        self, specs: Sequence[StepSpec], samplers: Sequence[SamplerSpec]
    ) -> list[tuple[StepSpec, SamplerSpec]]:
        """Those of the specs and samplers that decode steps are repeated with."""
        if self.config.decode_repeats == 1:
            return []
        repeated = Buckets.of(self.config).repeated_specs()
        chosen = [sampler for sampler in samplers if sampler in REPEATED_SAMPLERS]
        return [(spec, sampler) for spec in specs if spec in repeated for sampler in chosen]

    def warm_up_repeats(self, specs: Sequence[StepSpec], samplers: Sequence[SamplerSpec]) -> None:
        """Runs the programs of several decode steps on padding only."""
        assert self.config.decode_repeats
        for spec, sampler in self._repeated(specs, samplers):
            padding = self._padding(spec, sampler)._replace(repeats=self.config.decode_repeats)
            self.collect(self.decode(padding))

    def warm_up(self, spec: StepSpec, sampler: SamplerSpec, *, masked: bool = False) -> None:
        """Compiles and runs one spec on padding only, ``masked`` as for rows that follow a grammar:
        it writes to the scratch block and row."""
        padding = self._padding(spec, sampler)
        masks = all_allowed(spec.num_rows, self.params.config.vocab_size) if masked else None
        self.collect(self.sample(padding, self.forward(padding), masks))

    def _padding(self, spec: StepSpec, sampler: SamplerSpec) -> Plan:
        assert self.config.max_num_seqs
        plan, views = pack(forward_fields(spec))
        views["slots"][:] = self.config.max_num_seqs
        sample_plan, views = pack(sample_fields(spec.num_rows))
        views["slots"][:] = self.config.max_num_seqs
        return Plan(spec, plan, sampler, sample_plan, [], [], [], [], None)

    def warm_up_prompt_logprobs(self, num_prefill: int) -> None:
        """Compiles and runs what ``prompt_logprobs`` needs for steps of this prefill size."""
        shape = (num_prefill, self.params.config.hidden_size)
        targets = np.zeros(num_prefill, np.int32)
        with self._running():
            # Committed to the devices, as a step gives it: for another it would be compiled again.
            hidden = jnp.zeros(shape, self.params.dtype, device=self._whole)
            for count in (0, MAX_LOGPROBS):
                step.prompt_logprobs(self.params, hidden, targets, count=count, mesh=self._mesh)

    def warm_up_entries(self) -> None:
        """Compiles and runs what enters an admitted request's tokens and rules."""
        scratch = self._tokens.shape[0] - 1
        rules = Rules(*(np.zeros(x.shape[1:], x.dtype) for x in self._rules))  # type: ignore[arg-type]
        with self._running():
            self._enter(Entry(scratch, np.zeros(self._tokens.shape[1], np.int32), rules))

    def check_processor(self, processor: LogitsProcessor) -> None:
        """Traces a ``logits_processor``, so that its faults are its user's error and not the
        engine's: raises ValueError unless it maps logits (V,) and tokens (L,) to logits (V,)."""
        logits = jax.ShapeDtypeStruct((self.params.config.vocab_size,), jnp.float32)
        history = jax.ShapeDtypeStruct((self._tokens.shape[1],), jnp.int32)
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
        with self._running():
            parts = [
                list(map(np.asarray, step.read_blocks(self._cache, padded, mesh=self._mesh)))
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
            with self._running():
                self._cache = step.write_blocks(self._cache, padded, parts, mesh=self._mesh)

    def warm_up_copies(self) -> None:
        """Compiles the two programs that swapping needs."""
        scratch = np.zeros(1, np.int32)
        self.write_blocks(scratch, self.read_blocks(scratch), 0)

    @property
    def block_bytes(self) -> int:
        """Bytes of one KV block, all layers."""
        return sum(kv.nbytes // len(kv) for kv in self._cache)


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
