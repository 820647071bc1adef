"""How long until the first token? Cold (nothing compiled yet) and warm (everything in the cache).

    python -m jllm.bench startup --config qwen3-0.6b --out startup.json

Each start is a process of its own with a compilation cache of its own: the first finds it empty,
the second full. A start is: import, weights, engine, warm-up of every bucket, one token.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jllm.bench.environment import environment
from jllm.bench.models import add_engine_options, add_model_options, config_of
from jllm.bench.results import Result, add_record_options, row

GIB = 1 << 30
CHILD = "JLLM_BENCH_STARTUP_CHILD"  # set in the processes that are measured
SAMPLERS = ("greedy", "all")


def add_options(parser: argparse.ArgumentParser) -> None:
    add_model_options(parser)
    add_engine_options(parser)
    group = parser.add_argument_group("start")
    group.add_argument(
        "--samplers",
        choices=SAMPLERS,
        default="greedy",
        help="which sampling programs to warm up (default greedy)",
    )
    group.add_argument("--cache-dir", help="of the compiled programs; a fresh one unless given")
    group.add_argument("--only", choices=("cold", "warm"), help="one of the two starts")
    group.add_argument("--timeout-s", type=float, default=1800.0, help="of one start")
    add_record_options(parser)


def main(options: argparse.Namespace) -> int:
    """Starts twice in subprocesses; in such a subprocess, starts."""
    if os.environ.get(CHILD):
        print(json.dumps(start(options)))
        return 0
    name = Path(options.model).name if options.model else config_of(options)[0]
    weights = "checkpoint" if options.model and options.load_format == "auto" else "dummy"
    env = environment(options.arguments, options.commit, device=False)
    result = Result("startup", name, weights, options.dtype, env, settings={"starts": {}})
    with tempfile.TemporaryDirectory() as fresh:
        cache = options.cache_dir or fresh
        result.settings["cache_dir"] = options.cache_dir or "a fresh one"
        for kind in ("cold", "warm"):
            if options.only in (None, kind):
                print(f"{kind} start ...", file=sys.stderr)
                measured = _start_in_subprocess(options, cache)
                _add_rows(result, kind, measured)
                result.write(options.out)
    for row_name, measured_row in result.rows.items():
        print(f"{row_name:32} {measured_row.value:10.3f} {measured_row.unit}", file=sys.stderr)
    result.finish(options.out)
    return 0


def _start_in_subprocess(options: argparse.Namespace, cache: str) -> dict[str, Any]:
    """Raises ValueError with the end of its stderr if the start fails."""
    variables = {
        **os.environ,
        CHILD: "1",
        "JAX_COMPILATION_CACHE_DIR": cache,
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }
    # A package imported from a bare checkout must be found by the child, too.
    root = str(Path(__file__).parents[2])
    variables["PYTHONPATH"] = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
    command = [sys.executable, "-m", "jllm.bench", *options.arguments]
    began = time.perf_counter()
    done = subprocess.run(
        command, env=variables, capture_output=True, text=True, timeout=options.timeout_s
    )
    whole = time.perf_counter() - began
    if done.returncode:
        raise ValueError(f"The start failed: {done.stderr.strip()[-2000:]}")
    measured: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    measured["process_s"] = whole
    # Interpreter and imports: all that came before the child's own clock.
    measured["parts_s"] = {"import": whole - measured["seconds"], **measured["parts_s"]}
    return measured


def start(options: argparse.Namespace) -> dict[str, Any]:
    """One start in this process: seconds by part, programs, and the memory it peaked at."""
    import jax

    from jllm.bench.models import engine_config, load_model
    from jllm.bench.runs import Sampling
    from jllm.engine.batch import Buckets
    from jllm.engine.engine import Engine
    from jllm.models.sampler import SamplerSpec

    clock = time.perf_counter
    began = at = clock()
    parts: dict[str, float] = {}

    def done(name: str) -> None:
        nonlocal at
        now = clock()
        parts[name], at = now - at, now

    model = load_model(options)
    jax.block_until_ready(model.params)
    done("weights")
    engine = Engine(model.params, engine_config(options, model.params.config))
    done("engine")
    buckets = Buckets.of(engine.config)
    compiled = engine.warm_up([SamplerSpec()])
    if options.samplers == "all":
        compiled += engine.warm_up()
    done("buckets")
    before = engine.stats().num_compiles
    engine.add_request([1, 2, 3], Sampling().params(1))
    while engine.has_unfinished():
        engine.step()
    done("first_token")
    late = engine.stats().num_compiles - before
    stats = jax.local_devices()[0].memory_stats() or {}
    return {
        "seconds": clock() - began,
        "parts_s": parts,
        "buckets": len(buckets.all_specs()),
        "programs": compiled,
        "compiles_after_warm_up": late,
        "padding": padding(buckets.decode, buckets.mixed),
        "peak_device_bytes": stats.get("peak_bytes_in_use"),
        "peak_host_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "dtype": str(model.params.dtype),
        "device": jax.local_devices()[0].device_kind,
    }


def padding(decode: Sequence[int], mixed: Sequence[int]) -> dict[str, dict[str, float]]:
    """Mean share of a bucket that is padding, if every size up to it is equally likely.

    A bucket b after a smaller one a holds sizes a + 1 to b, on average (a + 1 + b) / 2.
    """

    def waste(sizes: Sequence[int]) -> dict[str, float]:
        lower = (0, *sizes[:-1])
        pairs = zip(lower, sizes, strict=True)
        return {str(b): 1 - (a + 1 + b) / 2 / b for a, b in pairs}

    return {"decode": waste(decode), "mixed": waste(mixed)}


def _add_rows(result: Result, kind: str, measured: dict[str, Any]) -> None:
    """``startup_s`` is the cold start, as in the baseline file; the warm one says so."""
    infix = "" if kind == "cold" else "_warm"
    late = measured["compiles_after_warm_up"]
    result.settings["starts"][kind] = measured
    result.dtype = measured["dtype"]

    def add(name: str, value: float, unit: str, what: str, **detail: Any) -> None:
        result.rows[name] = row(
            [value], unit, what, num_compiles=late, valid=late == 0, detail=detail
        )

    what = f"{kind} start: from the process to its first token, every bucket warmed up"
    counts = {name: measured[name] for name in ("buckets", "programs")}
    add(
        f"startup{infix}_s", measured["process_s"], "s", what, parts_s=measured["parts_s"], **counts
    )
    for part, seconds in measured["parts_s"].items():
        add(
            f"startup{infix}_{part}_s",
            seconds,
            "s",
            f"{part.replace('_', ' ')} of the {kind} start",
        )
    for where in ("device", "host"):
        peak = measured[f"peak_{where}_bytes"]
        if peak is not None:
            add(
                f"startup{infix}_peak_{where}_gib", peak / GIB, "GiB", f"peak memory of the {where}"
            )
