"""The command line of ``jllm serve``. Imports nothing that only a server needs."""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
import os
import resource
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import jllm
from jllm.weights import hub

DEFAULTS_KEPT = ("temperature", "top_p", "top_k")  # of generation_config.json


def add_options(parser: argparse.ArgumentParser) -> None:
    """Options of the server, then a flag for each field of EngineConfig."""
    group = parser.add_argument_group("server")
    option = group.add_argument
    option("--host", default="127.0.0.1", help="0.0.0.0 serves other machines too")
    option("--port", type=int, default=8000, help="0 takes a free one")
    option("--served-model-name", nargs="+", metavar="NAME", help="instead of --model's")
    option("--api-key", help="required of requests under /v1; else $JLLM_API_KEY, if that is set")
    option("--chat-template", metavar="FILE", help="Jinja, instead of the model's own")
    option(
        "--tool-call-parser",
        metavar="FORMAT",
        help="how the model writes tool calls, hermes or llama3_json; else as its template shows",
    )
    option(
        "--generation-config",
        choices=("auto", "none"),
        default="auto",
        help="auto: temperature, top_p and top_k of the model's generation_config.json are the "
        "defaults of requests",
    )
    option("--max-waiting", type=int, help="samples that may wait, before more get status 429")
    option("--max-n", type=int, default=128, help="most samples of one prompt")
    option("--no-warm-up", action="store_true", help="compile programs when they are first needed")
    option("--step-timeout-s", type=float, default=120.0, help="a longer step counts as stuck")
    option("--shutdown-timeout-s", type=float, default=30.0, help="for requests to end")
    option("--access-log", action="store_true", help="log a line per request")
    engine = parser.add_argument_group("engine", "explained in jllm/config.py")
    hints = get_type_hints(jllm.EngineConfig)
    for field in dataclasses.fields(jllm.EngineConfig):
        flag = "--" + field.name.replace("_", "-")
        shown = f"EngineConfig.{field.name}"
        engine.add_argument(flag, default=field.default, help=shown, **_kind(hints[field.name]))


def run(options: argparse.Namespace, load: Callable[[argparse.Namespace], jllm.Params]) -> None:
    """Serves the model that ``load`` gives until the process is told to stop.

    Raises ValueError or FileNotFoundError for a model or options that cannot be served.
    """
    try:
        from jllm.server import Server, ServerOptions
    except ImportError as error:
        raise ValueError(f"serve needs {error.name}: pip install 'jllm[server]'.") from error
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s: %(message)s")
    _allow_many_connections()
    names = tuple(options.served_model_name or (options.model,))
    server_options = ServerOptions(
        host=options.host,
        port=options.port,
        served_model_name=names,
        model=options.model,
        api_key=os.environ.get("JLLM_API_KEY") if options.api_key is None else options.api_key,
        chat_template=_chat_template(options.chat_template),
        tool_call_parser=options.tool_call_parser,
        sampling_defaults=_sampling_defaults(options),
        max_waiting=options.max_waiting,
        max_n=options.max_n,
        warm_up=not options.no_warm_up,
        step_timeout_s=options.step_timeout_s,
        shutdown_timeout_s=options.shutdown_timeout_s,
        access_log=options.access_log,
    )
    config = engine_config(options)
    server = Server(jllm.Engine(load(options), config), server_options)
    try:
        server.run()
    except OSError as error:
        raise ValueError(f"Cannot listen on {options.host}:{options.port}: {error}.") from error


def engine_config(options: argparse.Namespace) -> jllm.EngineConfig:
    """What the flags say; raises ValueError for what cannot be."""
    names = [field.name for field in dataclasses.fields(jllm.EngineConfig)]
    return jllm.EngineConfig(**{name: getattr(options, name) for name in names})


def _kind(hint: Any) -> dict[str, Any]:
    """How argparse reads a field of this type."""
    allowed = [part for part in get_args(hint) if part is not type(None)]
    if get_origin(hint) is Literal:
        return {"choices": get_args(hint)}
    kind = allowed[0] if type(None) in get_args(hint) else hint
    if kind is bool:
        return {"action": argparse.BooleanOptionalAction}
    if get_origin(kind) is tuple:
        return {"type": _integers, "metavar": "N,N"}
    return {"type": kind, "metavar": "N"}


def _integers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))


def _chat_template(path: str | None) -> str | None:
    return None if path is None else Path(path).read_text(encoding="utf-8")


def _sampling_defaults(options: argparse.Namespace) -> Mapping[str, float]:
    """What the model's makers recommend, unless that was turned off. Said once, for it changes
    what a request without these fields gives."""
    if options.generation_config == "none":
        return {}
    file = hub.locate(options.model) / "generation_config.json"
    if not file.is_file():
        return {}
    try:
        recommended = dict(json.loads(file.read_text(encoding="utf-8")))
    except (ValueError, TypeError) as error:
        raise ValueError(f"{file} holds no JSON object: {error}.") from error
    defaults = {
        name: recommended[name] for name in DEFAULTS_KEPT if recommended.get(name) is not None
    }
    if defaults:
        logging.getLogger("jllm.server").info(
            "Requests that do not say otherwise use %s, from %s (--generation-config none: not).",
            defaults,
            file,
        )
    return defaults


def _allow_many_connections() -> None:
    """Each is a file, and many systems allow 1024 unless more is asked for."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 65_536 if most == resource.RLIM_INFINITY else min(most, 65_536)
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, most))
