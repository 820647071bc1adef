"""What the engine's thread knows of the requests it works on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from jllm.outputs import RequestOutput
from jllm.sampling_params import SamplingParams
from jllm.server.metrics import Metrics
from jllm.server.ticket import Ticket


@dataclass(frozen=True)
class Job:
    """Prompts of one HTTP request, of which the engine takes all or none."""

    ticket: Ticket
    prompts: Sequence[Sequence[int]]
    params: Sequence[SamplingParams]
    name: str
    cache_salt: str | None
    stream: bool

    @property
    def num_samples(self) -> int:
        return sum(params.n for params in self.params)


class Part:
    """One prompt in the engine: whose it is, and what came of its samples so far."""

    def __init__(self, ticket: Ticket, index: int, params: SamplingParams) -> None:
        self.ticket = ticket
        self.index = index
        self._params = params
        self._counts = [0] * params.n  # tokens
        self._reasons = [""] * params.n
        self._last_news: float | None = None

    def note(
        self, output: RequestOutput, now: float, gaps: Counter[float], metrics: Metrics
    ) -> None:
        """Counts what is new; with the last output, all that became of the prompt.

        Args:
          now: the same for all news of a step.
          gaps: the seconds since the news before are counted there.
        """
        if self._last_news is not None:
            gaps[now - self._last_news] += 1
        self._last_news = now
        for sample in output.outputs:
            self._counts[sample.index] += len(sample.token_ids)
            self._reasons[sample.index] = sample.finish_reason or ""
        if output.times is not None:
            num_prompt = len(output.prompt_token_ids)
            metrics.request_finished(
                self._params, num_prompt, self._counts, self._reasons, output.times
            )
