"""The command line over several devices."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest

from jllm.cli import main
from tests.demo_model import load_demo_model

README = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")


def test_the_command_of_the_readme_says_what_one_device_says(
    capsys: pytest.CaptureFixture[str],
) -> None:
    load_demo_model()  # skips without it
    section = README.partition("## Several GPUs")[2].partition("\n## ")[0]
    command = re.search(r"jllm (generate .*? --tensor-parallel 3[^`]*)", section, re.DOTALL)
    assert command is not None
    arguments = [*shlex.split(command[1].replace("\\\n", " ")), "--max-tokens=12"]
    main(arguments)
    several = capsys.readouterr().out
    main([argument for argument in arguments if argument not in ("--tensor-parallel", "3")])
    assert several == capsys.readouterr().out != ""


@pytest.mark.parametrize(
    ("tp", "message"),
    [("2", "tp=2 must divide num_heads, 9."), ("9000", "tp must be between 1 and")],
)
def test_what_cannot_be_split_is_one_sentence(
    tp: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    load_demo_model()
    with pytest.raises(SystemExit, match="2"):
        main(["generate", "--model=smollm2-135m-instruct", "--prompt=x", "--tensor-parallel", tp])
    assert message in capsys.readouterr().err


def test_bench_measures_several_devices_beside_their_roofline(tmp_path: Path) -> None:
    records = []
    for tp in ("1", "2"):
        out = tmp_path / f"{tp}.json"
        words = ["bench", "latency", "--config=tiny", "--rows=prefill_s_B2x16", "--hardware=h200"]
        with pytest.raises(SystemExit, match="0"):
            main([*words, "--tp", tp, "--max-model-len=64", "--out", str(out)])
        records.append(json.loads(out.read_text()))
    one, two = records
    assert (one["settings"]["tp"], two["settings"]["tp"]) == (1, 2)
    assert two["hardware"]["name"] == "2 x h200"
    (row, slow), (_, fast) = next(iter(two["rows"].items())), next(iter(one["rows"].items()))
    assert slow["valid"] and slow["roofline"] == pytest.approx(fast["roofline"] / 2), row
