"""Plots of result files, as PNG."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jllm.bench import compare
from jllm.plotting import COLORS, MARKERS, figure, save


def ratio_bars(pairs: Sequence[tuple[compare.Numbers, compare.Numbers]], path: str | Path) -> None:
    """One bar per row: B over A, 1 drawn in; invalid rows hatched."""
    rows = [(a.model, row) for a, b in pairs for row in compare.ratios(a, b)]
    canvas = figure(9, 1.2 + 0.28 * len(rows))
    axes = canvas.subplots()
    models = list(dict.fromkeys(model for model, _ in rows))
    several = len(models) > 1
    labels = [f"{model}: {row.row}" if several else row.row for model, row in rows]
    bars = axes.barh(
        range(len(rows)),
        [row.ratio for _, row in rows],
        color=[COLORS[models.index(model) % len(COLORS)] for model, _ in rows],
        hatch=["//" if row.invalid else "" for _, row in rows],
    )
    axes.bar_label(bars, fmt="%.2f", padding=3, fontsize=8)
    axes.set_yticks(range(len(rows)), labels, fontsize=8)
    axes.invert_yaxis()
    axes.axvline(1, color="black", linewidth=1)
    axes.set_xlabel("B over A (above 1: B is better)")
    if pairs:
        axes.set_title(f"A: {pairs[0][0].label}\nB: {pairs[0][1].label}", fontsize=9)
    axes.margins(x=0.12)
    save(canvas, path)


def tpot_points(values: Mapping[str, float]) -> dict[int, list[tuple[int, float]]]:
    """Of ``tpot_ms_B{B}_ctx{C}`` rows, (batch, ms) by context, ascending."""
    points: dict[int, list[tuple[int, float]]] = {}
    for name, value in values.items():
        if found := re.fullmatch(r"tpot_ms_B(\d+)_ctx(\d+)", name):
            points.setdefault(int(found[2]), []).append((int(found[1]), value))
    return {context: sorted(found) for context, found in sorted(points.items())}


def tpot_against_batch(
    series: Sequence[tuple[str, Mapping[str, float]]],
    limits: Mapping[str, float],
    title: str,
    path: str | Path,
) -> bool:
    """Time per output token over the batch, a line per file and context, the roofline dashed.

    A file is a colour and a context a marker.

    Args:
      series: (label, value by row), one per file.
      limits: roofline in ms by row.

    Returns whether there was anything to draw.
    """
    drawn = [
        (context, label, COLORS[index % len(COLORS)], found)
        for index, (label, values) in enumerate(series)
        for context, found in tpot_points(values).items()
    ]
    if not drawn:
        return False
    contexts = sorted({context for context, *_ in drawn})
    drawn += [
        (context, "roofline", "black", found)
        for context, found in tpot_points(limits).items()
        if context in contexts
    ]
    canvas = figure(7, 5.5)
    axes = canvas.subplots()
    for context, label, color, found in drawn:
        marker = MARKERS[contexts.index(context) % len(MARKERS)]
        style = "--" if label == "roofline" else "-"
        axes.plot(
            *zip(*found, strict=True),
            linestyle=style,
            marker=marker,
            color=color,
            label=f"{label}, context {context}",
            markersize=5,
        )
    batches = sorted({batch for *_, found in drawn for batch, _ in found})
    axes.set_xscale("log", base=2)
    axes.set_xticks(batches, [str(batch) for batch in batches])
    axes.set_yscale("log")
    axes.set_xlabel("batch")
    axes.set_ylabel("time per output token, ms")
    axes.set_title(title, fontsize=10)
    axes.grid(alpha=0.3, which="both")
    canvas.legend(fontsize=7, loc="outside lower center", ncols=2)
    save(canvas, path)
    return True


def rate_bars(
    series: Sequence[tuple[str, Mapping[str, float]]],
    limits: Mapping[str, float],
    title: str,
    path: str | Path,
) -> bool:
    """Every ``tok_s`` row as a group of bars, one per file, with a tick at the roofline.

    Returns whether there was anything to draw.
    """
    names = list(dict.fromkeys(n for _, values in series for n in values if "tok_s" in n))
    if not names:
        return False
    canvas = figure(9, 1.2 + 0.35 * len(names) * max(1, len(series)))
    axes = canvas.subplots()
    height = 0.8 / len(series)
    for index, (label, values) in enumerate(series):
        at = [i + index * height for i, name in enumerate(names) if name in values]
        found = [values[name] for name in names if name in values]
        bars = axes.barh(at, found, height, label=label, color=COLORS[index % len(COLORS)])
        axes.bar_label(bars, fmt="{:,.0f}", padding=3, fontsize=7)
    for i, name in enumerate(names):
        if name in limits:
            x, low, high = limits[name], i - height / 2, i + 0.8 - height / 2
            axes.plot([x, x], [low, high], "k--", label=None if i else "roofline")
    axes.set_yticks([i + 0.4 - height / 2 for i in range(len(names))], names, fontsize=8)
    axes.invert_yaxis()
    axes.set_xlabel("tokens per second (each row's name says which tokens)")
    axes.set_title(title, fontsize=10)
    axes.margins(x=0.12)
    axes.legend(fontsize=7)
    save(canvas, path)
    return True


def step_time_bars(
    steps: Mapping[str, Mapping[str, tuple[float, float | None]]], title: str, path: str | Path
) -> bool:
    """The time of a step by kind of kernel, stacked, the same at the measured ceilings beside it.

    Args:
      steps: step (a batch and context) -> kind -> (ms, ms at the ceiling).

    Returns whether there was anything to draw.
    """
    if not steps:
        return False
    kinds = list(dict.fromkeys(kind for parts in steps.values() for kind in parts))
    canvas = figure(7, 4.5)
    axes = canvas.subplots()
    columns: list[tuple[str, list[float]]] = []
    for name, parts in steps.items():
        columns.append((name, [parts.get(kind, (0.0, None))[0] for kind in kinds]))
        columns.append((f"{name}\nlimit", [parts.get(kind, (0.0, None))[1] or 0 for kind in kinds]))
    bottom = [0.0] * len(columns)
    for index, kind in enumerate(kinds):
        heights = [values[index] for _, values in columns]
        color: Any = COLORS[index % len(COLORS)]
        axes.bar(range(len(columns)), heights, bottom=bottom, label=kind, color=color)
        bottom = [low + height for low, height in zip(bottom, heights, strict=True)]
    axes.set_xticks(range(len(columns)), [name for name, _ in columns], fontsize=7)
    axes.set_ylabel("ms per step, each kernel timed alone")
    axes.set_title(title, fontsize=10)
    axes.legend(fontsize=7)
    save(canvas, path)
    return True
