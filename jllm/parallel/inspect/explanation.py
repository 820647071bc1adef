"""``explain`` and ``compare``: what an engine over several devices will be like."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh

from jllm import roofline
from jllm.config import EngineConfig, ModelConfig
from jllm.engine.batch import Buckets, StepSpec
from jllm.parallel.inspect import gpus
from jllm.parallel.inspect.collectives import Collective, of_all_layers
from jllm.parallel.inspect.gpus import GPU
from jllm.parallel.inspect.memory import DTYPE, Memory, Weight, sized, weights
from jllm.parallel.inspect.programs import Compiler
from jllm.parallel.mesh import AXIS, checked
from jllm.parallel.sharding import laid_out

BATCH, CONTEXT = 64, 2048
COMPILED_LAYERS = 4  # the temporaries of 80 layers, within 2 %, in a tenth of the time
DEFAULT_GPU = "h200"


class Time(NamedTuple):
    """Seconds that a step takes at least; see ``roofline``. What crosses between devices waits for
    what is computed, and is waited for; of it only the bytes count, not the latency."""

    matmuls: float
    attention: float
    link: float

    @property
    def total(self) -> float:
        return sum(self)


@dataclass(frozen=True)
class Step:
    """One step of an engine.

    Attributes:
      rows: requests in it.
      context: tokens of each, those of this step included.
      tokens: that go through the model.
      spec: the sizes that it is padded to.
      collectives: what crosses between devices, in the order of the program.
      temporaries: bytes on each device while it runs.
      time: at least.
    """

    rows: int
    context: int
    tokens: int
    spec: StepSpec
    collectives: tuple[Collective, ...]
    temporaries: int
    time: Time

    @property
    def counted(self) -> list[tuple[Collective, int]]:
        """Those that are alike in all layers once, and how often."""
        return list(Counter(one._replace(layer=None) for one in self.collectives).items())


@dataclass(frozen=True)
class Explanation:
    """A model over ``tp`` devices.

    Attributes:
      config: of the model.
      engine_config: with every field filled in.
      tp: devices.
      gpu: which.
      compiled_for: ``cuda``, or ``cpu`` where there is no compiler for GPUs; temporaries are those
        of that platform.
      compiled_layers: how many of the model's layers were compiled; collectives of the others are
        those of the second.
      memory: of each device.
      weights: by name.
      decode: a step that draws a token for each of its rows.
      prefill: a step of as many prompt tokens as the engine takes.
    """

    config: ModelConfig
    engine_config: EngineConfig
    tp: int
    gpu: GPU
    compiled_for: str
    compiled_layers: int
    memory: Memory
    weights: tuple[Weight, ...]
    decode: Step
    prefill: Step

    def __str__(self) -> str:
        from jllm.parallel.inspect.text import report

        return report(self)


class Layout(NamedTuple):
    """One way to split a model, or why it cannot be."""

    tp: int
    explanation: Explanation | None
    problem: str | None


def explain(
    config: ModelConfig,
    mesh: Mesh | int = 1,
    engine_config: EngineConfig | None = None,
    *,
    gpu: str | None = None,
    batch: int | None = None,
    context: int | None = None,
    compiled_layers: int = COMPILED_LAYERS,
) -> Explanation:
    """What a model takes on each device, what crosses between them, and how long a step takes at
    least: from shapes, in bfloat16, without weights and without running anything.

        print(jllm.parallel.explain(jllm.ModelConfig.preset("llama-3.1-70b"), 8))

    Args:
      config: the model.
      mesh: the devices whose program is read, or how many: then of GPUs that need not be there if
        JAX's plugin for NVIDIA GPUs is installed, else of this process's CPU devices.
      engine_config: the engine's, as ``Engine`` takes it.
      gpu: whose memory and speed are meant: h200, h100, a100 or l40s. That of the mesh unless
        given, or an H200.
      batch: rows of the decode step; 64, or as many as the engine runs at once.
      context: tokens of each row; 2048, or as many as the engine allows.
      compiled_layers: how many layers are really compiled, at least 2, or all that there are.

    Raises ValueError if the model cannot be split so or does not fit, or if there are too few
    devices to compile for.
    """
    if not isinstance(config, ModelConfig):
        raise ValueError(f"explain needs a ModelConfig, such as a preset's, not {config!r}.")
    tp = _size(mesh)
    chosen = _gpu(mesh, gpu)
    memory, resolved = sized(config, tp, engine_config or EngineConfig(), chosen)
    assert resolved.max_num_seqs and resolved.max_model_len and resolved.prefill_buckets
    batch = _within("batch", batch, BATCH, resolved.max_num_seqs, "max_num_seqs")
    context = _within("context", context, CONTEXT, resolved.max_model_len, "max_model_len")

    if not isinstance(compiled_layers, int) or compiled_layers < 2:
        raise ValueError(f"compiled_layers must be at least 2, not {compiled_layers!r}.")
    layers = min(config.num_layers, compiled_layers)
    few = dataclasses.replace(
        config, num_layers=layers, sliding_layers=config.sliding_layers[:layers]
    )
    compiler = Compiler(few, _mesh(mesh, chosen), resolved, chosen)

    def step(rows: int, new_tokens: int, spec: StepSpec) -> Step:
        forward, sample = compiler.forward(spec), compiler.sample(spec.num_rows)
        crossing = of_all_layers(forward.collectives, layers, config.num_layers)
        crossing += sample.collectives
        linked = sum(one.link_bytes(tp) for one in crossing) / chosen.link_bytes_per_s
        split = laid_out(config, tp) if tp > 1 else config
        several, itemsize = chosen.hardware.times(tp), jnp.dtype(DTYPE).itemsize
        if new_tokens == 1:
            time = roofline.decode_step(split, several, rows, context, itemsize)
        else:
            time = roofline.prefill(
                split, several, rows, new_tokens, chunk=rows * new_tokens, itemsize=itemsize
            )
        return Step(
            rows=rows,
            context=context if new_tokens == 1 else new_tokens,
            tokens=rows * new_tokens,
            spec=spec,
            collectives=tuple(crossing),
            temporaries=max(forward.temporaries, sample.temporaries),
            time=Time(*time, linked),
        )

    buckets = Buckets.of(resolved)
    most = resolved.prefill_buckets[-1]
    prompts = max(1, min(most // context, buckets.decode[-1]))
    return Explanation(
        config=config,
        engine_config=resolved,
        tp=tp,
        gpu=chosen,
        compiled_for=compiler.platform,
        compiled_layers=layers,
        memory=memory,
        weights=weights(config, tp),
        decode=step(batch, 1, buckets.decode_spec(batch)),
        prefill=step(prompts, min(context, most), buckets.mixed_spec(most)),
    )


def compare(
    config: ModelConfig,
    sizes: Sequence[int] = (1, 2, 4, 8),
    engine_config: EngineConfig | None = None,
    *,
    gpu: str | None = None,
    batch: int | None = None,
    context: int | None = None,
    compiled_layers: int = COMPILED_LAYERS,
) -> list[Layout]:
    """``explain`` for several numbers of devices; what cannot be is told in a layout's problem."""
    layouts = []
    for tp in sizes:
        try:
            found = explain(
                config,
                tp,
                engine_config,
                gpu=gpu,
                batch=batch,
                context=context,
                compiled_layers=compiled_layers,
            )
        except ValueError as error:
            layouts.append(Layout(tp, None, str(error)))
        else:
            layouts.append(Layout(tp, found, None))
    return layouts


