"""Times of GPU kernels, as the device itself takes them.

A clock on the host sees launches and gaps as well, which for kernels of a few microseconds are most
of what it sees, and which a step that runs as one CUDA graph does not have.
"""

from __future__ import annotations

import functools
import re
import tempfile
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jllm.kernels import triton_call

CALLS_PER_TRACE = 50  # the profiler's buffers are finite: kernels beyond them are dropped


class Launched(NamedTuple):
    """One kernel's run."""

    name: str
    us: float


class Kernel(NamedTuple):
    """All runs of kernels of one name, per call."""

    name: str
    launches: float
    us: float


def traced(run: Callable[[], Any]) -> list[Launched]:
    """The kernels that the first GPU runs within ``run``, in order; none on a CPU. ``run`` must
    wait for its results."""
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = options.host_tracer_level = 0
    _start_profiler()
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder, profiler_options=options):
            run()
        data = jax.profiler.ProfileData.from_file(str(next(Path(folder).rglob("*.xplane.pb"))))
        events: list[tuple[float, str, float]] = [
            (event.start_ns, event.name, event.duration_ns / 1e3)
            for plane in data.planes
            if plane.name.startswith("/device:GPU:0")
            for line in plane.lines
            if line.name.startswith("Stream")  # the others are derived from the streams
            for event in line.events
            if not event.name.startswith("Memcpy")
        ]
    return [Launched(name, us) for _, name, us in sorted(events)]


@functools.cache
def _start_profiler() -> None:
    """The first trace of a process misses the first kernels, while the profiler starts."""
    with tempfile.TemporaryDirectory() as folder, jax.profiler.trace(folder):
        jax.block_until_ready(jnp.zeros(1) + 1)


def by_name(launched: Sequence[Launched], calls: int) -> list[Kernel]:
    """Sums over kernels of one name, the most expensive first, divided by the number of calls."""
    count: Counter[str] = Counter()
    us: defaultdict[str, float] = defaultdict(float)
    for kernel in launched:
        name = re.sub(r"(_\d+)+$", "", kernel.name)  # XLA numbers what it fuses
        count[name] += 1
        us[name] += kernel.us
    kernels = [Kernel(name, count[name] / calls, us[name] / calls) for name in us]
    return sorted(kernels, key=lambda kernel: -kernel.us)


def kernel_seconds(calls: Sequence[Callable[[], Any]], repeats: int) -> list[list[float]]:
    """For each call the seconds that its kernels take together, ``repeats`` values.

    Every call must have run before: it is not to compile here. Between the calls a kernel of a
    name of its own marks where one ends.

    Raises RuntimeError if the profiler lost some kernels.
    """
    mark = marker()
    queue = [call for call in calls for _ in range(repeats)]
    seconds: list[float] = []
    for start in range(0, len(queue), CALLS_PER_TRACE):
        chunk = queue[start : start + CALLS_PER_TRACE]

        def run(chunk: Sequence[Callable[[], Any]] = chunk) -> None:
            for call in chunk:
                mark()
                jax.block_until_ready(call())

        found: list[float] = []
        for kernel in traced(run):
            if kernel.name.startswith("marker_kernel"):
                found.append(0.0)
            elif found:
                found[-1] += kernel.us / 1e6
        if len(found) != len(chunk):
            raise RuntimeError(f"The profiler saw {len(found)} of {len(chunk)} calls.")
        seconds += found
    return [seconds[i : i + repeats] for i in range(0, len(seconds), repeats)]


@functools.cache
def marker() -> Callable[[], Any]:
    """Runs the marking kernel, which is compiled here."""
    from jllm.kernels.marker import marker_kernel

    def launch(x: jax.Array) -> jax.Array:
        out_type = jax.ShapeDtypeStruct(x.shape, x.dtype)
        result: jax.Array = triton_call.triton_call(
            x, kernel=marker_kernel, out_type=out_type, grid=(1,), num_warps=1, num_stages=1
        )
        return result

    one = jnp.zeros(1, jnp.int32)
    compiled = jax.jit(launch).lower(one).compile()
    return lambda: jax.block_until_ready(compiled(one))
