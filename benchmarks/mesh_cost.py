"""What a mesh costs on one device: decode steps with a mesh of one against steps without.

    python benchmarks/mesh_cost.py --config llama-3.1-8b --out mesh.json

Both engines run in turn in one process, so that what the device is doing otherwise meets both.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path

import jax
import numpy as np

import jllm
from jllm.bench.arguments import int_list
from jllm.bench.environment import environment

CONTEXT, SETTLING, STEPS, ROUNDS = 256, 16, 64, 5


def step_ms(engine: jllm.Engine, batch: int) -> float:
    """Milliseconds of a decode step of ``batch`` rows."""
    rng = np.random.default_rng(0)
    vocab_size = engine.model_config.vocab_size
    params = jllm.SamplingParams(
        temperature=0, max_tokens=2 * SETTLING + STEPS + batch, ignore_eos=True, detokenize=False
    )
    for _ in range(batch):
        prompt = rng.integers(0, vocab_size, CONTEXT).tolist()
        engine.add_request(prompt, params, stream=False)
    while engine.stats().generated_tokens % batch or engine.stats().waiting:
        engine.step()
    for _ in range(SETTLING):
        engine.step()
    before, start = engine.stats().num_steps, time.perf_counter()
    while engine.stats().num_steps < before + STEPS:
        engine.step()
    seconds = time.perf_counter() - start
    steps = engine.stats().num_steps - before
    while engine.has_unfinished():
        engine.step()
    return seconds / steps * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--config", default="qwen3-0.6b", help="a preset's name")
    parser.add_argument("--batch-sizes", type=int_list, default=(1, 64))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--commit", help="of the record, where there is no git checkout")
    options = parser.parse_args()
    params = jllm.init(jllm.ModelConfig.preset(options.config), jax.random.key(0))
    config = jllm.EngineConfig(max_model_len=1024, num_kv_blocks=8192, prefix_cache="naive")
    engines = {
        "no mesh": jllm.Engine(params, config),
        "mesh of one": jllm.Engine(params, config, mesh=jllm.make_mesh(tp=1)),
    }
    rows = {}
    for batch in options.batch_sizes:
        times: dict[str, list[float]] = {name: [] for name in engines}
        for round_number in range(ROUNDS + 1):
            for name, engine in engines.items():
                found = step_ms(engine, batch)
                if round_number:  # the first compiles
                    times[name].append(found)
        medians = {name: statistics.median(found) for name, found in times.items()}
        ratio = medians["mesh of one"] / medians["no mesh"]
        rows[f"B{batch}"] = {"step_ms": times, "median_ms": medians, "ratio": ratio}
        print(f"batch {batch}: {medians}, ratio {ratio:.4f}")
    env = environment([], options.commit, device=True) | {"command": " ".join(sys.argv)}
    options.out.write_text(json.dumps({"environment": env, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
