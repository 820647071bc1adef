"""Times the sampler's kernels on a GPU over launch configurations, 256 rows of 128,256 logits.

    python benchmarks/sampler_sweep.py --out sampler.json

Every configuration first has to draw the XLA sampler's tokens. It is then timed over logits that
do not fit L2 together with those before, beside the limit: the logits read once at the speed of a
copy measured in the same run.
"""

from __future__ import annotations

import argparse
import functools
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jllm.bench.timing import ceilings, time_op
from jllm.kernels import sampling
from jllm.models.sampler import (
    BOUNDARY,
    SamplerSpec,
    SamplingRows,
    kernel_options,
    sample_reference,
)

ROWS, VOCAB = 256, 128_256
CASES: dict[str, tuple[dict[str, float], SamplerSpec]] = {
    "greedy": ({"temperature": 0.0}, SamplerSpec()),
    "temperature": ({"temperature": 0.8}, SamplerSpec(random=True)),
    "temperature, logprob": ({"temperature": 0.8}, SamplerSpec(random=True, logprobs=0)),
    "top-k 50, top-p 0.95, logprob": (
        {"top_k": 50, "top_p": 0.95},
        SamplerSpec(filtered=True, logprobs=0),
    ),
    "min-p 0.05": ({"min_p": 0.05}, SamplerSpec(filtered=True)),
    "top-p 0.5 of 1000s of tokens": ({"top_p": 0.5}, SamplerSpec(filtered=True)),
    "top-p 0.95 of 1000s of tokens": ({"top_p": 0.95}, SamplerSpec(filtered=True)),
}
SCANS = [
    sampling.Launch(tile=tile, scan_warps=warps)
    for tile, warps in ((4096, 4), (4096, 8), (2048, 2), (2048, 4), (8192, 8), (1024, 2))
]
DRAWS = [
    sampling.Launch(draw_warps=warps, gather=gather, candidates=candidates, wide=wide)
    for warps, gather, candidates, wide in (
        (8, 2048, 1024, 1024),
        (8, 1024, 512, 2048),
        (4, 1024, 512, 1024),
        (4, 1024, 512, 2048),
        (2, 512, 256, 1024),
    )
]


def inputs(key: jax.Array, options: dict[str, float]) -> tuple[jax.Array, SamplingRows]:
    a, b = jax.random.split(key)

    def full(name: str, default: float, dtype: Any = jnp.float32) -> jax.Array:
        return jnp.full(ROWS, options.get(name, default), dtype)

    rows = SamplingRows(
        temperature=full("temperature", 1.0),
        top_k=full("top_k", 0, jnp.int32),
        top_p=full("top_p", 1.0),
        min_p=full("min_p", 0.0),
        seeds=jax.random.bits(b, (ROWS, 2), jnp.uint32),
        samples=jnp.zeros(ROWS, jnp.int32),
        positions=jnp.arange(ROWS, dtype=jnp.int32),
        processed=jnp.zeros(ROWS, jnp.int32),
    )
    return jax.random.normal(a, (ROWS, VOCAB)) * 3, rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, required=True)
    out = parser.parse_args().out
    key = jax.random.key(0)
    copy = ceilings(1 << 31, 1024, jnp.bfloat16, key).copy_bytes_per_s
    record: dict[str, Any] = {
        "gpu": jax.devices()[0].device_kind,
        "jax": jax.__version__,
        "copy_tb_s": copy / 1e12,
        "limit_us": ROWS * VOCAB * 4 / copy * 1e6,
        "rows": [],
    }
    print({name: value for name, value in record.items() if name != "rows"}, flush=True)
    for name, (options, spec) in CASES.items():
        make = jax.jit(functools.partial(inputs, options=options))
        sets = [make(jax.random.fold_in(key, index)) for index in range(2)]
        expected = jax.jit(functools.partial(sample_reference, spec=spec))(
            sets[0][0], sets[0][0], sets[0][1]
        )
        for launch in [sampling.Launch(), *SCANS, *(DRAWS if spec.filtered else [])]:

            def op(
                logits: jax.Array,
                rows: SamplingRows,
                spec: SamplerSpec = spec,
                launch: sampling.Launch = launch,
            ) -> sampling.Drawn:
                return sampling.draw(
                    logits,
                    logits,
                    kernel_options(rows),
                    random=spec.random,
                    filtered=spec.filtered,
                    logprobs=spec.logprobs is not None,
                    processed=spec.processed,
                    boundary=BOUNDARY,
                    launch=launch,
                )

            wrong = int((np.asarray(jax.jit(op)(*sets[0]).tokens) != expected.tokens).sum())
            us = min(time_op(op, sets).seconds) * 1e6
            record["rows"].append(
                {"case": name, "us": us, "wrong_tokens": wrong, "launch": launch._asdict()}
            )
            print(f"{name:30} {us:8.1f} us, {wrong} wrong {tuple(launch)}", flush=True)
    out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
