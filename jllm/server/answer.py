"""How outputs become one JSON answer, or a stream of chunks: the same for both endpoints.

What an endpoint adds is a function that turns news of a prompt into pieces: parts of a chunk, each
with its ``choices``. Streamed, every piece is a chunk; otherwise they are joined.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import orjson
from fastapi import Request, Response

import jllm
from jllm.outputs import RequestOutput
from jllm.server.errors import bad_request
from jllm.server.limits import MAX_NAME
from jllm.server.middleware import REQUEST_ID
from jllm.server.protocol import Generation
from jllm.server.served import Served
from jllm.server.sse import EventStream, EventWriter, while_connected
from jllm.server.ticket import News, Ticket
from jllm.server.usage import Usage

Piece = dict[str, Any]
Pieces = Callable[[int, RequestOutput], list[Piece]]  # of the index of a prompt and its news

FINGERPRINT = f"jllm-{jllm.__version__}"


def answer_id(prefix: str, body: Generation, request: Request) -> str:
    """A name for the answer: the client's own, or one made up."""
    name: str = request.headers.get(REQUEST_ID) or body.request_id or request.state.request_id
    return f"{prefix}-{name[:MAX_NAME]}"


def _checked(output: RequestOutput) -> RequestOutput:
    """Raises APIError for a sample that could not be ended as it had to be."""
    for sample in output.outputs:
        if sample.finish_reason == "abort" and sample.stop_reason is not None:
            raise bad_request(f"The text could not be finished: {sample.stop_reason}")
    return output


async def answer(
    request: Request,
    body: Generation,
    served: Served,
    ticket: Ticket,
    pieces: Pieces,
    usage: Usage,
    *,
    id: str,
    object: str,
) -> Response:
    """The response to a request that the engine has taken. It closes the ticket at its end,
    also when the client goes away.

    Args:
      id, object: the fields of that name; ``.chunk`` is not part of the object.
    """
    head: Piece = {
        "id": id,
        "object": object,
        "created": int(time.time()),
        "model": served.name,
        "system_fingerprint": FINGERPRINT,
    }
    if body.stream:
        chunks = _Chunks(body, pieces, usage, head)
        return EventStream(ticket, chunks.events, chunks.last)
    async with while_connected(request.receive, ticket):
        return await _whole(ticket, pieces, usage, head)


async def _whole(ticket: Ticket, pieces: Pieces, usage: Usage, head: Piece) -> Response:
    choices: list[Piece] = []
    while news := await ticket.news():
        for index, output in news:
            usage.add(index, _checked(output))
            for piece in pieces(index, output):
                choices += piece.pop("choices")
                head |= piece
    choices.sort(key=lambda choice: int(choice["index"]))
    return json_response({**head, "choices": choices, "usage": usage.as_json()})


class _Chunks:
    """The events of a streamed answer."""

    def __init__(self, body: Generation, pieces: Pieces, usage: Usage, head: Piece) -> None:
        options = body.stream_options
        self._shows_usage = options is not None and options.include_usage
        self._continuous_usage = options is not None and options.continuous_usage_stats
        self._pieces = pieces
        self._usage = usage
        self._write = EventWriter(head).event

    def events(self, news: News) -> bytes:
        """A chunk for each piece; raises APIError for a sample that came to no good end."""
        events = []
        for index, output in news:
            self._usage.add(index, _checked(output))
            for piece in self._pieces(index, output):
                if self._continuous_usage:
                    piece["usage"] = self._usage.as_json()
                events.append(self._write(piece))
        return b"".join(events)

    def last(self) -> bytes:
        """The chunk with the usage, if one is wanted."""
        if not self._shows_usage:
            return b""
        return self._write({"choices": [], "usage": self._usage.as_json()})


def json_response(content: Any) -> Response:
    """Status 200 with JSON."""
    return Response(orjson.dumps(content), media_type="application/json")
