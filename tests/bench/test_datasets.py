"""The generators draw known lengths: the same workload on every machine."""

import json
from pathlib import Path

import pytest

from jllm.bench import datasets
from jllm.bench.datasets import Workload


def lengths(workload: Workload) -> list[tuple[int, int]]:
    return [(len(request.prompt), request.output_len) for request in workload.requests]


def test_the_original_nano_protocol_has_its_known_totals() -> None:
    found = lengths(datasets.nano_original(vocab_size=151_936))
    assert len(found) == 256
    assert sum(out for _, out in found) == 133_966  # nano-vllm's README
    assert sum(prompt for prompt, _ in found) == 142_827


def test_the_baseline_files_nano_protocol_draws_all_lengths_first() -> None:
    workload = datasets.nano_lengths_first(vocab_size=151_936)
    found = lengths(workload)
    assert found[:3] == [(964, 304), (494, 366), (876, 467)]
    assert (sum(p for p, _ in found), sum(out for _, out in found)) == (144_831, 144_160)
    assert "lengths first" in workload.what


def test_the_same_seed_draws_the_same_ids_and_another_seed_others() -> None:
    make = datasets.random_workload
    one, same = make(3, 5, 7, vocab_size=100), make(3, 5, 7, vocab_size=100)
    other = make(3, 5, 7, vocab_size=100, seed=1)
    assert one == same
    assert one.requests != other.requests
    assert lengths(one) == [(5, 7)] * 3


@pytest.mark.parametrize("vocab_size", [17, 512])
def test_every_generator_stays_inside_a_small_vocabulary(vocab_size: int) -> None:
    workloads = [
        datasets.random_workload(4, 30, 1, vocab_size=vocab_size),
        datasets.nano_original(2, vocab_size=vocab_size),
        datasets.nano_lengths_first(2, vocab_size=vocab_size),
        datasets.shared_prefix(2, 20, 10, 1, vocab_size=vocab_size),
    ]
    for workload in workloads:
        assert all(0 <= int(t) < vocab_size for r in workload.requests for t in r.prompt)


@pytest.mark.parametrize(
    ("convention", "ratio", "low", "high"),
    [
        pytest.param("vllm", 0.0, 100, 100, id="vllm-0-is-fixed"),
        pytest.param("vllm", 0.5, 50, 150, id="vllm-both-sides"),
        pytest.param("sglang", 0.0, 1, 100, id="sglang-0-starts-at-one"),
        pytest.param("sglang", 0.8, 80, 100, id="inferencemax"),
        pytest.param("sglang", 1.0, 100, 100, id="sglang-1-is-fixed"),
    ],
)
def test_a_range_ratio_means_what_its_convention_says(
    convention: datasets.Convention, ratio: float, low: int, high: int
) -> None:
    workload = datasets.random_workload(
        2000, 100, 100, vocab_size=50, range_ratio=ratio, convention=convention
    )
    for values in zip(*lengths(workload), strict=True):
        assert (min(values), max(values)) == (low, high)
    assert convention in workload.what


@pytest.mark.parametrize(("convention", "ratio"), [("vllm", 1.0), ("vllm", -0.1), ("sglang", 1.1)])
def test_a_senseless_range_ratio_is_refused(convention: datasets.Convention, ratio: float) -> None:
    with pytest.raises(ValueError, match=f"range_ratio of the {convention} convention"):
        datasets.random_workload(1, 8, 8, vocab_size=9, range_ratio=ratio, convention=convention)


def test_shared_prefix_prompts_share_just_the_prefix() -> None:
    workload = datasets.shared_prefix(4, 50, 10, 3, vocab_size=10_000)
    prompts = [list(request.prompt) for request in workload.requests]
    assert lengths(workload) == [(60, 3)] * 4
    assert all(prompt[:50] == workload.prefix for prompt in prompts)
    assert len({tuple(prompt[50:]) for prompt in prompts}) == 4


def test_sharegpt_keeps_conversations_that_fit(tmp_path: Path) -> None:
    turns = [("four words are here", "an answer of five words"), ("too short", "an answer of it")]
    turns += [("w " * 1025, "an answer of five words"), ("four words are here", "short")]
    data = [
        {"conversations": [{"from": "human", "value": q}, {"from": "gpt", "value": a}]}
        for q, a in turns
    ]
    path = tmp_path / "sharegpt.json"
    path.write_text(json.dumps([*data, {"conversations": [{"value": "alone"}]}]))

    def encode(text: str) -> list[int]:
        return [1] * len(text.split())

    assert lengths(datasets.sharegpt(path, 1, encode)) == [(4, 5)]
    with pytest.raises(ValueError, match="has 1 usable conversations, fewer than 2"):
        datasets.sharegpt(path, 2, encode)


def test_jsonl_takes_texts_and_ids_and_their_output_lengths(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": [1, 2, 3], "output_len": 9}\n\n{"prompt": "two words"}\n')
    workload = datasets.jsonl(path, None, str.split, output_len=5)  # type: ignore[arg-type]
    assert lengths(workload) == [(3, 9), (2, 5)]
    assert datasets.jsonl(path, 2, None, output_len=5).requests[1].prompt == "two words"


@pytest.mark.parametrize(
    ("line", "why"),
    [
        pytest.param("{", "line 1: not valid JSON", id="json"),
        pytest.param("[1]", 'line 1: "prompt" must be', id="not-an-object"),
        pytest.param('{"prompt": []}', 'line 1: "prompt" must be', id="empty"),
        pytest.param('{"prompt": [1], "output_len": 0}', "must be a positive integer", id="none"),
        pytest.param("", "has 0 requests, but 1 are wanted", id="no-line"),
    ],
)
def test_a_malformed_jsonl_line_is_named(tmp_path: Path, line: str, why: str) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text(line + "\n")
    with pytest.raises(ValueError, match=why):
        datasets.jsonl(path, None, None, output_len=5)
