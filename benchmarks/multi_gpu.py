"""Measures tensor parallelism on several GPUs of one host: is it right, and how does it scale?

    python benchmarks/multi_gpu.py --out multi-gpu.json --plot multi-gpu.png

For every model and every number of devices, in processes of their own: logprobs of fixed texts
against those of one device; the rows of ``jllm.bench`` (time per output token, prompt tokens per
second, a whole workload); from a profile of decode steps the time in collectives; and what XLA's
log says of collectives in CUDA graphs. The record is written after every step of this.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
ROWS = (
    "tpot_ms_B1_ctx1024,tpot_ms_B16_ctx1024,tpot_ms_B64_ctx1024,tpot_ms_B256_ctx1024,"
    "prefill_s_B64x1024,nano_out_tok_s_t0.0"
)
TEXTS, TEXT_LEN = 4, 256
# Of a logprob in bfloat16: sums over devices are rounded in another order.
TOLERANCE = 0.1
COLLECTIVES = ("allreduce", "all-reduce", "all_reduce", "nccl", "allgather", "all-gather")
GRAPH_LOG = {"TF_CPP_MIN_LOG_LEVEL": "0", "TF_CPP_VMODULE": "command_buffer_conversion_pass=2"}


def logprobs(config: str, tp: int) -> list[list[float]]:
    """Of each token of fixed texts but the first, by an engine over ``tp`` devices."""
    import jax
    import numpy as np

    import jllm

    model = jllm.ModelConfig.preset(config)
    mesh = jllm.make_mesh(tp=tp) if tp > 1 else None
    params = jllm.init(model, jax.random.key(0), mesh=mesh)
    rng = np.random.default_rng(0)
    length = min(TEXT_LEN, model.max_position_embeddings - 1)
    texts = [rng.integers(0, model.vocab_size, length).tolist() for _ in range(TEXTS)]
    engine = jllm.EngineConfig(max_num_seqs=TEXTS, max_model_len=length + 1)
    asked = jllm.SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False)
    found = []
    for output in jllm.generate(params, texts, asked, config=engine, use_tqdm=False):
        assert output.prompt_logprobs is not None
        pairs = zip(output.prompt_logprobs[1:], output.prompt_token_ids[1:], strict=True)
        found.append([entry[token].logprob for entry, token in pairs if entry is not None])
    return found


def bench(command: str, out: Path, *options: str) -> tuple[dict[str, Any] | None, str]:
    """One subcommand of ``jllm.bench`` in a process of its own: its record, if it wrote one, and
    what it said."""
    line = [sys.executable, "-m", "jllm.bench", command, *options, "--quiet", "--out", str(out)]
    done = subprocess.run(
        line, cwd=ROOT, env=os.environ | GRAPH_LOG, capture_output=True, text=True, check=False
    )
    return (json.loads(out.read_text()) if out.is_file() else None), done.stderr


def measure(config: str, tp: int, rows: str, options: argparse.Namespace) -> dict[str, Any]:
    """All about one model on so many devices."""
    given = ["--config", config, "--tp", str(tp)]
    if options.commit:
        given += ["--commit", options.commit]
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder)
        record, said = bench(
            "latency", out / "rows.json", *given, "--rows", rows, "--repeats", options.repeats
        )
        batches = ["--batch-sizes", options.profiled]
        profile, _ = bench("profile", out / "profile.json", *given, *batches)
    if record is None:
        return {"failed": said.strip().splitlines()[-1:]}
    found: dict[str, Any] = {
        "environment": record["environment"] | {"command": shlex.join(["python", *sys.argv])},
        "rows": {name: row["value"] for name, row in record["rows"].items()},
        "skipped": record["skipped"],
        # Lines in which XLA says that a collective is not part of a graph, each once.
        "not_captured": sorted(
            {
                line.split("] ", 1)[-1]
                for line in said.splitlines()
                if "is not" in line and any(name in line.lower() for name in COLLECTIVES)
            }
        ),
    }
    for name, row in (profile or {"rows": {}})["rows"].items():
        kernels = row["detail"]["kernels"]
        sums = [k for k in kernels if any(part in k["name"].lower() for part in COLLECTIVES)]
        found.setdefault("profile", {})[name] = {
            "step_ms": row["value"],
            "busy_ms": row["detail"]["busy_ms"],
            "collectives_ms": sum(kernel["us"] for kernel in sums) / 1e3,
            "collectives": sums,
        }
    return found


def compared(config: str, tp: int, reference: list[list[float]]) -> dict[str, Any]:
    """The logprobs of ``tp`` devices, from a process of their own, against the reference."""
    line = [sys.executable, __file__, "--logprobs", config, str(tp)]
    done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        return {"failed": done.stderr.strip().splitlines()[-1:]}
    found = json.loads(done.stdout.splitlines()[-1])
    if not reference:
        reference += found
    pairs = [pair for a, b in zip(found, reference, strict=True) for pair in zip(a, b, strict=True)]
    worst = max(abs(a - b) for a, b in pairs)
    return {"max_difference": worst, "tolerance": TOLERANCE, "agrees": worst <= TOLERANCE}


def plot(record: dict[str, Any], path: Path) -> None:
    """Every row over the number of devices, relative to the fewest."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    from jllm.bench.results import direction

    figure, axes = pyplot.subplots(figsize=(7, 4.5))
    for config, by_tp in record["models"].items():
        tps = sorted(int(tp) for tp in by_tp if by_tp[tp].get("rows"))
        for name in by_tp[str(tps[0])]["rows"] if tps else ():
            values = [by_tp[str(tp)]["rows"].get(name) for tp in tps]
            if all(values):
                faster = [v / values[0] for v in values]
                if direction(name) == "lower":
                    faster = [1 / v for v in faster]
                axes.plot(tps, faster, marker="o", label=f"{config} {name}")
    axes.set(xlabel="devices", ylabel="times as fast as on the fewest")
    axes.legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--configs", default="llama-3.1-8b,llama-3.1-70b")
    parser.add_argument("--tp", default="1,2,4,8", help="numbers of devices; those there are")
    parser.add_argument("--rows", default=ROWS)
    parser.add_argument("--profiled", default="1,64", help="batch sizes of the profile")
    parser.add_argument("--repeats", default="2")
    parser.add_argument("--commit", help="of the record, where the checkout does not say")
    parser.add_argument("--logprobs", nargs=2, metavar=("CONFIG", "TP"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.logprobs:
        print(json.dumps(logprobs(options.logprobs[0], int(options.logprobs[1]))))
        return
    if options.out is None:
        parser.error("--out is required")
    count = "import jax; print(jax.local_device_count())"  # in a process that frees them again
    there = int(subprocess.check_output([sys.executable, "-c", count], text=True))
    record: dict[str, Any] = {"devices": there, "models": {}}
    for config in options.configs.split(","):
        reference: list[list[float]] = []
        by_tp: dict[str, Any] = record["models"].setdefault(config, {})
        for tp in (int(tp) for tp in options.tp.split(",")):
            if tp > there:
                continue
            print(f"{config}, {tp} device(s) ...", file=sys.stderr, flush=True)
            by_tp[str(tp)] = {"correctness": compared(config, tp, reference)}
            by_tp[str(tp)] |= measure(config, tp, options.rows, options)
            options.out.write_text(json.dumps(record, indent=1) + "\n")
            print(json.dumps(by_tp[str(tp)].get("rows")), file=sys.stderr, flush=True)
    if options.plot:
        plot(record, options.plot)


if __name__ == "__main__":
    main()
