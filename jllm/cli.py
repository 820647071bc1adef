"""The command line: ``python -m jllm generate | chat | serve | inspect | bench``."""

from __future__ import annotations

import argparse
import functools
import os
import sys
import time
from collections.abc import Iterator, Sequence

import jllm
from jllm import inspect_command
from jllm.api import chat_prompt
from jllm.params import DTYPES
from jllm.server import arguments as serve_arguments


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs one command; a user's mistake ends it with one sentence and exit code 2."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    if arguments[:1] == ["bench"]:  # has subcommands and options of its own
        from jllm.bench.__main__ import main as bench

        sys.exit(bench(arguments[1:]))
    options = _parser().parse_args(arguments)
    try:
        options.run(options)
    except (ValueError, FileNotFoundError) as error:
        print(f"jllm: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:  # the reader, such as ``head``, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="jllm", description="An LLM inference engine in JAX.")
    parser.add_argument("--version", action="version", version=f"jllm {jllm.__version__}")
    commands = parser.add_subparsers(required=True, metavar="command")
    show_defaults = argparse.ArgumentDefaultsHelpFormatter
    generate = commands.add_parser(
        "generate",
        help="complete a prompt and print it as it comes",
        formatter_class=show_defaults,
    )
    generate.add_argument("--prompt", required=True, help="text to go on from")
    generate.add_argument("--chat", action="store_true", help="treat the prompt as a chat message")
    _add_model_options(generate)
    _add_sampling_options(generate, max_tokens=128)
    generate.set_defaults(run=_generate)
    chat = commands.add_parser(
        "chat", help="talk with a model; an empty line ends it", formatter_class=show_defaults
    )
    chat.add_argument("--system", help="a system message to begin with")
    _add_model_options(chat)
    _add_sampling_options(chat, max_tokens=512)
    chat.set_defaults(run=_chat)
    serve = commands.add_parser(
        "serve", help="an OpenAI-compatible server", formatter_class=show_defaults
    )
    _add_model_options(serve)
    serve_arguments.add_options(serve)
    serve.set_defaults(run=functools.partial(serve_arguments.run, load=_load))
    inspect = commands.add_parser(
        "inspect",
        help="what a model over several GPUs takes and sends, without them",
        formatter_class=show_defaults,
    )
    inspect_command.add_options(inspect)
    inspect.set_defaults(run=inspect_command.run)
    commands.add_parser("bench", help="benchmarks: see jllm bench --help", add_help=False)
    return parser


def _add_model_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model", required=True, help="a folder, a .gguf file, a hub name, or a packaged model"
    )
    option = parser.add_argument
    option("--dtype", choices=DTYPES, help="of the weights; float32 on a CPU, bfloat16 on a GPU")
    option("--tensor-parallel", type=int, default=1, metavar="N", help="devices to split it over")


def _add_sampling_options(parser: argparse.ArgumentParser, max_tokens: int) -> None:
    defaults = jllm.SamplingParams()
    option = parser.add_argument
    option("--max-tokens", type=int, default=max_tokens, help="most tokens to generate")
    option("--temperature", type=float, default=0.0, help="0 is greedy")
    option("--top-k", type=int, default=defaults.top_k, help="draw among the k likeliest; 0: all")
    option("--top-p", type=float, default=defaults.top_p, help="draw among this much probability")
    option("--min-p", type=float, default=defaults.min_p, help="least share of the likeliest's")
    option("--seed", type=int, help="the same seed gives the same text")
    option("--stop", action="append", default=[], help="end at this text; may be repeated")
    option("--ignore-eos", action="store_true", help="do not end where the model would")


def _load(options: argparse.Namespace) -> jllm.Params:
    """The model of ``_add_model_options``, on one device or split over several."""
    tp = options.tensor_parallel
    mesh = None if tp == 1 else jllm.make_mesh(tp=tp)
    return jllm.load(options.model, dtype=options.dtype, mesh=mesh)


def _sampling_params(options: argparse.Namespace) -> jllm.SamplingParams:
    return jllm.SamplingParams(
        max_tokens=options.max_tokens,
        temperature=options.temperature,
        top_k=options.top_k,
        top_p=options.top_p,
        min_p=options.min_p,
        seed=options.seed,
        stop=options.stop,
        ignore_eos=options.ignore_eos,
    )


def _generate(options: argparse.Namespace) -> None:
    sampling_params = _sampling_params(options)
    params = _load(options)
    prompt: str | list[int] = options.prompt
    if options.chat:
        prompt = chat_prompt(params, [{"role": "user", "content": options.prompt}])
    for text in _printed(params, prompt, sampling_params):
        print(text, end="", flush=True)


def _chat(options: argparse.Namespace) -> None:
    sampling_params = _sampling_params(options)
    params = _load(options)
    messages = []
    if options.system:
        messages.append({"role": "system", "content": options.system})
    chat_prompt(params, [*messages, {"role": "user", "content": "Hello"}])  # refuse before asking
    while True:
        try:
            line = input("> ")
        except EOFError:
            break
        if not line.strip():
            break
        answer = ""
        try:
            prompt = chat_prompt(params, [*messages, {"role": "user", "content": line}])
            for text in _printed(params, prompt, sampling_params):
                answer += text
                print(text, end="", flush=True)
        except ValueError as error:  # too long, say: the conversation goes on without this line
            print(f"jllm: {error}", file=sys.stderr)
            continue
        messages.append({"role": "user", "content": line})
        messages.append({"role": "assistant", "content": answer})


def _printed(
    params: jllm.Params, prompt: str | list[int], sampling_params: jllm.SamplingParams
) -> Iterator[str]:
    """Yields the text as it comes, then reports the speed on stderr. The first token's time is
    told apart: it holds loading of the programs and the prompt's prefill."""
    start, first, count = time.perf_counter(), 0.0, 0
    for output in jllm.stream(params, prompt, sampling_params):
        for part in output.outputs:
            count += len(part.token_ids)
            first = first or time.perf_counter()
            yield part.text
    end = time.perf_counter()
    speed = f", then {(count - 1) / (end - first):.1f} tokens/s" if count > 1 else ""
    report = f"[{count} tokens; the first after {first - start:.2f} s{speed}]"
    print(f"\n{report}", file=sys.stderr, flush=True)
