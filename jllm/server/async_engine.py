"""The engine in a thread of its own, and the event loop's way to it.

Two queues, and nothing else is shared: commands go to the thread, news comes back, one hop for
everything that a step brought. The thread alone touches the engine.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import logging
import queue
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jllm
from jllm.sampling_params import SamplingParams
from jllm.server.errors import APIError, from_value_error, server_fault
from jllm.server.jobs import Job, Part
from jllm.server.metrics import Metrics
from jllm.server.ticket import Ticket
from jllm.structured import Structured

logger = logging.getLogger("jllm.server")

WATCH_INTERVAL_S = 0.5
CLOSE_TIMEOUT_S = 10.0  # for the step under way; compiling cannot be interrupted

Call = tuple[Callable[..., None], tuple[Any, ...]]
State = Literal["loading", "ready", "stuck", "dead"]


class AsyncEngine:
    """Runs an engine for the coroutines of one event loop.

    Args:
      engine: owned, and in the end closed, by the thread.
      warm_up: compile every program before saying ready.
      step_timeout_s: longest that a step may take before the engine counts as stuck.
      max_waiting: samples that may wait before more are refused; None for any number.
      metrics: told of every step and every finished request.
    """

    def __init__(
        self,
        engine: jllm.Engine,
        *,
        warm_up: bool,
        step_timeout_s: float,
        max_waiting: int | None,
        metrics: Metrics,
    ) -> None:
        self._engine = engine
        self._warm_up = warm_up
        self._step_timeout_s = step_timeout_s
        self._max_waiting = max_waiting
        self._metrics = metrics
        self._commands: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="jllm-engine", daemon=True)
        self._ready = False
        self._busy_since: float | None = None  # a step or several commands are under way
        # Of the thread:
        self._parts: dict[str, Part] = {}  # by the engine's request id
        self._numbers = itertools.count()
        self._news: list[Call] = []  # for the event loop to do
        # Of the event loop:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._watcher: asyncio.Task[None] | None = None
        self._tickets: set[Ticket] = set()
        self._closing = False

    # The event loop's side.

    async def start(self) -> None:
        """Starts the thread; what it brings goes to the running loop."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()
        self._watcher = asyncio.create_task(self._watch())

    async def close(self) -> None:
        """Ends what is unfinished with an error, and the thread."""
        self.refuse_all(APIError(503, "The server is shutting down."))
        if self._watcher is not None:
            self._watcher.cancel()
        self._commands.put(None)
        await asyncio.to_thread(self._thread.join, CLOSE_TIMEOUT_S)

    @property
    def state(self) -> State:
        """``stuck`` is a step that takes longer than it may; it can end and be ready again."""
        if self._loop is not None and not self._thread.is_alive():
            return "dead"
        if not self._ready:
            return "loading"
        since = self._busy_since
        if since is not None and time.monotonic() - since > self._step_timeout_s:
            return "stuck"
        return "ready"

    @property
    def failed_to_start(self) -> bool:
        """Whether the engine died before it was ever ready."""
        return self.state == "dead" and not self._ready

    @property
    def num_open(self) -> int:
        """HTTP requests that the engine works on or is about to."""
        return len(self._tickets)

    def prepare_structured(self, form: Structured) -> None:
        """``Engine.prepare_structured``; any thread may call it.

        Raises ValueError: the form cannot be used.
        """
        self._engine.prepare_structured(form)

    async def submit(
        self,
        prompts: Sequence[Sequence[int]],
        params: Sequence[SamplingParams],
        *,
        name: str,
        cache_salt: str | None = None,
        stream: bool,
    ) -> Ticket:
        """Gives prompts to the engine, each with its options, and waits until it has taken them.

        Whoever gets the ticket must close it.

        Raises:
          APIError: 400 for prompts or options that can never run, 429 when too many wait already,
            500 when the engine is dead or stuck. Nothing runs then.
        """
        if self.state in ("dead", "stuck"):
            raise _broken(self.state)
        if self._closing:
            raise APIError(503, "The server is shutting down.")
        ticket = Ticket(len(prompts), self._abort)
        self._tickets.add(ticket)
        job = Job(ticket, prompts, params, name, cache_salt, stream)
        self._commands.put(functools.partial(self._take, job))
        try:
            await ticket.accepted()
        except BaseException:
            ticket.close()
            raise
        return ticket

    def refuse_all(self, error: APIError) -> None:
        """Answers whoever waits with an error, and whoever comes from now on with 503."""
        self._closing = True
        for ticket in list(self._tickets):
            ticket.fail(error)

    def _abort(self, ticket: Ticket) -> None:
        """A ticket was closed; what is unfinished of it need not run on."""
        self._tickets.discard(ticket)
        if not ticket.finished:
            self._commands.put(functools.partial(self._drop, ticket))

    async def _watch(self) -> None:
        """Answers those who wait for an engine that will not: a thread cannot report its own end
        in every case, nor a step that it is stuck."""
        while True:
            await asyncio.sleep(min(WATCH_INTERVAL_S, self._step_timeout_s))
            state = self.state
            if state in ("dead", "stuck"):
                for ticket in list(self._tickets):
                    ticket.fail(_broken(state))

    def _deliver(self, news: list[Call]) -> None:
        for call, arguments in news:
            call(*arguments)

    # The thread's side.

    def _run(self) -> None:
        try:
            if self._warm_up:
                start = time.perf_counter()
                count = self._engine.warm_up()
                logger.info("Warmed up %d programs in %.1f s.", count, time.perf_counter() - start)
            self._publish_stats()
            self._ready = True
            while self._obey():
                if self._engine.has_unfinished():
                    self._step()
                self._publish_stats()  # before the news, so that no answer is ahead of the metrics
                self._send_news()
                self._busy_since = None
            self._engine.close()
        except BaseException as error:
            # Whoever waits is told by the watcher.
            logger.critical("The engine died; the server must be restarted.", exc_info=error)

    def _obey(self) -> bool:
        """Does what was commanded, waiting for it if there is nothing else to do; False to end."""
        wait = not self._engine.has_unfinished()
        while True:
            try:
                command = self._commands.get(block=wait)
            except queue.Empty:
                break
            wait = False
            self._busy_since = self._busy_since or time.monotonic()
            if command is None:
                return False
            command()
        self._busy_since = time.monotonic()
        self._send_news()  # of requests refused and taken, whose clients need not wait for a step
        return True

    def _take(self, job: Job) -> None:
        try:
            self._check_queue(job.num_samples)
            for index, (prompt, params) in enumerate(zip(job.prompts, job.params, strict=True)):
                name = self._engine.add_request(
                    prompt,
                    params,
                    # Never the same twice: of a name that is used again the engine might still have
                    # to report that it was aborted.
                    request_id=f"{job.name}-{next(self._numbers)}",
                    cache_salt=job.cache_salt,
                    stream=job.stream,
                )
                self._parts[name] = Part(job.ticket, index, params)
                job.ticket.names.append(name)
        except Exception as error:
            self._drop(job.ticket)
            self._news.append((job.ticket.fail, (_as_api_error(error),)))
        else:
            self._news.append((job.ticket.accept, ()))

    def _check_queue(self, new: int) -> None:
        """Raises APIError when a request of so many samples would make too many wait."""
        if self._max_waiting is None:
            return
        stats = self._engine.stats()
        assert self._engine.config.max_num_seqs
        places = self._engine.config.max_num_seqs - stats.running
        if stats.waiting + new - places > self._max_waiting:
            raise APIError(
                429,
                f"The queue is full: {stats.waiting} samples wait, and at most "
                f"{self._max_waiting} may. Try again later.",
                code="queue_full",
                headers={"Retry-After": "1"},
            )

    def _drop(self, ticket: Ticket) -> None:
        for name in ticket.names:
            if self._parts.pop(name, None) is not None:
                self._engine.abort(name)

    def _step(self) -> None:
        outputs = self._engine.step()
        now = time.monotonic()
        gaps: Counter[float] = Counter()
        for output in outputs:
            part = self._parts.get(output.request_id)
            if part is not None:  # else it was dropped
                self._news.append((part.ticket.push, (part.index, output)))
                part.note(output, now, gaps, self._metrics)
                if output.finished:
                    del self._parts[output.request_id]
        self._metrics.token_gaps(gaps)

    def _publish_stats(self) -> None:
        self._metrics.engine_stats(self._engine.stats())

    def _send_news(self) -> None:
        if not self._news:
            return
        news, self._news = self._news, []
        assert self._loop is not None
        try:
            self._loop.call_soon_threadsafe(self._deliver, news)
        except RuntimeError:  # the loop is closed: nobody waits any more
            logger.debug("The event loop is closed.")


def _as_api_error(error: Exception) -> APIError:
    if isinstance(error, APIError):
        return error
    return from_value_error(error) if isinstance(error, ValueError) else server_fault(error)


def _broken(state: State) -> APIError:
    why = "has stopped after an error" if state == "dead" else "does not answer"
    return APIError(500, f"The engine {why}; the server's log says more.", code="engine_" + state)
