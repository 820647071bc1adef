"""The record that every benchmark writes: one JSON file, checked when written and when read.

    {"schema": "jllm-bench/1", "benchmark": "latency", "model": "qwen3-0.6b", ...,
     "environment": {...}, "rows": {"tpot_ms_B1_ctx1024": {"value": 1.7, "unit": "ms", ...}},
     "skipped": {"tpot_ms_B256_ctx1024": "time limit"}}

Rows are named as in ``benchmarks/baselines/vllm-0.24.0-h200.json``, so that two files compare key
by key.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

from jllm.bench.arguments import output_file

SCHEMA = "jllm-bench/1"

Better = Literal["lower", "higher"]

# Units as they stand between underscores in a row's name. Rates first: "tok_s" ends in "s".
_HIGHER = ("tok_s", "req_s", "tb_s", "tflop_s", "share")
_LOWER = ("ms", "us", "s", "gib")


def direction(name: str) -> Better:
    """Whether less or more of a row is better, by the unit in its name.

    Raises ValueError for a name without a unit.
    """
    for names, better in ((_HIGHER, "higher"), (_LOWER, "lower")):
        for unit in names:
            if re.search(rf"(^|_){unit}(_|$)", name):
                return better  # type: ignore[return-value]
    raise ValueError(
        f"The row {name!r} has no unit in its name, so nobody knows which direction is better; "
        f"units are {', '.join((*_HIGHER, *_LOWER))}."
    )


@dataclass(frozen=True)
class Row:
    """One measured number.

    Attributes:
      value: the median over ``runs``.
      unit: of value, runs and roofline.
      what: the number in words: of output tokens only, or of input and output?
      runs: one value per repetition.
      num_compiles: programs compiled while the clock ran. Must be 0.
      valid: False if something was compiled or the result was not what had been asked for.
      roofline: the hardware's limit for this row, if the hardware is known.
      step: milliseconds per engine step by part, see ``runs.step_times``.
      detail: whatever explains the row: lengths, counts, other rates.
    """

    value: float
    unit: str
    what: str
    runs: tuple[float, ...]
    num_compiles: int | None = 0
    valid: bool = True
    roofline: float | None = None
    step: dict[str, float] | None = None
    detail: dict[str, Any] = field(default_factory=dict)

    @property
    def spread(self) -> float:
        """(max - min) / median of the runs."""
        return (max(self.runs) - min(self.runs)) / self.value if self.value else 0.0

    def share(self, name: str) -> float | None:
        """How much of the hardware's limit is reached, 0 to 1."""
        if self.roofline is None or not self.value:
            return None
        lower = direction(name) == "lower"
        return self.roofline / self.value if lower else self.value / self.roofline

    def to_json(self, name: str) -> dict[str, Any]:
        more = {"better": direction(name), "spread": self.spread, "share": self.share(name)}
        return {**asdict(self), **more}


def row(runs: Sequence[float], unit: str, what: str, **more: Any) -> Row:
    """A Row of the median."""
    return Row(statistics.median(runs), unit, what, tuple(runs), **more)


@dataclass
class Result:
    """One benchmark's record; rows are added as they are measured.

    Attributes:
      benchmark: the subcommand.
      model: the preset's or the checkpoint's name.
      weights: ``dummy`` (random), ``checkpoint``, or ``server`` (whatever it serves).
      dtype: of the weights.
      environment: see environment.py.
      settings: options of the run: the engine's config, seeds, sizes.
      hardware: the roofline's GPU, or None.
      skipped: rows that were asked for and not measured, and why.
      finished: False in a file whose process was killed on the way.
    """

    benchmark: str
    model: str
    weights: str
    dtype: str | None
    environment: dict[str, Any]
    settings: dict[str, Any] = field(default_factory=dict)
    hardware: dict[str, Any] | None = None
    rows: dict[str, Row] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)
    finished: bool = False

    def to_json(self) -> dict[str, Any]:
        plain = {f.name: getattr(self, f.name) for f in fields(self)}
        plain["rows"] = {name: row.to_json(name) for name, row in self.rows.items()}
        compiles = sum(row.num_compiles or 0 for row in self.rows.values())
        return {"schema": SCHEMA, **plain, "compiles_after_warm_up": compiles}

    def write(self, path: str | Path | None) -> None:
        """Writes the file in one go: a killed process leaves the last whole one. Without a path
        nothing is written."""
        if path is None:
            return
        record = self.to_json()
        check(record)
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(path.name + ".partial")
        partial.write_text(json.dumps(record, indent=1) + "\n")
        os.replace(partial, path)

    def finish(self, path: str | Path | None) -> None:
        """Writes the finished record, or prints it if there is no path."""
        self.finished = True
        self.write(path)
        if path is None:
            record = self.to_json()
            check(record)
            print(json.dumps(record, indent=1))


