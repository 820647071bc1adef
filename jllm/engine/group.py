"""A prompt and its n samples, as the caller sees them."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from jllm.engine.completion import Completion
from jllm.engine.logprobs import PromptLogprobs
from jllm.outputs import Logprob, RequestOutput, RequestTimes


@dataclass(slots=True, eq=False)
class Group:
    """Joins what its completions have to say into one RequestOutput.

    Attributes:
      request_id: the name that the caller knows.
      prompt: the text, if the prompt was text.
      prompt_ids: the ids.
      completions: one for each sample, by index.
      prompt_logprobs: the prompt's, until they were reported; None if not asked for.
      stream: report what is new as it comes, or the whole at the end.
      arrived, first_token: when it was made, and when its first token arrived on the host.
    """

    request_id: str
    prompt: str | None
    prompt_ids: list[int]
    completions: list[Completion]
    prompt_logprobs: PromptLogprobs | None
    stream: bool
    arrived: float = field(default_factory=time.monotonic)
    first_token: float | None = None

    @property
    def finished(self) -> bool:
        return all(completion.request.finished for completion in self.completions)

    def report(self) -> RequestOutput | None:
        """What there is to report now; None as long as that is nothing."""
        finished = self.finished
        if self.stream:
            parts = [c.news() for c in self.completions if c.has_news]
        elif finished:
            parts = [completion.whole() for completion in self.completions]
        else:
            return None
        return RequestOutput(
            self.request_id,
            self.prompt,
            self.prompt_ids,
            parts,
            finished,
            self._take_prompt_logprobs(),
            self.completions[0].request.num_cached,
            self._times() if finished else None,
        )

    def _times(self) -> RequestTimes:
        began = [c.request.admitted for c in self.completions if c.request.admitted is not None]
        return RequestTimes(
            self.arrived, min(began, default=None), self.first_token, time.monotonic()
        )

    def _take_prompt_logprobs(self) -> list[dict[int, Logprob] | None] | None:
        """The logprobs of the prompt, if they were asked for, are complete, and not shown yet."""
        entries = None if self.prompt_logprobs is None else self.prompt_logprobs.complete
        if entries is not None:
            self.prompt_logprobs = None
        return entries
