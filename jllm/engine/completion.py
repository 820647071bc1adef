"""The output side of one sample: tokens to text, stop conditions, and what was shown already."""

from __future__ import annotations

from collections.abc import Sequence

from jllm.detokenizer import IncrementalDetokenizer, StopStringMatcher
from jllm.engine.request import Request
from jllm.outputs import CompletionOutput, Logprob
from jllm.tokenizer import Tokenizer


class Completion:
    """Follows one request: every arrived token goes through ``push``."""

    def __init__(
        self, request: Request, tokenizer: Tokenizer | None, eos_token_ids: Sequence[int]
    ) -> None:
        params = request.params
        self.request = request
        self._eos = frozenset(() if params.ignore_eos else eos_token_ids)
        self._stop_ids = frozenset(params.stop_token_ids)
        self._detokenizer = None
        if tokenizer is not None and params.detokenize:
            self._detokenizer = IncrementalDetokenizer(
                tokenizer,
                skip_special_tokens=params.skip_special_tokens,
                spaces_between_special_tokens=params.spaces_between_special_tokens,
            )
        self._matcher = StopStringMatcher(params.stop, params.include_stop_str_in_output)
        self._text: list[str] = []  # all of it, in pieces
        self._logprobs: list[dict[int, Logprob]] = []
        self._cumulative = 0.0
        self._shown_pieces = 0
        self._shown_tokens = 0
        self._shown_end = False

    def push(self, token: int, logprobs: dict[int, Logprob] | None) -> None:
        """Takes a token that arrived, and ends the request where it must end.

        The token that ends it is part of the ids; its text is shown only if it is the end of a
        stop string, or with ``include_stop_str_in_output``.
        """
        request = self.request
        request.append(token)
        matcher = request.matcher
        if logprobs is not None:
            self._logprobs.append(logprobs)
            self._cumulative += logprobs[token].logprob
        if matcher is not None and matcher.error is not None:  # its mask allowed only eos
            request.finish_reason, request.stop_reason = "abort", matcher.error
        elif token in self._stop_ids or token in self._eos:
            request.finish_reason = "stop"
            request.stop_reason = token if token in self._stop_ids else None
            if request.params.include_stop_str_in_output:
                self._push_text(token)
        elif (stop := self._push_text(token)) is not None:
            request.finish_reason, request.stop_reason = "stop", stop
        elif matcher is not None and matcher.ends_with(token):
            request.finish_reason = "stop"
        elif request.num_known == request.max_tokens:
            request.finish_reason = "length"
        if request.finished:
            self._flush()

    def abort(self) -> None:
        """Ends the request where it is; text that was held back is shown."""
        self.request.finish_reason = "abort"
        self._flush()

    def _flush(self) -> None:
        """Shows what was held back at the end: half a character, or the beginning of a stop
        string. The replacement for half a character may complete one."""
        request = self.request
        if self._detokenizer is None:
            return
        tail, stop = self._detokenizer.flush(), None
        if self._looks_for_stops:
            tail, stop = self._matcher.push(tail)
        self._text.append(tail + self._matcher.flush())
        if request.finish_reason == "length" and stop is not None:
            request.finish_reason, request.stop_reason = "stop", stop

    def _push_text(self, token: int) -> str | None:
        """Adds the token's text; returns the stop string it completes, if any."""
        if self._detokenizer is None:
            return None
        text, stop = self._detokenizer.push((token,)), None
        if self._looks_for_stops:
            text, stop = self._matcher.push(text)
        self._text.append(text)
        return stop

    @property
    def _looks_for_stops(self) -> bool:
        return len(self.request.output) > self.request.params.min_tokens

    def whole(self) -> CompletionOutput:
        """Everything so far."""
        return self._output(0, 0)

    @property
    def has_news(self) -> bool:
        """Whether a token came or the request ended since the last call of ``news``."""
        ended = self.request.finished and not self._shown_end
        return ended or len(self.request.output) > self._shown_tokens

    def news(self) -> CompletionOutput:
        """What came since the last call of ``news``."""
        output = self._output(self._shown_pieces, self._shown_tokens)
        self._shown_pieces = len(self._text)
        self._shown_tokens = len(self.request.output)
        self._shown_end = self.request.finished
        return output

    def _output(self, first_piece: int, first_token: int) -> CompletionOutput:
        request = self.request
        wants_logprobs = request.params.logprobs is not None
        return CompletionOutput(
            index=request.sample,
            text="".join(self._text[first_piece:]),
            token_ids=request.output[first_token:].tolist(),
            cumulative_logprob=self._cumulative if wants_logprobs else None,
            logprobs=self._logprobs[first_token:] if wants_logprobs else None,
            finish_reason=request.finish_reason,
            stop_reason=request.stop_reason,
        )
