"""Every subcommand runs on a CPU and gives a record that passes the check."""

import json
import time
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

import jllm
from jllm.bench import results, suite
from jllm.bench.__main__ import main
from jllm.bench.datasets import Request
from jllm.bench.results import Result
from jllm.bench.rows import SUITES
from jllm.bench.runs import Sampling, StepParts, TimeLimitReached, run, step_times
from jllm.bench.startup import padding
from tests.tiny_model import random_prompts, tiny_model

ENGINE = ["--decode-buckets=8", "--prefill-buckets=16", "--max-num-seqs=8", "--max-model-len=192"]
TINY = ["--config=tiny", *ENGINE, "--repeats=2", "--quiet"]


def measured(arguments: list[str], out: Path, code: int = 0) -> Result:
    assert main([*arguments, "--out", str(out)]) == code
    return results.read(out)


@pytest.fixture(scope="module")
def latency(tmp_path_factory: pytest.TempPathFactory) -> Result:
    out = tmp_path_factory.mktemp("latency") / "latency.json"
    return measured(["latency", *TINY, "--suite=tiny", "--hardware=h200"], out)


@pytest.fixture(scope="module")
def throughput(tmp_path_factory: pytest.TempPathFactory) -> Result:
    out = tmp_path_factory.mktemp("throughput") / "throughput.json"
    return measured(["throughput", *TINY, "--suite=tiny", "--hardware=h200"], out)


def test_latency_measures_every_row_and_compiles_nothing_meanwhile(latency: Result) -> None:
    assert list(latency.rows) == list(SUITES["tiny"]["latency"])
    assert latency.finished and not latency.skipped
    for row in latency.rows.values():
        assert row.valid and row.num_compiles == 0 and row.value > 0 and len(row.runs) == 2
        assert row.roofline and row.step and 0 < row.step["host_gap_ms"] <= row.step["step_ms"]
    assert latency.environment["backend"] == "cpu"
    assert latency.settings["engines"][0]["config"]["decode_buckets"] == [8]


def test_time_per_output_token_is_the_difference_of_two_runs(latency: Result) -> None:
    row = latency.rows["tpot_ms_B2_ctx16"]
    long, short = row.detail["seconds_with_new_tokens"], row.detail["seconds_with_1"]
    assert row.detail["new_tokens"] == 129
    # Medians of two runs each, so the mean of the two differences is just this.
    assert row.value == pytest.approx((long - short) / 128 * 1e3)
    assert row.detail["ttft_ms"]["median"] <= short * 1e3 * 1.5
    # The prefill row shares its runs.
    assert latency.rows["prefill_s_B2x16"].value == pytest.approx(short)


def test_throughput_measures_every_row_and_labels_its_rates(throughput: Result) -> None:
    assert list(throughput.rows) == list(SUITES["tiny"]["throughput"])
    for row in throughput.rows.values():
        assert row.valid and row.num_compiles == 0 and row.roofline
    out, total = (throughput.rows[f"6x16_8_{which}_tok_s"] for which in ("out", "total"))
    assert out.what == "output tokens per second"
    assert total.what == "input and output tokens per second"
    assert out.detail["in_and_out_tok_s"] == pytest.approx(3 * out.detail["out_tok_s"], rel=0.5)
    assert (out.detail["prompt_tokens"], out.detail["output_tokens"]) == (96, 48)
    rollout = throughput.rows["rollout_2x3_8_4_logprobs_out_tok_s"]
    assert (rollout.detail["n"], rollout.detail["output_tokens"]) == (3, 24)
    shared = throughput.rows["shared32_4x8_4_out_tok_s"]
    assert shared.detail["prefix_hit_tokens"] == 4 * 32  # the prefix was cached beforehand
    assert out.detail["prefix_hit_tokens"] == 0


def test_one_process_measures_rows_of_both_kinds_and_prints_the_record(
    capsys: pytest.CaptureFixture[str],
) -> None:
    names = "prefill_s_B1x8,2x8_4_out_tok_s"
    assert main(["throughput", *TINY, "--repeats=1", "--rows", names]) == 0
    record = json.loads(capsys.readouterr().out)
    results.check(record)
    assert list(record["rows"]) == names.split(",")
    assert record["rows"]["2x8_4_out_tok_s"]["roofline"] is None  # a CPU's limit is not known


