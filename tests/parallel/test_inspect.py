"""``explain`` against engines that really run on eight devices, and ``jllm inspect``."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections import Counter
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import jllm
from jllm.cli import main
from jllm.engine import runner
from jllm.parallel import compare, explain
from jllm.parallel.inspect import gpus, memory, picture, text
from jllm.parallel.inspect.collectives import Collective, collectives
from jllm.parallel.inspect.gpus import GPUS
from jllm.parallel.inspect.holders import parts
from jllm.parallel.sharding import place
from tests.parallel.models import MODELS, config, split, weights

LLAMA_70B = jllm.ModelConfig.preset("llama-3.1-70b")
RESULTS = Path(__file__).parents[2] / "benchmarks/results"


@pytest.fixture(autouse=True)
def _no_gpu_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """These tests are of fake devices, also where the plugin is installed."""
    monkeypatch.setattr(gpus, "compile_only", lambda gpu, count: None)


@functools.cache
def explained(model: str, tp: int) -> Any:
    return explain(MODELS[model], jllm.make_mesh(tp=tp), config())


def bfloat16(model: str, tp: int) -> jllm.Params:
    params = jax.tree.map(lambda x: x.astype("bfloat16"), weights(model))
    return params if tp == 1 else place(params, jllm.make_mesh(tp=tp))


@pytest.mark.parametrize("tp", [1, 2, 8])
@pytest.mark.parametrize("model", MODELS)
def test_weights_take_what_they_really_take_on_each_device(model: str, tp: int) -> None:
    real: Counter[str] = Counter()
    for path, leaf in jax.tree.leaves_with_path(bfloat16(model, tp)):
        real[path[-1].name] += leaf.addressable_shards[0].data.nbytes
    found = memory.weights(MODELS[model], tp)
    assert {weight.name: weight.local_bytes for weight in found} == real


@pytest.mark.parametrize(("model", "tp"), [("biased", 2), ("tied", 8)])
def test_kv_blocks_are_those_that_an_engine_makes(
    model: str, tp: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A GPU with room for weights, a step, and a few blocks in 0.9 of its memory.
    params = bfloat16(model, tp)
    held = sum(leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(params))
    engine_config = config(num_kv_blocks=None, max_model_len=None, max_num_seqs=256)
    engine_config = dataclasses.replace(engine_config, decode_buckets=(256,))
    slack = memory.sized(MODELS[model], tp, engine_config, GPUS["h200"])[0].slack
    room = 50_000
    small = dataclasses.replace(GPUS["h200"], memory_bytes=math.ceil((held + slack + room) / 0.9))
    found, _ = memory.sized(MODELS[model], tp, engine_config, small)

    resolve = runner.resolve
    stats = {"bytes_limit": small.limit_bytes, "bytes_in_use": held}
    monkeypatch.setattr(
        runner, "resolve", lambda *args, **kw: resolve(*args, **{**kw, "memory": stats})
    )
    with jllm.Engine(params, engine_config) as engine:
        assert found.num_blocks == engine._runner.config.num_kv_blocks
        cache = engine._runner.cache
        real = sum(kv.addressable_shards[0].data.nbytes // len(kv) for kv in cache)
        assert found.block == real
        tables = (engine._runner.tokens, *engine._runner.rules)
        assert found.tables == sum(table.nbytes for table in tables)
    assert room - found.block < found.kv <= room
    assert found.tokens == found.num_blocks * 16
    heads = MODELS[model].num_kv_heads
    assert found.copies == max(1, tp // heads)


@pytest.mark.parametrize("tp", [2, 8])
@pytest.mark.parametrize("model", MODELS)
def test_a_step_sums_twice_a_layer_and_exchanges_one_thing_to_sample(model: str, tp: int) -> None:
    found, layers = explained(model, tp), MODELS[model].num_layers
    for step, tokens in ((found.decode, 4), (found.prefill, 32)):
        sums = [one for one in step.collectives if one.kind == "all-reduce"]
        places = Counter(one.place for one in sums)
        assert places == {"embed": 1, "attention": layers, "mlp": layers}
        assert {one.num_bytes for one in sums} == {tokens * 64 * 2}  # E is 64, two bytes each
        (sampling,) = (one for one in step.collectives if one.kind != "all-reduce")
        # A float and an id of each row and device.
        assert (sampling.kind, sampling.place) == ("all-gather", "sampling")
        assert sampling.num_bytes == tp * step.spec.num_rows * 8
        assert step.temporaries > 0


def test_one_device_says_nothing_to_others() -> None:
    found = explained("tied", 1)
    assert not found.decode.collectives and found.decode.time.link == 0


def test_collectives_of_layers_that_were_not_compiled_are_those_of_a_model_that_was() -> None:
    model = dataclasses.replace(MODELS["tied"], num_layers=4, sliding_layers=(True, False) * 2)
    few = explain(model, 4, config(), compiled_layers=2)
    every = explain(model, 4, config(), compiled_layers=4)
    assert (few.compiled_layers, every.compiled_layers) == (2, 4)
    for one, other in ((few.decode, every.decode), (few.prefill, every.prefill)):
        assert sorted(map(str, one.collectives)) == sorted(map(str, other.collectives))


def test_bytes_over_the_link_are_those_of_a_ring() -> None:
    def bytes_of(kind: str) -> float:
        return Collective(kind, "", 800, "mlp").link_bytes(8)

    assert bytes_of("all-reduce") == 2 * 700  # each device sends 7 parts twice
    assert bytes_of("all-gather") == 700
    assert bytes_of("reduce-scatter") == 7 * 800  # the result is an eighth of what went in


def test_asynchronous_and_combined_collectives_are_counted_once() -> None:
    program = """
  %s = ((bf16[4,8]{1,0}), bf16[4,8]{1,0}) all-reduce-start(%x), to_apply=%add, metadata={op_name="jit(f)/layer3/jit(block)/mlp/psum"}
  %d = bf16[4,8]{1,0} all-reduce-done(%s), metadata={op_name="jit(f)/layer3/jit(block)/mlp/psum"}
  %g = (s32[2,4]{1,0}, pred[16]{0}) all-gather(%a, %b), dimensions={0}
  %p = f32[4,8]{1,0} all-reduce(%x), to_apply=%region_1.2_promoted
  %f = bf16[4,8]{1,0} fusion(%d), metadata={op_name="all-reduce(no)"}