def _size(mesh: Mesh | int) -> int:
    if isinstance(mesh, int) and not isinstance(mesh, bool):
        if mesh < 1:
            raise ValueError(f"tp must be at least 1, not {mesh}.")
        return mesh
    return checked(mesh).size


def _gpu(mesh: Mesh | int, name: str | None) -> GPU:
    if name is None and isinstance(mesh, Mesh):
        known = roofline.hardware(mesh.devices.flat[0].device_kind)
        name = known.name if known else None
    return gpus.named(name or DEFAULT_GPU)


def _mesh(mesh: Mesh | int, gpu: GPU) -> Mesh:
    if isinstance(mesh, Mesh):
        return checked(mesh)
    devices = gpus.compile_only(gpu, mesh)
    if devices is None:
        devices = jax.local_devices(backend="cpu")[:mesh]
    if len(devices) < mesh:
        raise ValueError(
            f"To compile for {mesh} devices takes JAX's plugin for NVIDIA GPUs, or as many CPU "
            f"devices: there are {len(devices)}, and "
            f"jax.config.update('jax_num_cpu_devices', {mesh}) before JAX is used makes more."
        )
    return Mesh(np.array(devices), (AXIS,), axis_types=(AxisType.Auto,))


def _within(name: str, value: int | None, default: int, most: int, limit: str) -> int:
    if value is None:
        return min(default, most)
    if not isinstance(value, int) or not 0 < value <= most:
        raise ValueError(f"{name} must be between 1 and {limit}, {most}, not {value!r}.")
    return value
