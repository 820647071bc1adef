"""Types of command-line arguments: what is wrong is said before any work."""

from __future__ import annotations

import argparse
from pathlib import Path


def positive(text: str) -> int:
    """An integer of at least 1, for argparse."""
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be an integer of at least 1 and not {text!r}")
    return value


def int_list(text: str) -> tuple[int, ...]:
    """``1,16`` -> (1, 16), for argparse."""
    return tuple(positive(part) for part in text.split(","))


def output_file(text: str) -> str:
    """A path that a record can be written to, for argparse: found out before the work."""
    path = Path(text)
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"must be a file, but {text!r} is a folder")
    if not path.absolute().parent.is_dir():
        raise argparse.ArgumentTypeError(f"there is no folder {str(path.parent)!r} to write it in")
    return text