_NUMBER = (int, float)
_TOP: dict[str, tuple[type, ...]] = {
    "schema": (str,),
    "benchmark": (str,),
    "model": (str,),
    "weights": (str,),
    "dtype": (str, type(None)),
    "environment": (dict,),
    "settings": (dict,),
    "hardware": (dict, type(None)),
    "rows": (dict,),
    "skipped": (dict,),
    "finished": (bool,),
    "compiles_after_warm_up": (int,),
}
_ROW: dict[str, tuple[type, ...]] = {
    "value": _NUMBER,
    "unit": (str,),
    "what": (str,),
    "runs": (list, tuple),
    "num_compiles": (int, type(None)),
    "valid": (bool,),
    "roofline": (*_NUMBER, type(None)),
    "step": (dict, type(None)),
    "detail": (dict,),
    "better": (str,),
    "spread": _NUMBER,
    "share": (*_NUMBER, type(None)),
}
_ENVIRONMENT = ("jllm", "jax", "python", "gpu", "driver", "xla_flags", "command", "commit")


def check(record: Any) -> None:
    """Raises ValueError naming the first field that is missing, unknown or of a wrong type, or a
    row whose direction contradicts its name."""
    _check_fields("result", record, _TOP)
    if record["schema"] != SCHEMA:
        raise ValueError(f"result.schema must be {SCHEMA!r}, not {record['schema']!r}.")
    for name in _ENVIRONMENT:
        if name not in record["environment"]:
            raise ValueError(f"result.environment.{name} is missing.")
    for name, entry in record["rows"].items():
        _check_fields(f"result.rows.{name}", entry, _ROW)
        if entry["better"] != direction(name):
            raise ValueError(f"result.rows.{name}.better contradicts the row's name.")
        if not entry["runs"]:
            raise ValueError(f"result.rows.{name}.runs is empty.")


def _check_fields(where: str, value: Any, kinds: dict[str, tuple[type, ...]]) -> None:
    if not isinstance(value, dict):
        raise ValueError(f"{where} must be an object, not {type(value).__name__}.")
    for name in value.keys() - kinds.keys():
        raise ValueError(f"{where} has an unknown field {name!r}.")
    for name, allowed in kinds.items():
        if name not in value:
            raise ValueError(f"{where}.{name} is missing.")
        wrong_bool = isinstance(value[name], bool) and bool not in allowed
        if wrong_bool or not isinstance(value[name], allowed):
            raise ValueError(f"{where}.{name} has type {type(value[name]).__name__}.")


def read(path: str | Path) -> Result:
    """Reads and checks a file that ``Result.write`` made."""
    record = load_json(path)
    try:
        check(record)
    except ValueError as error:
        raise ValueError(f"{path} is not a result of jllm.bench: {error}") from error
    rows = {name: _row_of(entry) for name, entry in record["rows"].items()}
    plain = {f.name: record[f.name] for f in fields(Result)}
    return Result(**{**plain, "rows": rows})


def _row_of(entry: dict[str, Any]) -> Row:
    stored: dict[str, Any] = {f.name: entry[f.name] for f in fields(Row)}
    return Row(**{**stored, "runs": tuple(entry["runs"])})


def load_json(path: str | Path) -> Any:
    """Raises FileNotFoundError or ValueError, each naming the file."""
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"There is no result file at {path}.")
    try:
        return json.loads(path.read_text())
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is not valid JSON: {error}.") from error


def add_record_options(parser: argparse.ArgumentParser) -> None:
    """Where the record goes; every subcommand that measures has these."""
    group = parser.add_argument_group("record")
    group.add_argument(
        "--out", type=output_file, metavar="JSON", help="where to write; printed unless given"
    )
    group.add_argument("--commit", help="of the record, where the checkout does not say")
    group.add_argument("--quiet", action="store_true", help="no progress bars")
