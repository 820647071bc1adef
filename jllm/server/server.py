"""Runs the application under uvicorn, on the main thread or beside it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import threading
import time
from types import TracebackType

import uvicorn

import jllm
from jllm.server.app import make_app
from jllm.server.errors import APIError
from jllm.server.options import ServerOptions
from jllm.server.served import Served

logger = logging.getLogger("jllm.server")

KEEP_ALIVE_S = 75  # longer than clients keep an idle connection, so that it is they who close it
BACKLOG = 4096
POLL_S = 0.01
ERROR_GRACE_S = 5.0  # for the errors of a shutdown to reach their clients


class Server:
    """Serves a model over HTTP.

        with Server(jllm.Engine(params), ServerOptions(port=0)) as server:
            print(server.url)

    Args:
      engine: the server's from now on, and closed with it.
      options: names, limits and where to listen.
    """

    def __init__(self, engine: jllm.Engine, options: ServerOptions | None = None) -> None:
        self.options = options or ServerOptions()
        self.served = Served(engine, self.options)
        config = uvicorn.Config(
            make_app(self.served),
            host=self.options.host,
            port=self.options.port,
            log_config=None,
            access_log=self.options.access_log,
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=int(self.options.shutdown_timeout_s + ERROR_GRACE_S),
            backlog=BACKLOG,
            ws="none",
        )
        self._uvicorn = _Uvicorn(config, self.served)
        self._thread: threading.Thread | None = None

    def run(self) -> None:
        """Serves until the process is told to stop, by SIGINT or SIGTERM.

        Raises:
          OSError: the address is taken or not ours.
          RuntimeError: the engine died before it was ready.
        """
        bound = self._bind()
        logger.info("Serving %s on %s", ", ".join(self.options.served_model_name), self.url)
        self._uvicorn.run([bound])
        if self.served.engine.failed_to_start:
            raise RuntimeError("The engine died before it was ready; the log says how.")

    def __enter__(self) -> Server:
        """Starts serving in a thread; requests get 503 until the engine is ready."""
        bound = self._bind()
        self._thread = threading.Thread(
            target=self._uvicorn.run, args=([bound],), name="jllm-http", daemon=True
        )
        self._thread.start()
        while not self._uvicorn.started and self._thread.is_alive():
            time.sleep(POLL_S)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        assert self._thread is not None
        self._uvicorn.should_exit = True
        self._thread.join()

    @property
    def url(self) -> str:
        """Where it listens, without /v1."""
        host = f"[{self._host}]" if ":" in self._host else self._host
        return f"http://{host}:{self._port}"

    def _bind(self) -> socket.socket:
        """The socket, bound before anything else starts, so that a taken port is found out."""
        family = socket.AF_INET6 if ":" in self.options.host else socket.AF_INET
        bound = socket.create_server(
            (self.options.host, self.options.port), family=family, backlog=BACKLOG
        )
        self._host, self._port = bound.getsockname()[:2]
        return bound


class _Uvicorn(uvicorn.Server):
    """Lets requests end before it stops, for a while; then they get an error, not a cut."""

    def __init__(self, config: uvicorn.Config, served: Served) -> None:
        super().__init__(config)
        self._served = served

    async def on_tick(self, counter: int) -> bool:
        """Whether to stop: also when the engine never came up, which nothing can cure."""
        return await super().on_tick(counter) or self._served.engine.failed_to_start

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        refusing = asyncio.create_task(self._refuse_later())
        await super().shutdown(sockets)
        refusing.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await refusing

    async def _refuse_later(self) -> None:
        await asyncio.sleep(self._served.options.shutdown_timeout_s)
        self._served.engine.refuse_all(APIError(503, "The server is shutting down."))
