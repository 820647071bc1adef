"""Explanations as plots."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from jllm.config import ModelConfig
from jllm.parallel.inspect.explanation import Layout
from jllm.parallel.inspect.holders import parts
from jllm.plotting import COLORS, figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def holders(config: ModelConfig, tp: int) -> Figure:
    """Which device holds which slice of which weight: a bar for each weight, cut where devices
    part, in each device's colour. Copies lie one above the other.

    Raises ValueError if the model cannot be split over so many devices.
    """
    found = parts(config, tp)
    canvas = figure(8, 1 + 0.5 * len(found))
    axes = canvas.subplots()
    for row, part in enumerate(found):
        for device, (start, stop) in enumerate(part.held):
            if start == stop:  # more devices than there are ids
                continue
            sharers = [other for other, held in enumerate(part.held) if held == (start, stop)]
            height = 0.8 / len(sharers)
            middle = row - 0.4 + height * (sharers.index(device) + 0.5)
            left, width = start / part.size, (stop - start) / part.size
            axes.barh(
                middle,
                width,
                height,
                left=left,
                color=COLORS[device % len(COLORS)],
                edgecolor="white",
                linewidth=0.5,
                label=None if row else f"device {device}",
            )
            text = f"{start}:{stop}"
            if len(sharers) <= 2 and 0.0065 * len(text) < width:  # else it would not fit
                centre = (left + width / 2, middle)
                axes.annotate(text, centre, ha="center", va="center", fontsize=5, color="white")
    axes.set_yticks(
        range(len(found)), [f"{p.name}\n{p.size:,} {p.unit}" for p in found], fontsize=7
    )
    axes.invert_yaxis()
    axes.set_xticks([])
    axes.set_xlim(0, 1)
    axes.set_title(f"Who holds what, of {tp} devices", fontsize=10)
    canvas.legend(fontsize=7, loc="outside lower center", ncols=min(tp, 8))
    return canvas


def comparison(layouts: Sequence[Layout]) -> Figure:
    """Layouts side by side: the memory of each device, and the time of a step of each kind.

    Raises ValueError if none of them can be.
    """
    found = [layout.explanation for layout in layouts if layout.explanation]
    if not found:
        raise ValueError("There is nothing to plot: no layout fits.")
    canvas = figure(10, 3.6)
    memory, decode, prefill = canvas.subplots(1, 3)
    names = [f"tp={e.tp}" for e in found]
    _stacked(
        memory,
        names,
        {
            "weights": [e.memory.weights / 1e9 for e in found],
            "KV cache": [e.memory.kv / 1e9 for e in found],
            "temporaries": [e.memory.slack / 1e9 for e in found],
        },
        "GB on each device",
    )
    total = found[0].memory.total / 1e9
    memory.axhline(total, color="black", linestyle="--", linewidth=1)
    memory.annotate(f"{found[0].gpu.name}: {total:.0f} GB", (-0.4, total * 1.01), fontsize=7)
    for axes, steps, kind in (
        (decode, [e.decode for e in found], "decode"),
        (prefill, [e.prefill for e in found], "prefill"),
    ):
        _stacked(
            axes,
            names,
            {
                "products": [1e3 * step.time.matmuls for step in steps],
                "attention": [1e3 * step.time.attention for step in steps],
                found[0].gpu.link: [1e3 * step.time.link for step in steps],
            },
            f"ms of a {kind} step, at least",
        )
    return canvas


def _stacked(axes: Axes, names: list[str], series: dict[str, list[float]], title: str) -> None:
    bottom = [0.0] * len(names)
    for index, (label, values) in enumerate(series.items()):
        axes.bar(names, values, bottom=bottom, label=label, color=COLORS[index])
        bottom = [low + value for low, value in zip(bottom, values, strict=True)]
    axes.set_title(title, fontsize=9)
    axes.tick_params(labelsize=8)
    axes.margins(y=0.3)
    axes.legend(fontsize=7, loc="upper right")
