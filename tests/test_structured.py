"""The form that a request may ask of its text, as a value."""

from __future__ import annotations

import re
from typing import Any

import pytest

import jllm
from jllm.structured import MAX_CHARS, MAX_CHOICES


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "exactly one of json_schema, json_object, regex, choice, grammar, not none"),
        ({"regex": "a", "choice": ["b"]}, "exactly one of .*, not regex and choice"),
        ({"regex": ""}, None),
        ({"choice": [""]}, None),
        ({"json_object": "yes"}, "json_object must be True or False, not 'yes'"),
        ({"json_schema": 3}, "json_schema must be a JSON object, not 3"),
        ({"json_schema": "[]"}, r"json_schema must be a JSON object, not '\[\]'"),
        ({"json_schema": "{"}, "json_schema is not JSON: Expecting property name"),
        ({"json_schema": {"minimum": float("nan")}}, "json_schema is not JSON: Out of range"),
        ({"json_schema": {"default": object()}}, "json_schema is not JSON: Object of type object"),
        ({"regex": 5}, "regex must be a string, not 5"),
        ({"grammar": b"x"}, "grammar must be a string, not b'x'"),
        ({"choice": "yes"}, "choice must be a sequence of strings, not 'yes'"),
        ({"choice": []}, "choice must have between 1 and 10000 texts, not 0"),
        ({"choice": ["a"] * (MAX_CHOICES + 1)}, "between 1 and 10000 texts, not 10001"),
        ({"choice": ["a", 2]}, "choice must hold strings, not 2"),
        ({"choice": ["\ud800"]}, "choice has a lone surrogate, '\\\\ud800'"),
        ({"regex": "a" * (MAX_CHARS + 1)}, f"has {MAX_CHARS + 1} characters; at most {MAX_CHARS}"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_what_is_no_form_is_refused(options: dict[str, Any], message: str | None) -> None:
    if message is None:
        jllm.Structured(**options)
        return
    with pytest.raises(ValueError, match=message):
        jllm.Structured(**options)


def test_a_schema_nested_without_end_is_refused() -> None:
    schema: dict[str, Any] = {}
    schema["not"] = schema
    with pytest.raises(ValueError, match="json_schema is not JSON"):
        jllm.Structured(json_schema=schema)
    with pytest.raises(ValueError, match="json_schema is not JSON"):
        jllm.Structured(json_schema='{"not":' * 50_000)


def test_equal_forms_are_equal_however_they_are_given() -> None:
    one = jllm.Structured(json_schema={"type": "object", "title": "é"})
    other = jllm.Structured(json_schema='{"type":  "object", "title": "\\u00e9"}')
    assert one == other and hash(one) == hash(other)
    assert jllm.Structured(choice=["a", "b"]) == jllm.Structured(choice=("a", "b"))


def test_the_order_of_properties_is_part_of_a_schema() -> None:
    schemas = [{"properties": {"a": {}, "b": {}}}, {"properties": {"b": {}, "a": {}}}]
    one, other = (jllm.Structured(json_schema=schema) for schema in schemas)
    assert one != other


def test_sampling_params_take_a_form_and_nothing_else() -> None:
    form = jllm.Structured(json_object=True)
    assert jllm.SamplingParams(structured=form) == jllm.SamplingParams(structured=form)
    message = re.escape("structured must be a Structured or None, not {'json_object': True}")
    with pytest.raises(ValueError, match=message):
        jllm.SamplingParams(structured={"json_object": True})  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="structured cannot go with ignore_eos"):
        jllm.SamplingParams(structured=form, ignore_eos=True)
