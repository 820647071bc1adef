"""How far is each op from what the device can do? Every op of a step on a model's real shapes.

    python -m jllm.bench kernels --config llama-3.1-8b --batch-sizes 1,64,256 --out kernels.json

Ceilings (a large read, copy and matrix product) are measured in the same run; an op's limit is its
bytes or its FLOPs over them, whichever takes longer. Each op is checked against float32 on fresh
random inputs; one that is wrong is INVALID.
"""

from __future__ import annotations

import argparse
import re
import statistics
import sys
import time

import jax
import jax.numpy as jnp
from tqdm import tqdm

from jllm.bench import timing, tune
from jllm.bench.arguments import int_list, positive
from jllm.bench.case import Case
from jllm.bench.environment import environment
from jllm.bench.kernel_ops import all_cases
from jllm.bench.models import add_model_options, chosen_hardware, config_of
from jllm.bench.results import Result, Row, add_record_options, row
from jllm.bench.suite import line
from jllm.params import default_dtype

MIB = 1 << 20
# Relative error allowed: a few roundings of 8 bits (bfloat16), or of 24.
TOLERANCE = {2: 2e-2, 4: 1e-4}


def add_options(parser: argparse.ArgumentParser) -> None:
    add_model_options(parser)
    group = parser.add_argument_group("sizes")
    group.add_argument("--batch-sizes", type=int_list, default=(1, 16, 64, 256), metavar="N,N")
    group.add_argument("--contexts", type=int_list, default=(1024,), metavar="N,N")
    group.add_argument("--chunks", type=int_list, default=(2048,), metavar="N,N")
    group.add_argument("--block-size", type=positive, default=16)
    group.add_argument("--ops", default="", metavar="REGEX", help="only rows whose name matches")
    group.add_argument("--ceiling-mib", type=positive, help="array of the ceilings (2048; CPU: 64)")
    group.add_argument(
        "--ceiling-width", type=positive, help="matrix of the ceilings (8192; CPU: 512)"
    )
    group.add_argument(
        "--rotate-mib", type=int, help="inputs to rotate among: more than L2 (128; CPU: 4)"
    )
    group.add_argument(
        "--tune",
        action="store_true",
        help="instead, find this GPU's fastest launches for the model, for kernels/configs/",
    )
    group.add_argument("--time-limit-s", type=float, help="ops not done by then are skipped")
    add_record_options(parser)


def main(options: argparse.Namespace) -> int:
    """Measures the ceilings, then every op."""
    if options.tune:
        return tune.main(options)
    began = time.monotonic()
    name, config = config_of(options)
    dtype = jnp.dtype(options.dtype or default_dtype())
    cpu = jax.default_backend() == "cpu"
    env = environment(options.arguments, options.commit, device=True)
    known = chosen_hardware(options, env["gpu"])
    sizes = {
        "batch_sizes": options.batch_sizes,
        "contexts": options.contexts,
        "chunks": options.chunks,
        "block_size": options.block_size,
        "ceiling_mib": options.ceiling_mib or (64 if cpu else 2048),
        "ceiling_width": options.ceiling_width or (512 if cpu else 8192),
        "rotate_mib": options.rotate_mib or (4 if cpu else 128),
    }
    hardware = known.to_json() if known else None
    result = Result("kernels", name, "dummy", str(dtype), env, settings=sizes, hardware=hardware)
    key = jax.random.key(options.seed)
    limits = timing.ceilings(
        sizes["ceiling_mib"] * MIB, sizes["ceiling_width"], dtype, jax.random.fold_in(key, 0)
    )
    result.rows |= _ceiling_rows(limits)
    for row_name, measured in result.rows.items():
        print(line(row_name, measured), file=sys.stderr)
    cases = [
        case
        for case in all_cases(
            config,
            dtype,
            batches=options.batch_sizes,
            contexts=options.contexts,
            chunks=options.chunks,
            block_size=options.block_size,
        )
        if re.search(options.ops, case.name)
    ]
    limit_s = options.time_limit_s
    for index, case in enumerate(tqdm(cases, desc="kernels", disable=options.quiet, leave=False)):
        if limit_s is not None and time.monotonic() - began > limit_s:
            result.skipped[case.name] = f"the time limit of {limit_s:g} s had passed"
            continue
        try:
            measured = measure(
                case,
                limits,
                jax.random.fold_in(key, index + 1),
                sizes["rotate_mib"] * MIB,
                TOLERANCE[dtype.itemsize],
            )
        except RuntimeError as error:  # of the device, most likely out of memory
            result.skipped[case.name] = f"failed: {str(error).splitlines()[0]}"
            continue
        result.rows[case.name] = measured
        tqdm.write(line(case.name, measured), file=sys.stderr)
        result.write(options.out)
    result.finish(options.out)
    return 0 if all(measured.valid for measured in result.rows.values()) else 1


def measure(
    case: Case, limits: timing.Ceilings, key: jax.Array, rotate_bytes: int, tolerance: float
) -> Row:
    """Checks one op on fresh inputs and times it on others."""
    make = jax.jit(case.make)  # one program: made op by op, inputs would take longer than the op
    args = make(jax.random.fold_in(key, 0))
    error = case.error(args, jax.jit(case.op)(*args))
    total = case.bytes_read + case.bytes_written
    count = timing.num_sets(total, rotate_bytes)
    keys = [jax.random.fold_in(key, index + 1) for index in range(count)]
    if case.in_place:
        carry, *_ = args
        rest = [make(k)[1:] for k in keys]
        timed = timing.time_in_place(case.op, carry, rest)
    else:
        timed = timing.time_op(case.op, [make(k) for k in keys])
    seconds = statistics.median(timed.seconds)
    mostly_reads = case.bytes_written * 4 <= case.bytes_read
    rate = limits.read_bytes_per_s if mostly_reads else limits.copy_bytes_per_s
    memory_s, arithmetic_s = total / rate, case.flops / limits.flops_per_s
    ok = error <= tolerance and timed.num_compiles == 0
    return row(
        [s * 1e6 for s in timed.seconds],
        "us",
        f"{case.kind}, alone, its inputs in memory",
        num_compiles=timed.num_compiles,
        valid=ok,
        roofline=max(memory_s, arithmetic_s) * 1e6,
        detail={
            "kind": case.kind,
            "relative_error": error if error == error else "nan",
            "tolerance": tolerance,
            "bytes": total,
            "flops": case.flops,
            "tb_per_s": total / seconds / 1e12,
            "tflop_per_s": case.flops / seconds / 1e12,
            "bound_by": "memory" if memory_s >= arithmetic_s else "arithmetic",
            "input_sets": count,
            "per_step": case.per_step,
            "step": case.step,
        },
    )


def _ceiling_rows(limits: timing.Ceilings) -> dict[str, Row]:
    tera = 1e12
    return {
        "ceiling_read_tb_s": row(
            [limits.bytes / s / tera for s in limits.read.seconds],
            "TB/s",
            "sum of a large array: bytes read",
        ),
        "ceiling_copy_tb_s": row(
            [2 * limits.bytes / s / tera for s in limits.copy.seconds],
            "TB/s",
            "copy of a large array: bytes read and written",
        ),
        "ceiling_matmul_tflop_s": row(
            [limits.flops / s / tera for s in limits.matmul.seconds],
            "TFLOP/s",
            "large square matrix product",
        ),
    }
