"""Compiles the programs of a step from shapes alone."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from jllm.config import EngineConfig, ModelConfig
from jllm.engine import step
from jllm.engine.batch import Field, StepSpec, forward_fields, offsets, sample_fields
from jllm.kernels import triton_call
from jllm.models.sampler import SamplerSpec
from jllm.parallel.inspect.collectives import Collective, collectives
from jllm.parallel.inspect.gpus import GPU
from jllm.parallel.inspect.memory import DTYPE, tables
from jllm.parallel.sharding import CACHE, LOGITS, WHOLE, laid_out, param_specs
from jllm.params import param_shapes


class Program(NamedTuple):
    """What a compiled program says of itself, for one device."""

    collectives: list[Collective]
    temporaries: int  # bytes


class Compiler:
    """Compiles steps of one model for the devices of a mesh, and runs nothing.

    Args:
      config: the model.
      mesh: one axis, ``tp``. Its devices may be there or not.
      engine_config: resolved.
      gpu: what the devices are, unless they are a CPU's.
    """

    def __init__(
        self, config: ModelConfig, mesh: Mesh, engine_config: EngineConfig, gpu: GPU
    ) -> None:
        self._config, self._engine_config = config, engine_config
        self._laid_out = laid_out(config, mesh.size) if mesh.size > 1 else config
        self._mesh = mesh if mesh.size > 1 else None
        self._device = mesh.devices.flat[0]
        self._gpu = None if self._device.platform == "cpu" else gpu

    @property
    def platform(self) -> str:
        return "cpu" if self._gpu is None else "cuda"

    def forward(self, spec: StepSpec) -> Program:
        """The model's part of a step of these sizes."""
        c = self._engine_config
        assert c.num_kv_blocks
        shapes = param_shapes(self._laid_out, DTYPE)
        params = jax.tree.map(
            lambda x, spec: self._array(x.shape, x.dtype, spec), shapes, param_specs(shapes)
        )
        params = dataclasses.replace(params, config=self._config)
        heads, dim = self._laid_out.num_kv_heads, self._config.head_dim
        kv = self._array((c.num_kv_blocks + 1, 2, heads, c.block_size, dim), DTYPE, CACHE)
        tokens, _ = tables(self._config, c)
        return self._compile(
            "forward",
            step.forward,
            params,
            [kv] * self._config.num_layers,
            self._array(tokens.shape, tokens.dtype, WHOLE),
            self._plan(forward_fields(spec)),
            spec=spec,
        )

    def sample(self, num_rows: int) -> Program:
        """Greedy sampling of so many rows."""
        tokens, rules = jax.tree.map(
            lambda x: self._array(x.shape, x.dtype, WHOLE),
            tables(self._config, self._engine_config),
        )
        logits = self._array((num_rows, self._laid_out.vocab_size), "float32", LOGITS)
        plan = self._plan(sample_fields(num_rows))
        return self._compile(
            "sampling", step.sample, tokens, rules, logits, logits, plan, spec=SamplerSpec()
        )

    def _compile(self, name: str, program: Any, *args: Any, **options: Any) -> Program:
        # Autotuning would run kernels.
        xla_options = {"xla_gpu_autotune_level": 0} if self._gpu else {}
        with jax.set_mesh(None), self._target():
            traced = program.trace(*args, **options, mesh=self._mesh)
            compiled = traced.lower(lowering_platforms=(self.platform,)).compile(xla_options)
        found = collectives(compiled.as_text(), name)
        return Program(found, compiled.memory_analysis().temp_size_in_bytes)

    @contextmanager
    def _target(self) -> Iterator[None]:
        if self._gpu is None:
            yield
            return
        with triton_call.compiling_for(self._gpu.compute_capability):
            yield

    def _plan(self, fields: tuple[Field, ...]) -> jax.ShapeDtypeStruct:
        return self._array((offsets(fields)[1],), "int32", WHOLE)

    def _array(
        self, shape: tuple[int, ...], dtype: Any, spec: PartitionSpec
    ) -> jax.ShapeDtypeStruct:
        sharding = (
            SingleDeviceSharding(self._device)
            if self._mesh is None
            else NamedSharding(self._mesh, spec)
        )
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)
