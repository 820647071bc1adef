"""Which meshes and sizes there are, and how params get onto a mesh."""

from __future__ import annotations

import dataclasses
import logging
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from gguf import GGMLQuantizationType
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jllm
from jllm.parallel.sharding import SPECS, place
from jllm.params import Layer, Params
from jllm.weights import safetensors
from tests.parallel.models import MODELS, PROMPTS, answers, config, split, weights
from tests.tiny_model import greedy_params
from tests.weights import test_gguf
from tests.weights.checkpoints import hf_config, hf_tensors, write_folder

CHECKPOINTS: dict[str, Any] = {
    # 11 ids on eight devices: most have none.
    "biased": dict(
        architecture="LlamaForCausalLM",
        attention_bias=True,
        mlp_bias=True,
        num_attention_heads=8,
        num_key_value_heads=2,
        intermediate_size=152,
    ),
    "qk_norm": dict(
        architecture="Qwen3ForCausalLM",
        num_attention_heads=8,
        num_key_value_heads=8,
        intermediate_size=152,
        vocab_size=300,
        tie_word_embeddings=True,
    ),
}


def assert_same(one: Params, other: Params) -> None:
    """The same values in the same places."""
    assert jax.tree.structure(one) == jax.tree.structure(other)
    for (path, a), b in zip(
        jax.tree_util.tree_leaves_with_path(one), jax.tree.leaves(other), strict=True
    ):
        name = jax.tree_util.keystr(path)
        assert a.sharding.is_equivalent_to(b.sharding, a.ndim), name
        np.testing.assert_array_equal(a, b, err_msg=name)


