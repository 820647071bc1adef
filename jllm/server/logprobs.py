"""Logprobs in OpenAI's two shapes, that of completions and that of chat."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jllm.detokenizer import IncrementalDetokenizer
from jllm.outputs import Logprob
from jllm.tokenizer import Tokenizer

Entry = Mapping[int, Logprob] | None  # None: of a token that nothing precedes
LEAST = -9999.0  # stands for -inf, which JSON does not have


class Spelling:
    """Shows tokens as text, or as ``token_id:N`` where that is asked for or there is no text.

    A token is shown as it stands inside a text, with its space before it; one that is a part of a
    character shows as U+FFFD.
    """

    def __init__(self, tokenizer: Tokenizer | None, as_ids: bool) -> None:
        self._tokenizer = None if as_ids else tokenizer

    def text(self, token: int) -> str:
        if self._tokenizer is None:
            return f"token_id:{token}"
        return self._tokenizer.token_string(token)

    def bytes(self, token: int) -> list[int]:
        """The token's true bytes, also where it is only a part of a character."""
        if self._tokenizer is None:
            return list(self.text(token).encode())
        return list(self._tokenizer.token_bytes(token))


class TextOffsets:
    """How many characters of the text precede each token, as tokens come.

    Args:
      tokenizer: without one there is no text, and every offset is the first.
      start: offset of the first token; negative if the text begins within it or after it.
      skip_special_tokens: whether the text leaves them out.
    """

    def __init__(self, tokenizer: Tokenizer | None, start: int, skip_special_tokens: bool) -> None:
        self._detokenizer = None
        if tokenizer is not None:
            self._detokenizer = IncrementalDetokenizer(
                tokenizer, skip_special_tokens=skip_special_tokens
            )
        self._offset = start

    def take(self, token: int) -> int:
        """The token's offset."""
        offset = max(self._offset, 0)
        if self._detokenizer is not None:
            self._offset += len(self._detokenizer.push((token,)))
        return offset


def completion_logprobs(
    ids: Sequence[int], entries: Sequence[Entry], offsets: TextOffsets, spelling: Spelling
) -> dict[str, list[Any]]:
    """``tokens``, ``token_logprobs``, ``top_logprobs`` and ``text_offset`` of some tokens.

    ``top_logprobs`` of a token holds the likeliest ones and the token itself. Of ids that are
    spelled alike it keeps the likelier. A token that is the likeliest has the same number in both
    lists: clients compare them for equality.
    """
    token_logprobs: list[float | None] = []
    tops: list[dict[str, float] | None] = []
    for token, entry in zip(ids, entries, strict=True):
        if entry is None:
            token_logprobs.append(None)
            tops.append(None)
            continue
        token_logprobs.append(_finite(entry[token].logprob))
        top: dict[str, float] = {}
        for other, logprob in entry.items():
            text, value = spelling.text(other), _finite(logprob.logprob)
            top[text] = max(value, top.get(text, value))
        tops.append(top)
    return {
        "tokens": [spelling.text(token) for token in ids],
        "token_logprobs": token_logprobs,
        "top_logprobs": tops,
        "text_offset": [offsets.take(token) for token in ids],
    }


def chat_logprobs(
    ids: Sequence[int], entries: Sequence[Mapping[int, Logprob]], count: int, spelling: Spelling
) -> dict[str, Any]:
    """The ``logprobs`` of a chat's choice, with the ``count`` likeliest tokens for each."""
    content = []
    for token, entry in zip(ids, entries, strict=True):
        ranked = sorted(entry.items(), key=lambda item: -item[1].logprob)[:count]
        top = [_token(other, logprob, spelling) for other, logprob in ranked]
        content.append({**_token(token, entry[token], spelling), "top_logprobs": top})
    return {"content": content}


def prompt_logprobs(entries: Sequence[Entry], spelling: Spelling) -> list[Any]:
    """By token id, as vLLM shows them."""
    return [
        entry
        and {
            str(token): {
                "logprob": _finite(logprob.logprob),
                "decoded_token": spelling.text(token),
            }
            for token, logprob in entry.items()
        }
        for entry in entries
    ]


def _token(token: int, logprob: Logprob, spelling: Spelling) -> dict[str, Any]:
    return {
        "token": spelling.text(token),
        "logprob": _finite(logprob.logprob),
        "bytes": spelling.bytes(token),
    }


def _finite(value: float) -> float:
    return max(value, LEAST)
