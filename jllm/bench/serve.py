"""How does a server do under load? An open-loop generator for any OpenAI-compatible endpoint.

    python -m jllm.bench serve --base-url http://127.0.0.1:8000 --model NAME --request-rate 8

Open loop: requests are sent when they arrive, whether or not earlier ones are answered, unless
``--max-concurrency`` holds them back. TTFT and E2E count from the sending.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import random
import sys
import time
from collections.abc import Sequence
from typing import Any

from tqdm import tqdm

from jllm.bench.arguments import positive
from jllm.bench.client import Outcome, send
from jllm.bench.datasets import Request, jsonl, random_workload
from jllm.bench.environment import environment
from jllm.bench.results import Result, add_record_options
from jllm.bench.serve_metrics import parse_goodput, summarize

WORDS = "the of and to in a is that for it as was with be by on not he his but at are this have"


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--base-url", default="http://127.0.0.1:8000", help="without /v1")
    parser.add_argument("--endpoint", choices=("completions", "chat"), default="completions")
    parser.add_argument("--model", required=True, help="the name under which it is served")
    parser.add_argument("--api-key", help="sent as a bearer token")
    load = parser.add_argument_group("load")
    load.add_argument("--dataset", choices=("random", "jsonl"), default="random")
    load.add_argument("--dataset-path", help="of jsonl")
    load.add_argument("--num-prompts", type=positive, default=1000)
    load.add_argument("--input-len", type=positive, default=1024)
    load.add_argument("--output-len", type=positive, default=128)
    load.add_argument("--range-ratio", type=float, help="spread of the lengths, see --convention")
    load.add_argument("--convention", choices=("vllm", "sglang"), default="vllm")
    load.add_argument("--vocab-size", type=positive, default=10_001, help="random ids lie below it")
    load.add_argument(
        "--request-rate",
        type=float,
        default=math.inf,
        help="per second; inf (default): all at once",
    )
    load.add_argument(
        "--burstiness",
        type=float,
        default=1.0,
        help="shape of the gamma distribution of the gaps: 1 is Poisson, less is burstier",
    )
    load.add_argument("--max-concurrency", type=positive, help="most requests under way at once")
    load.add_argument("--seed", type=int, default=0)
    load.add_argument("--warm-up", type=int, default=1, help="requests sent before (default 1)")
    load.add_argument("--timeout-s", type=float, default=600.0, help="of one request")
    sampling = parser.add_argument_group("sampling")
    sampling.add_argument("--temperature", type=float, default=0.0)
    sampling.add_argument("--top-p", type=float)
    sampling.add_argument("--top-k", type=int)
    sampling.add_argument(
        "--allow-eos", action="store_true", help="without it ignore_eos is sent: outputs are full"
    )
    parser.add_argument(
        "--goodput",
        nargs="+",
        default=[],
        metavar="SLO:MS",
        help="count requests that meet all of these: ttft:500 tpot:30 e2el:5000",
    )
    parser.add_argument("--name", default="serve", help="first word of the rows' names")
    add_record_options(parser)


def main(options: argparse.Namespace) -> int:
    """Sends the load and records what came back."""
    try:
        import aiohttp  # noqa: F401
    except ImportError as error:
        raise ValueError("serve needs aiohttp: pip install 'jllm[bench]'.") from error
    slos = parse_goodput(options.goodput)
    if not (options.request_rate > 0 and options.burstiness > 0):
        raise ValueError("--request-rate and --burstiness must be positive.")
    requests = _requests(options, options.seed)
    # Other prompts than those measured, or the server's prefix cache would know the first.
    warm_up = _requests(options, options.seed + 1_000_003)[: options.warm_up]
    times = arrivals(len(requests), options.request_rate, options.burstiness, options.seed)
    outcomes, seconds = asyncio.run(_load(options, warm_up, requests, times))
    metrics = summarize(outcomes, seconds, slos)
    result = Result(
        "serve",
        options.model,
        "server",
        None,
        environment(options.arguments, options.commit, device=False),
        settings={
            name: str(value) if value == math.inf else value
            for name, value in vars(options).items()
            if name not in ("api_key", "arguments", "commit", "quiet", "out", "command")
        },
    )
    result.settings["failures"] = metrics.failures
    for name, measured in metrics.rows.items():
        result.rows[f"{_prefix(options)}_{name}"] = measured
    for name, measured in result.rows.items():
        print(f"{name:48} {measured.value:12.4g} {measured.unit}", file=sys.stderr)
    for reason, count in metrics.failures.items():
        print(f"*** {count} FAILED: {reason}", file=sys.stderr)
    result.finish(options.out)
    return 1 if metrics.failures else 0


def arrivals(count: int, rate: float, burstiness: float, seed: int) -> list[float]:
    """Seconds at which requests arrive, the first at 0: gaps from a gamma distribution of mean
    1 / rate, scaled so that the last arrives when it should on average (as vLLM's benchmark
    does: otherwise runs of one rate differ by their luck)."""
    if rate == math.inf:
        return [0.0] * count
    rng = random.Random(seed)
    gaps = [rng.gammavariate(burstiness, 1 / (rate * burstiness)) for _ in range(count - 1)]
    scale = (count - 1) / rate / sum(gaps) if gaps else 1.0
    times = [0.0]
    for gap in gaps:
        times.append(times[-1] + gap * scale)
    return times


def _requests(options: argparse.Namespace, seed: int) -> list[Request]:
    if options.dataset == "jsonl":
        if not options.dataset_path:
            raise ValueError("--dataset jsonl needs --dataset-path.")
        found = jsonl(
            options.dataset_path, options.num_prompts, None, output_len=options.output_len
        )
        if options.endpoint == "chat" and not all(
            isinstance(r.prompt, str) for r in found.requests
        ):
            raise ValueError("A chat needs texts, but the file has prompts of token ids.")
        return found.requests
    requests = random_workload(
        options.num_prompts,
        options.input_len,
        options.output_len,
        vocab_size=options.vocab_size,
        range_ratio=options.range_ratio,
        convention=options.convention,
        seed=seed,
    ).requests
    if options.endpoint == "chat":  # about a token a word; the server's usage says how many
        words = WORDS.split()
        texts = [" ".join(words[int(i) % len(words)] for i in r.prompt) for r in requests]
        return [Request(text, r.output_len) for text, r in zip(texts, requests, strict=True)]
    return requests


def _body(options: argparse.Namespace, request: Request) -> dict[str, Any]:
    body: dict[str, Any] = {
        "model": options.model,
        "max_tokens": request.output_len,
        "temperature": options.temperature,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if options.endpoint == "chat":
        body["messages"] = [{"role": "user", "content": request.prompt}]
    else:
        body["prompt"] = request.prompt
    if not options.allow_eos:
        body["ignore_eos"] = True
    for name in ("top_p", "top_k"):
        if getattr(options, name) is not None:
            body[name] = getattr(options, name)
    return body


async def _load(
    options: argparse.Namespace,
    warm_up: Sequence[Request],
    requests: Sequence[Request],
    times: Sequence[float],
) -> tuple[list[Outcome], float]:
    """The outcome of each request, and seconds from the first arrival to the last answer.

    Raises ValueError if a warm-up request fails: then the load would tell nothing.
    """
    import aiohttp

    path = "/v1/chat/completions" if options.endpoint == "chat" else "/v1/completions"
    url = options.base_url.rstrip("/") + path
    headers = {"Authorization": f"Bearer {options.api_key}"} if options.api_key else None
    limit = asyncio.Semaphore(options.max_concurrency or len(requests) + 1)
    connector = aiohttp.TCPConnector(limit=0)
    bar = tqdm(total=len(requests), unit="request", disable=options.quiet, desc="serve")
    # A line of the stream may be long: twice this buffer, with many logprobs.
    async with aiohttp.ClientSession(connector=connector, read_bufsize=1 << 20) as session:

        async def one(request: Request, at: float) -> Outcome:
            await asyncio.sleep(max(0.0, at - time.perf_counter()))
            async with limit:
                return await send(
                    session,
                    url,
                    _body(options, request),
                    asked=request.output_len,
                    timeout_s=options.timeout_s,
                    headers=headers,
                )

        async def counted(request: Request, at: float) -> Outcome:
            outcome = await one(request, at)
            bar.update()
            return outcome

        for request in warm_up:
            first = await one(request, 0.0)
            if first.failure:
                raise ValueError(f"A warm-up request to {url} failed: {first.failure}")
        with bar:
            start = time.perf_counter()
            tasks = [counted(r, start + at) for r, at in zip(requests, times, strict=True)]
            outcomes = await asyncio.gather(*tasks)
            return outcomes, time.perf_counter() - start


def _prefix(options: argparse.Namespace) -> str:
    """Name, lengths, rate and cap: rows of different loads must not compare."""
    o = options
    what = "jsonl" if o.dataset == "jsonl" else f"random{o.input_len}_{o.output_len}"
    cap = f"_c{o.max_concurrency}" if o.max_concurrency else ""
    return f"{o.name}_{what}_r{o.request_rate:g}{cap}"
