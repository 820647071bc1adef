"""lm-eval's ``local-completions`` scores texts as Hugging Face transformers does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from lm_eval import simple_evaluate
from lm_eval.tasks import TaskManager

from tests.clients.conftest import MODEL

HERE = Path(__file__).parent
SCORES = json.loads((HERE.parent / "goldens" / "scores.json").read_text())


@pytest.fixture(scope="module")
def results(server: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Of both tasks; the texts become tokens at the server."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_DATASETS_CACHE", str(tmp_path_factory.mktemp("datasets")))
        results = simple_evaluate(
            model="local-completions",
            model_args=dict(
                model=MODEL, base_url=server + "/v1/completions", tokenizer_backend="remote",
                num_concurrent=4, max_length=512,
            ),
            tasks=["jllm_choice", "jllm_passages"],
            task_manager=TaskManager(include_path=str(HERE), include_defaults=False),
            bootstrap_iters=0,
            log_samples=True,
        )  # fmt: skip
    assert results is not None
    return results


def test_choices_score_as_with_transformers(results: dict[str, Any]) -> None:
    samples = sorted(results["samples"]["jllm_choice"], key=lambda sample: sample["doc_id"])
    for sample, expected in zip(samples, SCORES["choices"], strict=True):
        scores = [float(response[0]) for response in sample["filtered_resps"]]
        assert scores == pytest.approx(expected, abs=1e-3)
        likeliest = expected.index(max(expected))
        assert sample["acc"] == (likeliest == sample["doc"]["answer"])


def test_whole_texts_score_as_with_transformers(results: dict[str, Any]) -> None:
    samples = sorted(results["samples"]["jllm_passages"], key=lambda sample: sample["doc_id"])
    scores = [float(sample["filtered_resps"][0]) for sample in samples]
    assert scores == pytest.approx(SCORES["passages"], abs=1e-3)
