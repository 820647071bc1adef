"""What a handler holds while the engine works on its request."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from jllm.outputs import RequestOutput
from jllm.server.errors import APIError

News = list[tuple[int, RequestOutput]]  # index of the prompt, and what is new of it


class Ticket:
    """The outputs of one HTTP request's prompts, as they come. Belongs to the event loop.

    Args:
      num_prompts: how many prompts will each come to an end.
      on_close: told once when nobody wants the outputs any more.

    Attributes:
      names: what the engine calls its prompts; touched by the engine's thread alone.
    """

    def __init__(self, num_prompts: int, on_close: Callable[[Ticket], None]) -> None:
        self.names: list[str] = []
        self._unfinished = num_prompts
        self._on_close = on_close
        self._closed = False
        self._accepted = False
        self._news: News = []
        self._error: APIError | None = None
        self._waiter: asyncio.Future[None] | None = None

    @property
    def finished(self) -> bool:
        """Whether all prompts have come to their end."""
        return self._unfinished == 0

    async def accepted(self) -> None:
        """Waits until the engine has taken the prompts; raises APIError if it has not."""
        while not self._accepted:
            await self._change()

    async def news(self) -> News:
        """What came since it was last asked, waiting for it if that is nothing; empty when all
        prompts have ended.

        Raises APIError when the engine fails.
        """
        while not self._news and self._unfinished:
            await self._change()
        news, self._news = self._news, []
        return news

    def close(self) -> None:
        """Aborts what is unfinished. Closing again does nothing."""
        if not self._closed:
            self._closed = True
            self._on_close(self)

    # Called by the engine, on the event loop.

    def accept(self) -> None:
        self._accepted = True
        self._wake()

    def push(self, index: int, output: RequestOutput) -> None:
        self._news.append((index, output))
        self._unfinished -= output.finished
        self._wake()

    def fail(self, error: APIError) -> None:
        """Whoever waits, or asks next, gets the error."""
        self._error = self._error or error
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _change(self) -> asyncio.Future[None]:
        if self._error is not None:
            raise self._error
        self._waiter = asyncio.get_running_loop().create_future()
        return self._waiter
