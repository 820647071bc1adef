"""Grammars of structured outputs: which tokens may come next, by the library ``llguidance``.

A form (``Structured``) is compiled once, when the first request that has it is added. Each
request then has a ``Matcher`` of its own, on the host, which follows the tokens that arrive; before
a step samples, ``Grammars.masks`` asks the matchers for one bit per token of the vocabulary.

Every way to spell an allowed text in tokens is allowed, not only the tokenizer's own: the model
chooses among all tokens after which the text can still be completed.
"""

from __future__ import annotations

import importlib.util
import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from jllm.engine.grammar_compiler import compile_grammar, one_line
from jllm.structured import Structured
from jllm.tokenizer import Tokenizer

if TYPE_CHECKING:
    import llguidance

MAX_CACHED = 256  # compiled forms; a few kB each before any token


class Matcher:
    """Follows the text of one request.

    Attributes:
      error: why the form cannot be followed any further (it met a limit), or None.
    """

    def __init__(self, matcher: llguidance.LLMatcher) -> None:
        self._matcher = matcher

    def ends_with(self, token: int) -> bool:
        """Takes the next token, which must be one that the last mask allowed. True if with it the
        text is complete and nothing may follow."""
        self._matcher.consume_token(token)
        return self._matcher.is_stopped() and not self._matcher.is_error()

    @property
    def error(self) -> str | None:
        return one_line(self._matcher.get_error()) if self._matcher.is_error() else None


class Grammars:
    """Compiles forms for one vocabulary and keeps the compiled ones.

    Args:
      tokenizer: whose tokens spell the text; None refuses every form.
      vocab_size: V, the model's.
      eos_token_ids: the tokens that end a text.
    """

    def __init__(
        self, tokenizer: Tokenizer | None, vocab_size: int, eos_token_ids: Sequence[int]
    ) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        self._vocabulary: llguidance.LLTokenizer | None = None
        self._executor: llguidance.LLExecutor | None = None
        self._compiled: OrderedDict[Structured, llguidance.LLMatcher] = OrderedDict()
        self._lock = threading.Lock()

    def matcher(self, form: Structured) -> Matcher:
        """A matcher at the beginning of the text. May be called by any thread.

        Raises ValueError: the package, the tokenizer or the eos token for it is missing; the form
        is not valid, not supported, matches no text, or is too complex.
        """
        with self._lock:
            compiled = self._compiled.get(form)
        if compiled is None:
            compiled = self._compile(form)
        with self._lock:
            self._compiled[form] = compiled
            self._compiled.move_to_end(form)
            if len(self._compiled) > MAX_CACHED:
                self._compiled.popitem(last=False)
            return Matcher(compiled.deep_copy())

    def prepare(self) -> None:
        """Reads the vocabulary now, a second for a large one, if structured outputs are possible:
        else it is read for the first form."""
        if self._objection() is None:
            self._read_vocabulary()

    def masks(self, num_rows: int, rows: Sequence[tuple[int, Matcher]]) -> NDArray[np.uint32]:
        """Which tokens may come next, as ``all_allowed``, which rows without a matcher get."""
        masks = all_allowed(num_rows, self._vocab_size)
        assert self._executor is not None
        self._executor.unsafe_compute_mask_ptr(
            [(matcher._matcher, row) for row, matcher in rows],
            masks.ctypes.data,
            masks.strides[0],
            num_rows,
        )
        return masks

    def _objection(self) -> str | None:
        """Why this model cannot have structured outputs at all."""
        if importlib.util.find_spec("llguidance") is None:
            return "structured outputs need a package: pip install 'jllm[structured]'."
        if self._tokenizer is None:
            return "SamplingParams.structured needs text, but the model has no tokenizer."
        if self._tokenizer.spelling.joined_by_spaces:
            return (
                "SamplingParams.structured does not work with a tokenizer of whole words that are "
                "joined by spaces."
            )
        if not self._eos_token_ids:
            return "SamplingParams.structured needs a model that has an eos token."
        return None

    def _compile(self, form: Structured) -> llguidance.LLMatcher:
        objection = self._objection()
        if objection is not None:
            raise ValueError(objection)
        vocabulary = self._read_vocabulary()
        assert self._tokenizer is not None
        try:
            begin_with_space = self._tokenizer.spelling.strips_first_space
            return compile_grammar(form, vocabulary, begin_with_space=begin_with_space)
        except ValueError as error:
            raise ValueError(f"Structured.{form.kind} cannot be used: {error}") from error

    def _read_vocabulary(self) -> llguidance.LLTokenizer:
        import llguidance

        with self._lock:
            if self._vocabulary is None:
                assert self._tokenizer is not None
                self._executor = llguidance.LLExecutor()
                tokens: Any = _Vocabulary(self._tokenizer, self._vocab_size, self._eos_token_ids)
                self._vocabulary = llguidance.LLTokenizer(
                    tokens, n_vocab=self._vocab_size, eos_token=list(self._eos_token_ids)
                )
            return self._vocabulary


def all_allowed(num_rows: int, vocab_size: int) -> NDArray[np.uint32]:
    """Masks (B, V32) that allow every token: bit v % 32 of word v // 32 stands for token v. V32 is
    V / 32 rounded up."""
    return np.full((num_rows, -(-vocab_size // 32)), 0xFFFFFFFF, np.uint32)


class _Vocabulary:
    """A tokenizer in the form that the library asks for. Ids without a token have no bytes and
    are never allowed; special tokens are allowed only where a grammar names them."""

    is_tokenizer_wrapper = True

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self.eos_token_id = eos_token_ids[0]
        self.bos_token_id = tokenizer.bos_token_id
        self.tokens = [tokenizer.token_bytes(token) for token in range(vocab_size)]
        special = tokenizer.special_ids | set(eos_token_ids)
        self.special_token_ids = sorted(token for token in special if token < vocab_size)
        self._tokenizer = tokenizer

    def __call__(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False)
