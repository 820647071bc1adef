"""Server-sent events, and clients that go away."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

import orjson
from fastapi import Request, Response
from fastapi.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from jllm.server.errors import APIError, server_fault

DONE = b"data: [DONE]\n\n"
HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}  # for proxies


def event(data: Any) -> bytes:
    """One event of JSON data."""
    return b"data: " + orjson.dumps(data) + b"\n\n"


class EventStream(StreamingResponse):
    """Sends events, then ``[DONE]``. An error on the way is an event too: a stream that just ended
    would pass for an answer.

    Args:
      events: pieces of one event or several. Cancelled when the client goes away.
      on_end: called once when the stream has ended, in whatever way.
    """

    media_type = "text/event-stream"

    def __init__(self, events: AsyncIterator[bytes], on_end: Callable[[], None]) -> None:
        super().__init__(events, headers=HEADERS)
        self._events = events
        self._on_end = on_end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._on_end()

    async def stream_response(self, send: Send) -> None:
        """Called by Starlette, which cancels it when the client disconnects."""
        status, headers = self.status_code, self.raw_headers
        await send({"type": "http.response.start", "status": status, "headers": headers})
        end = DONE
        try:
            async for events in self._events:
                await send({"type": "http.response.body", "body": events, "more_body": True})
        except APIError as error:
            end = event(error.body()) + DONE
        except Exception as error:
            end = event(server_fault(error).body()) + DONE
        await send({"type": "http.response.body", "body": end, "more_body": False})


async def unless_gone(
    request: Request, answer: Coroutine[Any, Any, Response], on_end: Callable[[], None]
) -> Response:
    """The answer, given up when the client disconnects before it is there.

    Args:
      request: whose body has been read.
      answer: makes the response; cancelled when nobody waits for it any more.
      on_end: called once, in whatever way this ends.
    """
    working = asyncio.ensure_future(answer)
    gone = asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait((working, gone), return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else Response(status_code=499)
    finally:
        working.cancel()
        gone.cancel()
        on_end()


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
