"""The notebooks run from top to bottom, and are committed with what they print and draw."""

from __future__ import annotations

from pathlib import Path

import nbclient
import nbformat
import pytest

from tests.demo_model import load_demo_model

ROOT = Path(__file__).parent.parent
PLOTS = {"generate": 1, "sharding": 4}
MOST_BYTES = 400_000  # of a file: plots, not photographs
TIMEOUT_S = 120


def shown(notebook: nbformat.NotebookNode) -> list[set[str]]:
    """Of each code cell, what kinds of output it has; what libraries log is not counted."""
    return [
        {
            kind
            for output in cell.outputs
            if output.get("name") != "stderr"
            for kind in output.get("data", {output.get("name", output.output_type): None})
        }
        for cell in notebook.cells
        if cell.cell_type == "code"
    ]


def test_every_notebook_is_tested() -> None:
    assert {path.stem for path in (ROOT / "notebooks").glob("*.ipynb")} == set(PLOTS)


@pytest.mark.parametrize(("name", "plots"), PLOTS.items(), ids=PLOTS)
def test_a_notebook_runs_and_shows_what_it_is_committed_with(name: str, plots: int) -> None:
    if name == "generate":
        load_demo_model()  # skips without it
    path = ROOT / "notebooks" / f"{name}.ipynb"
    assert path.stat().st_size < MOST_BYTES
    notebook = nbformat.read(path, as_version=4)
    committed = shown(notebook)
    assert all(cell.execution_count for cell in notebook.cells if cell.cell_type == "code")
    assert sum("image/png" in kinds for kinds in committed) == plots, "run `make notebooks`"
    assert not any("error" in kinds for kinds in committed)
    client = nbclient.NotebookClient(
        notebook, timeout=TIMEOUT_S, resources={"metadata": {"path": str(ROOT)}}
    )
    client.execute()  # raises what a cell raises
    assert shown(notebook) == committed
