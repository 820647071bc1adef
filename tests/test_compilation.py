"""What one process compiled, the next reads from disk."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

OF_THE_TESTS = ("JAX_COMPILATION_CACHE_DIR", "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS")

PROGRAM = """
import collections, json
import jax, jllm
from jllm.models.sampler import SamplerSpec

counts = collections.Counter()
jax.monitoring.register_event_listener(lambda event, **_: counts.update([event]))
params = jllm.init(jllm.ModelConfig.preset("tiny"), jax.random.key(0))
config = jllm.EngineConfig(
    max_num_seqs=2, max_model_len=64, decode_buckets=(2,), prefill_buckets=(16,), decode_repeats=2
)
with jllm.Engine(params, config) as engine:
    engine.warm_up([SamplerSpec()])
print(json.dumps([counts[f"/jax/compilation_cache/cache_{name}"] for name in ("hits", "misses")]))
"""

WHERE = """
import json
import jax
from jllm.compilation import use_compilation_cache

use_compilation_cache()
print(json.dumps(jax.config.jax_compilation_cache_dir))
"""


def run(program: str, home: Path, **variables: str) -> Any:
    """What a program prints that keeps its files in ``home``, and not where the tests do."""
    env = {
        **{name: value for name, value in os.environ.items() if name not in OF_THE_TESTS},
        "XDG_CACHE_HOME": str(home),
        **variables,
    }
    done = subprocess.run(
        [sys.executable, "-c", program], env=env, capture_output=True, text=True, check=True
    )
    return json.loads(done.stdout.splitlines()[-1])


def test_a_second_start_compiles_nothing(tmp_path: Path) -> None:
    found, compiled = run(PROGRAM, tmp_path)
    assert compiled > 10 and found == 0
    assert run(PROGRAM, tmp_path) == [compiled, 0]
    assert any((tmp_path / "jllm").rglob("*-cache"))


def test_the_cache_can_be_moved_and_turned_off(tmp_path: Path) -> None:
    assert run(WHERE, tmp_path) == str(tmp_path / "jllm" / "xla")
    assert run(WHERE, tmp_path, JAX_COMPILATION_CACHE_DIR="/elsewhere") == "/elsewhere"
    assert run(WHERE, tmp_path, JAX_ENABLE_COMPILATION_CACHE="0") is None
