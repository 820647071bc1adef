"""The README's Python runs as it is printed, from the first block to the last."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.demo_model import load_demo_model

README = (Path(__file__).parent.parent / "README.md").read_text(encoding="utf-8")


def test_the_python_of_the_readme_runs(capsys: pytest.CaptureFixture[str]) -> None:
    load_demo_model()  # skips without it
    blocks = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert len(blocks) >= 4
    names: dict[str, object] = {}
    for block in blocks:
        exec(compile(block, "README.md", "exec"), names)
    assert "Paris" in capsys.readouterr().out
    names["jllm"].release()  # type: ignore[attr-defined]


def test_no_placeholder_is_left() -> None:
    assert not re.findall(r"\b(RATIO|HOSTMS|TODO|TBD|XXX)\b", README)
