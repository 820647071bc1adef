"""What people call: generate, chat, stream, logprobs, and the errors they may see."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jllm
from jllm.compilation import compiles_so_far
from tests.demo_model import load_demo_model
from tests.tiny_model import greedy, greedy_params, random_prompts, tiny_model

CONFIG = jllm.EngineConfig(max_num_seqs=4, max_num_batched_tokens=64, max_model_len=256)


def generate(prompts: object, sampling: object = None) -> list[jllm.RequestOutput]:
    return jllm.generate(tiny_model(), prompts, sampling, config=CONFIG, use_tqdm=False)  # type: ignore[arg-type]


def test_exported_names_are_all_importable() -> None:
    assert set(jllm.__all__) <= set(dir(jllm))
    for name in jllm.__all__:
        assert callable(getattr(jllm, name))


def test_a_prompt_may_be_one_list_of_ids_or_several() -> None:
    one, two = random_prompts([5, 9])
    assert generate(one, greedy_params(4))[0].outputs[0].token_ids == greedy(one, 4)
    both = generate([one, two], greedy_params(4))
    assert [o.outputs[0].token_ids for o in both] == [greedy(one, 4), greedy(two, 4)]
    assert [o.prompt_token_ids for o in both] == [one, two]


def test_no_prompts_give_no_outputs() -> None:
    assert generate([]) == []


def test_each_prompt_may_have_its_own_sampling_params() -> None:
    one, two = random_prompts([5, 9])
    outputs = generate([one, two], [greedy_params(2), greedy_params(5)])
    assert [len(o.outputs[0].token_ids) for o in outputs] == [2, 5]
    with pytest.raises(ValueError, match="2 prompts but 1 sampling_params"):
        generate([one, two], [greedy_params(2)])


def test_generate_again_with_new_weights_compiles_nothing() -> None:
    prompt = random_prompts([5])[0]
    generate(prompt, greedy_params(4))
    changed = jax.tree.map(lambda x: x * 1.5 if x.ndim > 1 else x, tiny_model())
    jax.block_until_ready(changed)
    before = compiles_so_far()
    jllm.generate(changed, prompt, greedy_params(4), config=CONFIG, use_tqdm=False)
    assert compiles_so_far() == before


@pytest.mark.parametrize("make", [np.array, jnp.asarray, tuple], ids=["numpy", "jax", "tuple"])
def test_ids_may_be_arrays(make: object) -> None:
    one, two = random_prompts([5, 5])
    expected = [greedy(one, 3), greedy(two, 3)]
    for prompts in ([make(one), make(two)], make([make(one), make(two)])):  # type: ignore[operator]
        outputs = generate(prompts, greedy_params(3))
        assert [o.outputs[0].token_ids for o in outputs] == expected


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        ([1.5, 2], "integer token ids, not float64"),
        ([[1, 2], [3.5]], r"prompts\[1\]: .*not float64"),
        ([[[1]]], r"not int64 of shape \(1, 1\)"),
        (None, "must be text, token ids, or a list of either, not None"),
    ],
    ids=str,
)
def test_prompts_of_a_wrong_type_are_refused(prompts: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        generate(prompts, greedy_params(2))


def test_messages_of_a_wrong_type_are_refused() -> None:
    for wrong in ({"role": "user", "content": "x"}, "hello", None):
        with pytest.raises(ValueError, match="messages must be a list of"):
            jllm.chat(tiny_model(), wrong)  # type: ignore[arg-type]


def test_a_seeded_request_does_not_depend_on_neighbours_that_need_more_candidates() -> None:
    options = dict(temperature=2.0, seed=7, max_tokens=60, ignore_eos=True)
    for filters in ({"min_p": 0.01, "top_p": 0.9}, {"top_k": 300, "top_p": 0.95}):
        mine = jllm.SamplingParams(**options, **filters)  # type: ignore[arg-type]
        wide = jllm.SamplingParams(temperature=500.0, top_k=400, seed=1, max_tokens=60)
        alone = generate([5], mine)[0].outputs[0].token_ids
        assert generate([[5], [5]], [mine, wide])[0].outputs[0].token_ids == alone


@pytest.mark.parametrize("filters", [{"top_p": 1 - 1e-8}, {"min_p": 1e-40}], ids=str)
def test_a_filter_too_weak_for_float32_is_off_and_not_greedy(filters: dict[str, float]) -> None:
    options = dict(temperature=3.0, seed=3, max_tokens=8, ignore_eos=True)
    plain = generate([5], jllm.SamplingParams(**options))[0]  # type: ignore[arg-type]
    weak = generate([5], jllm.SamplingParams(**options, **filters))[0]  # type: ignore[arg-type]
    assert weak.outputs[0].token_ids == plain.outputs[0].token_ids


def test_numbers_of_numpy_are_numbers() -> None:
    params = jllm.SamplingParams(
        temperature=np.float32(0.5), max_tokens=np.int64(3), stop=None, top_k=np.int32(2**31 - 1)
    )
    assert (params.temperature, params.max_tokens, params.stop) == (0.5, 3, ())
    assert len(generate([5], params)[0].outputs[0].token_ids) <= 3
    assert generate([5], jllm.SamplingParams(top_k=2**40, max_tokens=2))


def test_arguments_of_a_wrong_type_are_refused() -> None:
    with pytest.raises(ValueError, match=r"params must be jllm.Params.*not 'smollm2'"):
        jllm.generate("smollm2", "hello")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"must be a SamplingParams, not \{'temperature': 0\}"):
        generate([[1], [2]], [{"temperature": 0}] * 2)
    with pytest.raises(ValueError, match=r"init needs a ModelConfig.*not 'tiny'"):
        jllm.init("tiny", jax.random.key(0))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="load needs a name or a path, not None"):
        jllm.load(None)  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", ["int8", "float64", "fp32"])
def test_a_dtype_that_weights_cannot_have_is_refused(dtype: str) -> None:
    config = jllm.ModelConfig.preset("tiny")
    with pytest.raises(ValueError, match=f"dtype must be one of float32.*not '{dtype}'"):
        jllm.init(config, jax.random.key(0), dtype=dtype)
    with pytest.raises(ValueError, match=f"not '{dtype}'"):
        jllm.load("anything", dtype=dtype)


def test_the_same_params_again_find_their_prefixes() -> None:
    prompt = random_prompts([40])[0]
    jllm.release()
    for _ in range(2):
        generate(prompt, greedy_params(2))
    with jllm.api._engine(tiny_model(), CONFIG) as engine:
        assert engine.stats().prefix_hits == 32


def test_broken_weights_spoil_no_later_request() -> None:
    prompt = random_prompts([40])[0]
    broken = jax.tree.map(lambda x: x * jnp.nan, tiny_model())
    jllm.generate(broken, prompt, greedy_params(4), config=CONFIG, use_tqdm=False)
    assert generate(prompt, greedy_params(4))[0].outputs[0].token_ids == greedy(prompt, 4)


def test_params_of_mixed_dtypes_do_not_meet_an_engine_of_others() -> None:
    prompt = random_prompts([5])[0]
    mixed = tiny_model().replace(final_norm=tiny_model().final_norm.astype("bfloat16"))  # type: ignore[attr-defined]
    jllm.generate(mixed, prompt, greedy_params(2), config=CONFIG, use_tqdm=False)
    assert generate(prompt, greedy_params(2))[0].outputs[0].token_ids == greedy(prompt, 2)


def test_logprobs_of_unknown_ids_are_refused() -> None:
    with pytest.raises(ValueError, match="token id 600, outside the vocabulary of 512"):
        jllm.logprobs(tiny_model(), jnp.asarray([1, 600]))


def test_a_refused_prompt_leaves_generate_usable() -> None:
    good = random_prompts([5])[0]
    with pytest.raises(ValueError, match="empty"):
        generate([good, []], greedy_params(4))
    assert generate(good, greedy_params(4))[0].outputs[0].token_ids == greedy(good, 4)


def test_a_stream_left_early_leaves_generate_usable() -> None:
    prompt = random_prompts([5])[0]
    for output in jllm.stream(tiny_model(), prompt, greedy_params(50), config=CONFIG):
        assert output.outputs[0].token_ids
        break
    assert generate(prompt, greedy_params(4))[0].outputs[0].token_ids == greedy(prompt, 4)


def test_release_frees_the_kept_engine() -> None:
    generate(random_prompts([5])[0], greedy_params(2))
    jllm.release()
    jllm.release()  # nothing left: no error
    assert generate(random_prompts([5])[0], greedy_params(2))


def test_logprobs_equal_those_of_the_sampler() -> None:
    prompt = random_prompts([30])[0]
    sampling = jllm.SamplingParams(seed=1, max_tokens=40, ignore_eos=True, logprobs=0)
    sample = generate(prompt, sampling)[0].outputs[0]
    whole = jllm.logprobs(tiny_model(), jnp.asarray(prompt + sample.token_ids))
    assert sample.logprobs is not None
    reported = [
        at[token].logprob for at, token in zip(sample.logprobs, sample.token_ids, strict=True)
    ]
    np.testing.assert_allclose(reported, whole[len(prompt) - 1 :], atol=1e-4)
    assert sample.cumulative_logprob == pytest.approx(sum(reported))


def test_logprobs_batch_jit_and_have_gradients() -> None:
    ids = jnp.asarray(random_prompts([24, 24]))
    rows = jnp.stack([jllm.logprobs(tiny_model(), row) for row in ids])
    batched = jax.jit(jllm.logprobs)(tiny_model(), ids)
    assert batched.shape == (2, 23)
    np.testing.assert_allclose(batched, rows, atol=1e-5)

    def loss(scale: jax.Array) -> jax.Array:
        params = tiny_model()
        head = params.embed * scale
        return -jllm.logprobs(jax.tree.map(lambda x: x, params).replace(embed=head), ids[0]).mean()

    slope = jax.grad(loss)(jnp.float32(1.0))
    step = 1e-2
    numeric = (loss(jnp.float32(1 + step)) - loss(jnp.float32(1 - step))) / (2 * step)
    assert float(slope) == pytest.approx(float(numeric), rel=2e-2)


def test_every_parameter_has_a_gradient() -> None:
    ids = jnp.asarray(random_prompts([24])[0])
    grads = jax.grad(lambda p: jllm.logprobs(p, ids).mean())(tiny_model())
    assert all(float(jnp.abs(leaf).max()) > 0 for leaf in jax.tree.leaves(grads))


def test_logprobs_of_one_token_are_refused() -> None:
    with pytest.raises(ValueError, match=r"at least two tokens, not shape \(1,\)"):
        jllm.logprobs(tiny_model(), jnp.asarray([3]))


def test_a_model_without_tokenizer_cannot_chat() -> None:
    with pytest.raises(ValueError, match="no tokenizer"):
        jllm.chat(tiny_model(), [{"role": "user", "content": "hello"}])


def test_chat_and_stream_on_the_demo_model_agree() -> None:
    params = load_demo_model()
    messages = [{"role": "user", "content": "Why is the sky blue? Answer in two sentences."}]
    sampling = jllm.SamplingParams(temperature=0, max_tokens=24)
    whole = jllm.chat(params, messages, sampling, use_tqdm=False)[0].outputs[0]
    assert params.tokenizer is not None
    ids = params.tokenizer.apply_chat_template(messages)
    parts = [o.outputs[0] for o in jllm.stream(params, ids, sampling)]
    assert "".join(part.text for part in parts) == whole.text
    assert "sky" in whole.text
    stop = jllm.SamplingParams(temperature=0, max_tokens=24, stop=[" of"])
    stopped = jllm.chat(params, messages, stop, use_tqdm=False)[0].outputs[0]
    assert stopped.text == whole.text.partition(" of")[0]
    assert (stopped.finish_reason, stopped.stop_reason) == ("stop", " of")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["generate", "--model", "nowhere", "--prompt", "x"], "There is no model 'nowhere'"),
        (["generate", "--model", "nowhere", "--prompt", "x", "--top-p", "0"], "top_p must be in"),
    ],
    ids=["unknown model", "bad option"],
)
def test_the_command_line_says_what_is_wrong(arguments: list[str], message: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "jllm", *arguments], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_the_command_line_streams_text_and_reports_the_speed() -> None:
    load_demo_model()  # skips without it
    command = [sys.executable, "-m", "jllm", "generate", "--model", "smollm2-135m-instruct"]
    done = subprocess.run(
        [*command, "--prompt", "The capital of France is", "--max-tokens", "8"],
        capture_output=True,
        text=True,
        timeout=300,
        cwd=Path(__file__).parent.parent,
    )
    assert done.returncode == 0, done.stderr
    assert "Paris" in done.stdout
    assert "tokens/s" in done.stderr