def no_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on a device array that is read by the host fails the test."""
    array = type(jax.numpy.zeros(1))
    monkeypatch.setattr(array, "_value", property(lambda self: pytest.fail("read by the host")))


def test_every_array_of_a_model_has_a_spec() -> None:
    arrays = {f.name for kind in (Params, Layer) for f in dataclasses.fields(kind)}
    assert set(SPECS) == arrays - {"layers", "config", "tokenizer"}


@pytest.mark.parametrize("tp", [0, 9, True, "2"])
def test_a_mesh_of_more_devices_than_there_are_is_refused(tp: Any) -> None:
    with pytest.raises(ValueError, match=f"tp must be between 1 and .*, 8 .cpu., not {tp!r}"):
        jllm.make_mesh(tp=tp)


def test_a_mesh_of_other_axes_is_refused(tmp_path: Path) -> None:
    mesh = training_mesh()
    folder = write_folder(tmp_path / "model", hf_config(), hf_tensors(hf_config()))
    for use in (
        lambda: jllm.Engine(weights("tied"), mesh=mesh),
        lambda: jllm.init(MODELS["tied"], jax.random.key(0), mesh=mesh),
        lambda: jllm.load(folder, mesh=mesh),
        lambda: jllm.load(folder, mesh=2),  # type: ignore[arg-type]
    ):
        with pytest.raises(
            ValueError, match=r"mesh must have the one axis 'tp', as jllm.make_mesh"
        ):
            use()


def test_a_mesh_as_jax_makes_it_is_one_of_ours() -> None:
    theirs = jax.make_mesh((2,), ("tp",))  # its axis is Explicit
    assert_same(place(weights("tied"), theirs), split("tied", 2))


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        (dict(num_heads=6, num_kv_heads=2), "tp=4 must divide num_heads, 6"),
        (dict(intermediate_size=130), "tp=4 must divide intermediate_size, 130"),
        (
            dict(num_heads=12, num_kv_heads=6),
            "tp=4 must divide num_kv_heads, 6, or be a multiple of it",
        ),
    ],
)
def test_sizes_that_do_not_divide_are_named(sizes: dict[str, int], message: str) -> None:
    model = dataclasses.replace(MODELS["tied"], **sizes)
    mesh = jllm.make_mesh(tp=4)
    with pytest.raises(ValueError, match=message):
        jllm.init(model, jax.random.key(0), mesh=mesh)
    with pytest.raises(ValueError, match=message):
        jllm.Engine(jllm.init(model, jax.random.key(0)), mesh=mesh)


def test_copies_of_heads_are_not_split_anew() -> None:
    with pytest.raises(ValueError, match="laid out for 8 devices, with copies of their 2 key"):
        place(split("tied", 8), jllm.make_mesh(tp=4))


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("tp", [2, 8])
def test_random_weights_are_those_of_one_device(model: str, tp: int) -> None:
    mesh, key = jllm.make_mesh(tp=tp), jax.random.key(1)
    one = jllm.init(MODELS[model], key, dtype="float32")
    assert_same(jllm.init(MODELS[model], key, dtype="float32", mesh=mesh), place(one, mesh))


@pytest.mark.parametrize("sizes", CHECKPOINTS.values(), ids=CHECKPOINTS)
@pytest.mark.parametrize("tp", [2, 8])
def test_a_checkpoint_loads_straight_onto_a_mesh(
    tmp_path: Path, sizes: dict[str, Any], tp: int
) -> None:
    config = hf_config(**sizes)
    folder = write_folder(tmp_path / "model", config, hf_tensors(config), shards=3)
    mesh = jllm.make_mesh(tp=tp)
    one = jllm.load(folder, dtype="float32")
    assert_same(jllm.load(folder, dtype="float32", mesh=mesh), place(one, mesh))


@pytest.mark.parametrize("tp", [2, 4])
def test_a_quantized_gguf_file_loads_onto_a_mesh(tmp_path: Path, tp: int) -> None:
    config = hf_config(**test_gguf.SMALL)
    config |= dict(num_attention_heads=8, hidden_size=64)
    tensors = hf_tensors(config)
    types = test_gguf.matrices(GGMLQuantizationType.Q8_0)
    file = test_gguf.write(tmp_path / "model.gguf", config, tensors, types)
    mesh = jllm.make_mesh(tp=tp)
    one = jllm.load(file, dtype="float32")
    assert_same(jllm.load(file, dtype="float32", mesh=mesh), place(one, mesh))


def test_each_device_reads_its_part_and_nothing_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = hf_config(**{**CHECKPOINTS["qk_norm"], "vocab_size": 512})
    tensors = hf_tensors(model)
    read: dict[str, int] = {}
    largest = 0
    assemble = safetensors.assemble

    def counting(config: Any, checkpoint: Any, *rest: Any) -> Params:
        def one(name: str, part: tuple[slice, ...]) -> Any:
            nonlocal largest
            array = checkpoint.read(name, part)
            read[name] = read.get(name, 0) + array.size
            largest = max(largest, array.size)
            return array

        return assemble(config, dataclasses.replace(checkpoint, read=one), *rest)

    monkeypatch.setattr(safetensors, "assemble", counting)
    jllm.load(write_folder(tmp_path / "model", model, tensors), mesh=jllm.make_mesh(tp=8))
    assert read == {name: tensor.size for name, tensor in tensors.items()}
    assert largest == max(tensor.size for tensor in tensors.values()) // 8


def training_mesh(kind: AxisType = AxisType.Auto) -> Mesh:
    return jax.make_mesh((4, 2), ("fsdp", "tp"), axis_types=(kind, kind))


def trained(spec: P, kind: AxisType = AxisType.Auto) -> Params:
    """Params as a training mesh splits them, matrices by their first axis where it divides."""

    def split_one(leaf: jax.Array) -> jax.Array:
        divides = leaf.ndim > 1 and leaf.shape[0] % 8 == 0
        return jax.device_put(leaf, NamedSharding(training_mesh(kind), spec if divides else P()))

    params: Params = jax.tree.map(split_one, weights("tied"))
    return params


def tokens_of(params: Params) -> list[list[int]]:
    return [out.outputs[0].token_ids for out in answers(params, greedy_params(6))]


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
@pytest.mark.parametrize("spec", [P("tp"), P(("fsdp", "tp")), P("fsdp")], ids=str)
def test_params_of_a_training_mesh_are_resharded_on_the_devices(
    spec: P, kind: AxisType, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    params = trained(spec, kind)
    with monkeypatch.context() as patch, caplog.at_level(logging.INFO, logger="jllm"):
        no_host(patch)
        placed = place(params, jllm.make_mesh(tp=8))
    assert "Resharded 0.00 GB of params on the devices to tp=8." in caplog.text
    assert_same(placed, split("tied", 8))
    # All devices that hold a part of the params run the engine.
    assert tokens_of(params) == tokens_of(weights("tied"))


def test_params_of_a_training_mesh_are_resharded_once(caplog: pytest.LogCaptureFixture) -> None:
    params = trained(P(("fsdp", "tp")))
    with caplog.at_level(logging.INFO, logger="jllm"):
        for reports in (1, 1, 2):
            if reports == 2:  # after a step of training
                params = jax.tree.map(lambda x: x * 1, params)
            jllm.generate(params, PROMPTS[:1], greedy_params(2), config=config(), use_tqdm=False)
            assert caplog.text.count("Resharded") == reports
    jllm.release()


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_a_mesh_that_the_caller_has_set_changes_nothing(kind: AxisType) -> None:
    expected = tokens_of(weights("tied"))
    with jax.set_mesh(training_mesh(kind)):
        for params in (weights("tied"), split("tied", 2), trained(P("fsdp"), kind)):
            assert tokens_of(params) == expected


def test_params_go_to_fewer_or_other_devices_without_the_host(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    devices = np.array(jax.devices())
    others = Mesh(devices[[7, 2]], ("tp",), axis_types=(AxisType.Auto,))
    for params in (weights("biased"), split("biased", 4)):
        with monkeypatch.context() as patch:
            no_host(patch)
            placed = place(params, others)
        assert placed.embed.sharding.device_set == set(devices[[7, 2]])
        assert_same(placed, place(weights("biased"), others))


def test_params_that_are_whole_on_every_device_run_on_one() -> None:
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    params = jax.device_put(weights("tied"), NamedSharding(mesh, P()))
    with jllm.Engine(params, config()) as engine:
        assert len(engine._runner.params.embed.sharding.device_set) == 1
    outputs = answers(params, greedy_params(4), PROMPTS[:1])
    expected = answers(weights("tied"), greedy_params(4), PROMPTS[:1])
    assert outputs[0].outputs[0].token_ids == expected[0].outputs[0].token_ids


def test_params_that_are_placed_are_not_copied() -> None:
    params = split("biased", 4)
    again = place(params, jllm.make_mesh(tp=4))
    pairs = zip(jax.tree.leaves(params), jax.tree.leaves(again), strict=True)
    assert all(one is other for one, other in pairs)
