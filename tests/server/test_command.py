"""``jllm serve`` as a process, and its flags."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest

import jllm
from jllm.cli import main
from jllm.server import arguments
from tests.server.clients import COMPLETIONS, chunks_of
from tests.server.conftest import wait_until
from tests.weights.checkpoints import hf_config, hf_tensors, write_folder

SMALL = ["--no-warm-up", "--max-num-seqs", "2", "--num-kv-blocks", "16", "--prefill-buckets", "32"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that says what tokens to draw from: the likeliest alone."""
    config = hf_config()
    made = write_folder(tmp_path_factory.mktemp("models") / "tiny", config, hf_tensors(config))
    recommended = {"temperature": 1.5, "top_k": 1, "max_new_tokens": 3, "repetition_penalty": 9.0}
    (made / "generation_config.json").write_text(json.dumps(recommended))
    return made


@contextmanager
def serving(*options: str, **environment: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """The process and its URL, once it is healthy."""
    process = subprocess.Popen(
        [sys.executable, "-m", "jllm", "serve", "--port", "0", *options],
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **environment},
    )
    try:
        assert process.stderr is not None
        log = ""
        while not (found := re.search(r"http://[\d.:]+", log)):
            line = process.stderr.readline()
            assert line, f"it ended: {log}"
            log += line
        wait_until(lambda: httpx2.get(found[0] + "/health").status_code == 200)
        yield process, found[0]
    finally:
        process.kill()
        process.wait(10)


def tokens(url: str, **body: Any) -> list[int]:
    body = {
        "prompt": [5, 6],
        "max_tokens": 12,
        "return_token_ids": True,
        "ignore_eos": True,
        **body,
    }
    answer = httpx2.post(url + COMPLETIONS, json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    ids: list[int] = answer.json()["choices"][0]["token_ids"]
    return ids


def test_it_serves_until_it_is_told_to_stop_and_lets_requests_end(folder: Path) -> None:
    with serving("--model", str(folder), *SMALL) as (process, url):
        model = httpx2.get(url + "/v1/models").json()["data"][0]
        assert model["id"] == model["root"] == str(folder) and model["max_model_len"] == 64
        # generation_config.json says top_k 1, so every draw is the greedy one, whatever the seed.
        greedy = tokens(url, temperature=0)
        assert tokens(url, seed=1) == tokens(url, seed=2) == greedy and len(greedy) == 12
        assert len({str(tokens(url, seed=seed, top_k=0)) for seed in range(4)}) > 1
        body = {"prompt": [5], "max_tokens": 60, "stream": True, "ignore_eos": True}
        with httpx2.stream("POST", url + COMPLETIONS, json=body, timeout=60) as answer:
            process.send_signal(signal.SIGTERM)
            chunks = chunks_of(answer.read())
        assert chunks[-1]["choices"][0]["finish_reason"] == "length"
        assert process.wait(20) == -signal.SIGTERM


def test_its_options_are_heard(folder: Path) -> None:
    options = ["--generation-config", "none", "--served-model-name", "a", "b", "--max-n", "2"]
    with serving("--model", str(folder), *SMALL, *options, JLLM_API_KEY="secret") as (_, url):
        assert httpx2.get(url + "/v1/models").status_code == 401
        headers = {"Authorization": "Bearer secret"}
        listed = httpx2.get(url + "/v1/models", headers=headers).json()["data"]
        assert [model["id"] for model in listed] == ["a", "b"]

        def post(**body: Any) -> Any:
            return httpx2.post(url + COMPLETIONS, json=body, headers=headers, timeout=60)

        assert post(prompt=[5], n=3).status_code == 400
        texts = [
            post(prompt=[5, 6], max_tokens=12, seed=seed, return_token_ids=True).json()
            for seed in range(4)
        ]
        assert len({str(text["choices"][0]["token_ids"]) for text in texts}) > 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        pytest.param(["--model", "nowhere"], "no model 'nowhere'", id="model"),
        pytest.param(["--port", "70000"], "port must be", id="port"),
        pytest.param(["--api-key", ""], "api_key is empty", id="key"),
        pytest.param(["--max-n", "0"], "max_n must be", id="n"),
        pytest.param(["--max-waiting", "-1"], "max_waiting must be", id="waiting"),
        pytest.param(["--step-timeout-s", "0"], "step_timeout_s must be", id="timeout"),
        pytest.param(["--chat-template", "nofile"], "nofile", id="template"),
        pytest.param(["--max-num-seqs", "0"], "max_num_seqs must be", id="engine"),
        pytest.param(["--num-kv-blocks", "1", "--max-model-len", "64"], "num_kv_blocks", id="pool"),
        pytest.param(["--host", "192.0.2.1"], "Cannot listen on 192.0.2.1", id="host"),
    ],
)
def test_a_mistake_ends_it_with_one_sentence(
    folder: Path, capsys: pytest.CaptureFixture[str], options: list[str], message: str
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["serve", "--model", str(folder), *options])
    assert ended.value.code == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("jllm: ") and message in error


@pytest.mark.parametrize(
    ("content", "message"),
    [
        pytest.param("{", "no JSON object", id="broken"),
        pytest.param("[1]", "no JSON object", id="list"),
        pytest.param('{"top_p": "high"}', "top_p must be a number", id="type"),
        pytest.param('{"temperature": -1}', "temperature must be in", id="range"),
    ],
)
def test_a_damaged_generation_config_is_found_at_the_start(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str, message: str
) -> None:
    config = hf_config()
    write_folder(tmp_path, config, hf_tensors(config))
    (tmp_path / "generation_config.json").write_text(content)
    with pytest.raises(SystemExit):
        main(["serve", "--model", str(tmp_path)])
    assert message in capsys.readouterr().err


def test_every_field_of_the_engines_config_has_a_flag() -> None:
    parser = argparse.ArgumentParser()
    arguments.add_options(parser)
    given: dict[str, Any] = dict(
        max_num_seqs=3,
        max_num_batched_tokens=77,
        max_model_len=55,
        block_size=8,
        num_kv_blocks=99,
        gpu_memory_utilization=0.5,
        decode_buckets=(1, 3),
        prefill_buckets=(16, 64),
        prefix_cache="naive",
        preemption="swap",
        swap_space_gib=1.5,
        scheduling_policy="priority",
        decode_repeats=4,
        shared_attention=False,
        overlap=False,
        stats_interval_s=2.5,
    )
    assert given.keys() == {field.name for field in dataclasses.fields(jllm.EngineConfig)}
    line = []
    for name, value in given.items():
        flag = name.replace("_", "-")
        if value is False:
            line.append("--no-" + flag)
        else:
            text = ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
            line += ["--" + flag, text]
    assert arguments.engine_config(parser.parse_args(line)) == jllm.EngineConfig(**given)
    assert arguments.engine_config(parser.parse_args([])) == jllm.EngineConfig()
