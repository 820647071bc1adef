"""Which model and which engine: the options that most subcommands share."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any, NamedTuple

import jax

from jllm.bench.arguments import int_list, positive
from jllm.config import EngineConfig, ModelConfig
from jllm.parallel.mesh import make_mesh
from jllm.params import Params, init, load
from jllm.presets import PRESETS
from jllm.roofline import HARDWARE, Hardware, hardware


def add_model_options(parser: argparse.ArgumentParser) -> None:
    """``--model`` or ``--config``, and what goes with them."""
    which = parser.add_argument_group("model").add_mutually_exclusive_group(required=True)
    which.add_argument("--model", help="a folder, a .gguf file, a hub name or a packaged model")
    which.add_argument(
        "--config",
        metavar="PRESET|CONFIG.JSON",
        help=f"random weights of a shape: {', '.join(PRESETS)}, or a config.json",
    )
    parser.add_argument(
        "--load-format",
        choices=("auto", "dummy"),
        default="auto",
        help="dummy: random weights made on the device; what --config means anyway",
    )
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"))
    parser.add_argument("--seed", type=int, default=0, help="of random weights and of workloads")
    parser.add_argument(
        "--hardware",
        choices=sorted(HARDWARE),
        help="draw this GPU's roofline; otherwise the one found, if it is known",
    )


def add_engine_options(parser: argparse.ArgumentParser) -> None:
    """Fields of EngineConfig; what is left out the engine or the row chooses."""
    group = parser.add_argument_group("engine")
    group.add_argument("--tp", type=positive, default=1, help="devices to split the model over")
    group.add_argument("--max-num-seqs", type=positive)
    group.add_argument("--max-num-batched-tokens", type=positive)
    group.add_argument("--max-model-len", type=positive, help="instead of what each row prescribes")
    group.add_argument("--num-kv-blocks", type=positive)
    group.add_argument("--gpu-memory-utilization", type=float)
    group.add_argument("--decode-buckets", type=int_list, metavar="N,N")
    group.add_argument("--prefill-buckets", type=int_list, metavar="N,N")


class Model(NamedTuple):
    """A loaded model and what the record says of it."""

    params: Params
    name: str
    weights: str  # dummy or checkpoint


def config_of(options: argparse.Namespace) -> tuple[str, ModelConfig]:
    """Name and shape of ``--config``, or of ``--model`` with ``--load-format dummy``.

    Raises ValueError or FileNotFoundError if there is none.
    """
    source = options.config or options.model
    if options.config in PRESETS:
        return options.config, ModelConfig.preset(options.config)
    path = Path(source)
    if not path.exists():
        raise FileNotFoundError(
            f"{source!r} is neither a preset ({', '.join(PRESETS)}) nor a file or folder with a "
            "config.json."
        )
    name = path.parent.name if path.name == "config.json" else path.stem
    return name, ModelConfig.from_hf(path)


def load_model(options: argparse.Namespace) -> Model:
    """Loads the checkpoint, or makes random weights, on one device or split over several.

    Raises ValueError if there are fewer, or the model cannot be split over so many.
    """
    mesh = make_mesh(tp=options.tp) if options.tp > 1 else None
    if options.model and options.load_format == "auto":
        name = Path(options.model).name.removesuffix(".gguf")
        return Model(load(options.model, dtype=options.dtype, mesh=mesh), name, "checkpoint")
    name, config = config_of(options)
    key = jax.random.key(options.seed)
    return Model(init(config, key, dtype=options.dtype, mesh=mesh), name, "dummy")


def chosen_hardware(
    options: argparse.Namespace, device_kind: str | None, count: int = 1
) -> Hardware | None:
    """The GPU whose roofline is drawn, or so many of them."""
    known = hardware(options.hardware or device_kind or "")
    return known and known.times(count)


ENGINE_FIELDS = (
    "max_num_seqs",
    "max_num_batched_tokens",
    "num_kv_blocks",
    "gpu_memory_utilization",
    "decode_buckets",
    "prefill_buckets",
)


def engine_config(
    options: argparse.Namespace,
    model: ModelConfig,
    *,
    max_model_len: int | None = None,
    share_prefixes: bool = False,
) -> EngineConfig:
    """The engine's config of a row, what the user chose before what the row prescribes.

    A prescribed max_model_len beyond the model's own is lowered to it, which the record shows.
    Prefixes are shared only where the row says so: else repetitions would be served from the cache.
    """
    given = {name: getattr(options, name) for name in ENGINE_FIELDS}
    changes: dict[str, Any] = {name: v for name, v in given.items() if v is not None}
    if options.max_model_len is not None:
        changes["max_model_len"] = options.max_model_len
    elif max_model_len is not None:
        changes["max_model_len"] = min(max_model_len, model.max_position_embeddings)
    changes["prefix_cache"] = "radix" if share_prefixes else "naive"
    return EngineConfig(**changes)
