"""Schemathesis reads the server's OpenAPI document and asks whatever it allows, and what not."""

from __future__ import annotations

import os
import subprocess
import sys


def test_no_input_is_the_servers_fault(server: str) -> None:
    command = [sys.executable, "-m", "schemathesis.cli", "run", server + "/openapi.json"]
    checks = "not_a_server_error,content_type_conformance,response_schema_conformance"
    options = ["--checks", checks, "--max-examples", "25", "--seed", "1", "--phases", "fuzzing"]
    env = {**os.environ, "SCHEMATHESIS_HOOKS": "tests.clients.schemathesis_hooks"}
    done = subprocess.run(
        [*command, *options], capture_output=True, text=True, timeout=200, env=env
    )
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
