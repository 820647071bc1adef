"""Many clients of a live server at once: they share a batch and nothing else."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable
from typing import Any

import aiohttp
import pytest

import jllm
from jllm.server import Server
from jllm.server.limits import MAX_BODY_BYTES
from tests.server.clients import CHAT, COMPLETIONS, chunks_of, joined
from tests.server.conftest import wait_until
from tests.tiny_model import random_prompts, run

Work = Callable[[aiohttp.ClientSession], Awaitable[Any]]


def together(server: Server, work: list[Work]) -> list[Any]:
    """What each piece of work gives, all of them done at once."""

    async def do() -> list[Any]:
        timeout = aiohttp.ClientTimeout(total=120)
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(
            server.url, timeout=timeout, connector=connector
        ) as session:
            return await asyncio.gather(*(one(session) for one in work))

    return asyncio.run(do())


def post(body: dict[str, Any], path: str = COMPLETIONS) -> Work:
    async def work(session: aiohttp.ClientSession) -> tuple[int, bytes]:
        async with session.post(path, json=body) as response:
            return response.status, await response.read()

    return work


def hang_up(body: dict[str, Any], path: str, after: float) -> Work:
    """Leaves after so many seconds, whatever has come by then."""

    async def work(session: aiohttp.ClientSession) -> None:
        try:
            async with asyncio.timeout(after), session.post(path, json=body) as response:
                await response.read()
        except TimeoutError:
            pass

    return work


def settle(server: Server, engine: jllm.Engine) -> None:
    """Nothing may be left behind: no request, no block."""
    wait_until(lambda: server.served.engine.num_open == 0)
    wait_until(lambda: not engine.has_unfinished() and engine.stats().running == 0)
    time.sleep(0.05)  # the step that brought this about may still be ending
    stats = engine.stats()
    assert (stats.running, stats.waiting) == (0, 0) and stats.kv_usage == 0
    engine.check_integrity()


@pytest.fixture(scope="module")
def solo(engine: jllm.Engine) -> list[tuple[dict[str, Any], list[int]]]:
    """Requests, and what each gives when it runs alone."""
    requests = []
    for seed, prompt in enumerate(random_prompts(random.Random(0).choices(range(1, 90), k=48))):
        options = dict(seed=seed, max_tokens=5 + seed % 12, ignore_eos=True)
        engine.add_request(prompt, jllm.SamplingParams(**options), stream=False)  # type: ignore[arg-type]
        (output,) = run(engine).values()
        body = {"prompt": prompt, **options, "return_token_ids": True}
        requests.append((body, output.outputs[0].token_ids))
    return requests


def test_512_streams_at_once_each_equal_their_solo_run(
    live: Server, live_engine: jllm.Engine, solo: list[tuple[dict[str, Any], list[int]]]
) -> None:
    requests = [solo[i % len(solo)] for i in range(512)]
    answers = together(live, [post({**body, "stream": True}) for body, _ in requests])
    for (_, expected), (status, content) in zip(requests, answers, strict=True):
        assert status == 200
        assert joined(chunks_of(content))[0]["token_ids"] == expected
    settle(live, live_engine)


@pytest.mark.parametrize("streamed", [True, False], ids=["streamed", "whole"])
def test_clients_that_hang_up_leave_nothing_behind(
    live: Server, live_engine: jllm.Engine, streamed: bool
) -> None:
    rng = random.Random(streamed)
    body = {"n": 3, "max_tokens": 120, "ignore_eos": True, "stream": streamed}
    text = {**body, "prompt": "hello" * 20}
    conversation = {**body, "messages": [{"role": "user", "content": "hello"}]}
    work = [
        hang_up(text, COMPLETIONS, rng.uniform(0, 2))
        if i % 2
        else hang_up(conversation, CHAT, rng.uniform(0, 2))
        for i in range(100)
    ]
    together(live, work)
    settle(live, live_engine)


@pytest.mark.parametrize("streamed", [True, False], ids=["streamed", "whole"])
def test_a_client_that_hangs_up_frees_its_blocks_at_once(
    live: Server, live_engine: jllm.Engine, streamed: bool
) -> None:
    """Long before its request would have ended."""
    before = live_engine.stats().generated_tokens
    body = {"prompt": [7] * 100, "n": 4, "max_tokens": 150, "ignore_eos": True, "stream": streamed}
    together(live, [hang_up(body, COMPLETIONS, 0.1)])
    settle(live, live_engine)
    assert live_engine.stats().generated_tokens - before < 600


POISON: list[dict[str, Any]] = [
    {"prompt": [5, 600]},
    {"prompt": "\ud800"},
    {"prompt": ""},
    {"prompt": [7] * 400},
    {"prompt": [7], "max_tokens": 400},
    {"prompt": [7], "temperature": 1e-7},
    {"prompt": [7], "top_p": 1e-9, "temperature": 2},
    {"prompt": [7], "logit_bias": {"5": -100}, "allowed_token_ids": [5]},
    {"prompt": [7], "allowed_token_ids": [5], "bad_words": [" "]},
    {"prompt": [7], "min_tokens": 9, "allowed_token_ids": [1]},
    {"prompt": [7], "min_tokens": 99},
    {"prompt": [7], "repetition_penalty": 0},
    {"prompt": [7], "logprobs": 20, "prompt_logprobs": 20, "echo": True, "n": 3},
    {"prompt": [7], "stop": ["a" * 1000] * 64},
    {"prompt": [7], "cache_salt": "x" * 256},
    {"prompt": "</s>" * 30, "echo": True, "logprobs": 1},
    {"prompt": [7], "seed": -(2**63)},
    {"prompt": [7], "n": 500},
    {"prompt": [1, 1, 1], "priority": 2**40},
]


# Bodies that are no requests, or too much of one.
RAW_POISON = [
    b'{"prompt": ',
    b'{"prompt": "\xff"}',
    b'{"prompt": [NaN]}',
    b'{"a":' * 200_000,
    b"[" * 1_000_000,
    b'{"prompt": "' + b"x " * 500_000 + b'"}',
    b'{"prompt": [7], "stop": [' + b'"a",' * 500_000 + b'"a"]}',
    b'{"prompt": [7], "guided_regex": "((a|b){999}){999}"}',
    b'{"prompt": [7], "guided_json": ' + b'{"items":' * 3000 + b"{}" + b"}" * 3001,
    b"x" * (MAX_BODY_BYTES + 1),
]


def post_raw(body: bytes) -> Work:
    async def work(session: aiohttp.ClientSession) -> tuple[int, bytes]:
        headers = {"Content-Type": "application/json"}
        try:
            async with session.post(COMPLETIONS, data=body, headers=headers) as response:
                return response.status, await response.read()
        except aiohttp.ClientConnectionError:
            return 413, b""  # hung up on while it was still sending

    return work


def test_bodies_that_are_no_requests_disturb_no_neighbour(
    live: Server, live_engine: jllm.Engine, solo: list[tuple[dict[str, Any], list[int]]]
) -> None:
    good = [post({**body, "stream": True}) for body, _ in solo[:24]]
    answers = together(live, [*good, *map(post_raw, RAW_POISON)])
    for (status, content), (_, expected) in zip(answers, solo[:24], strict=False):
        assert status == 200 and joined(chunks_of(content))[0]["token_ids"] == expected
    statuses = [status for status, _ in answers[24:]]
    # A large form may be compiled and kept to; nothing here is the server's fault.
    assert set(statuses) <= {200, 400, 413} and statuses.count(200) <= 2, statuses
    settle(live, live_engine)


def test_poisoned_requests_disturb_no_neighbour(
    live: Server, live_engine: jllm.Engine, solo: list[tuple[dict[str, Any], list[int]]]
) -> None:
    requests = [solo[i % len(solo)] for i in range(64)]
    good = [post({**body, "stream": i % 2 == 0}) for i, (body, _) in enumerate(requests)]
    bad = [post({**body, "stream": i % 2 == 0}) for i, body in enumerate(POISON * 3)]
    mixed = good + bad
    order = random.Random(1).sample(range(len(mixed)), len(mixed))
    answers = dict(zip(order, together(live, [mixed[i] for i in order]), strict=True))
    for i, (_, expected) in enumerate(requests):
        status, content = answers[i]
        assert status == 200
        if i % 2 == 0:
            assert joined(chunks_of(content))[0]["token_ids"] == expected
        else:
            assert str(expected).replace(" ", "").encode() in content
    statuses = [answers[i][0] for i in range(len(good), len(mixed))]
    assert set(statuses) == {200, 400}, "nobody's mistake is the server's fault"
    settle(live, live_engine)


def test_requests_of_one_name_are_kept_apart(live: Server, live_engine: jllm.Engine) -> None:
    bodies = [
        {"prompt": [7 + i], "request_id": "same", "max_tokens": 40, "seed": i, "stream": True}
        for i in range(8)
    ]
    answers = together(live, [post({**b, "return_token_ids": True}) for b in bodies])
    alone = [together(live, [post({**b, "return_token_ids": True})])[0] for b in bodies]
    for (_, mine), (_, theirs) in zip(answers, alone, strict=True):
        assert joined(chunks_of(mine))[0]["token_ids"] == joined(chunks_of(theirs))[0]["token_ids"]
    settle(live, live_engine)


def test_a_long_text_does_not_hold_up_the_others(live: Server) -> None:
    """Tokenizing a megabyte takes longer than this whole test may."""

    async def health(session: aiohttp.ClientSession) -> float:
        loop, slowest = asyncio.get_running_loop(), 0.0
        for _ in range(20):
            start = loop.time()
            async with session.get("/health") as response:
                assert response.status == 200
            slowest = max(slowest, loop.time() - start)
            await asyncio.sleep(0.01)
        return slowest

    body = {"prompt": "The quick brown fox. " * 50_000}
    *answers, slowest = together(live, [*[post(body)] * 3, health])
    assert [status for status, _ in answers] == [400] * 3
    assert slowest < 0.5
