"""The engine through its public face, on a tiny model: batching never changes an output."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jllm
from tests.tiny_model import greedy, greedy_params, random_prompts, run, tiny_model

WIDE = {"decode_buckets": (32,), "prefill_buckets": (512,)}  # few programs to compile
LENGTHS = [1, 2, 15, 16, 17, 31, 32, 33, 64, 100, 150, 7, 3, 5, 40, 16] * 2


@dataclasses.dataclass(frozen=True)
class Unhashable:
    """A processor that says it can be hashed and cannot, as a module of arrays does."""

    weight: object = dataclasses.field(default_factory=lambda: jnp.zeros(512))

    def __call__(self, logits: jax.Array, tokens: jax.Array) -> jax.Array:
        return logits + self.weight  # type: ignore[operator]


def only_one_row(logits: jax.Array, tokens: jax.Array) -> jax.Array:
    """Can be traced, but not for a batch."""
    spec = jax.ShapeDtypeStruct(logits.shape, logits.dtype)
    return jax.pure_callback(np.asarray, spec, logits)  # type: ignore[no-any-return]


def engine(**options: object) -> jllm.Engine:
    defaults = dict(max_num_seqs=32, num_kv_blocks=400, max_model_len=400)
    return jllm.Engine(tiny_model(), jllm.EngineConfig(**{**defaults, **options}))  # type: ignore[arg-type]


def outputs_of(prompts: list[list[int]], count: int = 12, **options: object) -> list[list[int]]:
    with engine(**options) as e:
        for i, prompt in enumerate(prompts):
            e.add_request(prompt, greedy_params(count), request_id=str(i), stream=False)
        outputs = run(e)
    return [outputs[str(i)].outputs[0].token_ids for i in range(len(prompts))]


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, id="batch of 32"),
        pytest.param({"max_num_seqs": 1, "prefill_buckets": (64,)}, id="one at a time"),
        pytest.param(
            {"max_num_batched_tokens": 32, "decode_buckets": (32,)}, id="chunks of at most 32"
        ),
        pytest.param(
            {"prefill_buckets": (7,), "decode_buckets": (4,), "max_num_seqs": 4}, id="chunks of 7"
        ),
        pytest.param(
            {"prefill_buckets": (1,), "decode_buckets": (8,), "max_num_seqs": 8}, id="chunks of 1"
        ),
        pytest.param(WIDE, id="widest buckets"),
        pytest.param({**WIDE, "block_size": 32}, id="blocks of 32"),
        pytest.param({**WIDE, "num_kv_blocks": 26}, id="pool that forces preemption"),
    ],
)
def test_greedy_tokens_do_not_depend_on_batching(options: dict[str, object]) -> None:
    prompts = random_prompts(LENGTHS)
    assert outputs_of(prompts, **options) == [greedy(prompt, 12) for prompt in prompts]


def test_a_small_pool_preempts_and_ends_whole() -> None:
    with engine(num_kv_blocks=12, max_num_seqs=8, max_model_len=150) as e:
        prompts = random_prompts([30, 30, 30, 30, 30])
        for prompt in prompts:
            e.add_request(prompt, greedy_params(60), stream=False)
        outputs = run(e)
        assert e.stats().num_preemptions > 0
        assert e.stats().kv_usage == 0
    got = [output.outputs[0].token_ids for output in outputs.values()]
    assert sorted(got) == sorted(greedy(prompt, 60) for prompt in prompts)


def test_nothing_compiles_after_warm_up() -> None:
    with engine(max_num_seqs=2, max_num_batched_tokens=32) as e:
        assert e.warm_up() > 0
        compiled = e.stats().num_compiles
        rng = np.random.default_rng(0)
        for i, prompt in enumerate(random_prompts(rng.integers(1, 200, 24))):
            options = [
                jllm.SamplingParams(temperature=0),
                jllm.SamplingParams(temperature=0.7, logprobs=3),
                jllm.SamplingParams(top_k=5, logprobs=0),
                jllm.SamplingParams(top_p=0.9, min_p=0.1, n=3),
            ]
            e.add_request(prompt, options[i % 4])
            e.step()
        run(e)
        assert e.stats().num_compiles == compiled


def test_new_weights_of_the_same_shape_compile_nothing() -> None:
    prompt = random_prompts([20])[0]
    changed = jax.tree.map(lambda x: x * 1.5 if x.ndim > 1 else x, tiny_model())
    with engine() as e:
        before = e.add_request(prompt, greedy_params(8))
        first = run(e)[before]
        compiled = e.stats().num_compiles
        e.update_params(changed)
        e.add_request(prompt, greedy_params(8), request_id="after", stream=False)
        after = run(e)["after"]
        assert e.stats().num_compiles == compiled
    with jllm.Engine(changed, jllm.EngineConfig(max_num_seqs=4, num_kv_blocks=64)) as e:
        e.add_request(prompt, greedy_params(8), request_id="fresh", stream=False)
        assert run(e)["fresh"].outputs[0].token_ids == after.outputs[0].token_ids
    assert first.outputs[0].token_ids != after.outputs[0].token_ids


def test_update_params_refuses_another_dtype() -> None:
    other = jax.tree.map(lambda x: x.astype("bfloat16"), tiny_model())
    with engine() as e, pytest.raises(ValueError, match=r"embed.*bfloat16.*float32"):
        e.update_params(other)


def test_streamed_deltas_add_up_to_the_whole() -> None:
    prompt = random_prompts([9])[0]
    with engine() as e:
        e.add_request(prompt, greedy_params(10))
        tokens, last = [], None
        while e.has_unfinished():
            for last in e.step():
                tokens += last.outputs[0].token_ids
    assert tokens == greedy(prompt, 10)
    assert last is not None and last.finished and last.outputs[0].finish_reason == "length"


def test_eos_ends_a_request_and_ignore_eos_does_not() -> None:
    prompt = random_prompts([5])[0]
    expected = greedy(prompt, 12)
    stop = expected[6]
    first = expected.index(stop)
    with engine() as e:
        e.add_request(
            prompt, jllm.SamplingParams(temperature=0, max_tokens=12, stop_token_ids=[stop])
        )
        e.add_request(prompt, greedy_params(12), request_id="all", stream=False)
        ids: list[int] = []
        reasons = []
        while e.has_unfinished():
            for output in e.step():
                for part in output.outputs:
                    if output.request_id == "all":
                        assert part.token_ids == expected
                    else:
                        ids += part.token_ids
                        reasons.append((part.finish_reason, part.stop_reason))
    assert ids == expected[: first + 1]
    assert reasons[-1] == ("stop", stop)
    assert set(reasons[:-1]) <= {(None, None)}


@pytest.mark.parametrize("steps", [0, 1, 2, 3, 5])
def test_abort_gives_every_block_back_and_disturbs_nobody(steps: int) -> None:
    prompts = random_prompts([200, 20, 33])
    with engine(max_num_batched_tokens=64, max_num_seqs=4) as e:
        for i, prompt in enumerate(prompts):
            e.add_request(prompt, greedy_params(12), request_id=str(i), stream=False)
        outputs = {}
        for _ in range(steps):
            outputs |= {o.request_id: o for o in e.step()}
        e.abort("0")
        outputs |= run(e)
        assert outputs["0"].outputs[0].finish_reason == "abort"
        for i in (1, 2):
            assert outputs[str(i)].outputs[0].token_ids == greedy(prompts[i], 12)
        assert e.stats().kv_usage == 0
        assert e.stats().running == e.stats().waiting == 0


@pytest.mark.parametrize("salt", [1, ["a"], b"x"])
def test_a_salt_that_is_no_text_is_refused(salt: object) -> None:
    with engine() as e, pytest.raises(ValueError, match="cache_salt must be a string"):
        e.add_request([1, 2], cache_salt=salt)  # type: ignore[arg-type]


def test_aborting_an_unknown_request_is_ignored() -> None:
    with engine() as e:
        e.abort("nobody")
        assert not e.has_unfinished()


def test_a_prompt_plus_max_tokens_of_exactly_max_model_len_runs_to_the_last_position() -> None:
    prompt = random_prompts([40])[0]
    with engine(max_model_len=64) as e:
        e.add_request(prompt, greedy_params(24), request_id="r", stream=False)
        assert run(e)["r"].outputs[0].token_ids == greedy(prompt, 24)


def test_a_prompt_larger_than_the_whole_pool_is_refused_and_holds_up_nobody() -> None:
    small, large = random_prompts([10, 70])
    with engine(max_model_len=None, num_kv_blocks=4) as e:
        name = e.add_request(small, greedy_params(4), stream=False)
        with pytest.raises(ValueError, match="max_model_len is 64"):
            e.add_request(large, greedy_params(4))
        assert run(e)[name].outputs[0].token_ids == greedy(small, 4)


def test_max_tokens_none_runs_to_max_model_len() -> None:
    prompt = random_prompts([40])[0]
    with engine(max_model_len=64) as e:
        params = jllm.SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)
        e.add_request(prompt, params, request_id="r", stream=False)
        assert len(run(e)["r"].outputs[0].token_ids) == 24


def test_the_name_of_an_ended_request_is_free_at_once() -> None:
    """Its last row may still be in flight, and must not be taken for the new request's."""
    prompt, other = random_prompts([2, 3])
    stop = greedy(prompt, 8)[2]
    with engine() as e:
        params = jllm.SamplingParams(temperature=0, max_tokens=20, stop_token_ids=[stop])
        e.add_request(prompt, params, request_id="a")
        while not any(output.finished for output in e.step()):
            pass
        e.add_request(other, greedy_params(5), request_id="a", stream=False)
        assert run(e)["a"].outputs[0].token_ids == greedy(other, 5)
        e.add_request(prompt, greedy_params(20), request_id="a")
        for _ in range(3):
            e.step()
        e.abort("a")
        e.add_request(other, greedy_params(5), request_id="a", stream=False)
        assert run(e)["a"].outputs[0].token_ids == greedy(other, 5)


