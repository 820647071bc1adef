"""The load generator against a server that misbehaves on purpose."""

import asyncio
import itertools
import json
import math
import re
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

aiohttp = pytest.importorskip("aiohttp")
from aiohttp import web  # noqa: E402

from jllm.bench import results, serve  # noqa: E402
from jllm.bench.__main__ import main  # noqa: E402
from jllm.bench.client import Outcome, events, send  # noqa: E402
from jllm.bench.serve_metrics import parse_goodput, percentile, summarize  # noqa: E402

GAP = 0.01  # seconds between the server's tokens


class Server:
    """Behaves as the request's model name says; counts what it got and how much at once."""

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.under_way = self.most_under_way = 0
        self.url = ""
        self._loop = asyncio.new_event_loop()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def start(self) -> None:
        self._thread.start()
        assert self._ready.wait(10)

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        app = web.Application()
        app.router.add_post("/v1/completions", self._answer)
        app.router.add_post("/v1/chat/completions", self._answer)
        runner = web.AppRunner(app, shutdown_timeout=0)
        self._loop.run_until_complete(runner.setup())
        self._loop.run_until_complete(web.TCPSite(runner, "127.0.0.1", 0).start())
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        self._ready.set()
        self._loop.run_forever()
        self._loop.run_until_complete(runner.cleanup())
        self._loop.close()

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        good = body["model"] == "good"  # a stalled one of another test may be under way, too
        self.under_way += good
        self.most_under_way = max(self.most_under_way, self.under_way)
        try:
            return await self._stream(request, body, len(self.bodies))
        finally:
            self.under_way -= good

    async def _stream(
        self, request: web.Request, body: dict[str, Any], number: int
    ) -> web.StreamResponse:
        kind = body["model"]
        if kind == "status-500":
            return web.json_response({"error": {"message": "out of order"}}, status=500)
        if kind == "every-third-breaks":
            kind = "no-done" if number % 3 == 0 else "good"
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        chat = "messages" in body

        async def event(data: Any, name: str = "") -> None:
            text = data if isinstance(data, str) else json.dumps(data)
            await response.write(f"{name}data: {text}\n\n".encode())

        def choice(text: str, finish: str | None) -> dict[str, Any]:
            part = {"delta": {"content": text}} if chat else {"text": text}
            return {"choices": [{"index": 0, "finish_reason": finish, **part}]}

        if chat:
            await event({"choices": [{"delta": {"role": "assistant"}, "finish_reason": None}]})
        await response.write(b": a comment\n\n")
        count = body["max_tokens"]
        if kind == "no-choices":
            count = 0
        for index in range(count):
            await asyncio.sleep(2 if kind == "slow" and index == 1 else GAP)
            if kind == "error-event" and index == 1:
                await event({"error": {"message": "the engine died"}}, "event: error\n")
                await event("[DONE]")
                return response
            if kind == "not-json" and index == 1:
                await event("{oops")
            await event(choice("a", None))
        if count:
            await event(choice("", "length"))
        if kind != "no-usage":
            usage = {"prompt_tokens": 7, "completion_tokens": count}
            await event({"choices": [], "usage": usage})
        if kind != "no-done":
            await event("[DONE]")
        return response


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    started = Server()
    started.start()
    yield started
    started.stop()


def outcome_of(server: Server, model: str, tokens: int = 4, timeout_s: float = 5.0) -> Outcome:
    async def ask() -> Outcome:
        async with aiohttp.ClientSession() as session:
            body = {"model": model, "prompt": [1], "max_tokens": tokens}
            url = server.url + "/v1/completions"
            return await send(session, url, body, asked=tokens, timeout_s=timeout_s)

    return asyncio.run(ask())


def test_a_good_stream_is_timed_and_counted(server: Server) -> None:
    outcome = outcome_of(server, "good")
    assert outcome.failure is None
    assert (outcome.prompt_tokens, outcome.output_tokens, outcome.counted_by) == (7, 4, "usage")
    assert outcome.finish_reason == "length"
    # Four tokens: the closing chunk with a finish_reason and the one with usage bring none.
    assert len(outcome.itl) == 3
    assert outcome.ttft >= GAP and outcome.e2e >= 4 * GAP
    assert outcome.tpot == pytest.approx((outcome.e2e - outcome.ttft) / 3)


