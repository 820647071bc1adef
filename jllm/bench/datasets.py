"""Workloads: which prompts and how many new tokens each. Same seed, same workload, everywhere.

Two conventions for a *range ratio* r are in use, and they mean different things:

    vllm     lengths uniform in [length * (1 - r), length * (1 + r)]; 0 is a fixed length
    sglang   lengths uniform in [length * r, length]; 1 is a fixed length, 0 starts at 1 token
             (InferenceMAX's 0.8 is this one)
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

Convention = Literal["vllm", "sglang"]

VOCAB = 10_001  # nano-vllm draws ids 0 to 10000


class Request(NamedTuple):
    """One prompt: its token ids (or its text, for a server) and how many tokens it asks for."""

    prompt: list[int] | str
    output_len: int


class Workload(NamedTuple):
    """A list of requests.

    Attributes:
      requests: in order of arrival.
      prefix: tokens that every prompt begins with and that are cached before the clock starts.
      what: one line for the record: the generator and its parameters.
    """

    requests: list[Request]
    prefix: list[int]
    what: str


class Source(NamedTuple):
    """What a generator needs of the run: the model's vocabulary, a seed, and the tokenizer's
    ``encode`` if the model has one."""

    vocab_size: int
    seed: int = 0
    encode: Callable[[str], list[int]] | None = None


def random_ids(rng: random.Random, length: int, vocab_size: int) -> list[int]:
    """Ids from the lower vocabulary, as nano-vllm's benchmark draws them."""
    return [rng.randrange(min(VOCAB, vocab_size)) for _ in range(length)]


def random_lengths(
    rng: random.Random, count: int, length: int, ratio: float, convention: Convention
) -> list[int]:
    """``count`` lengths around or up to ``length``; see the module's docstring.

    Raises ValueError for a ratio outside [0, 1), or (0, 1] of SGLang's convention.
    """
    if convention == "vllm":
        if not 0 <= ratio < 1:
            raise ValueError(f"range_ratio of the vllm convention must be in [0, 1), not {ratio}.")
        low, high = int(length * (1 - ratio)), int(length * (1 + ratio))
    else:
        if not 0 <= ratio <= 1:
            raise ValueError(
                f"range_ratio of the sglang convention must be in [0, 1], not {ratio}."
            )
        low, high = int(length * ratio), length
    return [rng.randint(max(low, 1), max(high, 1)) for _ in range(count)]


def random_workload(
    count: int,
    input_len: int,
    output_len: int,
    *,
    vocab_size: int,
    range_ratio: float | None = None,
    convention: Convention = "vllm",
    seed: int = 0,
) -> Workload:
    """Random ids; fixed lengths unless a range ratio is given."""
    rng = random.Random(seed)
    ins, outs = [input_len] * count, [output_len] * count
    what = f"random {count} x {input_len} in / {output_len} out"
    if range_ratio is not None:
        ins = random_lengths(rng, count, input_len, range_ratio, convention)
        outs = random_lengths(rng, count, output_len, range_ratio, convention)
        what += f", range ratio {range_ratio} ({convention} convention)"
    prompts = [random_ids(rng, length, vocab_size) for length in ins]
    requests = [Request(p, n) for p, n in zip(prompts, outs, strict=True)]
    return Workload(requests, [], f"{what}, seed {seed}")


def nano_original(
    count: int = 256, *, vocab_size: int, low: int = 100, high: int = 1024, seed: int = 0
) -> Workload:
    """The generator of nano-vllm's bench.py: the ids of each prompt are drawn right after its
    length, then all output lengths. 256 prompts: 142,827 tokens in, 133,966 out."""
    rng = random.Random(seed)
    drawn = [[rng.randint(0, 10_000) for _ in range(rng.randint(low, high))] for _ in range(count)]
    outs = [rng.randint(low, high) for _ in range(count)]
    prompts = [[token % vocab_size for token in ids] for ids in drawn]  # only tiny models wrap
    requests = [Request(p, n) for p, n in zip(prompts, outs, strict=True)]
    return Workload(requests, [], f"nano-vllm bench.py, {count} requests, seed {seed}")


