"""From a step's numbers to the ``Logprob`` objects that a request reports."""

from __future__ import annotations

import math

from jllm.engine.runner import TokenLogprobs
from jllm.outputs import Logprob
from jllm.tokenizer import Tokenizer


def logprobs_of(
    values: TokenLogprobs, row: int, token: int, count: int, tokenizer: Tokenizer | None
) -> dict[int, Logprob]:
    """The token's own Logprob, then those of the ``count`` likeliest (-1: of all), by id.

    Tokens that cannot be drawn have none: every number reported is finite.
    """
    found = {token: float(values.chosen[row])}
    limit = None if count == -1 else count
    ids, top = values.top_ids[row, :limit].tolist(), values.top[row, :limit].tolist()
    for other, value in zip(ids, top, strict=True):
        if value > -math.inf:
            found.setdefault(other, value)
    return {
        other: Logprob(value, None if tokenizer is None else tokenizer.token_string(other))
        for other, value in found.items()
    }


class PromptLogprobs:
    """The logprobs of a prompt's tokens, filled in as its chunks are run. A chunk that runs again
    after a preemption gives the same values and replaces them."""

    def __init__(self, prompt_ids: list[int], count: int, tokenizer: Tokenizer | None) -> None:
        self._ids = prompt_ids
        self._count = count
        self._tokenizer = tokenizer
        self._entries: list[dict[int, Logprob] | None] = [None] * len(prompt_ids)
        self._missing = len(prompt_ids) - 1  # nothing precedes the first token

    def add(self, values: TokenLogprobs, position: int, offset: int, length: int) -> None:
        """Takes the logprobs of ``length`` tokens from ``position`` on, which are the rows from
        ``offset`` on."""
        for index in range(position, position + length):
            row = offset + index - position
            self._missing -= self._entries[index] is None
            self._entries[index] = logprobs_of(
                values, row, self._ids[index], self._count, self._tokenizer
            )

    @property
    def complete(self) -> list[dict[int, Logprob] | None] | None:
        """All of them, or None as long as some are missing."""
        return self._entries if self._missing == 0 else None
