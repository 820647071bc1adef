"""Loading, dead, stuck, full, shutting down: the server says so, and nobody waits for ever."""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import httpx2
import pytest
from starlette.testclient import TestClient

import jllm
from jllm.server import Server, ServerOptions
from jllm.server.app import make_app
from jllm.server.served import Served
from tests.server.clients import CHAT, COMPLETIONS, chunks_of, error_of
from tests.server.conftest import OPTIONS, make_engine, wait_until

ENDLESS: dict[str, Any] = {"prompt": [7], "max_tokens": 250, "ignore_eos": True}


class Obstacle:
    """Stands in the way of an engine's steps: each waits for a while or for a sign, or fails."""

    def __init__(self, engine: jllm.Engine) -> None:
        self.go_on = threading.Event()
        self.go_on.set()
        self.pause_s = 0.0
        self.error: BaseException | None = None
        self.in_the_way = threading.Event()
        self._step = engine.step
        engine.step = self.step  # type: ignore[method-assign]

    def step(self) -> list[jllm.RequestOutput]:
        if not self.go_on.is_set():
            self.in_the_way.set()
        self.go_on.wait(60)
        time.sleep(self.pause_s)
        if self.error is not None:
            raise self.error
        return self._step()


class Running:
    """A live server whose engine can be hindered, and clients that wait for it."""

    def __init__(self, options: ServerOptions = OPTIONS, **engine: Any) -> None:
        self.engine = make_engine(**engine)
        self.obstacle = Obstacle(self.engine)
        self.server = Server(self.engine, options)
        self.pool = ThreadPoolExecutor(16)

    def __enter__(self) -> Running:
        before = _engine_threads()
        self.server.__enter__()
        wait_until(lambda: self.health() == 200)
        self.engine_threads = _engine_threads() - before
        return self

    def __exit__(self, *exception: object) -> None:
        self.obstacle.go_on.set()
        self.server.__exit__(None, None, None)
        self.pool.shutdown()

    def health(self) -> int:
        return httpx2.get(self.server.url + "/health").status_code

    def post(self, **changes: Any) -> Future[httpx2.Response]:
        body = {**ENDLESS, **changes}
        path = CHAT if "messages" in body else COMPLETIONS
        return self.pool.submit(httpx2.post, self.server.url + path, json=body, timeout=60)

    def wait_for_running(self, count: int) -> None:
        wait_until(lambda: self.server.served.engine.num_open == count)


def _engine_threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name == "jllm-engine"}


def kill_thread(running: Running) -> None:
    """Ends the engine's thread where it stands, as nothing in it foresees."""
    (thread,) = running.engine_threads
    ctypes.pythonapi.PyThreadState_SetAsyncExc(
        ctypes.c_ulong(thread.ident or 0), ctypes.py_object(SystemExit)
    )


def fail_step(running: Running) -> None:
    running.obstacle.error = RuntimeError("the GPU fell off the bus")


@pytest.mark.parametrize("how", [kill_thread, fail_step])
def test_when_the_engine_dies_everyone_is_told(how: Callable[[Running], None]) -> None:
    with Running() as running:
        running.obstacle.pause_s = 0.05  # 250 tokens take 12 s
        whole = [running.post() for _ in range(3)]
        messages = [{"role": "user", "content": "hi"}]
        chat = running.post(messages=messages, max_tokens=200)
        streams = [running.post(stream=True, n=2) for _ in range(3)]
        running.wait_for_running(7)
        wait_until(lambda: running.engine.stats().running == 10)
        how(running)
        start = time.monotonic()
        for answer in (*whole, chat):
            assert answer.result().status_code == 500
            assert error_of(answer.result())["type"] == "InternalServerError"
        for stream in streams:
            assert stream.result().status_code == 200  # it had begun
            last = chunks_of(stream.result().content)[-1]
            assert last["error"]["type"] == "InternalServerError"
        assert time.monotonic() - start < 5
        assert running.health() == 503
        late = running.post().result()
        assert late.status_code == 500 and error_of(late)["code"] == "engine_dead"


def test_a_stuck_step_is_noticed_and_may_end() -> None:
    with Running() as running:
        assert running.post().result().status_code == 200  # so that all is compiled
    with Running(replace(OPTIONS, step_timeout_s=1.0)) as running:
        running.obstacle.go_on.clear()
        waiting = running.post()
        assert running.health() == 200
        wait_until(lambda: running.health() == 503)
        assert error_of(waiting.result())["code"] == "engine_stuck"
        assert running.post().result().status_code == 500
        running.obstacle.go_on.set()
        wait_until(lambda: running.health() == 200)
        assert running.post().result().status_code == 200
        running.engine.check_integrity()


