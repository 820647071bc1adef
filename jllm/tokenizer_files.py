"""Builds a ``Tokenizer`` from what a checkpoint holds: a folder's files or a GGUF's metadata."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.processors import TemplateProcessing

from jllm.tokenizer import SPACE_MARK, Tokenizer

__all__ = ["tokenizer_from_folder", "tokenizer_from_gguf"]

# ---------------------------------------------------------------------------------- folders

NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token")
TOKEN_LISTS = ("additional_special_tokens", "extra_special_tokens")


def tokenizer_from_folder(folder: Path) -> Tokenizer | None:
    """See ``Tokenizer.from_folder``."""
    if (folder / "tokenizer.json").is_file():
        return _from_tokenizer_json(folder)
    for files in (["tokenizer.model"], ["vocab.json", "merges.txt"]):
        if all((folder / file).is_file() for file in files):
            return _from_transformers(folder, " and ".join(files))
    return None


def _from_tokenizer_json(folder: Path) -> Tokenizer:
    try:
        backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    except Exception as error:  # the library raises bare Exception
        raise ValueError(f"{folder / 'tokenizer.json'} cannot be read: {error}") from error
    config = _read_json(folder / "tokenizer_config.json")
    special_map = _read_json(folder / "special_tokens_map.json")
    # As transformers does: the map is the older file and counts only where the config is as old.
    named = (
        {**special_map, **config} if "added_tokens_decoder" in config else {**config, **special_map}
    )

    added = config.get("added_tokens_decoder", {})
    tokens = [AddedToken(**added[i]) for i in sorted(added, key=int)]
    for key in NAMED_TOKENS:
        if (content := _content(named.get(key))) is not None:
            tokens.append(AddedToken(content, special=True, normalized=False))
    for key in TOKEN_LISTS:
        for value in named.get(key) or ():
            tokens.append(AddedToken(str(_content(value)), special=True, normalized=False))
    known = {token.content for token in backend.get_added_tokens_decoder().values()}
    backend.add_tokens([token for token in tokens if token.content not in known])

    template = _default_template(config.get("chat_template"))
    if (folder / "chat_template.jinja").is_file():
        template = (folder / "chat_template.jinja").read_text(encoding="utf-8")
    return Tokenizer(
        backend, _content(named.get("bos_token")), _content(named.get("eos_token")), template
    )


def _from_transformers(folder: Path, files: str) -> Tokenizer:
    from transformers import AutoTokenizer  # takes seconds to import, so only here

    try:
        loaded: Any = AutoTokenizer.from_pretrained(folder)
        backend: tokenizers.Tokenizer = loaded.backend_tokenizer
    except Exception as error:  # whatever a converter raises
        raise ValueError(
            f"transformers cannot convert {files} of {folder}, which has no tokenizer.json; a "
            f"tokenizer.model needs the package sentencepiece. ({' '.join(str(error).split())})"
        ) from error
    template = loaded.chat_template
    if isinstance(template, dict):
        template = template.get("default")
    return Tokenizer(backend, loaded.bos_token, loaded.eos_token, template)


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} must hold a JSON object, not a {type(content).__name__}.")
    return content


def _content(token: str | dict[str, str] | None) -> str | None:
    """The text of a token that is written as a string or as ``{"content": ..., ...}``."""
    return token["content"] if isinstance(token, dict) else token


def _default_template(value: str | list[dict[str, str]] | None) -> str | None:
    """``chat_template`` is a string, or a list of ``{"name", "template"}`` with one "default"."""
    if not isinstance(value, list):
        return value
    return next((item["template"] for item in value if item["name"] == "default"), None)


# ------------------------------------------------------------------------------------- GGUF

# `tokenizer.ggml.token_type`, as in llama.cpp's llama.h.
NORMAL, UNKNOWN, CONTROL, USER_DEFINED = 1, 2, 3, 4

LLAMA3_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2_WORDS = LLAMA3_WORDS.replace(r"\p{N}{1,3}", r"\p{N}")
TEKKEN_WORDS = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
GPT2_WORDS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"

# `tokenizer.ggml.pre` -> the patterns that split a text into words, one after the other. They are
# those of the models' own tokenizer.json (the source of llama.cpp's table in llama-vocab.cpp).
PRE_TOKENIZERS = {
    "default": (r"[\p{P}\$\+<=>\^~\|]+", GPT2_WORDS, r"\p{N}+", r"[0-9][0-9][0-9]"),
    "gpt-2": (GPT2_WORDS,),
    "smollm": (r"\p{N}", GPT2_WORDS),
    "llama-bpe": (LLAMA3_WORDS,),
    "llama3": (LLAMA3_WORDS,),
    "llama-v3": (LLAMA3_WORDS,),
    "qwen2": (QWEN2_WORDS,),
    "deepseek-r1-qwen": (QWEN2_WORDS,),
    "tekken": (TEKKEN_WORDS,),
}
# Where a word that is itself a token is taken whole, whatever the merges say; these also put BOS
# in front of a prompt unless the file says otherwise.
WHOLE_WORDS = ("llama-bpe", "llama3", "llama-v3", "tekken")


def tokenizer_from_gguf(metadata: Mapping[str, Any]) -> Tokenizer:
    """See ``Tokenizer.from_gguf``."""
    model = metadata.get("tokenizer.ggml.model")
    if model == "gpt2":
        pre = metadata.get("tokenizer.ggml.pre", "default")
        backend, adds_bos = _byte_level_bpe(metadata, pre), pre in WHOLE_WORDS
    elif model == "llama":
        backend, adds_bos = _sentencepiece_bpe(metadata), True
    else:
        raise ValueError(
            f"Unknown tokenizer.ggml.model {model!r} in the GGUF file; known are 'gpt2', 'llama'."
        )

    tokens = _required(metadata, "tokens")
    bos, eos = _named_token(metadata, "bos"), _named_token(metadata, "eos")
    types = metadata.get("tokenizer.ggml.token_type", [NORMAL] * len(tokens))
    control = {t for t, kind in zip(tokens, types, strict=False) if kind in (CONTROL, UNKNOWN)}
    control |= {token for token in (bos, eos) if token is not None}
    backend.add_tokens(
        [
            AddedToken(token, special=token in control, normalized=False)
            for token, kind in zip(tokens, types, strict=False)
            if token in control or kind == USER_DEFINED
        ]
    )
    prefix = _added_end(metadata, "bos", bos, adds_bos)
    suffix = _added_end(metadata, "eos", eos, False)
    if ends := {token: backend.token_to_id(token) for token in prefix + suffix}:
        backend.post_processor = TemplateProcessing(
            single=[*prefix, "$A", *suffix], special_tokens=list(ends.items())
        )
    return Tokenizer(backend, bos, eos, metadata.get("tokenizer.chat_template"))


def _named_token(metadata: Mapping[str, Any], name: str) -> str | None:
    tokens, token_id = (
        _required(metadata, "tokens"),
        metadata.get(f"tokenizer.ggml.{name}_token_id"),
    )
    if token_id is None:
        return None
    if not 0 <= token_id < len(tokens):
        raise ValueError(
            f"tokenizer.ggml.{name}_token_id is {token_id}, but the GGUF file has "
            f"{len(tokens)} tokens."
        )
    return str(tokens[token_id])


def _added_end(
    metadata: Mapping[str, Any], name: str, token: str | None, default: bool
) -> list[str]:
    """What is put before or after every prompt: the token or nothing."""
    if not metadata.get(f"tokenizer.ggml.add_{name}_token", default):
        return []
    if token is None:
        raise ValueError(
            f"The GGUF file wants {name.upper()} added to prompts, but has no "
            f"tokenizer.ggml.{name}_token_id."
        )
    return [token]


def _byte_level_bpe(metadata: Mapping[str, Any], pre: str) -> tokenizers.Tokenizer:
    if pre not in PRE_TOKENIZERS:
        raise ValueError(
            f"Unknown tokenizer.ggml.pre {pre!r} in the GGUF file; known are "
            f"{', '.join(map(repr, PRE_TOKENIZERS))}."
        )
    merges = [tuple(merge.split(" ", 1)) for merge in _required(metadata, "merges")]
    vocab = {token: i for i, token in enumerate(_required(metadata, "tokens"))}
    backend = tokenizers.Tokenizer(BPE(vocab, merges, ignore_merges=pre in WHOLE_WORDS))
    if pre == "qwen2":
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            *(pre_tokenizers.Split(Regex(words), "isolated") for words in PRE_TOKENIZERS[pre]),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    return backend


def _sentencepiece_bpe(metadata: Mapping[str, Any]) -> tokenizers.Tokenizer:
    tokens, scores = _required(metadata, "tokens"), _required(metadata, "scores")
    vocab = {token: i for i, token in enumerate(tokens)}
    # SentencePiece merges the pair whose joined piece has the best score, so every way to cut a
    # piece into two others is a merge of that piece's rank.
    merges = [
        (token[:cut], token[cut:])
        for token, _ in sorted(zip(tokens, scores, strict=True), key=lambda item: -item[1])
        for cut in range(1, len(token))
        if token[:cut] in vocab and token[cut:] in vocab
    ]
    unknown = metadata.get("tokenizer.ggml.unknown_token_id", 0)
    backend = tokenizers.Tokenizer(
        BPE(vocab, merges, unk_token=tokens[unknown], fuse_unk=True, byte_fallback=True)
    )
    prefix = metadata.get("tokenizer.ggml.add_space_prefix", True)
    backend.normalizer = normalizers.Sequence(
        [
            *([normalizers.Prepend(SPACE_MARK)] if prefix else []),
            normalizers.Replace(" ", SPACE_MARK),
        ]
    )
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace(SPACE_MARK, " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            *([decoders.Strip(" ", left=1)] if prefix else []),
        ]
    )
    return backend


def _required(metadata: Mapping[str, Any], name: str) -> Any:
    key = f"tokenizer.ggml.{name}"
    if key not in metadata:
        raise ValueError(f"The GGUF file has no {key}, which its tokenizer needs.")
    return metadata[key]
