"""The way in: checks a prompt and its options, and makes the requests of its samples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from jllm.config import ModelConfig
from jllm.engine.completion import Completion
from jllm.engine.grammar import Grammars
from jllm.engine.group import Group
from jllm.engine.logprobs import PromptLogprobs
from jllm.engine.request import Request
from jllm.engine.rules import request_rules
from jllm.models.logit_rules import Rules
from jllm.sampling_params import SamplingParams
from jllm.tokenizer import Tokenizer

# Ids may also be a one-dimensional integer array of numpy or JAX.
Prompt = str | Sequence[int]


class Intake:
    """Refuses at once what could never run; what it lets through, the engine can finish."""

    def __init__(
        self,
        model: ModelConfig,
        tokenizer: Tokenizer | None,
        grammars: Grammars,
        max_model_len: int,
    ) -> None:
        self._model = model
        self._tokenizer = tokenizer
        self._grammars = grammars
        self._max_model_len = max_model_len
        self._arrivals = 0
        self._seeds = np.random.default_rng()
        self._last_rules: tuple[SamplingParams, Rules | None] | None = None

    def make_group(
        self,
        prompt: Prompt,
        params: SamplingParams,
        *,
        request_id: str | None,
        taken: Mapping[str, object],
        cache_salt: str | None,
        stream: bool,
    ) -> Group:
        """The requests of a prompt. Its name is made up if None, and made unique among ``taken``.

        Raises ValueError for whatever is wrong with the prompt or the options.
        """
        if not isinstance(params, SamplingParams):
            raise ValueError(f"sampling_params must be a SamplingParams, not {params!r}.")
        if cache_salt is not None and not isinstance(cache_salt, str):
            raise ValueError(f"cache_salt must be a string or None, not {cache_salt!r}.")
        params.check_vocab(self._model.vocab_size)
        if params.stop and self._tokenizer is None:
            raise ValueError("SamplingParams.stop needs text, but the model has no tokenizer.")
        ids = self._prompt_ids(prompt)
        tokens = np.zeros(self._total_length(len(ids), params), np.int32)
        tokens[: len(ids)] = ids
        eos = self._model.eos_token_ids
        rules = self._rules_of(params)
        form = params.structured
        seed = params.seed
        if seed is None:
            seed = int(self._seeds.integers(-(2**63), 2**63 - 1))
        completions = []
        for sample in range(params.n):
            request = Request(
                arrival=self._arrivals,
                tokens=tokens.copy(),
                num_prompt=len(ids),
                params=params,
                cache_salt=cache_salt,
                sample=sample,
                seed=seed,
                rules=rules,
                matcher=None if form is None else self._grammars.matcher(form),
            )
            self._arrivals += 1
            completions.append(Completion(request, self._tokenizer, eos))
        prompt_logprobs = None
        if params.prompt_logprobs is not None:
            prompt_logprobs = PromptLogprobs(ids, params.prompt_logprobs, self._tokenizer)
        text = prompt if isinstance(prompt, str) else None
        name = self._unique(request_id, taken)
        return Group(name, text, ids, completions, prompt_logprobs, stream)

    def _rules_of(self, params: SamplingParams) -> Rules | None:
        """The rules of some options, made once for requests in a row that share the object: a
        large vocabulary's masks take longer than the rest of a request."""
        if self._last_rules is None or self._last_rules[0] is not params:
            eos = self._model.eos_token_ids
            rules = request_rules(params, self._tokenizer, eos, self._model.vocab_size)
            self._last_rules = params, rules
        return self._last_rules[1]

    def _unique(self, name: str | None, taken: Mapping[str, object]) -> str:
        base = name or "request"
        number = self._arrivals
        if name is None:
            name = f"{base}-{number}"
        while name in taken:
            name = f"{base}-{number}"
            number += 1
        return name

    def _prompt_ids(self, prompt: Prompt) -> list[int]:
        if isinstance(prompt, str):
            if self._tokenizer is None:
                raise ValueError("The prompt is text, but the model has no tokenizer; give ids.")
            ids = self._tokenizer.encode(prompt)
        else:
            ids = _as_ids(prompt)
        if not ids:
            raise ValueError("The prompt is empty: it must hold at least one token.")
        vocab_size = self._model.vocab_size
        for token in (min(ids), max(ids)):
            if not 0 <= token < vocab_size:
                raise ValueError(
                    f"The prompt has token id {token}, outside the vocabulary of {vocab_size}."
                )
        return ids

    def _total_length(self, num_prompt: int, params: SamplingParams) -> int:
        """Prompt plus output, in tokens."""
        limit = self._max_model_len
        if num_prompt >= limit:
            raise ValueError(
                f"The prompt has {num_prompt} tokens and needs room for one more, but "
                f"max_model_len is {limit}."
            )
        for name in ("max_tokens", "min_tokens"):
            count = getattr(params, name) or 0
            if num_prompt + count > limit:
                raise ValueError(
                    f"The prompt has {num_prompt} tokens and {name} is {count}: together more "
                    f"than max_model_len, {limit}."
                )
        return limit if params.max_tokens is None else num_prompt + params.max_tokens


def _as_ids(prompt: Sequence[int]) -> list[int]:
    if isinstance(prompt, bytes | Mapping):
        raise ValueError(f"A prompt must be text or token ids, not {prompt!r}.")
    try:
        array = np.asarray(prompt if hasattr(prompt, "dtype") else list(prompt))
    except (TypeError, ValueError, OverflowError) as error:  # nothing to iterate, or ragged
        raise ValueError(f"A prompt must be text or token ids, not {prompt!r}.") from error
    if array.size == 0:
        return []
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise ValueError(
            "A prompt must be text or a flat sequence of integer token ids, "
            f"not {array.dtype} of shape {array.shape}."
        )
    ids: list[int] = array.tolist()
    return ids