@pytest.mark.parametrize(
    ("options", "name", "tokens"),
    [
        pytest.param(
            ["--dataset=random", "--range-ratio=0.5", "--convention=sglang"],
            "random_3_10_5_out_tok_s_t0.0",
            None,
            id="random",
        ),
        pytest.param(
            ["--dataset=rollout", "--n=2"], "rollout_3_10_5_out_tok_s_t1.0", 30, id="rollout"
        ),
        pytest.param(
            ["--dataset=shared-prefix", "--prefix-len=20", "--temperature=0.5", "--top-k=5"],
            "shared_prefix_3_10_5_out_tok_s_t0.5",
            15,
            id="shared-prefix",
        ),
    ],
)
def test_a_workload_can_be_described_by_options(
    options: list[str], name: str, tokens: int | None, tmp_path: Path
) -> None:
    sizes = ["--num-prompts=3", "--input-len=10", "--output-len=5", "--repeats=1", "--warm-up=run"]
    found = measured(["throughput", *TINY, *options, *sizes], tmp_path / "out.json")
    assert list(found.rows) == [name]
    assert found.rows[name].detail["warm_up_runs"] >= 1
    assert tokens is None or found.rows[name].detail["output_tokens"] == tokens


def test_rows_past_the_time_limit_are_listed_as_skipped(tmp_path: Path) -> None:
    limited = ["latency", *TINY, "--suite=tiny", "--time-limit-s=0"]
    found = measured(limited, tmp_path / "out.json", code=1)
    assert not found.rows
    assert list(found.skipped) == list(SUITES["tiny"]["latency"])
    assert "the time limit of 0 s had passed" in found.skipped["tpot_ms_B2_ctx16"]


def test_a_row_that_does_not_fit_is_skipped_and_the_others_are_measured(tmp_path: Path) -> None:
    names = "prefill_s_B9x8,prefill_s_B1x500,prefill_s_B1x8"
    found = measured(["latency", *TINY, "--rows", names], tmp_path / "out.json")
    assert list(found.rows) == ["prefill_s_B1x8"]
    assert "needs 9 rows at once, but max_num_seqs is 8" in found.skipped["prefill_s_B9x8"]
    assert "needs 501 tokens, but max_model_len is 192" in found.skipped["prefill_s_B1x500"]


