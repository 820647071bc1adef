"""The page at ``/``: chat, options and the engine's gauges, in plain HTML and JavaScript."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from pathlib import Path

from fastapi import APIRouter, Response

FILES = {
    "/": ("index.html", "text/html"),
    "/page.css": ("page.css", "text/css"),
    "/page.js": ("page.js", "text/javascript"),
}
# Nothing from elsewhere, and no script but the page's own: what a model writes cannot run.
HEADERS = {
    "Content-Security-Policy": "default-src 'self'; img-src 'self' data:; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


def page_routes() -> APIRouter:
    """The page's files."""
    router = APIRouter()
    for path, (name, kind) in FILES.items():
        content = Path(__file__).with_name(name).read_bytes()
        router.add_api_route(path, _answer(content, kind), include_in_schema=False)
    return router


def _answer(content: bytes, kind: str) -> Callable[[], Coroutine[None, None, Response]]:
    async def file() -> Response:
        return Response(content, media_type=kind, headers=HEADERS)

    return file
