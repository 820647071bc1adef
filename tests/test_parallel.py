"""Runs tests/parallel on eight fake devices."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent


def test_everything_in_tests_parallel_passes_on_eight_devices() -> None:
    command = [sys.executable, "-m", "pytest", "-q", "--no-header", "tests/parallel"]
    env = {**os.environ, "JLLM_TEST_DEVICES": "8"}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
