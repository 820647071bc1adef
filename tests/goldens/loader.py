"""Reads the golden files of this folder; needs numpy only. README.md describes the files."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

HERE = Path(__file__).parent


@dataclass(frozen=True)
class Golden:
    """What the reference computed for one prompt. T tokens, P recorded positions, N new tokens.

    ``logits[i]`` are those after reading ``ids[: positions[i] + 1]``: they predict the next token.
    """

    ids: NDArray[np.int32]  # (T,)
    positions: NDArray[np.int32]  # (P,) ascending; the last is T - 1
    logits: NDArray[np.float32]  # (P, V) for tiny models; (P, 256), at DemoGoldens.vocab_ids
    greedy: NDArray[np.int32]  # (N,) argmax tokens after the whole prompt, eos not a stop
    gaps: NDArray[np.float32]  # (N,) top-1 logit minus top-2 logit at each of those steps


@dataclass(frozen=True)
class DemoGolden(Golden):
    name: str
    text: str
    messages: list[dict[str, str]] | None  # where text is a rendered chat: what was rendered
    argmax: NDArray[np.int32]  # (P,) over the full vocabulary, as are the next three
    mean: NDArray[np.float32]  # (P,)
    std: NDArray[np.float32]  # (P,) population standard deviation
    logsumexp: NDArray[np.float32]  # (P,)
    logprobs: NDArray[np.float32]  # (T - 1,): log p(ids[t + 1] | ids[: t + 1])


@dataclass(frozen=True)
class DemoGoldens:
    vocab_ids: NDArray[np.int32]  # (256,) ascending: the columns of every prompt's logits
    prompts: dict[str, DemoGolden]
    info: dict[str, Any]  # versions, gguf_sha256, vocab_size


@dataclass(frozen=True)
class TinyGolden:
    name: str
    path: Path  # a checkpoint folder: config.json, safetensors, generation_config.json
    about: str
    eos_token_ids: tuple[int, ...]  # config and generation_config together
    prompts: dict[str, Golden] = field(repr=False)  # "short" (T = 12) and "long" (T = 300)


def load_demo(folder: Path = HERE) -> DemoGoldens:
    info = json.loads((folder / "demo.json").read_text(encoding="utf-8"))
    with np.load(folder / "demo.npz") as arrays:
        prompts = {
            p["name"]: DemoGolden(
                name=p["name"],
                text=p["text"],
                messages=p.get("messages"),
                **_arrays(arrays, p["name"]),
            )
            for p in info.pop("prompts")
        }
        return DemoGoldens(arrays["vocab_ids"], prompts, info)


def load_tiny(folder: Path = HERE) -> dict[str, TinyGolden]:
    info = json.loads((folder / "tiny.json").read_text(encoding="utf-8"))
    with np.load(folder / "tiny.npz") as arrays:
        return {
            m["name"]: TinyGolden(
                name=m["name"],
                path=folder / "tiny" / m["name"],
                about=m["about"],
                eos_token_ids=tuple(m["eos_token_ids"]),
                prompts={
                    p: Golden(**_arrays(arrays, f"{m['name']}/{p}")) for p in ("short", "long")
                },
            )
            for m in info["models"]
        }


def _arrays(arrays: Any, prefix: str) -> dict[str, Any]:
    """The arrays ``prefix/key`` of an npz, by key."""
    start = prefix + "/"
    return {key[len(start) :]: arrays[key] for key in arrays.files if key.startswith(start)}