def nano_lengths_first(
    count: int = 256, *, vocab_size: int, low: int = 100, high: int = 1024, seed: int = 0
) -> Workload:
    """The generator of the vLLM baseline file: all input lengths, then all output lengths, then
    the ids. 256 prompts: 144,831 tokens in, 144,160 out."""
    rng = random.Random(seed)
    ins = [rng.randint(low, high) for _ in range(count)]
    outs = [rng.randint(low, high) for _ in range(count)]
    prompts = [random_ids(rng, length, vocab_size) for length in ins]
    requests = [Request(p, n) for p, n in zip(prompts, outs, strict=True)]
    return Workload(requests, [], f"nano, lengths first, {count} requests, seed {seed}")


def shared_prefix(
    count: int, prefix_len: int, own_len: int, output_len: int, *, vocab_size: int, seed: int = 0
) -> Workload:
    """Prompts that share a long prefix, as with one system prompt, which is cached already."""
    rng = random.Random(seed)
    prefix = random_ids(rng, prefix_len, vocab_size)
    prompts = [prefix + random_ids(rng, own_len, vocab_size) for _ in range(count)]
    what = f"{count} x ({prefix_len} shared + {own_len} own) in / {output_len} out, seed {seed}"
    return Workload([Request(p, output_len) for p in prompts], prefix, what)


def sharegpt(
    path: str | Path, count: int, encode: Callable[[str], list[int]], *, seed: int = 0
) -> Workload:
    """The first two turns of ShareGPT conversations, chosen as vLLM and SGLang do: a prompt of at
    least 4 and at most 1024 tokens, an answer of at least 4, together at most 2048.

    Raises ValueError if the file has fewer than ``count`` of those.
    """
    conversations = json.loads(Path(path).read_text())
    turns = [c["conversations"][:2] for c in conversations if len(c.get("conversations", [])) >= 2]
    random.Random(seed).shuffle(turns)
    requests = []
    for question, answer in turns:
        ids, output_len = encode(question["value"]), len(encode(answer["value"]))
        if len(ids) >= 4 and output_len >= 4 and len(ids) <= 1024 and len(ids) + output_len <= 2048:
            requests.append(Request(ids, output_len))
        if len(requests) == count:
            return Workload(requests, [], f"ShareGPT {Path(path).name}, {count}, seed {seed}")
    raise ValueError(f"{path} has {len(requests)} usable conversations, fewer than {count}.")


def jsonl(
    path: str | Path,
    count: int | None,
    encode: Callable[[str], list[int]] | None,
    *,
    output_len: int,
) -> Workload:
    """One request per line: ``{"prompt": "text" or [ids], "output_len": 64}``; ``output_len`` of
    the line wins over the one given. ``encode`` None leaves texts as they are.

    Raises ValueError naming the line that is malformed.
    """
    requests = []
    for number, line in enumerate(Path(path).read_text().splitlines(), 1):
        if not line.strip():
            continue
        requests.append(_json_request(line, f"{path}, line {number}", encode, output_len))
        if len(requests) == count:
            break
    if not requests or (count is not None and len(requests) < count):
        raise ValueError(f"{path} has {len(requests)} requests, but {count or 1} are wanted.")
    return Workload(requests, [], f"{Path(path).name}, {len(requests)} requests")


def _json_request(
    line: str, where: str, encode: Callable[[str], list[int]] | None, output_len: int
) -> Request:
    try:
        entry: Any = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{where}: not valid JSON: {error}.") from error
    prompt = entry.get("prompt") if isinstance(entry, dict) else None
    wanted = entry.get("output_len", output_len) if isinstance(entry, dict) else output_len
    if isinstance(prompt, str) and prompt:
        prompt = encode(prompt) if encode else prompt
    elif not (_is_ids(prompt) and prompt):
        raise ValueError(f'{where}: "prompt" must be a text or a list of token ids.')
    if not isinstance(wanted, int) or isinstance(wanted, bool) or wanted < 1:
        raise ValueError(f'{where}: "output_len" must be a positive integer, not {wanted!r}.')
    return Request(prompt, wanted)


def _is_ids(value: Any) -> bool:
    return isinstance(value, Sequence) and all(isinstance(item, int) for item in value)
