"""``jllm inspect``: what a model over several GPUs will be like, on any machine."""

from __future__ import annotations

import argparse
import contextlib

import jax

from jllm import plotting
from jllm.bench.arguments import int_list, output_file, positive
from jllm.bench.models import add_engine_options, config_of, engine_config
from jllm.parallel.inspect import gpus, picture, text
from jllm.parallel.inspect.explanation import (
    BATCH,
    COMPILED_LAYERS,
    CONTEXT,
    DEFAULT_GPU,
    compare,
    explain,
)
from jllm.presets import PRESETS


def add_options(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    option = parser.add_argument
    option(
        "--config",
        required=True,
        metavar="PRESET|CONFIG.JSON",
        help=f"a shape: {', '.join(PRESETS)}, or a config.json or its folder",
    )
    option("--gpu", choices=tuple(gpus.GPUS), default=DEFAULT_GPU, help="whose memory and speed")
    option("--batch", type=positive, help=f"rows of the decode step; {BATCH} if the engine may")
    option("--context", type=positive, help=f"tokens of each; {CONTEXT} if the engine may")
    option(
        "--compiled-layers",
        type=positive,
        default=COMPILED_LAYERS,
        metavar="N",
        help="layers that are really compiled; more take longer",
    )
    option("--compare", type=int_list, metavar="N,N", help="also these tp, side by side")
    option("--plot", type=output_file, metavar="PNG", help="draw that, or who holds what")
    add_engine_options(parser)
    parser.set_defaults(model=None)


def run(options: argparse.Namespace) -> None:
    """Prints the explanation.

    Raises ValueError or FileNotFoundError for a model or a layout that cannot be.
    """
    _, config = config_of(options)
    engine = engine_config(options, config)
    sizes = options.compare or ()
    _use_no_gpu(max(options.tp, *sizes, 1))
    settings = dict(
        gpu=options.gpu,
        batch=options.batch,
        context=options.context,
        compiled_layers=options.compiled_layers,
    )
    found = explain(config, options.tp, engine, **settings)
    print(found)
    if sizes:
        layouts = compare(config, sizes, engine, **settings)
        print(f"\n{text.comparison(layouts)}")
    if options.plot:
        drawn = picture.comparison(layouts) if sizes else picture.holders(config, options.tp)
        plotting.save(drawn, options.plot)


def _use_no_gpu(count: int) -> None:
    """Leaves GPUs alone, and lets the CPU be as many devices as may be compiled for."""
    jax.config.update("jax_platforms", "cpu")
    with contextlib.suppress(RuntimeError):  # JAX is in use: it has the devices that it has
        jax.config.update("jax_num_cpu_devices", count)
