"""``python -m jllm.bench``, also ``jllm bench``: one subcommand per question.

python -m jllm.bench latency --config qwen3-0.6b --suite quick --out latency.json
python -m jllm.bench throughput --config qwen3-0.6b --rows tp_128_128_out_tok_s
python -m jllm.bench compare benchmarks/baselines/vllm-0.24.0-h200.json latency.json
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from typing import NamedTuple

from jllm.bench import compare, kernels, profile, report, serve, startup, suite


class Command(NamedTuple):
    """A subcommand: its help, its options, and what it does; the result is the exit code."""

    help: str
    add_options: Callable[[argparse.ArgumentParser], None]
    main: Callable[[argparse.Namespace], int]


COMMANDS = {
    "throughput": Command(
        "whole workloads sent at once: tokens per second",
        suite.add_throughput_options,
        suite.throughput_main,
    ),
    "latency": Command(
        "fixed batches: time to the first token and per output token",
        suite.add_latency_options,
        suite.latency_main,
    ),
    "serve": Command("load on an OpenAI-compatible server", serve.add_options, serve.main),
    "kernels": Command("each op on its real shapes", kernels.add_options, kernels.main),
    "profile": Command("kernels of a decode step", profile.add_options, profile.main),
    "startup": Command("cold and warm start", startup.add_options, startup.main),
    "compare": Command("ratios of two result files", compare.add_options, compare.main),
    "report": Command("one page from result files", report.add_options, report.main),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one subcommand; a user's mistake is one sentence and exit code 2."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    parser = argparse.ArgumentParser(prog="jllm bench", description="Benchmarks of jllm.")
    commands = parser.add_subparsers(required=True, metavar="command", dest="command")
    for name, command in COMMANDS.items():
        sub = commands.add_parser(name, help=command.help, description=command.help)
        command.add_options(sub)
    options = parser.parse_args(arguments)
    options.arguments = arguments
    try:
        return COMMANDS[options.command].main(options)
    except (ValueError, FileNotFoundError) as error:
        print(f"jllm bench: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
