"""Counts what a request used."""

from __future__ import annotations

from typing import Any

from jllm.outputs import RequestOutput


class Usage:
    """Tokens of the prompts, each once, and of all samples together.

    Args:
      num_prompt_tokens: of all prompts.
      count_output: whether what is generated is part of the answer.
    """

    def __init__(self, num_prompt_tokens: int, count_output: bool = True) -> None:
        self._prompt = num_prompt_tokens
        self._count_output = count_output
        self._completion = 0
        self._cached: dict[int, int] = {}  # by prompt

    def add(self, index: int, output: RequestOutput) -> None:
        """Takes what is new of prompt number ``index``."""
        self._cached[index] = output.num_cached_tokens
        if self._count_output:
            for sample in output.outputs:
                self._completion += len(sample.token_ids)

    def as_json(self) -> dict[str, Any]:
        """OpenAI's ``usage``, so far."""
        return {
            "prompt_tokens": self._prompt,
            "completion_tokens": self._completion,
            "total_tokens": self._prompt + self._completion,
            "prompt_tokens_details": {"cached_tokens": sum(self._cached.values())},
        }
