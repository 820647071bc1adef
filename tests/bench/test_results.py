"""Records are checked, comparable, and honest about which direction is better."""

import json
from pathlib import Path
from typing import Any

import pytest

from jllm.bench import compare, report, results
from jllm.bench.__main__ import main
from jllm.bench.environment import environment
from jllm.bench.results import Result, Row
from jllm.bench.suite import line

BASELINE = Path(__file__).parents[2] / "benchmarks/baselines/vllm-0.24.0-h200.json"


def result(**rows: Row) -> Result:
    env = environment(["latency", "--config", "tiny"], "abc", device=False)
    return Result("latency", "qwen3-0.6b", "dummy", "bfloat16", env, rows=rows, finished=True)


def milliseconds(*runs: float, **more: Any) -> Row:
    return results.row(runs, "ms", "time per output token", **more)


def record(**rows: Row) -> Any:
    return json.loads(json.dumps(result(**rows).to_json()))


def test_a_record_survives_being_written_and_read(tmp_path: Path) -> None:
    written = result(tpot_ms_B1_ctx1024=milliseconds(2.0, 1.0, 3.0, roofline=0.5, detail={"a": 1}))
    path = tmp_path / "folder" / "result.json"
    written.write(path)
    assert results.read(path) == written
    assert not path.with_name("result.json.partial").exists()


def test_a_row_is_its_median_with_its_spread_and_its_share_of_the_limit() -> None:
    entry = record(tpot_ms_B1_ctx1024=milliseconds(2.0, 1.0, 3.0, roofline=0.5))["rows"]
    row = entry["tpot_ms_B1_ctx1024"]
    assert (row["value"], row["spread"], row["share"], row["better"]) == (2.0, 1.0, 0.25, "lower")
    rate = results.row([100.0], "tok/s", "output tokens per second", roofline=400.0)
    assert rate.share("nano_out_tok_s_t0.0") == 0.25


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        pytest.param(lambda r: r.pop("model"), "result.model is missing", id="missing"),
        pytest.param(lambda r: r.update(x=1), "has an unknown field 'x'", id="unknown"),
        pytest.param(lambda r: r.update(schema="other"), "result.schema must be", id="schema"),
        pytest.param(lambda r: r["environment"].pop("gpu"), "environment.gpu is missing", id="gpu"),
        pytest.param(
            lambda r: r["rows"]["tpot_ms_B1_ctx8"].update(value="2"), "value has type str", id="str"
        ),
        pytest.param(
            lambda r: r["rows"]["tpot_ms_B1_ctx8"].update(value=True), "has type bool", id="bool"
        ),
        pytest.param(
            lambda r: r["rows"]["tpot_ms_B1_ctx8"].update(better="higher"),
            "contradicts the row's name",
            id="direction",
        ),
        pytest.param(
            lambda r: r["rows"]["tpot_ms_B1_ctx8"].update(runs=[]), "runs is empty", id="runs"
        ),
    ],
)
def test_a_malformed_record_is_refused_by_the_fields_name(spoil: Any, why: str) -> None:
    spoiled = record(tpot_ms_B1_ctx8=milliseconds(2.0))
    results.check(spoiled)
    spoil(spoiled)
    with pytest.raises(ValueError, match=why):
        results.check(spoiled)


def test_a_record_says_what_ran_where() -> None:
    env = record()["environment"]
    assert env["command"] == "python -m jllm.bench latency --config tiny"
    assert env["jax"] and env["python"] and env["commit"]


def test_compiles_after_warm_up_are_summed_and_loud() -> None:
    bad = milliseconds(2.0, num_compiles=3, valid=False)
    assert record(tpot_ms_B1_ctx8=bad, tpot_ms_B2_ctx8=bad)["compiles_after_warm_up"] == 6
    assert line("tpot_ms_B1_ctx8", bad).startswith("*** INVALID ***")
    assert "compiles 3" in line("tpot_ms_B1_ctx8", bad)


def numbers(**values: float) -> compare.Numbers:
    return compare.Numbers("engine", "m", values, {})