def test_made_up_names_are_unique() -> None:
    with engine() as e:
        names = [e.add_request([5], greedy_params(2), request_id=n) for n in ("a-1", "a", "a", "a")]
        assert len(set(names)) == 4
        assert set(run(e)) == set(names)


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda x: jax.device_put(x, jax.devices()[0]), id="committed"),
        pytest.param(lambda x: jnp.full(x.shape, 0.02), id="weakly typed"),
        pytest.param(np.asarray, id="numpy"),
    ],
)
def test_weights_from_anywhere_compile_nothing(change: Callable[[jax.Array], object]) -> None:
    with engine(max_num_seqs=1, decode_buckets=(1,), prefill_buckets=(32,)) as e:
        e.add_request([5], greedy_params(3))
        run(e)
        compiled = e.stats().num_compiles
        e.update_params(jax.tree.map(change, tiny_model()))
        e.add_request([5], greedy_params(3))
        run(e)
        assert e.stats().num_compiles == compiled


def test_lists_of_buckets_work_as_tuples_do() -> None:
    config = jllm.EngineConfig(decode_buckets=[1, 4], max_num_seqs=4)  # type: ignore[arg-type]
    assert hash(config) == hash(jllm.EngineConfig(decode_buckets=(1, 4), max_num_seqs=4))
    for wrong in ((1.5, 4), (True,), (4, 1), (), 5, "ab"):
        with pytest.raises(ValueError, match="decode_buckets must be"):
            jllm.EngineConfig(decode_buckets=wrong)  # type: ignore[arg-type]


