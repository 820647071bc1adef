"""A tiny model that speaks bytes, served in-process and by a live server."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
from starlette.testclient import TestClient

import jllm
from jllm.server import Server, ServerOptions
from jllm.server.app import make_app
from jllm.server.served import Served
from tests.tiny_model import tiny_model
from tests.tokenizers_for_tests import byte_level_tokenizer

TEMPLATE = (
    "{% for message in messages %}"
    "{% if message.role == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}"
    "<{{ message.role }}>{{ message.content }}"
    "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
ENGINE = jllm.EngineConfig(
    max_num_seqs=32,
    max_num_batched_tokens=256,
    max_model_len=256,
    num_kv_blocks=300,
    decode_buckets=(4, 32),
    prefill_buckets=(64, 256),
    stats_interval_s=None,
)


def spoken_model() -> jllm.Params:
    """The tiny model with a tokenizer: the 256 bytes, "he", "ll", "hell" and "<tool>"; most of its
    ids have no token, and what it says is no valid UTF-8."""
    params = tiny_model()
    tokenizer = replace(byte_level_tokenizer(), chat_template=TEMPLATE)
    config = replace(params.config, eos_token_ids=(1,))
    return params.replace(tokenizer=tokenizer, config=config)


def make_engine(**changes: Any) -> jllm.Engine:
    return jllm.Engine(spoken_model(), replace(ENGINE, **changes))


def wait_until(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "this never came true"
        time.sleep(0.01)


OPTIONS = ServerOptions(
    port=0, served_model_name=("tiny", "alias"), model="some/where", warm_up=False
)


def started(client: TestClient) -> TestClient:
    """Waits for the engine behind a client."""
    wait_until(lambda: client.get("/health").status_code == 200)
    return client


@pytest.fixture(scope="session")
def client() -> Iterator[TestClient]:
    """Asks the application without a socket."""
    with TestClient(make_app(Served(make_engine(), OPTIONS))) as asking:
        yield started(asking)


@pytest.fixture(scope="session")
def engine() -> Iterator[jllm.Engine]:
    """An engine of the same model, to say what the server's should."""
    with make_engine() as made:
        yield made


@pytest.fixture(scope="session")
def live_engine() -> jllm.Engine:
    """The engine of ``live``; to be looked at when it is idle."""
    return make_engine()


@pytest.fixture(scope="session")
def live(live_engine: jllm.Engine) -> Iterator[Server]:
    """A server on a real socket."""
    with Server(live_engine, OPTIONS) as server:
        wait_until(lambda: server.served.engine.state == "ready")
        yield server
