"""What the text of a request must look like: a frozen, validated dataclass."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

__all__ = ["Structured"]

# A bound on the time that compiling can take; large sets of tools have some 10,000 characters.
MAX_CHARS = 1 << 17
MAX_CHOICES = 10_000


@dataclass(frozen=True, kw_only=True)
class Structured:
    """A form that generated text must have, whole: exactly one of the fields.

        Structured(json_schema={"type": "object", "properties": {"age": {"type": "integer"}}})
        Structured(json_object=True)
        Structured(regex=r"[0-9]{4}-[0-9]{2}")
        Structured(choice=["yes", "no"])
        Structured(grammar='start: "a" | "b" start')

    Attributes:
      json_schema: a JSON schema (draft 2020-12), as a mapping or as JSON; kept as JSON.
        Properties come in the order of the schema; between two symbols there is at most a
        space, or a line break and its indentation. Keywords that cannot be enforced are refused
        (`what is supported <https://github.com/guidance-ai/llguidance/blob/main/docs/json_schema.md>`_).
      json_object: any JSON object.
      regex: a regular expression that the whole text matches, in the `syntax of Rust
        <https://docs.rs/regex/latest/regex/#syntax>`_; no look-around, no back-references.
      choice: texts to choose from; kept as a tuple.
      grammar: a context-free grammar in `Lark's notation
        <https://github.com/guidance-ai/llguidance/blob/main/docs/syntax.md>`_ or in GBNF
        (``root ::= ...``).

    Raises:
      ValueError: not exactly one is given, it is of the wrong type, or too large. Whether it
        makes sense is found when a request that has it is added to an engine.
    """

    json_schema: Mapping[str, Any] | str | None = None
    json_object: bool = False
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.json_object, bool):
            raise ValueError(
                f"Structured.json_object must be True or False, not {self.json_object!r}."
            )
        given = self._given()
        if len(given) != 1:
            names = ", ".join(field.name for field in fields(self))
            raise ValueError(
                f"Structured must have exactly one of {names}, not {' and '.join(given) or 'none'}."
            )
        if self.json_schema is not None:
            object.__setattr__(self, "json_schema", _as_json(self.json_schema))
        if self.choice is not None:
            object.__setattr__(self, "choice", _choices(self.choice))
        value = getattr(self, self.kind)
        if self.kind in ("regex", "grammar") and not isinstance(value, str):
            raise ValueError(f"Structured.{self.kind} must be a string, not {value!r}.")
        texts = value if isinstance(value, tuple) else [value] if isinstance(value, str) else []
        for text in texts:
            _check_unicode(self.kind, text)
        if sum(map(len, texts)) > MAX_CHARS:
            raise ValueError(
                f"Structured.{self.kind} has {sum(map(len, texts))} characters; at most "
                f"{MAX_CHARS} are allowed."
            )

    @property
    def kind(self) -> str:
        """Which field is given."""
        return self._given()[0]

    def _given(self) -> list[str]:
        names = [field.name for field in fields(self)]
        return [name for name in names if getattr(self, name) not in (None, False)]


def _as_json(schema: Any) -> str:
    """A schema as JSON in one spelling, so that equal ones are compiled once."""
    try:
        value = json.loads(schema) if isinstance(schema, str) else schema
        if isinstance(value, Mapping):
            return json.dumps(dict(value), ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"Structured.json_schema is not JSON: {error}.") from error
    raise ValueError(f"Structured.json_schema must be a JSON object, not {schema!r}.")


def _choices(choices: Any) -> tuple[str, ...]:
    if isinstance(choices, str) or not isinstance(choices, Sequence):
        raise ValueError(f"Structured.choice must be a sequence of strings, not {choices!r}.")
    if not 0 < len(choices) <= MAX_CHOICES:
        raise ValueError(
            f"Structured.choice must have between 1 and {MAX_CHOICES} texts, not {len(choices)}."
        )
    for choice in choices:
        if not isinstance(choice, str):
            raise ValueError(f"Structured.choice must hold strings, not {choice!r}.")
    return tuple(choices)


def _check_unicode(name: str, text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"Structured.{name} has a lone surrogate, {text[error.start]!r}, which no text has."
        ) from error
