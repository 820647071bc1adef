"""Renders a conversation through a model's Jinja chat template, as transformers does.

A template comes with the weights, so it is somebody else's program: it runs in Jinja's immutable
sandbox, sees plain JSON data only, and its output is bounded.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

__all__ = ["render"]

MAX_CHARS = 1 << 24  # 16.8M, about four times what a context of a million tokens holds

# Appended to the message to continue, to find its end in the rendered text. The space at its end
# tells whether the template strips the content.
CONTINUE_MARK = "JLLM_CONTINUE_HERE "


def render(
    template: str | None,
    messages: Sequence[Mapping[str, Any]],
    /,
    *,
    bos_token: str | None,
    eos_token: str | None,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    tools: Sequence[Mapping[str, Any]] | None = None,
    **kwargs: Any,
) -> str:
    """The prompt text of a conversation.

    Args:
      template: Jinja source.
      messages: each with a ``role`` and a ``content``: a string, or a list of
        ``{"type": "text", "text": ...}`` parts, which are joined by newlines for a template that
        only knows strings. An assistant message with ``tool_calls`` needs no content.
      bos_token, eos_token: what the template writes for them; None leaves them undefined.
      add_generation_prompt: end with the header of the assistant's answer.
      continue_final_message: end inside the last message, for the model to go on with.
      tools: JSON schemas of functions the model may call.
      **kwargs: further variables of the template, such as ``enable_thinking=False``.

    Raises:
      ValueError: there is no template, a message is malformed, the template refuses the
        conversation (the message is the template's own) or fails.
    """
    if template is None:
        raise ValueError("The model has no chat template, so it cannot be given messages.")
    if continue_final_message and add_generation_prompt:
        raise ValueError(
            "continue_final_message and add_generation_prompt cannot both be true: the one goes on "
            "with the last message, the other begins a new one."
        )
    if "messages" in kwargs:
        raise ValueError("Chat template options cannot set messages.")
    copies = _plain("messages", messages)
    if not isinstance(copies, list) or not copies:
        raise ValueError(f"A conversation is a list of at least one message, not {messages!r}.")
    plain = [_checked(i, message) for i, message in enumerate(copies)]
    for message in plain:
        if isinstance(message.get("content"), list) and not _renders_parts(
            template, message["role"]
        ):
            message["content"] = "\n".join(part["text"] for part in message["content"])
    if continue_final_message:
        _append_mark(plain[-1])

    tokens = {"bos_token": bos_token, "eos_token": eos_token}
    text = _run(
        template,
        {name: token for name, token in tokens.items() if token is not None}
        | {"add_generation_prompt": add_generation_prompt, "documents": None}
        | {name: _plain(name, value) for name, value in {"tools": tools, **kwargs}.items()}
        | {"messages": plain},
    )
    return _cut_at_mark(text) if continue_final_message else text


def _plain(name: str, value: Any) -> Any:
    """A deep copy in JSON's types, so that a template gets no object that has methods."""
    try:
        return json.loads(json.dumps(value))
    except (TypeError, ValueError) as error:
        raise ValueError(f"The chat template's {name} must be plain JSON data: {error}") from error


def _checked(index: int, message: Any) -> dict[str, Any]:
    """The message without its null fields (which templates would print), or a ValueError."""
    where = f"messages[{index}]"
    if not isinstance(message, dict):
        raise ValueError(f"{where} must be a dict with role and content, not {message!r}.")
    fields = {str(key): value for key, value in message.items() if value is not None}
    if not isinstance(fields.get("role"), str):
        raise ValueError(f"{where} must have a role that is a string, not {fields.get('role')!r}.")
    content = fields.get("content")
    if isinstance(content, list):
        for part in content:
            if not isinstance(part, dict) or part.get("type") != "text":
                kind = part.get("type") if isinstance(part, dict) else part
                raise ValueError(f"{where} has a part of type {kind!r}; only 'text' is supported.")
            if not isinstance(part.get("text"), str):
                raise ValueError(f"{where} has a text part whose 'text' is not a string.")
    elif not isinstance(content, str) and not (content is None and fields.get("tool_calls")):
        raise ValueError(
            f"{where} must have a content that is a string or a list of text parts, "
            f"not {content!r}."
        )
    return fields


def _append_mark(message: dict[str, Any]) -> None:
    content = message.get("content")
    if isinstance(content, str):
        message["content"] = content + CONTINUE_MARK
    elif content:
        content[-1]["text"] += CONTINUE_MARK
    else:
        raise ValueError("continue_final_message needs a last message that has content.")


def _cut_at_mark(text: str) -> str:
    before, mark, after = text.rpartition(CONTINUE_MARK.strip())
    if not mark:
        raise ValueError(
            "continue_final_message is not possible: the chat template does not show the last "
            "message."
        )
    return before if after.startswith(" ") else before.rstrip()


@lru_cache(maxsize=256)
def _renders_parts(template: str, role: str) -> bool:
    """Whether the template writes out a list of text parts for this role, found by trying.

    A template that only knows strings fails, or prints the list as Python or JSON would: quoted.
    """
    probe = [{"role": role, "content": [{"type": "text", "text": "needle"}]}]
    other = [{"role": "user", "content": "x"}]
    messages = probe if role == "user" else probe + other if role == "system" else other + probe
    try:
        text = _run(template, {"messages": messages, "bos_token": "", "eos_token": ""})
    except ValueError:
        return False
    return "needle" in text and "'needle'" not in text and '"needle"' not in text


def _run(template: str, variables: dict[str, Any]) -> str:
    try:
        pieces: list[str] = []
        length = 0
        for piece in _compiled(template).generate(variables):
            pieces.append(piece)
            length += len(piece)
            if length > MAX_CHARS:
                raise jinja2.TemplateError(f"it writes more than {MAX_CHARS} characters")
        return "".join(pieces)
    except _Refusal as error:
        raise ValueError(str(error)) from error
    except Exception as error:  # foreign code may raise anything
        raise ValueError(f"The chat template failed: {str(error).rstrip('.')}.") from error


@lru_cache(maxsize=64)
def _compiled(template: str) -> jinja2.Template:
    return _environment().from_string(template)


@lru_cache(maxsize=1)
def _environment() -> jinja2.Environment:
    """What templates on the Hub are written for: the names and settings of transformers."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=["jinja2.ext.loopcontrols", _GenerationTag],
    )
    environment.filters["tojson"] = _tojson
    environment.globals |= {"raise_exception": _raise_exception, "strftime_now": _strftime_now}
    return environment


class _Refusal(jinja2.TemplateError):
    """The template called ``raise_exception``."""


def _raise_exception(message: str) -> None:
    raise _Refusal(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own ``tojson`` escapes for HTML, which no model was trained on."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


class _GenerationTag(Extension):
    """``{% generation %} ... {% endgeneration %}`` marks the assistant's words for training; for a
    prompt it is just its body."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)
