"""The arrows of the design: who may import whom, read from the source without running it."""

import ast
import glob
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parent.parent

TEXT = ["jllm.chat_template", "jllm.detokenizer", "jllm.tokenizer", "jllm.tokenizer_files"]
DATA = [
    "jllm.compilation",
    "jllm.config",
    "jllm.gpu_memory",
    "jllm.presets",
    "jllm.roofline",
    "jllm.sampling_params",
    "jllm.structured",
    "jllm.outputs",
    "jllm.params",
    *TEXT,
]
ENGINE = [*DATA, "jllm.cache", "jllm.engine", "jllm.models", "jllm.parallel", "jllm.weights"]

# Module or package -> what it may import of jllm, besides itself. The longest row that matches
# counts, and everything under jllm/ needs one. "jllm" is the top-level package alone, which
# offers all of it: nothing below api may import that.
MAY_IMPORT = {
    "jllm.kernels": [],
    "jllm.compilation": ["jllm.kernels"],
    "jllm.config": [],
    "jllm.gpu_memory": [],
    "jllm.plotting": [],
    "jllm.presets": ["jllm.config"],
    "jllm.roofline": ["jllm.config"],
    "jllm.sampling_params": ["jllm.structured"],
    "jllm.structured": [],
    "jllm.outputs": [],
    **dict.fromkeys(TEXT, TEXT),
    "jllm.params": ["jllm.compilation", "jllm.config", "jllm.tokenizer"],
    "jllm.models": ["jllm.kernels", "jllm.config", "jllm.params"],
    "jllm.parallel": ["jllm.config", "jllm.params"],
    # Above the engine: it compiles its steps, and runs nothing.
    "jllm.parallel.inspect": [*ENGINE, "jllm.kernels", "jllm.plotting"],
    "jllm.weights": ["jllm.config", "jllm.models", "jllm.parallel", "jllm.params", *TEXT],
    "jllm.cache": [],
    "jllm.engine": ENGINE,
    "jllm.api": ENGINE,
    "jllm.server": [*ENGINE, "jllm", "jllm.api"],
    "jllm.bench": [*ENGINE, "jllm", "jllm.api", "jllm.kernels", "jllm.plotting", "jllm.server"],
    "jllm.inspect_command": [*ENGINE, "jllm.bench", "jllm.parallel.inspect", "jllm.plotting"],
    "jllm.cli": [*ENGINE, "jllm", "jllm.api", "jllm.server", "jllm.bench", "jllm.inspect_command"],
    "jllm.__main__": ["jllm.cli"],
    "jllm": [*ENGINE, "jllm.api"],
}

# Against the arrows, inside a function or for types only: a user finds these where the thing is
# defined.
LAZY = {
    ("jllm.config", "jllm.models.families"),
    ("jllm.config", "jllm.presets"),
    ("jllm.parallel", "jllm.parallel.inspect"),
    ("jllm.params", "jllm.parallel.sharding"),
    ("jllm.params", "jllm.weights.hub"),
}

# Library -> the only places that may import it.
ONLY_IN = {
    "triton": ["jllm.kernels"],
    "jax_triton": ["jllm.kernels"],
    "torch": [],
    "kernels": [],  # Hugging Face's package; ours is jllm.kernels
}

# The host loop is plain Python and numpy: whatever touches a device goes through these two.
JAX = ["jax", "jaxlib", "flax"]
JAX_IN_ENGINE = ["jllm.engine.step", "jllm.engine.runner", "jllm.engine.warm_up"]


class Import(NamedTuple):
    target: str  # "jllm.config.ModelConfig" for `from jllm.config import ModelConfig`
    line: int
    lazy: bool


def within(name: str, package: str) -> bool:
    return name == package or (package != "jllm" and name.startswith(package + "."))


def row(name: str) -> str | None:
    return max((r for r in MAY_IMPORT if within(name, r)), key=len, default=None)


def imports(source: str, module: str, is_package: bool) -> list[Import]:
    """All imports of a module, those in functions and under TYPE_CHECKING included."""
    tree = ast.parse(source)
    lazy = {inner for node in ast.walk(tree) if _runs_later(node) for inner in ast.walk(node)}
    found = []
    for node in ast.walk(tree):
        targets = []
        if isinstance(node, ast.Import):
            targets = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            parents = module.split(".") if is_package else module.split(".")[:-1]
            base = parents[: len(parents) - node.level + 1] if node.level else []
            base += [node.module] if node.module else []
            targets = [".".join([*base, alias.name]) for alias in node.names]
        found += [Import(target, node.lineno, node in lazy) for target in targets]
    return found


def _runs_later(node: ast.AST) -> bool:
    """A function, or what only type checkers read."""
    checked = isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
    return checked or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)


