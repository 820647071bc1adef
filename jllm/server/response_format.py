"""What form a request wants its text in: ``response_format``, and vLLM's fields for the same.

All are plain JSON. Each way to ask gives a ``Structured``; whether it can be used is found when the
request is added to the engine.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jllm.server.shown import shown
from jllm.structured import Structured

# vLLM's names, in its dict ``structured_outputs`` and as fields ``guided_...``, and ours.
NAMES = {
    "json": "json_schema",
    "json_object": "json_object",
    "regex": "regex",
    "choice": "choice",
    "grammar": "grammar",
}
FIELDS = ("response_format", "structured_outputs", *(f"guided_{name}" for name in NAMES))
TYPES = ("text", "json_object", "json_schema", "regex", "choice", "grammar")


def structured_of(fields: Mapping[str, Any]) -> Structured | None:
    """The form that a request asks for; None if it asks for none.

        structured_of({"response_format": {"type": "json_object"}})
        structured_of({"guided_choice": ["yes", "no"]})

    Args:
      fields: the request's. Only ``FIELDS`` are read; null is the same as absent.

    Raises:
      ValueError: a field is malformed, or several ask for a form.
    """
    found: dict[str, Structured] = {}
    for field in FIELDS:
        value = fields.get(field)
        if value is None:
            continue
        if field == "response_format":
            form = _of_response_format(value)
        elif field == "structured_outputs":
            form = _of_options(value)
        else:
            form = _make(field, NAMES[field.removeprefix("guided_")], value)
        if form is not None:
            found[field] = form
    if len(found) > 1:
        raise ValueError(f"A text can have one form, but {' and '.join(found)} ask for several.")
    return next(iter(found.values()), None)


def _of_response_format(value: Any) -> Structured | None:
    kind = value.get("type") if isinstance(value, Mapping) else None
    if kind not in TYPES:
        raise ValueError(
            f"response_format must be an object whose type is {', '.join(TYPES[:-1])} or "
            f"{TYPES[-1]}, not {shown(value)}."
        )
    if kind == "text":
        return None
    if kind == "json_object":
        return Structured(json_object=True)
    where = f"response_format.{kind}"
    content = value.get(kind)
    if kind == "json_schema":
        where += ".schema"
        content = content.get("schema") if isinstance(content, Mapping) else None
    if content is None:
        raise ValueError(f"{where} is missing.")
    return _make(where, kind, content)


def _of_options(value: Any) -> Structured | None:
    """vLLM's ``structured_outputs``; its further options, which change how and not what, are
    refused unless they are off."""
    if not isinstance(value, Mapping):
        raise ValueError(f"structured_outputs must be an object, not {shown(value)}.")
    given = {name: option for name, option in value.items() if option not in (None, False)}
    if unknown := sorted(given.keys() - NAMES.keys()):
        raise ValueError(
            f"structured_outputs has {', '.join(unknown)}; supported are {', '.join(NAMES)}."
        )
    if len(given) > 1:
        raise ValueError(f"structured_outputs must have one form, not {' and '.join(given)}.")
    for name, option in given.items():
        return _make(f"structured_outputs.{name}", NAMES[name], option)
    return None


def _make(where: str, name: str, value: Any) -> Structured | None:
    """A form; its errors name the request's field."""
    if value is False:
        if name == "json_object":
            return None
        raise ValueError(f"{where} cannot be false.")
    try:
        return Structured(**{name: value})
    except ValueError as error:
        raise ValueError(str(error).replace(f"Structured.{name}", where)) from error
