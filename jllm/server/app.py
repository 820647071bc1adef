"""The routes."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import pydantic_core
from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.routing import APIRoute
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException
from starlette.responses import PlainTextResponse

import jllm
from jllm.server import tokens
from jllm.server.answer import json_response
from jllm.server.chat import chat
from jllm.server.completions import complete
from jllm.server.errors import APIError, add_handlers
from jllm.server.middleware import ApiKey, BodyLimit, RequestId
from jllm.server.page import page_routes
from jllm.server.protocol import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)
from jllm.server.served import Served


def make_app(served: Served) -> FastAPI:
    """The ASGI application. Its lifespan is the engine thread's."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        await served.engine.start()
        yield
        await served.engine.close()
        served.close()

    app = FastAPI(
        title="jllm",
        version=jllm.__version__,
        lifespan=lifespan,
        responses={"4XX": {"description": "OpenAI's error body"}},
    )
    app.state.served = served
    add_handlers(app)
    app.add_middleware(BodyLimit)
    if served.options.api_key is not None:
        app.add_middleware(ApiKey, api_key=served.options.api_key)
    app.add_middleware(RequestId)  # the last one added is the first to see a request
    app.include_router(_model_routes(served))
    app.include_router(_status_routes(served))
    app.include_router(page_routes())
    return app


def _model_routes(served: Served) -> APIRouter:
    """What needs the model, and is refused until it is there."""
    router = APIRouter(route_class=_ModelRoute)

    @router.post("/v1/completions", response_model=None)
    async def completions(body: CompletionRequest, request: Request) -> Response:
        return await complete(served, body, request)

    @router.post("/v1/chat/completions", response_model=None)
    async def chat_completions(body: ChatRequest, request: Request) -> Response:
        return await chat(served, body, request)

    @router.get("/v1/models", response_model=None)
    async def models() -> Response:
        return json_response(
            {"object": "list", "data": [_model(served, name) for name in served.names]}
        )

    @router.get("/v1/models/{name:path}", response_model=None)
    async def model(name: str) -> Response:
        served.check_model(name)
        return json_response(_model(served, name))

    @router.post("/tokenize", response_model=None)
    async def tokenize(body: TokenizeRequest) -> Response:
        return json_response(await tokens.tokenize(served, body))

    @router.post("/detokenize", response_model=None)
    async def detokenize(body: DetokenizeRequest) -> Response:
        return json_response(await tokens.detokenize(served, body))

    @router.get("/tokenizer_info", response_model=None)
    async def tokenizer_info() -> Response:
        return json_response(tokens.tokenizer_info(served))

    return router


def _status_routes(served: Served) -> APIRouter:
    """What can be asked at any time, without a key."""
    router = APIRouter()

    async def health() -> Response:
        state = served.engine.state
        if state == "ready":
            return Response()
        raise APIError(503, f"The engine is {state}.", code="engine_" + state)

    router.add_api_route("/health", health, methods=["GET"], response_class=Response)
    for method in ("GET", "POST"):
        name = f"ping_{method.lower()}"
        router.add_api_route("/ping", health, methods=[method], name=name, response_class=Response)

    @router.get("/version", response_model=None)
    async def version() -> Response:
        return json_response({"version": jllm.__version__})

    @router.get("/metrics", response_class=PlainTextResponse)
    async def metrics() -> Response:
        return Response(served.metrics.scrape(), media_type=CONTENT_TYPE_LATEST)

    return router


def _model(served: Served, name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": served.created,
        "owned_by": "jllm",
        "root": served.options.model or name,
        "parent": None,
        "max_model_len": served.max_model_len,
    }


class _JSONRequest(Request):
    """Reads JSON more strictly than Python does: no NaN, no lone surrogates, no deep nesting."""

    async def json(self) -> Any:
        try:
            return pydantic_core.from_json(await self.body(), allow_inf_nan=False)
        except ValueError as error:
            raise HTTPException(400, f"The body is not valid JSON: {error}.") from error


class _ModelRoute(APIRoute):
    """Refuses requests until the engine is ready; a dependency of FastAPI's that did so would take
    a tenth of a millisecond of each."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def handle_when_ready(request: Request) -> Response:
            if request.app.state.served.engine.state == "loading":
                headers = {"Retry-After": "5"}
                raise APIError(503, "The model is being loaded; try again later.", headers=headers)
            return await handle(_JSONRequest(request.scope, request.receive))

        return handle_when_ready
