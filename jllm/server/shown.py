"""Values of a request, as error messages quote them."""

from __future__ import annotations

import json
from typing import Any

MOST = 100  # characters


def shown(value: Any) -> str:
    """A value as JSON, not too long."""
    try:
        text = json.dumps(value, default=repr)
    except RecursionError:
        text = "something nested too deeply"
    return text if len(text) <= MOST else text[: MOST - 3] + "..."