def test_without_usage_the_chunks_are_counted(server: Server) -> None:
    outcome = outcome_of(server, "no-usage")
    assert (outcome.output_tokens, outcome.counted_by) == (4, "chunks")


def test_a_single_token_has_no_time_per_token(server: Server) -> None:
    assert outcome_of(server, "good", tokens=1).tpot is None


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        ("error-event", "an error event: .*the engine died"),
        ("no-done", r"the stream ended without \[DONE\]"),
        ("status-500", "status 500: .*out of order"),
        ("not-json", "an event is not JSON: {oops"),
        ("no-choices", "no chunk had a choice"),
    ],
)
def test_a_broken_answer_is_a_failure_with_its_reason(
    server: Server, model: str, reason: str
) -> None:
    failure = outcome_of(server, model).failure
    assert failure is not None and re.search(reason, failure)


def test_a_stream_that_stalls_is_a_failure_when_its_time_is_over(server: Server) -> None:
    start = time.monotonic()
    assert outcome_of(server, "slow", timeout_s=0.2).failure == "timeout after 0.2 s"
    assert time.monotonic() - start < 5


def test_a_server_that_is_not_there_is_a_failure() -> None:
    absent = Server()
    absent.url = "http://127.0.0.1:9"  # the discard port: nobody listens
    failure = outcome_of(absent, "good").failure
    assert failure is not None and "ClientConnectorError" in failure


def read_events(text: str) -> list[tuple[str, str]]:
    async def lines() -> AsyncIterator[bytes]:
        for line in text.splitlines(keepends=True):
            yield line.encode()

    async def collect() -> list[tuple[str, str]]:
        return [event async for event in events(lines())]

    return asyncio.run(collect())


def test_events_are_read_as_the_standard_says() -> None:
    text = ": comment\n\ndata: one\ndata:two\n\nevent: error\r\ndata: x\r\n\r\ndata: broken off\n"
    assert read_events(text) == [("message", "one\ntwo"), ("error", "x")]


def run_serve(server: Server, tmp_path: Path, *options: str, code: int = 0) -> results.Result:
    out = tmp_path / "serve.json"
    base = ["serve", "--base-url", server.url, "--input-len=5", "--output-len=3", "--quiet"]
    assert main([*base, "--out", str(out), *options]) == code
    return results.read(out)


def test_a_load_gives_a_record_of_rates_and_times(server: Server, tmp_path: Path) -> None:
    del server.bodies[:]
    options = ["--model=good", "--num-prompts=6", "--goodput", "ttft:60000", "tpot:60000"]
    found = run_serve(server, tmp_path, *options)
    prefix = "serve_random5_3_rinf_"
    names = [
        f"{m}_ms_{s}" for m in ("ttft", "tpot", "itl", "e2el") for s in ("mean", "median", "p99")
    ]
    assert {n.removeprefix(prefix) for n in found.rows} == {
        *("req_s", "out_tok_s", "total_tok_s", "goodput_req_s"),
        *names,
    }
    row = found.rows[prefix + "out_tok_s"]
    assert row.valid and row.detail["output_tokens"] == 18 and row.detail["prompt_tokens"] == 42
    assert found.rows[prefix + "goodput_req_s"].value == found.rows[prefix + "req_s"].value
    assert found.weights == "server" and found.settings["request_rate"] == "inf"
    assert len(server.bodies) == 7  # one to warm up, with a prompt of its own
    warm_up, *measured = (body["prompt"] for body in server.bodies)
    assert warm_up not in measured and all(len(prompt) == 5 for prompt in measured)
    assert server.bodies[0]["ignore_eos"] is True and server.bodies[0]["temperature"] == 0.0


def test_a_chat_is_sent_texts_and_its_role_chunk_is_no_token(
    server: Server, tmp_path: Path
) -> None:
    del server.bodies[:]
    found = run_serve(server, tmp_path, "--model=good", "--endpoint=chat", "--num-prompts=2")
    assert isinstance(server.bodies[0]["messages"][0]["content"], str)
    assert found.rows["serve_random5_3_rinf_ttft_ms_median"].value >= GAP * 1e3


