"""A live server of the demo model, for clients that live in an environment of their own.

`make test-clients` runs this folder with .venv/clients; elsewhere nothing of it is collected.

Not among them are the load generators guidellm and aiperf. guidellm 0.8 imports torch wherever it
is used, and brings it with 2 GB of CUDA. aiperf 0.13 brings 139 packages, 860 MB, among them a
Kubernetes client and a web dashboard; their installation alone takes the time of all these tests.
It works, with a folder of the model's tokenizer.json, tokenizer_config.json and config.json:

    aiperf profile --model smollm2-135m-instruct --url http://127.0.0.1:8000 --endpoint-type chat
        --streaming --concurrency 4 --request-count 12 --tokenizer FOLDER --ui none
        --synthetic-input-tokens-mean 30 --output-tokens-mean 12
"""

from __future__ import annotations

import os
import re
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from importlib.util import find_spec

import pytest

collect_ignore_glob = [] if find_spec("langchain_openai") else ["test_*.py"]

MODEL = "smollm2-135m-instruct"
os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # else it asks the internet for prices
SERVE = [
    ".venv/bin/python", "-m", "jllm", "serve", "--port", "0", "--no-warm-up",
    "--dtype", "float32", "--max-num-seqs", "8", "--max-model-len", "512",
    "--prefill-buckets", "64", "--decode-buckets", "8", "--num-kv-blocks", "300",
]  # fmt: skip


def healthy(url: str) -> bool:
    try:
        return bool(urllib.request.urlopen(url + "/health").status == 200)
    except urllib.error.HTTPError:
        return False


@pytest.fixture(scope="session")
def server() -> Iterator[str]:
    """Its URL. It runs jllm of the environment .venv."""
    process = subprocess.Popen(
        [*SERVE, "--model", MODEL], stderr=subprocess.PIPE, text=True, env={**os.environ}
    )
    try:
        assert process.stderr is not None
        log = ""
        while not (found := re.search(r"http://[\d.:]+", log)):
            line = process.stderr.readline()
            assert line, f"it ended: {log}"
            log += line
        for _ in range(600):
            if healthy(found[0]):
                break
            time.sleep(0.1)
        yield found[0]
        assert healthy(found[0]), "no client may bring it down"
    finally:
        process.terminate()
        process.wait(40)
