"""Row names are the contract with the baseline file."""

import json
from pathlib import Path

import pytest

from jllm.bench.datasets import Source
from jllm.bench.results import direction
from jllm.bench.rows import SUITES, LatencyRow, ThroughputRow, parse

BASELINE = Path(__file__).parents[2] / "benchmarks/baselines/vllm-0.24.0-h200.json"
RESULTS = json.loads(BASELINE.read_text())["results"]
NAMES = list(dict.fromkeys(name for rows in RESULTS.values() for name in rows))
# Measured by the startup subcommand; and a row of which the file does not say the temperature.
ELSEWHERE = {"startup_s", "nano_out_tok_s"}


def test_every_row_of_the_baseline_file_is_in_the_h200_suite() -> None:
    suite = {name for names in SUITES["h200"].values() for name in names}
    assert set(NAMES) - ELSEWHERE == suite


@pytest.mark.parametrize("suite", list(SUITES))
def test_every_name_of_a_suite_means_something(suite: str) -> None:
    for benchmark, kind in (("latency", LatencyRow), ("throughput", ThroughputRow)):
        for name in SUITES[suite][benchmark]:
            assert isinstance(parse(name), kind)
            assert parse(name).name == name


@pytest.mark.parametrize("name", NAMES)
def test_every_row_of_the_baseline_file_has_a_direction(name: str) -> None:
    assert direction(name) == ("higher" if "tok_s" in name else "lower")


def test_a_name_without_a_unit_has_no_direction() -> None:
    with pytest.raises(ValueError, match="has no unit in its name"):
        direction("nano_t0.0")


def test_latency_names_carry_their_sizes() -> None:
    row = parse("tpot_ms_B64_ctx1024_topk50_topp095")
    assert isinstance(row, LatencyRow)
    assert (row.batch, row.context, row.new_tokens, row.max_model_len) == (64, 1024, 129, 9216)
    assert (row.sampling.temperature, row.sampling.top_k, row.sampling.top_p) == (1.0, 50, 0.95)
    short = parse("tpot_ms_B1_ctx32")
    assert isinstance(short, LatencyRow) and short.new_tokens == 257
    assert parse("tpot_ms_B64_ctx8192").max_model_len == 40_000
    assert parse("prefill_tok_s_8x8192").max_model_len == 9216


def workload(name: str) -> tuple[ThroughputRow, list[tuple[int, int]]]:
    row = parse(name)
    assert isinstance(row, ThroughputRow)
    made = row.make(Source(151_936))
    return row, [(len(request.prompt), request.output_len) for request in made.requests]


def test_throughput_names_carry_their_workloads() -> None:
    row, lengths = workload("tp_1024_128_total_tok_s")
    assert row.total and lengths == [(1024, 128)] * 1000
    row, lengths = workload("512x1024_1024_out_tok_s")
    assert not row.total and lengths == [(1024, 1024)] * 512
    row, lengths = workload("shared2048_512x128_128_out_tok_s")
    assert row.share_prefixes and lengths == [(2048 + 128, 128)] * 512
    row, lengths = workload("rollout_64x8_512_512_logprobs_out_tok_s")
    assert lengths == [(512, 512)] * 64
    assert (row.sampling.n, row.sampling.logprobs, row.sampling.temperature) == (8, 0, 1.0)


def test_the_two_nano_protocols_are_two_rows() -> None:
    _, baseline = workload("nano_out_tok_s_t0.6")
    row, original = workload("nano_original_out_tok_s_t0.6")
    assert row.sampling.temperature == 0.6
    assert sum(out for _, out in baseline) == 144_160
    assert sum(out for _, out in original) == 133_966


def test_an_unknown_row_is_refused_with_the_patterns() -> None:
    with pytest.raises(ValueError, match=r"Unknown row 'tpot_B1'.*tpot_ms_B\{batch\}_ctx"):
        parse("tpot_B1")
