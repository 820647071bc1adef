"""From SamplingParams to the ``Rules`` of a request: what the device is told once, at admission.

Whatever can never be satisfied is refused here, before the request is queued.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from jllm.models.logit_rules import (
    BAD_SEQUENCE_TOKENS,
    BAD_SEQUENCES,
    BIAS_IDS,
    NO_TOKEN,
    Rules,
)
from jllm.sampling_params import SamplingParams
from jllm.tokenizer import Tokenizer

Sequences = list[tuple[int, ...]]


def request_rules(
    params: SamplingParams,
    tokenizer: Tokenizer | None,
    eos_token_ids: Sequence[int],
    vocab_size: int,
) -> Rules | None:
    """The rules of a request in numpy arrays, or None if it has none.

    Raises:
      ValueError: bad words are text but there is no tokenizer, one has too many tokens, or the
        options together forbid every token.
    """
    stops = set(params.stop_token_ids) | (set() if params.ignore_eos else set(eos_token_ids))
    early_stops = stops if params.min_tokens else set()
    masks = params.allowed_token_ids is not None or params.bad_words or early_stops
    if not masks and not params.logit_bias:
        return None

    sequences = bad_sequences(params.bad_words, tokenizer)
    single = [sequence[0] for sequence in sequences if len(sequence) == 1]
    allowed = np.ones(vocab_size, bool)
    if params.allowed_token_ids is not None:
        allowed[:] = False
        allowed[list(params.allowed_token_ids)] = True
    allowed[single] = False
    stop_mask = np.zeros(vocab_size, bool)
    stop_mask[list(early_stops)] = True
    if not (allowed & ~stop_mask).any():
        raise ValueError(
            "SamplingParams.allowed_token_ids, bad_words and min_tokens together forbid every "
            "token: bad words of one token are never allowed, and min_tokens forbids the stop "
            f"tokens {sorted(early_stops)}."
        )

    bias_ids = np.full(BIAS_IDS, vocab_size, np.int32)
    bias = np.zeros(BIAS_IDS, np.float32)
    if params.logit_bias:
        bias_ids[: len(params.logit_bias)] = list(params.logit_bias)
        bias[: len(params.logit_bias)] = list(params.logit_bias.values())
    words = np.full((BAD_SEQUENCES, BAD_SEQUENCE_TOKENS), NO_TOKEN, np.int32)
    longer = [sequence for sequence in sequences if len(sequence) > 1]
    for row, sequence in enumerate(longer):
        words[row, -len(sequence) :] = sequence
    return Rules(_bits(allowed), _bits(stop_mask), bias_ids, bias, words)  # type: ignore[arg-type]


def bad_sequences(
    words: Iterable[str | Sequence[int]], tokenizer: Tokenizer | None
) -> list[tuple[int, ...]]:
    """The token sequences of bad words, each once: of a text those with and without a space
    before it, ``"York"`` as in ``"YorkTown"`` and as in ``"New York"``."""
    found: dict[tuple[int, ...], None] = {}
    for word in words:
        spellings: Sequences = []
        if not isinstance(word, str):
            spellings = [tuple(word)]
        elif tokenizer is None:
            raise ValueError(
                f"SamplingParams.bad_words has the text {word!r}, but the model has no tokenizer; "
                "give token ids."
            )
        else:
            text = word.lstrip()
            for spelling in (text, " " + text):
                spellings.append(tuple(tokenizer.encode(spelling, add_special_tokens=False)))
        for sequence in spellings:
            if not 0 < len(sequence) <= BAD_SEQUENCE_TOKENS:
                raise ValueError(
                    f"SamplingParams.bad_words has {word!r} of {len(sequence)} tokens; a bad word "
                    f"must have between 1 and {BAD_SEQUENCE_TOKENS}."
                )
            found[sequence] = None
    return list(found)


def _bits(mask: NDArray[np.bool_]) -> NDArray[np.uint32]:
    """(V,) -> (V32,): bit v % 32 of word v // 32 is ``mask[v]``."""
    padded = np.zeros(-(-len(mask) // 32) * 32, bool)
    padded[: len(mask)] = mask
    return np.packbits(padded, bitorder="little").view(np.dtype("<u4")).astype(np.uint32)