def test_a_failing_device_loses_one_row_and_is_not_a_success(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    healthy = suite.throughput.measure

    def measure(session: Any, row: Any) -> Any:
        if row.name == "2x8_4_out_tok_s":
            raise RuntimeError("RESOURCE_EXHAUSTED: out of memory\nand so on")
        return healthy(session, row)

    monkeypatch.setattr(suite.throughput, "measure", measure)
    names = "2x8_4_out_tok_s,2x8_3_out_tok_s"
    found = measured(["throughput", *TINY, "--rows", names], tmp_path / "out.json", code=1)
    assert list(found.rows) == ["2x8_3_out_tok_s"]
    assert found.skipped == {"2x8_4_out_tok_s": "failed: RESOURCE_EXHAUSTED: out of memory"}


@pytest.fixture(scope="module")
def engine() -> jllm.Engine:
    config = jllm.EngineConfig(  # as ENGINE, so that programs are compiled once
        max_num_seqs=8, max_model_len=192, decode_buckets=(8,), prefill_buckets=(16,)
    )
    return jllm.Engine(tiny_model(), config)


def requests(count: int, tokens: int) -> list[Request]:
    return [Request(prompt, tokens) for prompt in random_prompts([9] * count)]


def test_a_run_counts_what_it_was_asked_for(engine: jllm.Engine) -> None:
    done = run(engine, requests(3, 5), Sampling(temperature=1.0, n=2))
    assert (done.prompt_tokens, done.output_tokens) == (27, 30)
    assert len(done.latencies) == 3 and max(done.latencies) <= done.seconds
    assert done.steps >= 5 and done.step["step_ms"] == pytest.approx(
        done.seconds / done.steps * 1e3
    )
    again = run(engine, requests(3, 5), Sampling(temperature=1.0, n=2))
    assert again.num_compiles == 0


def test_a_run_past_its_deadline_leaves_the_engine_empty(engine: jllm.Engine) -> None:
    with pytest.raises(TimeLimitReached):
        run(engine, requests(4, 50), Sampling(), deadline=time.monotonic())
    assert not engine.has_unfinished() and engine.stats().kv_usage == 0
    assert run(engine, requests(2, 3), Sampling()).output_tokens == 6


def test_a_short_output_is_an_error_and_not_a_fast_run(engine: jllm.Engine) -> None:
    class Hasty(Sampling):
        def params(self, max_tokens: int, **options: Any) -> jllm.SamplingParams:
            return super().params(max_tokens - 1, **options)

    with pytest.raises(RuntimeError, match=r"has \[4\] tokens, but 1 samples of 5 were asked for"):
        run(engine, requests(1, 5), Hasty())


def test_the_host_gap_is_what_the_host_did_not_wait() -> None:
    assert step_times(2.0, 0, StepParts(0, 0, 0)) == {}
    times = step_times(2.0, 1000, StepParts(plan=0.1, dispatch=0.3, wait=1.5))
    assert (times["step_ms"], times["plan_ms"]) == pytest.approx((2.0, 0.1))
    assert times["host_gap_ms"] == pytest.approx(0.5)


def test_kernels_are_checked_and_timed(tmp_path: Path) -> None:
    small = ["--ceiling-mib=4", "--ceiling-width=128", "--rotate-mib=0", "--quiet"]
    sizes = ["--batch-sizes=3", "--contexts=40", "--chunks=20"]
    ops = ["--ops", "attention|(add_norm|qkv|gate_up)_M3|head|sample_(greedy|topk)"]
    found = measured(
        ["kernels", "--config=tiny", *sizes, *small, *ops, "--hardware=h200"], tmp_path / "k.json"
    )
    names = {name.removeprefix("kernel_us_") for name in found.rows}
    assert names >= {
        "ceiling_read_tb_s",
        "ceiling_copy_tb_s",
        "ceiling_matmul_tflop_s",
        "attention_decode_B3_ctx40",
        "attention_prefill_T20",
        "attention_mixed_B3_ctx40_T20",
        "add_norm_M3",
        "enter_qkv_M3",
        "gate_up_M3",
        "sample_topk50_topp095_B3",
    }
    for name, row in found.rows.items():
        assert row.valid and row.value > 0, name
        if name.startswith("kernel_"):
            assert row.roofline and row.detail["relative_error"] < 1e-5, name


def test_startup_is_measured_cold_and_warm(tmp_path: Path) -> None:
    sizes = ["--decode-buckets=2", "--prefill-buckets=16", "--max-num-seqs=2", "--max-model-len=32"]
    found = measured(["startup", "--config=tiny", *sizes], tmp_path / "s.json")
    assert found.dtype == "float32"
    for infix in ("", "_warm"):
        parts = [found.rows[f"startup{infix}_{p}_s"].value for p in ("weights", "buckets")]
        assert found.rows[f"startup{infix}_s"].value > sum(parts)
        assert found.rows[f"startup{infix}_peak_host_gib"].value > 0.05
        # A decode step of 2 rows, mixed ones of 16 and 18 tokens; the sampler and what enters rows.
        detail = found.rows[f"startup{infix}_s"].detail
        assert detail["buckets"] == 3 <= detail["programs"]
    cold, warm = (found.settings["starts"][kind] for kind in ("cold", "warm"))
    assert cold["compiles_after_warm_up"] == warm["compiles_after_warm_up"] == 0
    assert found.rows["startup_warm_buckets_s"].value < found.rows["startup_buckets_s"].value


def test_padding_is_counted_per_bucket() -> None:
    # Bucket 4 holds 2, 3 or 4 after a bucket of 1: 3 on average.
    assert padding((1, 4), (32,))["decode"] == {"1": 0.0, "4": 0.25}


def test_jllm_bench_is_the_same_command(capsys: pytest.CaptureFixture[str]) -> None:
    from jllm.cli import main as jllm_main

    with pytest.raises(SystemExit) as exit:
        jllm_main(["bench", "--help"])
    assert exit.value.code == 0 and "throughput" in capsys.readouterr().out
    with pytest.raises(SystemExit) as exit:
        jllm_main(["bench", "latency", "--config", "tiny", "--rows", "nonsense"])
    assert exit.value.code == 2 and "Unknown row 'nonsense'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        pytest.param(["--config=huge"], "'huge' is neither a preset", id="config"),
        pytest.param(["--config=tiny", "--dataset=jsonl"], "needs --dataset-path", id="path"),
        pytest.param(
            ["--config=tiny", "--dataset=nano", "--range-ratio=0.1"],
            "--range-ratio is for --dataset random",
            id="ratio",
        ),
    ],
)
def test_a_mistake_is_one_sentence(
    arguments: list[str], why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["throughput", *arguments]) == 2
    assert why in capsys.readouterr().err


def test_a_config_json_is_a_model_of_random_weights() -> None:
    from jllm.bench.models import config_of

    folder = Path(__file__).parents[1] / "goldens/tiny/qwen3"
    for source in (folder, folder / "config.json"):
        name, config = config_of(Namespace(config=str(source), model=None))
        assert (name, config.family) == ("qwen3", "qwen3")