def test_a_ratio_above_one_means_that_b_is_better_in_either_direction() -> None:
    a = numbers(tpot_ms_B1_ctx8=4.0, nano_out_tok_s=100.0, startup_s=10.0, only_a_ms=1.0)
    b = numbers(tpot_ms_B1_ctx8=2.0, nano_out_tok_s=200.0, startup_s=20.0, only_b_ms=1.0)
    found = {row.row: row.ratio for row in compare.ratios(a, b)}
    assert found == {"tpot_ms_B1_ctx8": 2.0, "nano_out_tok_s": 2.0, "startup_s": 0.5}
    text = compare.table(a, b)
    assert "Only in A: only_a_ms." in text and "Only in B: only_b_ms." in text
    assert "Geometric mean of 3 rows: 1.260." in text


def test_a_result_compares_with_the_baseline_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mine, plot = tmp_path / "mine.json", tmp_path / "ratios.png"
    result(tpot_ms_B1_ctx1024=milliseconds(3.3)).write(mine)
    assert main(["compare", str(BASELINE), str(mine), "--plot", str(plot)]) == 0
    assert "| tpot_ms_B1_ctx1024 | lower | 1.65 | 3.3 | 0.500 |" in capsys.readouterr().out
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert main(["compare", str(BASELINE), str(mine), "--fail-below", "0.9"]) == 1


def test_an_invalid_row_makes_a_comparison_fail(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mine = tmp_path / "mine.json"
    result(tpot_ms_B1_ctx1024=milliseconds(1.0, num_compiles=2, valid=False)).write(mine)
    assert main(["compare", str(BASELINE), str(mine)]) == 1
    assert "INVALID: 2 compiles while the clock ran" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("content", "why"),
    [
        pytest.param(None, "There is no result file at", id="absent"),
        pytest.param("{", "is not valid JSON", id="not-json"),
        pytest.param("[]", "neither a result of jllm.bench nor a baseline", id="other"),
        pytest.param('{"results": {"other": {"startup_s": 1}}}', "no model in common", id="model"),
    ],
)
def test_files_that_cannot_be_compared_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str | None, why: str
) -> None:
    path = tmp_path / "b.json"
    if content is not None:
        path.write_text(content)
    assert main(["compare", str(BASELINE), str(path)]) == 2
    assert why in capsys.readouterr().err


def test_a_report_holds_the_numbers_and_draws_the_roofline(tmp_path: Path) -> None:
    mine = tmp_path / "mine.json"
    made = result(
        tpot_ms_B1_ctx1024=milliseconds(3.3, roofline=0.3, step={"host_gap_ms": 0.25}),
        nano_out_tok_s_t0_0=results.row([1e4], "tok/s", "output tokens per second"),
    )
    made.hardware = results_hardware()
    made.skipped["tpot_ms_B64_ctx1024"] = "the time limit of 5 s had passed"
    made.write(mine)
    page = report.write([str(BASELINE), str(mine)], tmp_path / "report")
    text = page.read_text()
    assert "| tpot_ms_B1_ctx1024 | lower | 1.65 | 3.3 | 0.3 |" in text
    assert "llama" not in text  # no result of ours
    assert "skipped tpot_ms_B64_ctx1024: the time limit of 5 s had passed" in text
    assert "host gap per step, at most: 0.250 to 0.250 ms" in text
    for what in ("rates", "tpot"):
        assert f"(qwen3-0.6b-{what}.png)" in text
        assert (page.parent / f"qwen3-0.6b-{what}.png").is_file()


def results_hardware() -> dict[str, Any]:
    from jllm.roofline import HARDWARE

    return HARDWARE["h200"].to_json()


def test_the_time_of_a_step_is_stacked_by_kind_of_kernel() -> None:
    kernels = result(
        kernel_us_qkv_M1=results.row(
            [10.0], "us", "", roofline=5.0, detail={"kind": "gemm", "step": "B1", "per_step": 28}
        ),
        kernel_us_o_M1=results.row(
            [5.0], "us", "", roofline=5.0, detail={"kind": "gemm", "step": "B1", "per_step": 28}
        ),
        kernel_us_qkv_M512=results.row(
            [99.0], "us", "", detail={"kind": "gemm", "step": None, "per_step": 28}
        ),
    )
    kernels.benchmark = "kernels"
    steps = report.steps_by_kind([kernels])
    assert steps == {"B1": {"gemm": (pytest.approx(0.42), pytest.approx(0.28))}}
