"""What does the server add to the engine's time?

    python benchmarks/server_overhead.py [--config qwen3-0.6b --device-ms 0] [--out FILE.json]

The same requests, all at once, by turns to an engine in this process (offline: outputs at the end;
stream: a delta per step and request) and through the HTTP server around another, where each is a
stream of server-sent events that a client in a process of its own reads. All turn every token into
text. Prints medians of seconds, tokens per second, and the server's time over that of the streaming
engine.

``floor`` is what no server could do without: the same events written to as many sockets in a bare
loop, a ``send`` for each, and read by the same client. Where CPUs are what is short, the server's
time cannot be less than that of the engine and the floor together, over the number of CPUs.

``--device-ms`` lets every step take at least so long on a device that is not this CPU, as a GPU's
would: the host plans, delivers and sends meanwhile. With 0 the engine, XLA, the server and the
clients have the CPU's cores to share.
"""

from __future__ import annotations

import argparse
import collections
import itertools
import json
import os
import platform
import selectors
import socket
import statistics
import string
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any, cast

import jax
import numpy as np
import tokenizers
from tokenizers import decoders, models

import jllm
from jllm.engine.planner import Plan
from jllm.engine.runner import Dispatched, Results
from jllm.server import Server, ServerOptions
from jllm.tokenizer import Tokenizer

BODY_END = b"0\r\n\r\n"
EVENT = b"data: {" + b"x" * 240 + b"}\n\n"  # as long as the server's


def letters(vocab_size: int) -> Tokenizer:
    """A tokenizer whose every token is three letters, so that each has a text."""
    words = itertools.islice(itertools.product(string.ascii_lowercase, repeat=3), vocab_size)
    vocab = {"".join(word): i for i, word in enumerate(words)}
    backend = tokenizers.Tokenizer(models.WordLevel(vocab, unk_token="aaa"))
    backend.decoder = decoders.ByteLevel()
    return Tokenizer(backend)


def bodies(options: argparse.Namespace) -> list[dict[str, Any]]:
    """One request per stream."""
    draw = np.random.default_rng(0)
    return [
        {
            "prompt": draw.integers(3, 512, options.input_len).tolist(),
            "max_tokens": options.output_len,
            "temperature": 0,
            "ignore_eos": True,
        }
        for _ in range(options.streams)
    ]


def with_device(engine: jllm.Engine, milliseconds: float) -> jllm.Engine:
    """An engine whose steps also take so long on a device that runs one after the other, while the
    host goes on: the next step is dispatched before the results of this one are waited for."""
    runner = engine._runner
    sample, collect = runner.sample, runner.collect
    ready: collections.deque[float] = collections.deque([0.0])  # when each step in flight ends

    def sample_and_note(plan: Plan, forwarded: Any, masks: Any) -> Dispatched:
        ready.append(max(ready[-1], time.perf_counter()) + milliseconds / 1000)
        return sample(plan, forwarded, masks)

    def collect_when_ready(results: Dispatched) -> Results:
        ready.popleft()
        time.sleep(max(0.0, ready[0] - time.perf_counter()))
        return collect(results)

    if milliseconds:
        runner.sample = sample_and_note  # type: ignore[method-assign]
        runner.collect = collect_when_ready  # type: ignore[method-assign]
    return engine


def cpu_seconds(thread: str) -> float:
    """CPU time that this process' thread of that name has taken."""
    (found,) = [t for t in threading.enumerate() if t.name == thread]
    assert found.ident is not None
    return time.clock_gettime(time.pthread_getcpuclockid(found.ident))


def run_engine(engine: jllm.Engine, requests: list[dict[str, Any]], stream: bool) -> float:
    """Seconds until all requests have ended."""
    engine.reset_prefix_cache()
    start = time.perf_counter()
    for request in requests:
        params = jllm.SamplingParams(
            temperature=0, max_tokens=request["max_tokens"], ignore_eos=True
        )
        engine.add_request(request["prompt"], params, stream=stream)
    while engine.has_unfinished():
        engine.step()
    return time.perf_counter() - start


def run_clients(url: str, requests: list[dict[str, Any]]) -> dict[str, float]:
    """The same through the server; times are the clients'."""
    command = [sys.executable, __file__, "--client", url]
    process = subprocess.run(command, input=json.dumps(requests).encode(), capture_output=True)
    if process.returncode:
        raise RuntimeError(process.stderr.decode())
    measured: dict[str, float] = json.loads(process.stdout)
    return measured


def run_floor(requests: list[dict[str, Any]]) -> tuple[float, float]:
    """Seconds until a client has read the events that a bare loop writes, and the loop's seconds of
    CPU."""
    cpu = []

    def write(listening: socket.socket) -> None:
        streams = [listening.accept()[0] for _ in requests]
        for stream in streams:
            stream.recv(65536)
        start = time.thread_time()
        for _ in range(requests[0]["max_tokens"]):
            for stream in streams:
                stream.send(EVENT)
        cpu.append(time.thread_time() - start)
        for stream in streams:
            stream.send(BODY_END)

    with socket.create_server(("127.0.0.1", 0), backlog=len(requests)) as listening:
        thread = threading.Thread(target=write, args=(listening,))
        thread.start()
        port = listening.getsockname()[1]
        measured = run_clients(f"http://127.0.0.1:{port}", requests)
        thread.join()
    return measured["seconds"], cpu[0]