def test_until_the_engine_is_warm_everything_is_503(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine()
    warm = threading.Event()
    monkeypatch.setattr(engine, "warm_up", lambda: int(warm.wait(60)))
    options = replace(OPTIONS, warm_up=True)
    with TestClient(make_app(Served(engine, options))) as asking:
        for response in (
            asking.get("/health"),
            asking.get("/ping"),
            asking.get("/v1/models"),
            asking.post(COMPLETIONS, json={"prompt": "a"}),
            asking.post("/tokenize", json={"prompt": "a"}),
        ):
            assert response.status_code == 503
            assert error_of(response)["type"] == "ServiceUnavailableError"
        assert asking.get("/version").status_code == asking.get("/metrics").status_code == 200
        warm.set()
        wait_until(lambda: asking.get("/health").status_code == 200)
        assert asking.get("/health").content == b""
        assert asking.post("/ping").status_code == 200
        assert asking.post(COMPLETIONS, json={"prompt": "a"}).status_code == 200


def test_a_server_that_cannot_warm_up_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine()

    def fail() -> int:
        raise MemoryError("no room")

    monkeypatch.setattr(engine, "warm_up", fail)
    with pytest.raises(RuntimeError, match="before it was ready"):
        Server(engine, replace(OPTIONS, warm_up=True)).run()


def test_a_full_queue_is_429_until_it_empties() -> None:
    with Running(replace(OPTIONS, max_waiting=2), max_num_seqs=4, decode_buckets=(4,)) as running:
        running.obstacle.go_on.clear()
        first = running.post(n=4)
        running.wait_for_running(1)
        running.obstacle.in_the_way.wait(10)
        # The thread takes what comes only between steps, so let one go by.
        second = running.post(n=2)
        third = running.post(n=1)
        running.wait_for_running(3)
        running.obstacle.go_on.set()
        statuses = sorted(f.result().status_code for f in (first, second, third))
        assert statuses == [200, 200, 429]
        refused = next(f.result() for f in (second, third) if f.result().status_code == 429)
        assert refused.headers["retry-after"] == "1"
        assert error_of(refused)["type"] == "RateLimitError"
        assert running.post().result().status_code == 200


def test_a_shutdown_lets_requests_end() -> None:
    with Running() as running:
        running.obstacle.go_on.clear()
        answers = [running.post(), running.post(stream=True)]
        running.wait_for_running(2)
        running.obstacle.go_on.set()
    whole, stream = (answer.result() for answer in answers)
    assert whole.json()["usage"]["completion_tokens"] == 250
    assert chunks_of(stream.content)[-1]["choices"][0]["finish_reason"] == "length"
    with pytest.raises(RuntimeError, match="closed"):
        running.engine.add_request([5])


def test_a_shutdown_does_not_wait_for_ever() -> None:
    with Running(replace(OPTIONS, shutdown_timeout_s=0.3)) as running:
        running.obstacle.pause_s = 0.05
        answers = [running.post(), running.post(stream=True)]
        wait_until(lambda: running.engine.stats().running == 2)
        start = time.monotonic()
        running.server.__exit__(None, None, None)
        assert time.monotonic() - start < 10
    whole, stream = (answer.result() for answer in answers)
    assert whole.status_code == 503 and "shutting down" in error_of(whole)["message"]
    assert "shutting down" in chunks_of(stream.content)[-1]["error"]["message"]


def test_an_exception_that_is_a_bug_fails_only_its_own_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with Running() as running:
        add = running.engine.add_request

        def sometimes(prompt: Any, *arguments: Any, **options: Any) -> str:
            if len(prompt) == 13:
                raise KeyError("a bug")
            return add(prompt, *arguments, **options)

        monkeypatch.setattr(running.engine, "add_request", sometimes)
        good, bad = running.post(), running.post(prompt=[7] * 13, max_tokens=9)
        assert bad.result().status_code == 500
        assert "bug" not in error_of(bad.result())["message"]
        assert good.result().status_code == 200 and running.health() == 200


def test_a_name_can_be_used_again_at_once_after_hanging_up() -> None:
    with Running() as running:
        running.obstacle.pause_s = 0.02
        body = {**ENDLESS, "request_id": "same", "stream": True}
        url = running.server.url + COMPLETIONS
        for _ in range(5):
            with httpx2.stream("POST", url, json=body, timeout=60) as answer:
                next(answer.iter_raw())
        running.obstacle.pause_s = 0.0
        last = running.post(request_id="same").result()
        assert last.json()["usage"]["completion_tokens"] == 250


def test_a_taken_port_is_an_error_at_once(live: Server) -> None:
    port = int(live.url.rpartition(":")[2])
    with make_engine() as engine, pytest.raises(OSError):
        Server(engine, replace(OPTIONS, port=port)).__enter__()
