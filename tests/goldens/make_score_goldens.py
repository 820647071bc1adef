"""Makes scores.json: how likely the demo model finds the texts of tests/clients.

Question: does lm-eval, asking jllm's server, give the scores of Hugging Face transformers?

Command, from the repository root (seconds):

    /opt/hf311/bin/python tests/goldens/make_score_goldens.py           # writes the file
    /opt/hf311/bin/python tests/goldens/make_score_goldens.py --check   # remakes and compares

The environment is make_goldens.py's; the versions of a run are written into the file. A passage is
scored from its first token on, after the bos token that lm-eval puts in front.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from pathlib import Path
from typing import Any

import torch
from make_goldens import find_gguf, forward, own_tokenizer, versions, write_json
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

FOLDER = Path(__file__).parent
FILE = FOLDER / "scores.json"
CLIENTS = FOLDER.parent / "clients"


def lines(name: str) -> list[dict[str, Any]]:
    text = (CLIENTS / name).read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]


def score(model: PreTrainedModel, context: list[int], text: list[int]) -> float:
    """log p(text given context)."""
    logits = forward(model, context + text)[len(context) - 1 : -1]
    logprobs = logits.double().log_softmax(-1)
    return float(logprobs.gather(1, torch.tensor(text)[:, None]).sum())


def make() -> dict[str, Any]:
    gguf = find_gguf()
    source: dict[str, Any] = {"pretrained_model_name_or_path": gguf.parent, "gguf_file": gguf.name}
    tokenizer = own_tokenizer(AutoTokenizer.from_pretrained(**source))
    model = AutoModelForCausalLM.from_pretrained(
        **source, dtype=torch.float32, attn_implementation="eager"
    ).eval()

    def ids(text: str) -> list[int]:
        encoded: list[int] = tokenizer.encode(text, add_special_tokens=False)
        return encoded

    def choice(question: str, text: str) -> float:
        context = ids(question)
        return score(model, context, ids(question + text)[len(context) :])

    return {
        "versions": versions(),
        "choices": [
            [choice(line["question"], text) for text in line["choices"]]
            for line in lines("questions.jsonl")
        ],
        "passages": [
            score(model, [tokenizer.bos_token_id], ids(line["text"]))
            for line in lines("passages.jsonl")
        ],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="compare instead of writing")
    goldens = make()
    if not parser.parse_args().check:
        write_json(FILE, goldens)
        return
    stored = json.loads(FILE.read_text())
    old, new = (
        torch.tensor([*itertools.chain(*scores["choices"]), *scores["passages"]])
        for scores in (stored, goldens)
    )
    sys.exit(f"Differs from {FILE.name}." if (old - new).abs().max() > 1e-3 else 0)


if __name__ == "__main__":
    main()
