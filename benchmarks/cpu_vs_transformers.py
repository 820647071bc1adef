"""How fast is jllm on a CPU beside Hugging Face transformers' static batch?

    python benchmarks/cpu_vs_transformers.py --hf-python /path/to/python/with/torch

Both run the demo model in float32 on the same cores, one after the other: a batch of 16 prompts
of equal length, 64 new tokens each, greedy, eos ignored. Compilation and the first call are not
counted; the figure is new tokens per second of the whole call, prefill included, the median of
several calls. Prints both and the ratio, and with --out writes them as JSON.

transformers needs torch and reads the same GGUF file; where this environment has no torch, name
the Python of one that has (``pip install torch transformers accelerate gguf``).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

BATCH, PROMPT, NEW, CALLS = 16, 32, 64, 5


def prompts() -> list[list[int]]:
    """The same ids for both; any will do, since eos is ignored."""
    return [[(37 * row + 101 * i) % 48_000 + 100 for i in range(PROMPT)] for row in range(BATCH)]


def measure(call: Callable[[], Any]) -> dict[str, Any]:
    call()
    seconds = []
    for _ in range(CALLS):
        start = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - start)
    return {"tokens_per_s": BATCH * NEW / statistics.median(seconds), "seconds": seconds}


def run_jllm() -> dict[str, Any]:
    import jax

    import jllm

    params = jllm.load("smollm2-135m-instruct", dtype="float32")
    sampling = jllm.SamplingParams(temperature=0, max_tokens=NEW, ignore_eos=True, detokenize=False)

    def call() -> None:
        outputs = jllm.generate(params, prompts(), sampling, use_tqdm=False)
        assert all(len(output.outputs[0].token_ids) == NEW for output in outputs)

    return {"engine": f"jllm {jllm.__version__}, jax {jax.__version__}", **measure(call)}


def run_transformers(gguf: str) -> dict[str, Any]:
    import torch
    import transformers

    path = Path(gguf)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32
    ).eval()
    ids = torch.tensor(prompts())

    def call() -> None:
        with torch.no_grad():
            out = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=NEW,
                do_sample=False,
                eos_token_id=None,
                pad_token_id=0,
            )
        assert out.shape[1] == PROMPT + NEW

    versions = f"transformers {transformers.__version__}, torch {torch.__version__}"
    return {"engine": versions, "threads": torch.get_num_threads(), **measure(call)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hf-python", default=sys.executable, help="a Python that has torch")
    parser.add_argument("--out", help="a JSON file to write")
    parser.add_argument("--only", choices=("jllm", "transformers"), help=argparse.SUPPRESS)
    parser.add_argument("--gguf", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.only:
        result = run_jllm() if options.only == "jllm" else run_transformers(options.gguf)
        print(json.dumps(result))
        return

    from jllm.weights.hub import locate

    gguf = str(locate("smollm2-135m-instruct"))
    results = {}
    for name, python in (("transformers", options.hf_python), ("jllm", sys.executable)):
        print(f"running {name} ...", file=sys.stderr)
        command = [python, __file__, "--only", name, "--gguf", gguf]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
        if done.returncode:
            sys.exit(f"{name} failed under {python}; --hf-python names a Python that has torch.")
        results[name] = json.loads(done.stdout.splitlines()[-1])
        print(f"{results[name]['engine']}: {results[name]['tokens_per_s']:.0f} tokens/s")
    ratio = results["jllm"]["tokens_per_s"] / results["transformers"]["tokens_per_s"]
    print(f"ratio: {ratio:.2f} ({os.cpu_count()} cores, batch {BATCH}, {PROMPT} + {NEW} tokens)")
    if options.out:
        Path(options.out).write_text(json.dumps({**results, "ratio": ratio}, indent=1) + "\n")


if __name__ == "__main__":
    main()
