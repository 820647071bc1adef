"""The subcommands ``latency`` and ``throughput``: which rows to measure, and their record, written
after every row, so that a killed process loses only the row it was at."""

from __future__ import annotations

import argparse
import dataclasses
import re
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from jllm.bench import latency, throughput
from jllm.bench.arguments import int_list, positive
from jllm.bench.datasets import (
    Source,
    Workload,
    jsonl,
    nano_lengths_first,
    nano_original,
    random_workload,
    shared_prefix,
    sharegpt,
)
from jllm.bench.environment import environment
from jllm.bench.models import add_engine_options, add_model_options, load_model
from jllm.bench.results import Result, Row, add_record_options
from jllm.bench.rows import (
    LONG_LEN,
    SHORT_LEN,
    SUITES,
    BenchRow,
    LatencyRow,
    ThroughputRow,
    parse,
)
from jllm.bench.runs import Sampling, TimeLimitReached
from jllm.bench.session import Session, add_session_options
from jllm.config import EngineConfig

DATASETS = ("random", "nano", "nano-lengths-first", "shared-prefix", "rollout", "sharegpt", "jsonl")


def add_latency_options(parser: argparse.ArgumentParser) -> None:
    _add_row_options(parser)
    group = parser.add_argument_group("sweep, instead of rows (default: batch 8, 32 tokens)")
    group.add_argument("--batch-sizes", type=int_list, metavar="N,N", default=(8,))
    group.add_argument("--contexts", type=int_list, metavar="N,N", default=(32,))


def latency_main(options: argparse.Namespace) -> int:
    """Measures the rows asked for, or every batch at every context."""
    rows = _chosen_rows(options, "latency")
    if rows is None:
        sizes = [(b, c) for c in options.contexts for b in options.batch_sizes]
        names = [n for b, c in sizes for n in (f"prefill_s_B{b}x{c}", f"tpot_ms_B{b}_ctx{c}")]
        rows = [parse(name) for name in names]
    return _exit_code(run_rows("latency", options, rows))


def add_throughput_options(parser: argparse.ArgumentParser) -> None:
    _add_row_options(parser)
    group = parser.add_argument_group("one workload, instead of rows")
    group.add_argument("--dataset", choices=DATASETS, default="random")
    group.add_argument("--dataset-path", help="of sharegpt and jsonl")
    group.add_argument("--num-prompts", type=positive, help="default 1000; 256 of nano")
    group.add_argument("--input-len", type=positive, default=1024, help="own tokens of each prompt")
    group.add_argument("--output-len", type=positive, default=128)
    group.add_argument("--prefix-len", type=positive, default=2048, help="of shared-prefix")
    group.add_argument(
        "--range-ratio", type=float, help="of random: spread of the lengths, see --convention"
    )
    group.add_argument(
        "--convention",
        choices=("vllm", "sglang"),
        default="vllm",
        help="vllm: lengths in [L(1-r), L(1+r)]; sglang and InferenceMAX: in [L*r, L]",
    )
    group.add_argument("--n", type=positive, help="samples per prompt; default 1, 8 of rollout")
    group.add_argument("--temperature", type=float, help="default 0 (greedy), 1 of rollout")
    group.add_argument("--top-k", type=int, default=0)
    group.add_argument("--top-p", type=float, default=1.0)
    group.add_argument("--min-p", type=float, default=0.0)
    group.add_argument("--logprobs", type=int, help="alternatives; default none, 0 of rollout")


def throughput_main(options: argparse.Namespace) -> int:
    """Measures the rows asked for, or the one workload that the options describe."""
    rows = _chosen_rows(options, "throughput")
    return _exit_code(run_rows("throughput", options, rows or [_custom_row(options)]))


def _add_row_options(parser: argparse.ArgumentParser) -> None:
    add_model_options(parser)
    add_engine_options(parser)
    group = parser.add_argument_group("rows").add_mutually_exclusive_group()
    group.add_argument("--rows", metavar="NAME,NAME", help="as in benchmarks/baselines/, any sizes")
    group.add_argument("--suite", choices=tuple(SUITES), help="h200: every row of the baseline")
    add_session_options(parser)
    add_record_options(parser)


def _chosen_rows(options: argparse.Namespace, benchmark: str) -> list[BenchRow] | None:
    if options.suite:
        return [parse(name) for name in SUITES[options.suite][benchmark]]
    if options.rows:
        return [parse(name) for name in options.rows.split(",")]
    return None