def test_concurrency_is_capped(server: Server, tmp_path: Path) -> None:
    server.most_under_way = 0
    capped = run_serve(server, tmp_path, "--model=good", "--num-prompts=6", "--max-concurrency=2")
    assert server.most_under_way == 2
    assert "serve_random5_3_rinf_c2_req_s" in capped.rows
    run_serve(server, tmp_path, "--model=good", "--num-prompts=6")
    assert server.most_under_way == 6


def test_failures_make_every_row_invalid_and_are_told_with_their_reason(
    server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    del server.bodies[:]
    options = ["--model=every-third-breaks", "--num-prompts=6", "--warm-up=0"]
    found = run_serve(server, tmp_path, *options, code=1)
    assert found.settings["failures"] == {"the stream ended without [DONE]": 2}
    row = found.rows["serve_random5_3_rinf_req_s"]
    assert not row.valid and row.detail["failed"] == 2
    assert "2 FAILED: the stream ended without [DONE]" in capsys.readouterr().err


def test_a_failing_warm_up_request_ends_the_benchmark(
    server: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", "--base-url", server.url, "--model=status-500", "--quiet"]) == 2
    assert "A warm-up request to" in capsys.readouterr().err


def test_arrivals_keep_their_rate_and_their_seed() -> None:
    assert serve.arrivals(4, math.inf, 1.0, 0) == [0.0] * 4
    times = serve.arrivals(1001, 10.0, 1.0, 0)
    assert times == serve.arrivals(1001, 10.0, 1.0, 0) != serve.arrivals(1001, 10.0, 1.0, 1)
    assert times[0] == 0 and times[-1] == pytest.approx(100.0) and times == sorted(times)


@pytest.mark.parametrize(("burstiness", "cv"), [(1.0, 1.0), (0.25, 2.0), (100.0, 0.1)])
def test_burstiness_is_the_shape_of_the_gaps(burstiness: float, cv: float) -> None:
    times = serve.arrivals(5001, 1.0, burstiness, 0)
    gaps = [b - a for a, b in itertools.pairwise(times)]
    deviation = (sum((gap - 1) ** 2 for gap in gaps) / len(gaps)) ** 0.5
    assert deviation == pytest.approx(cv, rel=0.1)  # of a gamma variable: 1 / sqrt(shape)


def outcome(ttft: float, tokens: int, tpot: float, failure: str | None = None) -> Outcome:
    return Outcome(
        asked=tokens,
        failure=failure,
        ttft=ttft,
        e2e=ttft + tpot * (tokens - 1),
        itl=[tpot] * (tokens - 1),
        prompt_tokens=10,
        output_tokens=tokens,
    )


def test_metrics_leave_failures_out_and_count_goodput() -> None:
    outcomes = [outcome(0.1, 11, 0.02), outcome(0.3, 11, 0.04), outcome(9.0, 5, 1.0, "broken")]
    metrics = summarize(outcomes, 2.0, {"ttft": 0.2, "tpot": 0.03})
    value: Callable[[str], float] = lambda name: metrics.rows[name].value  # noqa: E731
    assert metrics.failures == {"broken": 1}
    assert (value("req_s"), value("out_tok_s"), value("total_tok_s")) == (1.0, 11.0, 21.0)
    assert value("goodput_req_s") == 0.5
    assert value("ttft_ms_mean") == pytest.approx(200)
    assert value("tpot_ms_median") == pytest.approx(30)
    assert value("e2el_ms_p99") == pytest.approx(percentile([300, 700], 99))


def test_percentiles_lie_between_the_ranks() -> None:
    assert percentile([3, 1, 2], 50) == 2
    assert percentile([0, 100], 99) == pytest.approx(99)
    assert percentile([5], 99) == 5


@pytest.mark.parametrize("limit", ["ttft", "ttft:x", "speed:5", "tpot:0", "tpot:-1"])
def test_a_malformed_slo_is_refused(limit: str) -> None:
    with pytest.raises(ValueError, match="--goodput"):
        parse_goodput([limit])
