"""What the README shows of clients runs as it is printed, but for the server's address."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

README = Path(__file__).parents[2] / "README.md"


def test_the_clients_of_the_readme_get_answers(
    server: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (block,) = re.findall(r"```py\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    assert "http://127.0.0.1:8000" in block
    exec(compile(block.replace("http://127.0.0.1:8000", server), "README.md", "exec"), {})
    assert capsys.readouterr().out.count("Paris") == 3
