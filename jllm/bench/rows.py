"""Row names and the protocols they stand for: the contract with the baseline files.

A name says everything: ``tpot_ms_B64_ctx1024`` is 64 prompts of 1024 tokens, so any sizes can be
asked for by name (``--rows tpot_ms_B4_ctx256,tp_128_128_out_tok_s``).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from jllm.bench.datasets import (
    Request,
    Source,
    Workload,
    nano_lengths_first,
    nano_original,
    random_workload,
    shared_prefix,
)
from jllm.bench.runs import Sampling

# max_model_len of the baseline: the first for all rows, the second for those of long contexts,
# shared prefixes and rollouts.
SHORT_LEN, LONG_LEN = 9216, 40_000

GREEDY = Sampling()
TOPK_TOPP = Sampling(temperature=1.0, top_k=50, top_p=0.95)


@dataclass(frozen=True)
class LatencyRow:
    """A fixed batch of prompts of equal length.

    Attributes:
      measure: ``tpot`` (time per output token, ms, by difference), ``prefill`` (time with one new
        token, s) or ``prefill_rate`` (prompt tokens per second of that).
      batch, context: prompts, and tokens of each.
      new_tokens: of the longer run of a tpot row; the shorter has 1.
    """

    name: str
    measure: Literal["tpot", "prefill", "prefill_rate"]
    batch: int
    context: int
    new_tokens: int = 129
    sampling: Sampling = GREEDY

    @property
    def max_model_len(self) -> int:
        long = self.measure == "tpot" and self.context >= 8192
        return LONG_LEN if long else SHORT_LEN

    @property
    def share_prefixes(self) -> bool:
        return False


@dataclass(frozen=True)
class ThroughputRow:
    """A workload, all of it sent at once.

    Attributes:
      make: draws the workload.
      total: count input and output tokens, not the output alone.
      sampling: with n and logprobs.
      max_model_len: of the engine; None lets it choose.
      share_prefixes: turn the prefix cache on.
    """

    name: str
    make: Callable[[Source], Workload]
    total: bool = False
    sampling: Sampling = GREEDY
    max_model_len: int | None = SHORT_LEN
    share_prefixes: bool = False


BenchRow = LatencyRow | ThroughputRow


def parse(name: str) -> BenchRow:
    """The protocol of a row's name.

    Raises ValueError for a name that is none, listing the patterns.
    """
    for pattern, build in _PATTERNS:
        found = re.fullmatch(pattern, name)
        if found:
            groups = found.groupdict()
            for key, value in groups.items():
                if key != "temperature" and value is not None and re.fullmatch("0+", value):
                    raise ValueError(f"Row {name!r} has {key} {value}; sizes are at least 1.")
            return build(name, groups)
    known = "; ".join(re.sub(r"\(\?P<(\w+)>[^)]*\)\??", r"{\1}", p) for p, _ in _PATTERNS)
    raise ValueError(f"Unknown row {name!r}. Rows are {known}.")


Groups = dict[str, str]


def _tpot(name: str, g: Groups) -> LatencyRow:
    batch, context = int(g["batch"]), int(g["context"])
    # One short prompt steps so fast that 128 steps would be too few.
    new_tokens = 257 if (batch, context) == (1, 32) else 129
    sampling = TOPK_TOPP if g["variant"] else GREEDY
    return LatencyRow(name, "tpot", batch, context, new_tokens, sampling)


def _prefill(name: str, g: Groups) -> LatencyRow:
    return LatencyRow(name, "prefill", int(g["batch"]), int(g["context"]))


def _prefill_rate(name: str, g: Groups) -> LatencyRow:
    return LatencyRow(name, "prefill_rate", int(g["batch"]), int(g["context"]))


def _nano(name: str, g: Groups) -> ThroughputRow:
    sampling = Sampling(temperature=float(g["temperature"]))

    def make(source: Source) -> Workload:
        return nano_lengths_first(vocab_size=source.vocab_size, seed=source.seed)

    return ThroughputRow(name, make, sampling=sampling)


def _nano_original(name: str, g: Groups) -> ThroughputRow:
    sampling = Sampling(temperature=float(g["temperature"]))

    def make(source: Source) -> Workload:
        return nano_original(vocab_size=source.vocab_size, seed=source.seed)

    return ThroughputRow(name, make, sampling=sampling)


def _fixed(name: str, g: Groups) -> ThroughputRow:
    count, ins, outs = int(g.get("count") or 1000), int(g["input"]), int(g["output"])

    def make(source: Source) -> Workload:
        return random_workload(count, ins, outs, vocab_size=source.vocab_size, seed=source.seed)

    return ThroughputRow(name, make, total=g["which"] == "total")


def _shared(name: str, g: Groups) -> ThroughputRow:
    count, prefix, own, outs = (int(g[k]) for k in ("count", "prefix", "own", "output"))

    def make(source: Source) -> Workload:
        return shared_prefix(
            count, prefix, own, outs, vocab_size=source.vocab_size, seed=source.seed
        )

    return ThroughputRow(name, make, max_model_len=LONG_LEN, share_prefixes=True)


def _rollout(name: str, g: Groups) -> ThroughputRow:
    count, ins, outs = (int(g[k]) for k in ("count", "input", "output"))

    def make(source: Source) -> Workload:
        return random_workload(count, ins, outs, vocab_size=source.vocab_size, seed=source.seed)

    sampling = Sampling(temperature=1.0, n=int(g["n"]), logprobs=0)
    return ThroughputRow(name, make, sampling=sampling, max_model_len=LONG_LEN, share_prefixes=True)


_PATTERNS: tuple[tuple[str, Callable[[str, Groups], BenchRow]], ...] = (
    (r"tpot_ms_B(?P<batch>\d+)_ctx(?P<context>\d+)(?P<variant>_topk50_topp095)?", _tpot),
    (r"prefill_s_B(?P<batch>\d+)x(?P<context>\d+)", _prefill),
    (r"prefill_tok_s_(?P<batch>\d+)x(?P<context>\d+)", _prefill_rate),
    (r"nano_out_tok_s_t(?P<temperature>\d+\.\d+)", _nano),
    (r"nano_original_out_tok_s_t(?P<temperature>\d+\.\d+)", _nano_original),
    (r"tp_(?P<input>\d+)_(?P<output>\d+)_(?P<which>total|out)_tok_s", _fixed),
    (r"(?P<count>\d+)x(?P<input>\d+)_(?P<output>\d+)_(?P<which>total|out)_tok_s", _fixed),
    (
        r"shared(?P<prefix>\d+)_(?P<count>\d+)x(?P<own>\d+)_(?P<output>\d+)_out_tok_s",
        _shared,
    ),
    (
        r"rollout_(?P<count>\d+)x(?P<n>\d+)_(?P<input>\d+)_(?P<output>\d+)_logprobs_out_tok_s",
        _rollout,
    ),
)


def requests_of(row: LatencyRow, source: Source, new_tokens: int) -> list[Request]:
    """The batch of a latency row."""
    return random_workload(
        row.batch, row.context, new_tokens, vocab_size=source.vocab_size, seed=source.seed
    ).requests


def _both(batch: int) -> tuple[str, str]:
    """The two rows that share their runs."""
    return f"prefill_s_B{batch}x1024", f"tpot_ms_B{batch}_ctx1024"


_BATCHES = (1, 16, 64, 128, 256)

SUITES: dict[str, dict[str, tuple[str, ...]]] = {
    # Every row of the baseline files.
    "h200": {
        "latency": (
            "tpot_ms_B1_ctx32",
            *(row for b in _BATCHES for row in _both(b)),
            "prefill_tok_s_8x8192",
            *(f"tpot_ms_B{b}_ctx1024_topk50_topp095" for b in (1, 64, 256)),
            "tpot_ms_B1_ctx32768",
            "tpot_ms_B16_ctx32768",
            "tpot_ms_B64_ctx8192",
        ),
        "throughput": (
            "nano_out_tok_s_t0.0",
            "nano_out_tok_s_t0.6",
            "tp_1024_128_total_tok_s",
            "tp_128_128_out_tok_s",
            "512x1024_1024_out_tok_s",
            "shared2048_512x128_128_out_tok_s",
            "rollout_64x8_512_512_logprobs_out_tok_s",
        ),
    },
    # What a change of the engine is judged by, in a few minutes.
    "quick": {
        "latency": (
            "tpot_ms_B1_ctx32",
            *(
                row
                for b in (1, 16, 64)
                for row in (f"prefill_s_B{b}x1024", f"tpot_ms_B{b}_ctx1024")
            ),
            "tpot_ms_B64_ctx1024_topk50_topp095",
        ),
        "throughput": ("tp_128_128_out_tok_s", "nano_out_tok_s_t0.6"),
    },
    # Seconds on a CPU with --config tiny.
    "tiny": {
        "latency": (
            "prefill_s_B2x16",
            "tpot_ms_B2_ctx16",
            "prefill_tok_s_2x48",
            "tpot_ms_B1_ctx16_topk50_topp095",
        ),
        "throughput": (
            "6x16_8_out_tok_s",
            "6x16_8_total_tok_s",
            "shared32_4x8_4_out_tok_s",
            "rollout_2x3_8_4_logprobs_out_tok_s",
        ),
    },
}
