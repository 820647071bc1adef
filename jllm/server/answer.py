"""How outputs become one JSON answer, or a stream of chunks: the same for both endpoints.

What an endpoint adds is a function that turns news of a prompt into pieces: parts of a chunk, each
with its ``choices``. Streamed, every piece is a chunk; otherwise they are joined.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable
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
from jllm.server.sse import EventStream, event, unless_gone
from jllm.server.ticket import Ticket
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
        return EventStream(_chunks(body, ticket, pieces, usage, head), ticket.close)
    return await unless_gone(request, _whole(ticket, pieces, usage, head), ticket.close)


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


async def _chunks(
    body: Generation, ticket: Ticket, pieces: Pieces, usage: Usage, head: Piece
) -> AsyncIterator[bytes]:
    options = body.stream_options
    continuous = options is not None and options.continuous_usage_stats
    while news := await ticket.news():
        events = []
        for index, output in news:
            usage.add(index, _checked(output))
            for piece in pieces(index, output):
                if continuous:
                    piece["usage"] = usage.as_json()
                events.append(event({**head, **piece}))
        yield b"".join(events)
    if options is not None and options.include_usage:
        yield event({**head, "choices": [], "usage": usage.as_json()})


def json_response(content: Any) -> Response:
    """Status 200 with JSON."""
    return Response(orjson.dumps(content), media_type="application/json")
