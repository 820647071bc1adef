"""Server-sent events, and clients that go away."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any

import orjson
from fastapi import Response
from starlette.types import Receive, Scope, Send

from jllm.server.errors import APIError, server_fault
from jllm.server.ticket import News, Ticket

DONE = b"data: [DONE]\n\n"
HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}  # for proxies


class EventWriter:
    """Writes JSON objects as events, whose first fields are always the same."""

    def __init__(self, head: dict[str, Any]) -> None:
        self._head = b"data: " + orjson.dumps(head)[:-1] + b","

    def event(self, rest: dict[str, Any]) -> bytes:
        """One event of the head and these fields, of which there must be one."""
        return self._head + orjson.dumps(rest)[1:] + b"\n\n"


class EventStream(Response):
    """Sends events, then ``[DONE]``. An error on the way is an event too: a stream that just ended
    would pass for an answer.

    Args:
      ticket: whose news are sent; closed at the end, also when the client goes away.
      events: the events of some news. What has come while a slow client was written to, or while
        there was too much to do, is asked for together and sent in one piece.
      last: the events at the end, asked for when there will be no more news.
    """

    media_type = "text/event-stream"

    def __init__(
        self, ticket: Ticket, events: Callable[[News], bytes], last: Callable[[], bytes]
    ) -> None:
        super().__init__(headers=HEADERS)
        del self.headers["content-length"]
        self._ticket = ticket
        self._events = events
        self._last = last

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with while_connected(receive, self._ticket):
            status, headers = self.status_code, self.raw_headers
            await send({"type": "http.response.start", "status": status, "headers": headers})
            # By a task of its own, and past what looks only at how a response begins: each token
            # would wake all that stands between the route and the socket.
            await asyncio.create_task(self._send_body(scope["state"]["send"]))

    async def _send_body(self, send: Send) -> None:
        try:
            while news := await self._ticket.news():
                body = self._events(news)
                await send({"type": "http.response.body", "body": body, "more_body": True})
            end = self._last() + DONE
        except APIError as error:
            end = _error(error)
        except Exception as error:
            end = _error(server_fault(error))
        await send({"type": "http.response.body", "body": end, "more_body": False})


@contextlib.asynccontextmanager
async def while_connected(receive: Receive, ticket: Ticket) -> AsyncIterator[None]:
    """Fails the ticket when the client goes away, and closes it at the end.

    Args:
      receive: of a request whose body has been read.
    """

    async def watch() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        ticket.fail(APIError(499, "The client has gone away."))

    watching = asyncio.create_task(watch())
    try:
        yield
    finally:
        watching.cancel()
        ticket.close()


def _error(error: APIError) -> bytes:
    return b"data: " + orjson.dumps(error.body()) + b"\n\n" + DONE
