"""Two result files, row by row: which is better, and by how much?

    python -m jllm.bench compare benchmarks/baselines/vllm-0.24.0-h200.json mine.json --plot r.png

A ratio above 1 means that B is better, whichever direction is better for the row. Files are those
of jllm.bench or baselines: ``{"engine": ..., "gpu": ..., "results": {model: {row: value}}}``.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import Any, NamedTuple

from jllm.bench import results
from jllm.bench.results import direction


class Numbers(NamedTuple):
    """One model's numbers in one file.

    Attributes:
      label: what ran: engine, GPU.
      model: its name.
      values: by row.
      invalid: why a row must not be trusted, by row.
    """

    label: str
    model: str
    values: dict[str, float]
    invalid: dict[str, str]


class Ratio(NamedTuple):
    """A row that both files have; ``ratio`` above 1 if B is better."""

    row: str
    a: float
    b: float
    better: str
    ratio: float
    invalid: str


def load(path: str | Path) -> list[Numbers]:
    """All models of a file.

    Raises ValueError or FileNotFoundError, naming the file.
    """
    record: Any = results.load_json(path)
    if isinstance(record, dict) and record.get("schema") == results.SCHEMA:
        result = results.read(path)
        invalid = {
            name: f"{row.num_compiles} compiles while the clock ran"
            if row.num_compiles
            else "failures or wrong results"
            for name, row in result.rows.items()
            if not row.valid
        }
        env = result.environment
        label = f"jllm {env['jllm']} ({env['gpu'] or env.get('cpu')})"
        values = {name: row.value for name, row in result.rows.items()}
        return [Numbers(label, result.model, values, invalid)]
    if not (isinstance(record, dict) and isinstance(record.get("results"), dict)):
        raise ValueError(f"{path} is neither a result of jllm.bench nor a baseline file.")
    gpu = str(record.get("gpu", "GPU not stated")).partition(" (")[0]  # without its driver
    label = f"{record.get('engine', Path(path).stem)} ({gpu})"
    found = []
    for model, rows in record["results"].items():
        if not all(isinstance(value, int | float) for value in rows.values()):
            raise ValueError(f"{path}: results.{model} must be numbers by row.")
        found.append(Numbers(label, model, dict(rows), {}))
    return found


def match(a: list[Numbers], b: list[Numbers], model: str | None) -> list[tuple[Numbers, Numbers]]:
    """The models that both files have.

    Raises ValueError if there is none; ``--model NAME`` compares models of different names.
    """
    if model is not None:
        a = [numbers for numbers in a if numbers.model == model]
        b = [numbers for numbers in b if numbers.model == model] or b
    pairs = [(x, y) for x in a for y in b if x.model == y.model or (model and len(b) == 1)]
    if not pairs:
        names = " and ".join(", ".join(n.model for n in side) or "none" for side in (a, b))
        raise ValueError(f"The files have no model in common: {names}.")
    return pairs


def ratios(a: Numbers, b: Numbers) -> list[Ratio]:
    """Every row that both have, in the order of A."""
    found = []
    for name, value in a.values.items():
        if name not in b.values:
            continue
        other, better = b.values[name], direction(name)
        pair = (value, other) if better == "lower" else (other, value)
        ratio = pair[0] / pair[1] if pair[1] else math.nan
        invalid = a.invalid.get(name) or b.invalid.get(name) or ""
        found.append(Ratio(name, value, other, better, ratio, invalid))
    return found


def table(a: Numbers, b: Numbers) -> str:
    """The ratios as a Markdown table, the rows that only one has below it."""
    rows = ratios(a, b)
    lines = [
        f"**{a.model}**: A is {a.label}, B is {b.label}. Above 1: B is better.",
        "",
        "| row | better | A | B | B over A |",
        "|---|---|---:|---:|---:|",
    ]
    for row in rows:
        mark = f" **INVALID: {row.invalid}**" if row.invalid else ""
        numbers = f"{row.a:,.5g} | {row.b:,.5g} | {row.ratio:.3f}{mark}"
        lines.append(f"| {row.row} | {row.better} | {numbers} |")
    good = [row.ratio for row in rows if row.ratio > 0 and not row.invalid]
    if good:
        mean = math.exp(sum(map(math.log, good)) / len(good))
        lines += ["", f"Geometric mean of {len(good)} rows: {mean:.3f}."]
    for label, one, other in (("A", a, b), ("B", b, a)):
        missing = [name for name in one.values if name not in other.values]
        if missing:
            lines += ["", f"Only in {label}: {', '.join(missing)}."]
    return "\n".join(lines)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("a", help="a result or baseline file: the reference")
    parser.add_argument("b", help="the file to judge")
    parser.add_argument("--model", help="only this model")
    parser.add_argument("--plot", metavar="PNG", help="draw the ratios")
    parser.add_argument("--out", metavar="MD", help="write the table there, too")
    parser.add_argument(
        "--fail-below", type=float, metavar="R", help="exit code 1 if some row's ratio is below R"
    )


def main(options: argparse.Namespace) -> int:
    """Prints the table of every model that both files have."""
    pairs = match(load(options.a), load(options.b), options.model)
    text = "\n\n".join(table(a, b) for a, b in pairs)
    print(text)
    if options.out:
        Path(options.out).write_text(text + "\n")
    if options.plot:
        from jllm.bench import plots

        plots.ratio_bars(pairs, options.plot)
    found = [row for a, b in pairs for row in ratios(a, b)]
    if not found:
        raise ValueError("The files have no row in common.")
    if any(row.invalid for row in found):
        return 1
    low = options.fail_below
    return int(low is not None and any(not row.ratio >= low for row in found))