def _custom_row(options: argparse.Namespace) -> ThroughputRow:
    """The row of ``--dataset`` and its options."""
    o, kind = options, options.dataset
    count = o.num_prompts or (256 if kind.startswith("nano") else 1000)
    rollout = kind == "rollout"
    if kind in ("sharegpt", "jsonl") and not o.dataset_path:
        raise ValueError(f"--dataset {kind} needs --dataset-path.")
    if o.range_ratio is not None and kind != "random":
        raise ValueError(f"--range-ratio is for --dataset random, not {kind}.")

    def given(value: float | None, of_rollout: float, otherwise: float) -> float:
        return (of_rollout if rollout else otherwise) if value is None else value

    logprobs = 0 if rollout and o.logprobs is None else o.logprobs
    sampling = Sampling(
        temperature=given(o.temperature, 1.0, 0.0),
        top_k=o.top_k,
        top_p=o.top_p,
        min_p=o.min_p,
        n=int(given(o.n, 8, 1)),
        logprobs=logprobs,
    )

    def make(source: Source) -> Workload:
        vocab, seed, encode = source
        if kind == "nano":
            return nano_original(count, vocab_size=vocab, seed=seed)
        if kind == "nano-lengths-first":
            return nano_lengths_first(count, vocab_size=vocab, seed=seed)
        if kind == "shared-prefix":
            lengths = (count, o.prefix_len, o.input_len, o.output_len)
            return shared_prefix(*lengths, vocab_size=vocab, seed=seed)
        if kind in ("sharegpt", "jsonl"):
            if encode is None:
                raise ValueError(f"--dataset {kind} needs a model with a tokenizer.")
            if kind == "sharegpt":
                return sharegpt(o.dataset_path, count, encode, seed=seed)
            return jsonl(o.dataset_path, o.num_prompts, encode, output_len=o.output_len)
        return random_workload(
            count,
            o.input_len,
            o.output_len,
            vocab_size=vocab,
            range_ratio=o.range_ratio,
            convention=o.convention,
            seed=seed,
        )

    words = [kind.replace("-", "_"), str(count)]
    if kind in ("sharegpt", "jsonl"):
        words[0] = re.sub(r"\W", "-", f"{kind}_{Path(o.dataset_path).stem}")
    elif not kind.startswith("nano"):
        words += [str(o.input_len), str(o.output_len)]
    if kind == "jsonl" and o.num_prompts is None:
        words.pop()  # all of the file
    name = f"{'_'.join(words)}_out_tok_s_t{sampling.temperature}"
    shares = kind in ("shared-prefix", "rollout")
    longest = (o.input_len + o.output_len) * (1 + (o.range_ratio or 0))
    short = not shares and kind != "jsonl" and longest <= SHORT_LEN
    max_model_len = SHORT_LEN if short else LONG_LEN if shares else None
    return ThroughputRow(
        name, make, sampling=sampling, max_model_len=max_model_len, share_prefixes=shares
    )


def run_rows(benchmark: str, options: argparse.Namespace, rows: Sequence[BenchRow]) -> Result:
    """Measures rows one after the other; one that fails or comes too late is listed as skipped."""
    began = time.monotonic()
    deadline = None if options.time_limit_s is None else began + options.time_limit_s
    result, session = begin(benchmark, options, deadline)
    for spec in _grouped(rows):
        if deadline is not None and time.monotonic() > deadline:
            result.skipped[spec.name] = f"the time limit of {options.time_limit_s:g} s had passed"
            continue
        try:
            if isinstance(spec, LatencyRow):
                measured = latency.measure(session, spec)
            else:
                measured = throughput.measure(session, spec)
        except TimeLimitReached:
            result.skipped[spec.name] = (
                f"the time limit of {options.time_limit_s:g} s passed while it ran"
            )
        except ValueError as error:
            result.skipped[spec.name] = str(error)
        except RuntimeError as error:  # of the device, most likely out of memory
            result.skipped[spec.name] = f"failed: {str(error).splitlines()[0]}"
            session.abandon()
        else:
            result.rows[spec.name] = measured
            _note_engine(result, session.engine(spec).config, spec.name)
            print(line(spec.name, measured), file=sys.stderr)
        result.write(options.out)
    session.close()
    for name, why in result.skipped.items():
        print(f"skipped {name}: {why}", file=sys.stderr)
    result.finish(options.out)
    return result


def begin(
    benchmark: str, options: argparse.Namespace, deadline: float | None = None
) -> tuple[Result, Session]:
    """Loads the model; an empty record and a session to fill it."""
    began = time.monotonic()
    env = environment(options.arguments, options.commit, device=True)
    model = load_model(options)
    session = Session(options, model, env["gpu"], deadline)
    result = Result(
        benchmark,
        model.name,
        model.weights,
        str(model.params.dtype),
        env,
        settings={
            "seed": options.seed,
            "tp": options.tp,
            "load_s": time.monotonic() - began,
            "engines": [],
        },
        hardware=session.hardware.to_json() if session.hardware else None,
    )
    return result, session


def _note_engine(result: Result, config: EngineConfig, row: str) -> None:
    """Records under settings.engines which rows ran on which engine."""
    plain = dataclasses.asdict(config)
    for entry in result.settings["engines"]:
        if entry["config"] == plain:
            entry["rows"].append(row)
            return
    result.settings["engines"].append({"config": plain, "rows": [row]})


def line(name: str, row: Row) -> str:
    """A row as one line, with the hardware's limit beside it; loud if it is not valid."""
    text = f"{name:44} {row.value:12.4g} {row.unit}"
    if (share := row.share(name)) is not None and row.roofline is not None:
        text += f"   limit {row.roofline:.4g} ({share:.0%})"
    if len(row.runs) > 1:
        text += f"   spread {row.spread:.1%} of {len(row.runs)}"
    if row.step:
        text += f"   host gap {row.step['host_gap_ms']:.3f} ms/step"
    if row.num_compiles is not None:
        text += f"   compiles {row.num_compiles}"
    if not row.valid:
        text = f"*** INVALID *** {text}"
    return text


def _grouped(rows: Sequence[BenchRow]) -> list[BenchRow]:
    """In the order given, but those that share an engine together."""
    order: dict[tuple[int | None, bool], list[BenchRow]] = {}
    for row in rows:
        order.setdefault((row.max_model_len, row.share_prefixes), []).append(row)
    return [row for group in order.values() for row in group]


def _exit_code(result: Result) -> int:
    """1 if nothing was measured, or something that is not valid, or the device failed."""
    failed = any(why.startswith("failed:") for why in result.skipped.values())
    valid = all(row.valid for row in result.rows.values())
    return 0 if result.rows and valid and not failed else 1
