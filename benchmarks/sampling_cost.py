"""What do sampling options cost beside greedy decoding, on a CPU at batch 32?

    python benchmarks/sampling_cost.py --out benchmarks/results/cpu-sampling.json

The demo model in float32, 32 prompts of equal length, 64 new tokens each, eos ignored. The same
batch is run with greedy decoding, with one kind of option after the other, and with all of them in
every row. Kinds take turns, so a slow minute of the machine hits all of them; compilation and the
first call are not counted. The figure is new tokens per second of the whole call, prefill
included, the median of several calls, and its ratio to greedy.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import jax

import jllm

MODEL, BATCH, PROMPT, NEW, CALLS = "smollm2-135m-instruct", 32, 32, 64, 5

PENALTIES: dict[str, Any] = dict(
    presence_penalty=0.5, frequency_penalty=0.5, repetition_penalty=1.1
)
MASKS: dict[str, Any] = dict(
    logit_bias=dict.fromkeys(range(1000, 1300), 1.0),
    allowed_token_ids=range(100, 49_000),
    bad_words=[f"word{i}" for i in range(100)],
    min_tokens=NEW,
    stop_token_ids=[50],
)
FILTERS: dict[str, Any] = dict(temperature=0.8, top_k=50, top_p=0.95, min_p=0.02)
KINDS: dict[str, dict[str, Any]] = {
    "greedy": dict(temperature=0),
    "random": dict(temperature=0.8),
    "filters (top-k, top-p, min-p)": FILTERS,
    "greedy with penalties": dict(temperature=0, **PENALTIES),
    "greedy with masks (bias, allowed ids, bad words, min_tokens)": dict(temperature=0, **MASKS),
    "greedy with 20 logprobs": dict(temperature=0, logprobs=20),
    "everything": dict(
        **FILTERS, **PENALTIES, **MASKS, logprobs=20, logprobs_mode="processed"
    ),
}  # fmt: skip


def prompts() -> list[list[int]]:
    """Any ids will do, since eos is ignored."""
    return [[(37 * row + 101 * i) % 48_000 + 100 for i in range(PROMPT)] for row in range(BATCH)]


def seconds_of_a_call(params: jllm.Params, options: dict[str, Any]) -> float:
    sampling = jllm.SamplingParams(
        **(dict(max_tokens=NEW, ignore_eos=True, detokenize=False, seed=1) | options)
    )
    config = jllm.EngineConfig(max_num_seqs=BATCH, max_model_len=512)
    start = time.perf_counter()
    outputs = jllm.generate(params, prompts(), sampling, config=config, use_tqdm=False)
    seconds = time.perf_counter() - start
    assert all(len(output.outputs[0].token_ids) == NEW for output in outputs)
    return seconds


def commit() -> str:
    command = ["git", "describe", "--always", "--dirty"]
    return subprocess.run(
        command, cwd=Path(__file__).parent, capture_output=True, text=True
    ).stdout.strip()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", help="a JSON file to write")
    parser.add_argument("--calls", type=int, default=CALLS)
    options = parser.parse_args()
    params = jllm.load(MODEL, dtype="float32")
    for kind in KINDS.values():
        seconds_of_a_call(params, kind)  # compiles
    seconds: dict[str, list[float]] = {name: [] for name in KINDS}
    for _ in range(options.calls):
        for name, kind in KINDS.items():
            seconds[name].append(seconds_of_a_call(params, kind))
    tokens = BATCH * NEW
    rates = {name: tokens / statistics.median(calls) for name, calls in seconds.items()}
    for name, rate in rates.items():
        print(f"{rate:7.0f} tokens/s {rate / rates['greedy']:5.2f} of greedy   {name}")
    if options.out:
        result = {
            "command": shlex.join(["python", *sys.argv]),
            "commit": commit(),
            "versions": f"jllm {jllm.__version__}, jax {jax.__version__}, "
            f"Python {platform.python_version()}",
            "machine": f"{platform.machine()}, {os.cpu_count()} CPU cores",
            "model": f"{MODEL}, float32",
            "batch": f"{BATCH} prompts of {PROMPT} tokens, {NEW} new tokens each",
            "tokens_per_s": rates,
            "ratio_to_greedy": {name: rate / rates["greedy"] for name, rate in rates.items()},
            "seconds": seconds,
        }
        path = Path(options.out)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
