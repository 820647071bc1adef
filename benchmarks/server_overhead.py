"""What does the server add to the engine's time?

    python benchmarks/server_overhead.py [--config qwen3-0.6b] [--out FILE.json]

The same requests, all at once, alternately to an engine in this process (offline: outputs at the
end; stream: a delta per step and request) and through the HTTP server around it, each a stream of
server-sent events with a client that reads it, in a process of its own. Prints seconds, tokens per
second, and the server's wall time over that of the streaming engine. Medians of the repetitions.

``--device-ms`` makes every step take so much longer, asleep: a device at work, which leaves the CPU
to the server. Without it XLA, the server and the clients share the CPU's cores.
"""

from __future__ import annotations

import argparse
import json
import platform
import selectors
import socket
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any, cast

import jax
import numpy as np

import jllm
from jllm.server import Server, ServerOptions

BODY_END = b"0\r\n\r\n"


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
    """An engine whose steps wait for a device besides."""
    step = engine.step

    def slower() -> list[jllm.RequestOutput]:
        outputs = step()
        time.sleep(milliseconds / 1000)
        return outputs

    if milliseconds:
        engine.step = slower  # type: ignore[method-assign]
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


def client(url: str, requests: list[dict[str, Any]]) -> dict[str, float]:
    """Opens a connection per request, sends all at once, reads every stream to its end. No more
    than that is done per chunk: clients are not what is measured."""
    host, _, port = url.removeprefix("http://").partition(":")
    poll = selectors.DefaultSelector()
    connections = [socket.create_connection((host, int(port))) for _ in requests]
    start = time.perf_counter()
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
            data += connection.recv(65536)
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
    return {"seconds": seconds, "ttft": statistics.median(firsts.values())}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--config", default="tiny", help="a preset, with random weights")
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--input-len", type=int, default=32)
    parser.add_argument("--output-len", type=int, default=128)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--device-ms", type=float, default=0.0)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--client", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.client:
        print(json.dumps(client(options.client, json.load(sys.stdin))))
        return
    config = jllm.EngineConfig(
        max_num_seqs=options.streams,
        max_model_len=options.input_len + options.output_len,
        decode_buckets=(options.streams,),
        stats_interval_s=None,
    )
    params = jllm.init(jllm.ModelConfig.preset(options.config), jax.random.key(0))
    requests = bodies(options)
    engine, served = (with_device(jllm.Engine(params, config), options.device_ms) for _ in "12")
    times: dict[str, list[float]] = {
        name: []
        for name in (
            *("offline", "stream", "server", "ttft"),
            *("stream_cpu", "engine_cpu", "http_cpu"),  # of the engine alone; of the two threads
        )
    }
    with Server(served, ServerOptions(port=0, warm_up=False)) as server:
        for _ in range(options.repetitions + 1):  # the first one compiles
            times["offline"].append(run_engine(engine, requests, stream=False))
            alone = cpu_seconds("MainThread")
            times["stream"].append(run_engine(engine, requests, stream=True))
            times["stream_cpu"].append(cpu_seconds("MainThread") - alone)
            http, thread = cpu_seconds("jllm-http"), cpu_seconds("jllm-engine")
            measured = run_clients(server.url, requests)
            times["server"].append(measured["seconds"])
            times["ttft"].append(measured["ttft"])
            times["http_cpu"].append(cpu_seconds("jllm-http") - http)
            times["engine_cpu"].append(cpu_seconds("jllm-engine") - thread)
    engine.close()
    medians = {name: statistics.median(values[1:]) for name, values in times.items()}
    tokens = options.streams * options.output_len
    result = {
        "config": options.config,
        "streams": options.streams,
        "input_len": options.input_len,
        "output_len": options.output_len,
        "device_ms": options.device_ms,
        "seconds": medians,
        "all_seconds": {name: values[1:] for name, values in times.items()},
        "tokens_per_s": {name: tokens / medians[name] for name in ("offline", "stream", "server")},
        "http_cpu_us_per_token": medians["http_cpu"] / tokens * 1e6,
        "server_over_stream": medians["server"] / medians["stream"],
        "server_over_offline": medians["server"] / medians["offline"],
        "device": jax.devices()[0].device_kind,
        "machine": platform.machine(),
        "jax": jax.__version__,
        "python": platform.python_version(),
    }
    print(json.dumps(result, indent=1))
    if options.out:
        options.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
