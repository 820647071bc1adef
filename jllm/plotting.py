"""What every plot shares: colours, and figures that need no display."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLORS = ("#1f6fb2", "#d1662b", "#4a9a5b", "#8a5fb0", "#b8a02f", "#777777", "#c2507a", "#3aa7a7")
MARKERS = "os^Dvx*P"


def figure(width: float, height: float) -> Figure:
    """An empty figure of this size in inches.

    Raises ValueError if matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure as Canvas  # no pyplot: no display, no global state
    except ImportError as error:
        raise ValueError("Plots need matplotlib: pip install 'jllm[bench]'.") from error
    return Canvas(figsize=(width, height), layout="constrained")


def save(figure: Figure, path: str | Path) -> None:
    """Writes a figure as PNG (or what the path's ending says), in a folder made if need be."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
