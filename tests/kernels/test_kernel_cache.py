"""Compiled kernels are kept on disk, whatever becomes of the files."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")
pytest.importorskip("jax_triton")

from jllm.kernels.kernel_cache import kept


@dataclass
class Kernel:
    binary: str
    shared: int
    scratch: int | None = None


def compiler(folder: Path) -> tuple[list[str], Callable[..., Any]]:
    """What is compiled from here on, and the compiler of a new process."""
    compiled: list[str] = []

    def compile_it(ttir: str, backend: None, options: str, target: str) -> Kernel:
        compiled.append(ttir)
        return Kernel(f"{ttir} for {target} with {options}", len(ttir))

    return compiled, kept(compile_it, Kernel, folder)


def test_a_second_process_compiles_only_what_is_new(tmp_path: Path) -> None:
    kernels = [("a", None, "o", "sm90"), ("a", None, "p", "sm90"), ("a", None, "o", "sm80")]
    _, first = compiler(tmp_path / "new" / "folder")
    expected = [first(*kernel) for kernel in kernels]
    compiled, second = compiler(tmp_path / "new" / "folder")
    assert [second(*kernel) for kernel in kernels] == expected
    assert compiled == []
    second("b", None, "o", "sm90")
    assert compiled == ["b"]


def test_threads_compile_a_kernel_once(tmp_path: Path) -> None:
    compiled, find = compiler(tmp_path)
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda _: find("a", None, "o", "sm90"), range(32)))
    assert compiled == ["a"] and found == [found[0]] * 32


@pytest.mark.parametrize("content", ["", "{", "[]", '{"unknown": 1}'])
def test_a_damaged_file_is_compiled_again(content: str, tmp_path: Path) -> None:
    compiler(tmp_path)[1]("a", None, "o", "sm90")
    (file,) = tmp_path.iterdir()
    file.write_text(content)
    compiled, find = compiler(tmp_path)
    assert find("a", None, "o", "sm90").shared == 1
    assert compiled == ["a"]
    compiled, find = compiler(tmp_path)
    find("a", None, "o", "sm90")
    assert compiled == []


def test_a_folder_that_cannot_be_written_stops_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    compiled, find = compiler(tmp_path / "file" / "folder")
    assert find("a", None, "o", "sm90").shared == 1 and compiled == ["a"]