"""  # noqa: E501
    assert collectives(program, "sampling") == [
        Collective("all-reduce", "bf16[4,8]", 64, "mlp", 3),
        Collective("all-gather", "s32[2,4], pred[16]", 48, "sampling"),
        Collective("all-reduce", "bf16[4,8]", 64, "sampling"),
    ]


def test_70b_on_eight_h200s_takes_what_was_computed_by_hand() -> None:
    found = explain(LLAMA_70B, 8, batch=64, context=2048)
    layer = 8192 * (10 * 8 * 128 + 64 * 128 + 2 * 28672 + 28672)
    split_weights = 80 * layer + 2 * 128_256 * 8192
    norms = 161 * 8192
    assert found.memory.weights == 2 * (split_weights // 8 + norms)
    assert found.memory.token == 2 * 80 * 128 * 2  # keys and values, layers, head dim, bytes
    # The rest, but for what a step needs (tests/aot/test_sizing.py).
    free = 0.9 * 150.111e9 - found.memory.weights
    assert 1e9 < free - found.memory.tokens * 40_960 < 2e9
    time = found.decode.time
    assert time.matmuls == pytest.approx(2 * (80 * layer + 128_256 * 8192) / 8 / 4.4e12)
    assert time.attention == pytest.approx(64 * 2048 * 40_960 / 4.4e12)
    sums = 161 * 2 * 7 / 8 * 64 * 8192 * 2
    assert time.link == pytest.approx(sums / 450e9, rel=1e-4)
    assert time.total == pytest.approx(5.83e-3, rel=1e-2)
    # Of two key/value heads each device would have a copy of one, and as much to read.
    copied = explain(dataclasses.replace(LLAMA_70B, num_kv_heads=2), 8, compiled_layers=2)
    assert copied.decode.time.attention == pytest.approx(time.attention)
    # Four prompts of 2048 tokens: what limits them is arithmetic.
    assert found.prefill.tokens == 8192
    flops = 2 * (8192 * 80 * layer + 4 * 128_256 * 8192)
    assert found.prefill.time.matmuls == pytest.approx(flops / 8 / 790e12)


@pytest.mark.parametrize(("model", "tp"), [("biased", 8), ("tied", 4), ("tied", 2)])
def test_the_picture_shows_what_each_device_really_holds(model: str, tp: int) -> None:
    whole, placed = weights(model), split(model, tp)
    c, held = whole.config, {part.name: part.held for part in parts(whole.config, tp)}
    layer, group = whole.layers[0], c.group_size
    queries = np.asarray(layer.wqkv[:, :, :-2]).reshape(c.hidden_size, c.num_heads, c.head_dim)
    for device in range(tp):

        def local(array: jax.Array, device: int = device) -> np.ndarray:
            return np.asarray(array.addressable_shards[device].data)

        def cut(name: str, device: int = device) -> slice:
            return slice(*held[name][device])

        mine = local(placed.layers[0].wqkv)
        np.testing.assert_array_equal(
            mine[:, :, :-2].reshape(c.hidden_size, -1, c.head_dim),
            queries[:, cut("wqkv, queries")],
        )
        np.testing.assert_array_equal(
            mine[:, :, -2:], layer.wqkv[:, cut("wqkv, keys and values"), -2:]
        )
        rows = np.asarray(layer.wo).reshape(c.num_kv_heads * group, c.head_dim, -1)[cut("wo")]
        np.testing.assert_array_equal(local(placed.layers[0].wo).reshape(rows.shape), rows)
        ids = whole.embed[cut("embed")]
        np.testing.assert_array_equal(local(placed.embed)[: len(ids)], ids)
        down = layer.w_down[cut("w_down")]
        np.testing.assert_array_equal(local(placed.layers[0].w_down), down)
    copied = {part.name for part in parts(c, tp) if part.copied}
    assert ("KV cache" in copied) == (tp > c.num_kv_heads)
    assert ("lm_head" in held) == (not c.tie_embeddings)


def test_layouts_stand_side_by_side_and_what_cannot_be_says_why() -> None:
    layouts = compare(LLAMA_70B, (1, 3, 8))
    assert [layout.tp for layout in layouts if layout.explanation] == [8]
    shown = text.comparison(layouts)
    assert "tp=1: The weights do not fit: 141.1 GB on each of 1 h200" in shown
    assert "tp=3: tp=3 must divide num_heads, 64." in shown
    eight = layouts[2].explanation
    assert eight is not None
    row = next(line for line in shown.splitlines() if "KV blocks" in line)
    assert row.split()[2:] == ["-", "-", f"{eight.memory.num_blocks:,}"]
    bars = picture.comparison(layouts).axes[0].patches
    assert sum(bar.get_height() for bar in bars) * 1e9 == pytest.approx(
        eight.memory.usable, rel=1e-3
    )
    with pytest.raises(ValueError, match="no layout fits"):
        picture.comparison(layouts[:2])


def test_the_command_prints_and_plots(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plot = tmp_path / "plot.png"
    arguments = ["inspect", "--config=tiny", "--tp=4", "--gpu=l40s", "--batch=40"]
    main([*arguments, "--max-num-seqs=48", "--compare=2", f"--plot={plot}"])
    shown = capsys.readouterr().out
    asked = jllm.EngineConfig(max_num_seqs=48)
    found, _ = memory.sized(jllm.ModelConfig.preset("tiny"), 4, asked, GPUS["l40s"])
    for number in (found.weights, found.num_blocks, found.tokens):
        assert f"{number:,}" in shown
    assert "2  x all-reduce  attention  bf16[48,64]  6.14 kB" in shown  # padded to a bucket
    assert "decode of 40 rows" in shown and "Layouts side by side on l40s" in shown
    assert plot.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--config=nope"], "'nope' is neither a preset (tiny, "),
        (["--config=llama-3.1-70b", "--tp=7"], "tp=7 must divide num_heads, 64."),
        (["--config=llama-3.1-70b"], "The weights do not fit: 141.1 GB on each of 1 h200"),
        (["--config=tiny", "--batch=1000"], "batch must be between 1 and max_num_seqs, 256, not"),
        (["--config=tiny", "--context=9999"], "context must be between 1 and max_model_len, 2048"),
        (["--config=tiny", "--compiled-layers=1"], "compiled_layers must be at least 2, not 1."),
        (["--config=llama-3.1-70b", "--tp=64"], "there are 8, and jax.config.update("),
        (["--config=tiny", "--gpu=v100"], "invalid choice: 'v100'"),
    ],
    ids=lambda value: value[-1] if isinstance(value, list) else "",
)
def test_what_cannot_be_inspected_is_one_sentence(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["inspect", *arguments])
    error = capsys.readouterr().err
    assert message in error and "Traceback" not in error


@pytest.mark.parametrize("mesh", [0, True, "8", jax.make_mesh((2, 4), ("a", "b"))], ids=str)
def test_what_is_no_mesh_is_refused(mesh: Any) -> None:
    with pytest.raises(ValueError, match=r"tp must be at least 1|mesh must have the one axis"):
        explain(MODELS["tied"], mesh)
    with pytest.raises(ValueError, match="explain needs a ModelConfig"):
        explain("tiny", 2)  # type: ignore[arg-type]
