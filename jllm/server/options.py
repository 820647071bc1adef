"""What a server is told at its start, besides the engine."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from jllm.sampling_params import SamplingParams
from jllm.server.call_formats import FORMATS


@dataclass(frozen=True, kw_only=True)
class ServerOptions:
    """How a model is served.

    Attributes:
      host, port: where to listen; port 0 takes a free one.
      served_model_name: the names that requests may call the model; answers carry the first.
      model: what /v1/models says the model was loaded from.
      api_key: what requests under /v1 must send as a bearer token; None asks for nothing.
      chat_template: Jinja source used instead of the tokenizer's own template.
      tool_call_parser: how the model writes tool calls, one of ``call_formats.FORMATS``; None for
        what its chat template shows.
      sampling_defaults: of ``temperature``, ``top_p`` and ``top_k``, for requests that do not say.
      max_waiting: samples that may wait for a place in the batch before more are refused with
        status 429; None lets any number wait.
      max_n: most samples (``n``) of one prompt.
      warm_up: compile every program before the first request; else when it is first needed.
      step_timeout_s: a step that takes longer counts as stuck. Without ``warm_up`` it must allow
        for compiling.
      template_timeout_s: most time the chat template may take for one conversation.
      shutdown_timeout_s: how long a shutdown waits for requests to end; the rest get an error.
      access_log: log a line per request.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    served_model_name: tuple[str, ...] = ("model",)
    model: str | None = None
    api_key: str | None = field(default=None, repr=False)
    chat_template: str | None = None
    tool_call_parser: str | None = None
    sampling_defaults: Mapping[str, float] = field(default_factory=dict)
    max_waiting: int | None = None
    max_n: int = 128
    warm_up: bool = True
    step_timeout_s: float = 120.0
    template_timeout_s: float = 10.0
    shutdown_timeout_s: float = 30.0
    access_log: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.port < 2**16:
            raise ValueError(f"port must be between 0 and 65535, not {self.port}.")
        if not self.served_model_name or not all(self.served_model_name):
            raise ValueError("served_model_name must hold at least one name, none of them empty.")
        if self.api_key == "":
            raise ValueError("api_key is empty, which would let everyone in; leave it out instead.")
        if self.tool_call_parser is not None and self.tool_call_parser not in FORMATS:
            raise ValueError(
                f"tool_call_parser must be {' or '.join(FORMATS)}, not {self.tool_call_parser!r}."
            )
        if self.max_waiting is not None and self.max_waiting < 0:
            raise ValueError(f"max_waiting must be at least 0, not {self.max_waiting}.")
        if self.max_n < 1:
            raise ValueError(f"max_n must be at least 1, not {self.max_n}.")
        for name in ("step_timeout_s", "template_timeout_s", "shutdown_timeout_s"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be positive, not {getattr(self, name)}.")
        unknown = self.sampling_defaults.keys() - {"temperature", "top_p", "top_k"}
        if unknown:
            raise ValueError(f"sampling_defaults cannot set {', '.join(sorted(unknown))}.")
        try:
            SamplingParams(**self.sampling_defaults)  # type: ignore[arg-type]  # what it checks
        except ValueError as error:
            raise ValueError(f"sampling_defaults are wrong: {error}") from error
