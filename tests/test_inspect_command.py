"""``jllm inspect`` on a machine as it is: one CPU device, nothing set."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_command_of_the_readme_needs_no_devices_and_no_memory_for_weights() -> None:
    command = re.search(r"^jllm (inspect .*--tp \d+) ", README, re.MULTILINE)
    assert command is not None
    # Not getrusage: a new process begins with the peak of the one that started it.
    code = f"""
import re
from jllm.cli import main
main({command[1].split()!r})
print("peak", re.search(r"VmHWM:\\s*(\\d+) kB", open("/proc/self/status").read())[1])
"""
    env = {k: v for k, v in os.environ.items() if k not in ("XLA_FLAGS", "JAX_PLATFORMS")}
    run = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=env, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr
    assert "80  x all-reduce  attention  bf16[64,8192]" in run.stdout
    peak_kb = int(run.stdout.split()[-1])
    assert peak_kb < 4e6  # the weights alone are 141 GB


def test_explain_is_found_where_the_readme_says() -> None:
    code = "import jllm; print(jllm.parallel.explain.__name__)"
    run = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert run.stdout.split() == ["explain"]
