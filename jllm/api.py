"""The functions most people call: ``generate``, ``chat`` and ``stream``.

They keep the engine they built for the next call. It is keyed by what its programs and memory
depend on (the model's config, dtype and tokenizer, the devices it is split over, and the engine's
config), not by the weights: a call with new weights of the same shapes, as in a training loop,
compiles nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, cast

import jax
import numpy as np
from tqdm import tqdm

from jllm.config import EngineConfig
from jllm.engine.engine import Engine
from jllm.engine.intake import Prompt
from jllm.outputs import RequestOutput
from jllm.parallel.mesh import mesh_of
from jllm.params import Params, check_params
from jllm.sampling_params import SamplingParams

Message = Mapping[str, Any]

_kept: dict[Any, Engine] = {}


def generate(
    params: Params,
    prompts: Prompt | Sequence[Prompt],
    sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    *,
    config: EngineConfig | None = None,
    use_tqdm: bool = True,
) -> list[RequestOutput]:
    """Completes prompts, all at once.

        jllm.generate(params, "Once upon a time")
        jllm.generate(params, [[1, 15043], "text too"], jllm.SamplingParams(temperature=0))

    Args:
      params: the model; params that are split over devices run on those.
      prompts: a text, a list of token ids, or a list of either.
      sampling_params: for all prompts, or a list with one for each; ``SamplingParams()`` if None.
      config: how the engine batches; a different one builds a new engine.
      use_tqdm: show a progress bar on stderr.

    Returns:
      One RequestOutput per prompt, in the order of the prompts.

    Raises:
      ValueError: some prompt or option could never run; nothing has been run then.
    """
    check_params(params)
    prompts = _list_of_prompts(prompts)
    if sampling_params is None or isinstance(sampling_params, SamplingParams):
        options = [sampling_params or SamplingParams()] * len(prompts)
    else:
        options = list(sampling_params)
    if len(options) != len(prompts):
        raise ValueError(f"There are {len(prompts)} prompts but {len(options)} sampling_params.")
    with _engine(params, config) as engine:
        ids = []
        for index, (prompt, option) in enumerate(zip(prompts, options, strict=True)):
            try:
                ids.append(engine.add_request(prompt, option, stream=False))
            except ValueError as error:
                where = f"prompts[{index}]: " if len(prompts) > 1 else ""
                raise ValueError(f"{where}{error}") from error
        outputs: dict[str, RequestOutput] = {}
        with tqdm(total=len(ids), unit="prompt", disable=not use_tqdm, dynamic_ncols=True) as bar:
            tokens = 0
            while engine.has_unfinished():
                for output in engine.step():
                    outputs[output.request_id] = output
                    tokens += sum(len(sample.token_ids) for sample in output.outputs)
                    bar.update()
                if bar.format_dict["elapsed"]:
                    rate = tokens / bar.format_dict["elapsed"]
                    bar.set_postfix_str(f"{rate:.0f} tokens/s", refresh=False)
    return [outputs[request_id] for request_id in ids]


def chat(
    params: Params,
    messages: Sequence[Message] | Sequence[Sequence[Message]],
    sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    *,
    config: EngineConfig | None = None,
    use_tqdm: bool = True,
    **template_options: Any,
) -> list[RequestOutput]:
    """Answers a conversation, or several, through the model's chat template.

        jllm.chat(params, [{"role": "user", "content": "Why is the sky blue?"}])

    Args:
      messages: a list of ``{"role": ..., "content": ...}``, or a list of such lists.
      template_options: passed to the template: ``add_generation_prompt``, ``tools``, ...
      sampling_params, config, use_tqdm: as for ``generate``.

    Raises:
      ValueError: the model has no chat template, or the template refuses the messages.
    """
    if isinstance(messages, Mapping | str) or not isinstance(messages, Sequence):
        raise ValueError(
            f'messages must be a list of {{"role": ..., "content": ...}}, not {messages!r}.'
        )
    several = bool(messages) and not isinstance(messages[0], Mapping)
    conversations = cast(Sequence[Sequence[Message]], messages if several else [messages])
    prompts = [chat_prompt(params, one, **template_options) for one in conversations]
    return generate(params, prompts, sampling_params, config=config, use_tqdm=use_tqdm)


def stream(
    params: Params,
    prompt: Prompt,
    sampling_params: SamplingParams | None = None,
    *,
    config: EngineConfig | None = None,
) -> Iterator[RequestOutput]:
    """Completes one prompt and yields what is new as it comes: text and ids are deltas.

        for output in jllm.stream(params, "Once upon a time"):
            print(output.outputs[0].text, end="", flush=True)

    Arguments and errors are those of ``generate``; nothing runs before the first is asked for.
    """
    check_params(params)
    with _engine(params, config) as engine:
        request_id = engine.add_request(prompt, sampling_params)
        try:
            while engine.has_unfinished():
                yield from engine.step()
        except GeneratorExit:  # the caller has seen enough
            engine.abort(request_id)
            while engine.has_unfinished():
                engine.step()


def release() -> None:
    """Frees the engine that ``generate`` keeps, and its KV cache."""
    while _kept:
        _kept.popitem()[1].close()


def chat_prompt(params: Params, messages: Sequence[Message], **template_options: Any) -> list[int]:
    """The token ids of a conversation."""
    check_params(params)
    if params.tokenizer is None:
        raise ValueError("The model has no tokenizer, so it cannot chat.")
    return params.tokenizer.apply_chat_template(messages, **template_options)


def _list_of_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str):
        return [prompts]
    if not isinstance(prompts, Sequence) and not hasattr(prompts, "dtype"):
        raise ValueError(f"prompts must be text, token ids, or a list of either, not {prompts!r}.")
    items = list(cast(Sequence[Any], prompts))
    if items and not any(isinstance(item, str) or np.ndim(item) > 0 for item in items):
        return [cast(Prompt, prompts)]  # ids of one prompt
    return items


@contextmanager
def _engine(params: Params, config: EngineConfig | None) -> Iterator[Engine]:
    """Lends an idle engine for these params and keeps it afterwards; at most one is kept.

    It is taken out while lent, so a ``generate`` inside a ``stream`` gets one of its own.
    """
    config = config or EngineConfig()
    dtypes = tuple(str(leaf.dtype) for leaf in jax.tree.leaves(params))
    key = (params.config, dtypes, params.tokenizer, mesh_of(params), config)
    engine = _kept.pop(key, None)
    fresh = engine is None
    if engine is None:
        release()
        engine = Engine(params, config)
    try:
        if not fresh:
            engine.update_params(params)
        yield engine
    except BaseException:
        engine.close()  # whatever it was doing; a broken engine is not kept
        raise
    release()
    _kept[key] = engine
