"""One page from result files: ``report.md`` and its plots.

    python -m jllm.bench report benchmarks/baselines/vllm-0.24.0-h200.json latency.json \\
        throughput.json kernels.json --out benchmarks/report

Files of the same engine and GPU are one column. Numbers are copied, never computed anew.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from pathlib import Path

from jllm.bench import compare, plots, results
from jllm.bench.results import Result, direction
from jllm.presets import PRESETS
from jllm.roofline import Hardware, decode_step_s


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("files", nargs="+", help="result files, and baselines to stand beside them")
    parser.add_argument("--out", default="report", metavar="FOLDER", help="default: report/")
    parser.add_argument("--model", action="append", help="only this one; may be repeated")


def main(options: argparse.Namespace) -> int:
    """Writes the page and says where."""
    page = write(options.files, Path(options.out), options.model)
    print(f"wrote {page}")
    return 0


def write(files: Sequence[str], folder: Path, models: Sequence[str] | None = None) -> Path:
    """Writes ``folder/report.md``; returns its path.

    Raises ValueError if the files hold no number of the models.
    """
    folder.mkdir(parents=True, exist_ok=True)
    numbers = [found for file in files for found in compare.load(file)]
    records = [results.read(file) for file in files if _is_ours(file)]
    names = list(dict.fromkeys([r.model for r in records] or [n.model for n in numbers]))
    names = [name for name in names if not models or name in models]
    if not names:
        raise ValueError("The files hold no number of the models asked for.")
    lines = ["# Benchmark report", ""]
    for name in names:
        mine = [record for record in records if record.model == name]
        lines += _model_section(name, [n for n in numbers if n.model == name], mine, folder)
    lines += ["## How it was measured", ""]
    for record in records:
        lines += _provenance(record)
    page = folder / "report.md"
    page.write_text("\n".join(lines) + "\n")
    return page


def _is_ours(file: str) -> bool:
    record = results.load_json(file)
    return bool(record.get("schema") == results.SCHEMA)


def _columns(numbers: Sequence[compare.Numbers]) -> list[tuple[str, dict[str, float]]]:
    """The files of one engine and GPU merged, the later file before the earlier."""
    merged: dict[str, dict[str, float]] = {}
    for found in numbers:
        merged.setdefault(found.label, {}).update(found.values)
    return list(merged.items())


def _model_section(
    name: str,
    numbers: Sequence[compare.Numbers],
    records: Sequence[Result],
    folder: Path,
) -> list[str]:
    columns = _columns(numbers)
    limits = {
        row_name: row.roofline
        for record in records
        for row_name, row in record.rows.items()
        if row.roofline is not None
    }
    invalid = {row for found in numbers for row in found.invalid}
    lines = [f"## {name}", ""]
    slug = re.sub(r"[^\w.-]", "-", name)
    bounds = {**_preset_limits(name, columns, records), **limits}
    pictures = (
        (plots.rate_bars(columns, limits, name, folder / f"{slug}-rates.png"), "rates"),
        (plots.tpot_against_batch(columns, bounds, name, folder / f"{slug}-tpot.png"), "tpot"),
        (plots.step_time_bars(steps_by_kind(records), name, folder / f"{slug}-step.png"), "step"),
    )
    lines += [f"![{what}]({slug}-{what}.png)\n" for drawn, what in pictures if drawn]
    rows = list(dict.fromkeys(row for _, values in columns for row in values))
    kernel_rows = [row for row in rows if row.startswith("kernel_")]
    lines += _table([row for row in rows if row not in kernel_rows], columns, limits, invalid)
    if kernel_rows:
        lines += ["### Kernels", "", *_table(kernel_rows, columns, limits, invalid)]
    return lines


def _table(
    rows: Sequence[str],
    columns: Sequence[tuple[str, dict[str, float]]],
    limits: dict[str, float],
    invalid: set[str],
) -> list[str]:
    if not rows:
        return []
    labels = [label for label, _ in columns]
    lines = [
        f"| row | better | {' | '.join(labels)} | hardware's limit |",
        f"|---|---|{'---:|' * (len(labels) + 1)}",
    ]
    for row in rows:
        cells = [f"{values[row]:,.5g}" if row in values else "" for _, values in columns]
        limit = f"{limits[row]:,.5g}" if row in limits else ""
        name = f"{row} **INVALID**" if row in invalid else row
        lines.append(f"| {name} | {direction(row)} | {' | '.join(cells)} | {limit} |")
    return [*lines, ""]


def _preset_limits(
    name: str, columns: Sequence[tuple[str, dict[str, float]]], records: Sequence[Result]
) -> dict[str, float]:
    """Rooflines of tpot rows that only a baseline has, where the model is a known preset."""
    gpus = [record.hardware for record in records if record.hardware]
    if name not in PRESETS or not gpus:
        return {}
    gpu = Hardware(**gpus[0])
    limits = {}
    for _, values in columns:
        for context, points in plots.tpot_points(values).items():
            for batch, _ in points:
                seconds = decode_step_s(PRESETS[name], gpu, batch, context + 64)
                limits[f"tpot_ms_B{batch}_ctx{context}"] = seconds * 1e3
    return limits


def steps_by_kind(records: Sequence[Result]) -> dict[str, dict[str, tuple[float, float | None]]]:
    """From the kernels' rows: batch -> kind -> ms of a decode step (and at the ceilings)."""
    steps: dict[str, dict[str, tuple[float, float | None]]] = {}
    for record in records:
        if record.benchmark != "kernels":
            continue
        for row in record.rows.values():
            step, kind = row.detail.get("step"), row.detail.get("kind")
            if step is None or kind is None:
                continue
            times = row.detail["per_step"] / 1e3
            parts = steps.setdefault(step, {})
            ms, limit = parts.get(kind, (0.0, 0.0))
            more = None if limit is None or row.roofline is None else limit + row.roofline * times
            parts[kind] = ms + row.value * times, more
    return steps


def _provenance(record: Result) -> list[str]:
    env = record.environment
    device = env["gpu"] or env.get("cpu") or "device not known"
    state = f"commit {env['commit'] or 'unknown'}{' (dirty)' if env.get('dirty') else ''}"
    versions = f"jllm {env['jllm']}, jax {env['jax']}, Python {env['python']}"
    lines = [
        f"- **{record.benchmark}**, {record.model} ({record.weights} weights, "
        f"{record.dtype or 'dtype not known'}), {device}, driver {env['driver'] or '-'}; "
        f"{versions}; {state}; {env.get('started', '')}",
        f"  - `{env['command']}`, XLA_FLAGS `{env['xla_flags'] or '-'}`",
    ]
    compiles = sum(row.num_compiles or 0 for row in record.rows.values())
    lines.append(f"  - compiles while the clock ran: {compiles}")
    if not record.finished:
        lines.append("  - **the run did not finish**")
    lines += [f"  - skipped {name}: {why}" for name, why in record.skipped.items()]
    steps = [row.step for row in record.rows.values() if row.step]
    gaps = [step["host_gap_ms"] for step in steps]
    if gaps:
        lines.append(f"  - host gap per step, at most: {min(gaps):.3f} to {max(gaps):.3f} ms")
    return [*lines, ""]