def test_a_closed_engine_says_so_and_closes_again_without_complaint() -> None:
    with engine() as e:
        e.add_request([1, 2, 3], greedy_params(3))
        e.close()
        for call in (lambda: e.add_request([1]), e.step, lambda: e.update_params(tiny_model())):
            with pytest.raises(RuntimeError, match="closed"):
                call()
        assert not e.has_unfinished()
    e.close()
    assert e.stats().running == 0


def test_the_same_request_id_twice_gives_two_requests() -> None:
    with engine() as e:
        names = [e.add_request([5, 6, 7], greedy_params(3), request_id="x") for _ in range(2)]
        assert len(set(names)) == 2
        assert set(run(e)) == set(names)


@pytest.mark.parametrize(
    ("prompt", "options", "message"),
    [
        ([], {}, "empty"),
        ([1, 512], {}, r"token id 512, outside the vocabulary of 512"),
        ([1, -1], {}, r"token id -1"),
        ([1] * 64, {}, r"has 64 tokens and needs room for one more, but max_model_len is 64"),
        ([1] * 60, {"max_tokens": 5}, r"60 tokens and max_tokens is 5.*64"),
        ("text", {}, "no tokenizer"),
        ([1], {"stop": "x"}, "no tokenizer"),
        ([1], {"logits_processor": Unhashable()}, "cannot be traced|must be a function"),
        ([1], {"logits_processor": only_one_row}, "cannot be traced"),
        ([1], {"stop_token_ids": [512]}, r"stop_token_ids has 512, outside the vocabulary"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_what_can_never_run_is_refused_at_once(
    prompt: list[int] | str, options: dict[str, object], message: str
) -> None:
    with engine(max_model_len=64) as e:
        with pytest.raises(ValueError, match=message):
            e.add_request(prompt, jllm.SamplingParams(**options))  # type: ignore[arg-type]
        assert not e.has_unfinished()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_model_len": 4096}, r"max_model_len is 4096, but the model was made for .* 2048"),
        ({"max_model_len": 400, "num_kv_blocks": 4}, r"holds 64 tokens"),
        ({"decode_buckets": (4,), "max_num_seqs": 9}, r"decode_buckets \(4\) must hold .* \(9\)"),
    ],
    ids=["beyond the model", "beyond the pool", "too few rows"],
)
def test_a_config_that_cannot_work_is_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        jllm.Engine(tiny_model(), jllm.EngineConfig(**options))  # type: ignore[arg-type]


def test_an_output_says_when_its_request_ran_and_what_the_cache_spared() -> None:
    with engine() as e:
        prompt = random_prompts([40])[0]
        before = time.monotonic()
        e.add_request(prompt, greedy_params(3))
        unfinished = e.step() + e.step()
        assert all(output.times is None for output in unfinished if not output.finished)
        (first,) = run(e).values()
        e.add_request(prompt, greedy_params(3))
        (second,) = run(e).values()
        times = first.times
        assert times is not None and times.admitted is not None and times.first_token is not None
        marks = [before, times.arrived, times.admitted, times.first_token, times.finished]
        assert marks == sorted(marks) and marks[-1] <= time.monotonic()
        assert (first.num_cached_tokens, second.num_cached_tokens) == (0, 32)  # two whole blocks
        # Each ran its prompt but for what was cached, and its first two tokens; the last is not.
        assert e.stats().step_tokens == 40 + 2 + 8 + 2


def test_the_times_of_a_request_that_never_ran_say_so() -> None:
    with engine() as e:
        request_id = e.add_request([5, 6])
        e.abort(request_id)
        (output,) = e.step()
        assert output.times is not None
        assert output.times.admitted is None and output.times.first_token is None