def client(url: str, requests: list[dict[str, Any]]) -> dict[str, float]:
    """Opens a connection per request, sends all at once, reads every stream to its end. No more
    than that is done per chunk: clients are not what is measured."""
    host, _, port = url.removeprefix("http://").partition(":")
    poll = selectors.DefaultSelector()
    connections = [socket.create_connection((host, int(port))) for _ in requests]
    start, cpu = time.perf_counter(), time.process_time()
    for connection, request in zip(connections, requests, strict=True):
        body = json.dumps({**request, "stream": True}).encode()
        head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        poll.register(connection, selectors.EVENT_READ, bytearray())
    firsts: dict[socket.socket, float] = {}
    received = []
    while len(received) < len(requests):
        for key, _ in poll.select():
            connection, data = cast(socket.socket, key.fileobj), key.data
            new = connection.recv(65536)
            if not new:
                raise RuntimeError("The server hung up.")
            data += new
            if connection not in firsts and b"data: " in data:
                firsts[connection] = time.perf_counter() - start
            if data.endswith(BODY_END):
                received.append(data)
                poll.unregister(connection)
                connection.close()
    seconds = time.perf_counter() - start
    chunks = sum(data.count(b"data: {") for data in received)
    if chunks != sum(request["max_tokens"] for request in requests):
        raise RuntimeError(f"There were {chunks} chunks, not one for each token.")
    return {
        "seconds": seconds,
        "ttft": statistics.median(firsts.values()),
        "cpu": time.process_time() - cpu,
    }


def measure(options: argparse.Namespace, params: jllm.Params, device_ms: float) -> dict[str, Any]:
    """Medians of the repetitions, and what they make."""
    config = jllm.EngineConfig(
        max_num_seqs=options.streams,
        max_model_len=options.input_len + options.output_len,
        decode_buckets=(options.streams,),
        prefix_cache="naive",  # or the repetitions would find their prompts
        stats_interval_s=None,
    )
    requests = bodies(options)
    engine, served = (with_device(jllm.Engine(params, config), device_ms) for _ in range(2))
    seconds: dict[str, list[float]] = collections.defaultdict(list)
    with engine, Server(served, ServerOptions(port=0, warm_up=False)) as server:
        for _ in range(options.repetitions + 1):  # the first one compiles
            seconds["offline"].append(run_engine(engine, requests, stream=False))
            cpu = cpu_seconds("MainThread")
            seconds["stream"].append(run_engine(engine, requests, stream=True))
            seconds["cpu_of_engine_alone"].append(cpu_seconds("MainThread") - cpu)
            cpu, http_cpu = cpu_seconds("jllm-engine"), cpu_seconds("jllm-http")
            measured = run_clients(server.url, requests)
            seconds["server"].append(measured["seconds"])
            seconds["server_ttft"].append(measured["ttft"])
            seconds["cpu_of_engine_thread"].append(cpu_seconds("jllm-engine") - cpu)
            seconds["cpu_of_http_thread"].append(cpu_seconds("jllm-http") - http_cpu)
            seconds["cpu_of_clients"].append(measured["cpu"])
            wall, cpu = run_floor(requests)
            seconds["floor"].append(wall)
            seconds["cpu_of_floor"].append(cpu)
    medians = {name: statistics.median(values[1:]) for name, values in seconds.items()}
    tokens = options.streams * options.output_len
    return {
        "device_ms": device_ms,
        "server_over_stream": medians["server"] / medians["stream"],
        "server_over_offline": medians["server"] / medians["offline"],
        "us_of_cpu_per_token": {
            "http_thread": medians["cpu_of_http_thread"] / tokens * 1e6,
            "engine_thread_more_than_alone": (
                medians["cpu_of_engine_thread"] - medians["cpu_of_engine_alone"]
            )
            / tokens
            * 1e6,
            "floor": medians["cpu_of_floor"] / tokens * 1e6,
            "clients": medians["cpu_of_clients"] / tokens * 1e6,
        },
        "tokens_per_s": {name: tokens / medians[name] for name in ("offline", "stream", "server")},
        "seconds": medians,
        "server_seconds": seconds["server"][1:],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--config", default="tiny", help="a preset, with random weights")
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--input-len", type=int, default=32)
    parser.add_argument("--output-len", type=int, default=128)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--device-ms", type=float, nargs="+", default=[0.0, 10.0, 20.0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--client", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.client:
        print(json.dumps(client(options.client, json.load(sys.stdin))))
        return
    model = jllm.ModelConfig.preset(options.config)
    params = jllm.init(model, jax.random.key(0)).replace(tokenizer=letters(model.vocab_size))
    result = {
        "command": "python benchmarks/server_overhead.py " + " ".join(sys.argv[1:]),
        **{name: getattr(options, name) for name in ("config", "streams", "input_len")},
        "output_len": options.output_len,
        "device": jax.devices()[0].device_kind,
        "cpus": os.cpu_count(),
        "machine": platform.machine(),
        "jax": jax.__version__,
        "python": platform.python_version(),
        "runs": [measure(options, params, device_ms) for device_ms in options.device_ms],
    }
    text = json.dumps(result, indent=1)
    print(text)
    if options.out:
        options.out.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