def objection(module: str, imported: Import) -> str | None:
    """Why `module` may not import this, or None."""
    target, _, lazy = imported
    for library, places in ONLY_IN.items():
        if within(target, library) and not any(within(module, place) for place in places):
            who = f"only {' and '.join(places)}" if places else "nobody"
            return f"{who} may import {library}"
    if (
        within(module, "jllm.engine")
        and module not in JAX_IN_ENGINE
        and any(within(target, library) for library in JAX)
    ):
        return f"in jllm.engine only {' and '.join(JAX_IN_ENGINE)} may import {target}"
    if target.split(".")[0] != "jllm":
        return None
    mine = row(module)
    if mine is None:
        return f"{module} has no row in MAY_IMPORT"
    # `from jllm import Engine` is an import of the top-level package.
    if (row(target) or "jllm") in [mine, *MAY_IMPORT[mine]]:
        return None
    if lazy and any(module == m and within(target, t) for m, t in LAZY):
        return None
    return f"{mine} may not import {target}"


def objections(source: str, module: str, is_package: bool = False) -> list[str]:
    checked = [(i.line, objection(module, i)) for i in imports(source, module, is_package)]
    return [f"line {line}: {why}" for line, why in checked if why]


def test_every_import_follows_the_arrows() -> None:
    # glob, unlike Path.rglob, follows the link jllm/kernels.
    paths = [Path(p) for p in glob.glob("jllm/**/*.py", root_dir=ROOT, recursive=True)]
    assert paths, "no sources found"
    wrong = []
    for path in sorted(paths):
        is_package = path.name == "__init__.py"
        module = ".".join((path.parent if is_package else path.with_suffix("")).parts)
        source = (ROOT / path).read_text()
        wrong += [f"{path} {why}" for why in objections(source, module, is_package)]
        if row(module) is None:
            wrong.append(f"{path}: {module} has no row in MAY_IMPORT")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    ("module", "source", "why"),
    [
        pytest.param(
            "jllm.models.layers",
            "import jllm.engine.step",
            "jllm.models may not import jllm.engine.step",
            id="upwards",
        ),
        pytest.param(
            "jllm.engine.scheduler",
            "from ..server import app",
            "jllm.engine may not import jllm.server.app",
            id="relative",
        ),
        pytest.param(
            "jllm.cache.radix",
            "def f():\n  from jllm.engine.request import Request",
            "jllm.cache may not import jllm.engine.request.Request",
            id="in-function",
        ),
        pytest.param(
            "jllm.engine.batch",
            "if TYPE_CHECKING:\n  import jax.numpy as jnp",
            "in jllm.engine only jllm.engine.step and jllm.engine.runner and jllm.engine.warm_up "
            "may import jax.numpy",
            id="jax-in-host-loop",
        ),
        pytest.param(
            "jllm.engine.engine",
            "from jllm import generate, Engine",
            "jllm.engine may not import jllm.generate",
            id="function-of-the-top-level",
        ),
        pytest.param(
            "jllm.weights.gguf",
            "from jllm import ModelConfig",
            "jllm.weights may not import jllm.ModelConfig",
            id="top-level",
        ),
        pytest.param(
            "jllm.params",
            "from jllm.weights import hub",
            "jllm.params may not import jllm.weights.hub",
            id="lazy-import-not-in-function",
        ),
        pytest.param(
            "jllm.models.attention",
            "import triton.language as tl",
            "only jllm.kernels may import triton",
            id="triton",
        ),
        pytest.param(
            "jllm.models.attention",
            "from kernels import attention",
            "nobody may import kernels",
            id="kernels-by-the-wrong-name",
        ),
        pytest.param(
            "jllm.engine.engine",
            "from jllm.bench.runs import run",
            "jllm.engine may not import jllm.bench.runs.run",
            id="bench-from-below",
        ),
        pytest.param(
            "jllm.engine.step",
            "from jllm.parallel.inspect.explanation import explain",
            "jllm.engine may not import jllm.parallel.inspect.explanation",
            id="a-package-above-its-parent",
        ),
        pytest.param(
            "jllm.extra",
            "from jllm.config import ModelConfig",
            "jllm.extra has no row in MAY_IMPORT",
            id="no-row",
        ),
    ],
)
def test_a_wrong_import_is_named(module: str, source: str, why: str) -> None:
    assert any(why in found for found in objections(source, module))


@pytest.mark.parametrize(
    ("module", "source"),
    [
        pytest.param("jllm.engine.runner", "import jax", id="jax-in-runner"),
        pytest.param("jllm.engine.step", "from .batch import Plan", id="sibling"),
        pytest.param("jllm.models.attention", "from jllm.kernels import norm", id="kernels"),
        pytest.param("jllm.params", "def load():\n  from jllm.weights import hub", id="lazy"),
        pytest.param("jllm.cli", "import jllm\nfrom jllm.server import app", id="cli"),
        pytest.param("jllm.bench.runs", "from jllm.engine.engine import Engine", id="bench"),
    ],
)
def test_a_right_import_is_accepted(module: str, source: str) -> None:
    assert objections(source, module) == []


def test_importing_jllm_loads_nothing_heavy_that_it_may_not_need() -> None:
    heavy = "aiohttp fastapi gguf huggingface_hub jinja2 llguidance matplotlib"
    heavy += " openai orjson prometheus_client pydantic torch transformers triton uvicorn"
    code = f"import jllm.cli, sys; print(*[m for m in {heavy.split()} if m in sys.modules])"
    run = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert run.stdout.split() == []
