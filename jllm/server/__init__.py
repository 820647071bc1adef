"""An OpenAI-compatible server for one model, in this process.

    with Server(jllm.Engine(params), ServerOptions(port=8000)) as server:
        print(server.url)

``python -m jllm serve`` is the same from a command line. The two names are imported when they are
first used: the command line needs none of the web's packages before that.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jllm.server.options import ServerOptions
    from jllm.server.server import Server

__all__ = ["Server", "ServerOptions"]

_HOME = {"Server": "jllm.server.server", "ServerOptions": "jllm.server.options"}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'jllm.server' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)
