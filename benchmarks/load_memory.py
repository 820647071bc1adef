"""How much host memory does loading a checkpoint take beside the weights themselves?

    python benchmarks/load_memory.py --out benchmarks/results/load-memory.json

A random checkpoint of 1.5 GB in bfloat16, in 8 shards, is loaded in fresh processes: onto one
device, and onto 8 that the CPU plays. Their memory is the host's, so what is already on a device is
subtracted: every few milliseconds a thread reads the process's resident set, the pages of mapped
files included, and the bytes of all live JAX arrays. The figure is the largest difference, less
that from before loading. Over 8 devices it must be less than a shard: only one device's part of one
array is on the host at a time.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np

SHARDS, DEVICES, SAMPLE_S = 8, 8, 0.002
CONFIG = dict(
    architectures=["LlamaForCausalLM"],
    vocab_size=32_000,
    hidden_size=2048,
    intermediate_size=8192,
    num_hidden_layers=10,
    num_attention_heads=16,
    num_key_value_heads=8,
    head_dim=128,
    max_position_embeddings=4096,
    tie_word_embeddings=False,
)


def write_checkpoint(folder: Path) -> int:
    """Writes the checkpoint in files of about one size; returns the bytes of the smallest."""
    from ml_dtypes import bfloat16
    from safetensors.numpy import save_file

    from jllm.config import ModelConfig
    from jllm.weights.layout import _expected

    random = np.random.default_rng(0)
    shapes = dict(_expected(ModelConfig.from_hf(CONFIG), "hf"))
    limit = 2 * sum(int(np.prod(shape)) for shape in shapes.values()) / SHARDS
    files: list[dict[str, Any]] = [{}]
    size = 0
    for name, shape in shapes.items():
        if size >= limit:
            files.append({})
            size = 0
        files[-1][name] = random.standard_normal(shape, np.float32).astype(bfloat16)
        size += files[-1][name].nbytes
    weight_map = {}
    for index, tensors in enumerate(files):
        file = f"model-{index + 1:05}-of-{len(files):05}.safetensors"
        save_file(tensors, folder / file)
        weight_map |= dict.fromkeys(tensors, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return min(file.stat().st_size for file in folder.glob("*.safetensors"))


def load_and_watch(folder: Path, tp: int) -> dict[str, Any]:
    """In this process: seconds, bytes on the devices, and the largest excess on the host."""
    import jax
    import psutil

    import jllm

    process = psutil.Process()
    mesh = jllm.make_mesh(tp=tp) if tp > 1 else None
    jax.device_put(np.zeros(1)).block_until_ready()

    def excess() -> int:
        rss: int = process.memory_info().rss
        return rss - sum(array.nbytes for array in jax.live_arrays())

    base, highest, done = excess(), 0, threading.Event()

    def watch() -> None:
        nonlocal highest
        while not done.wait(SAMPLE_S):
            highest = max(highest, excess())

    watcher = threading.Thread(target=watch)
    watcher.start()
    began = time.perf_counter()
    params = jllm.load(folder, dtype="bfloat16", mesh=mesh)
    seconds = time.perf_counter() - began
    done.set()
    watcher.join()
    on_devices = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    return {"tp": tp, "seconds": seconds, "device_bytes": on_devices, "excess": highest - base}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", help="where to write the record")
    parser.add_argument("--child", nargs=2, metavar=("FOLDER", "TP"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        print(json.dumps(load_and_watch(Path(options.child[0]), int(options.child[1]))))
        return
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        shard = write_checkpoint(Path(folder))
        for tp in (1, DEVICES):
            flags = f"--xla_force_host_platform_device_count={tp}"
            done = subprocess.run(
                [sys.executable, __file__, "--child", folder, str(tp)],
                env={**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"},
                stdout=subprocess.PIPE,
                check=True,
            )
            row = json.loads(done.stdout)
            rows.append(row)
            print(
                f"tp={tp}: {row['device_bytes'] / 1e9:.2f} GB loaded in {row['seconds']:.1f} s, at "
                f"most {row['excess'] / 1e6:.0f} MB beside; a shard has {shard / 1e6:.0f} MB."
            )
    if options.out:
        record = {"command": "python benchmarks/load_memory.py", "shard_bytes": shard, "rows": rows}
        Path(options.out).write_text(json.dumps(record, indent=2) + "\n")
    if rows[-1]["excess"] >= shard:
        sys.exit("Loading over 8 devices took more host memory than a shard has.")


if __name__ == "__main__":
    main()
