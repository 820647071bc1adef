"""Requests without a model's name: a made-up one is 404, before anything else is looked at."""

from __future__ import annotations

from typing import Any

import schemathesis


@schemathesis.hook
def map_body(context: Any, body: Any) -> Any:
    if isinstance(body, dict):
        body.pop("model", None)
    return body
