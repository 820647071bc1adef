"""Errors as OpenAI's clients expect them: ``{"error": {"message", "type", "param", "code"}}``."""

from __future__ import annotations

import logging
from typing import Any

import orjson
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException

logger = logging.getLogger("jllm.server")

MAX_MESSAGE = 2000  # characters: a message may quote what a request sent
FAULT = "The server failed on this request; its log says how."

TYPES = {
    400: "BadRequestError",
    401: "AuthenticationError",
    404: "NotFoundError",
    405: "MethodNotAllowedError",
    413: "RequestTooLargeError",
    429: "RateLimitError",
    500: "InternalServerError",
    503: "ServiceUnavailableError",
}


class APIError(Exception):
    """A request's answer is an error.

    Attributes:
      status: of HTTP; 4xx is the client's mistake, 5xx the server's.
      message: one sentence.
      param: the field of the request that is at fault, if one is.
      code: a word that programs look for; the status unless given.
      headers: sent along.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.headers = headers

    def body(self) -> dict[str, Any]:
        """The JSON of the answer."""
        # A message may quote a lone surrogate, which no JSON in UTF-8 can hold.
        text = self.message[:MAX_MESSAGE].encode("utf-8", "backslashreplace").decode()
        return {
            "error": {
                "message": text,
                "type": TYPES.get(self.status, "APIError"),
                "param": self.param,
                "code": self.status if self.code is None else self.code,
            }
        }

    def response(self) -> Response:
        """The whole answer."""
        return Response(
            orjson.dumps(self.body()), self.status, self.headers, media_type="application/json"
        )


def bad_request(message: str, param: str | None = None, code: str | None = None) -> APIError:
    """Status 400: the request is wrong, and sending it again will not help."""
    return APIError(400, message, param=param, code=code)


def from_value_error(error: ValueError) -> APIError:
    """A ValueError of the engine as status 400; that of an option names its field."""
    message = str(error)
    options = "SamplingParams."
    if not message.startswith(options):
        return bad_request(message)
    message = message.removeprefix(options)
    param = message.partition(" ")[0].partition("[")[0]
    return bad_request(message, param)


def server_fault(error: BaseException) -> APIError:
    """Status 500 for a bug, whose traceback goes to the log and not to the client."""
    logger.error("A request failed.", exc_info=error)
    return APIError(500, FAULT)


def add_handlers(app: FastAPI) -> None:
    """Answers every exception in OpenAI's form, those of FastAPI included."""
    app.add_exception_handler(APIError, _api_error)
    app.add_exception_handler(HTTPException, _http_exception)
    app.add_exception_handler(RequestValidationError, _validation_error)
    app.add_exception_handler(Exception, _bug)


async def _api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, APIError)
    return error.response()


async def _http_exception(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    message = error.detail
    if error.status_code == 404 and message == "Not Found":
        message = f"There is no {request.method} {request.url.path}."
    elif error.status_code == 405:
        message = f"{request.url.path} cannot be asked by {request.method}."
    headers = dict(error.headers) if error.headers else None
    return APIError(error.status_code, message, headers=headers).response()


async def _validation_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    where = [str(part) for part in first["loc"][1:]]
    if not where:  # the body itself: absent, no JSON object, or not declared as JSON
        message = "The body must be a JSON object, sent as application/json."
        return bad_request(message).response()
    message = f"{'.'.join(where)}: {first['msg']}."
    if not first["type"].startswith(("missing", "invalid_")):
        message = message[:-1] + f", not {first['input']!r:.100}."
    return bad_request(message, where[0]).response()


async def _bug(request: Request, error: Exception) -> Response:
    # The traceback is logged by whoever catches it next.
    return APIError(500, FAULT).response()
