"""What happens to every request before its route sees it: its id, the API key, the size limit.

Plain ASGI, since Starlette's BaseHTTPMiddleware puts a queue between a stream and its socket.
"""

from __future__ import annotations

import secrets
import uuid

from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jllm.server.errors import APIError
from jllm.server.limits import MAX_BODY_BYTES

REQUEST_ID = "x-request-id"


class RequestId:
    """Sends the client's ``X-Request-Id`` back, or one made up, which routes find in the state of
    the request under the name ``request_id``. There is ``send`` too, by which the body of a stream
    is sent past what looks only at the beginning of a response."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = Headers(scope=scope).get(REQUEST_ID) or uuid.uuid4().hex

        state = scope.setdefault("state", {})
        state["request_id"] = request_id
        state["send"] = send

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)[REQUEST_ID] = request_id
            await send(message)

        await self._app(scope, receive, send_with_id)


class ApiKey:
    """Lets only bearers of the key use what is under /v1."""

    def __init__(self, app: ASGIApp, api_key: str) -> None:
        self._app = app
        self._key = api_key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"].startswith("/v1") and not self._fits(scope):
            message = "The API key is missing or wrong: send it as 'Authorization: Bearer KEY'."
            headers = {"WWW-Authenticate": "Bearer"}
            error = APIError(401, message, code="invalid_api_key", headers=headers)
            await error.response()(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _fits(self, scope: Scope) -> bool:
        scheme, _, token = Headers(scope=scope).get("authorization", "").partition(" ")
        # Headers are latin-1 on the wire; the comparison takes the same time wherever they differ.
        given = token.strip().encode("latin-1", "replace")
        return secrets.compare_digest(given, self._key) and scheme.lower() == "bearer"


class BodyLimit:
    """Refuses bodies of more than ``MAX_BODY_BYTES``, before they are read where they say so."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        message = f"The body is larger than {MAX_BODY_BYTES} bytes, the most that is accepted."
        # What is left of it is not read, so the connection cannot be used again.
        headers = {"Connection": "close"}
        length = Headers(scope=scope).get("content-length", "0")
        if not length.isdigit() or int(length) > MAX_BODY_BYTES:
            await APIError(413, message, headers=headers).response()(scope, receive, send)
            return
        total = 0

        async def receive_some() -> Message:
            nonlocal total
            part = await receive()
            total += len(part.get("body", b""))
            if total > MAX_BODY_BYTES:
                raise HTTPException(413, message, headers)
            return part

        await self._app(scope, receive_some, send)
