"""The form that a request asks for, by any of the names that clients use."""

from __future__ import annotations

from typing import Any

import pytest

from jllm.server.response_format import structured_of
from jllm.structured import Structured

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
JSON = Structured(json_schema=SCHEMA)
ANY_JSON = Structured(json_object=True)
OPENAI = {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": SCHEMA}}


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, None),
        ({"response_format": None, "guided_regex": None, "structured_outputs": None}, None),
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, ANY_JSON),
        ({"response_format": OPENAI}, JSON),
        ({"response_format": {"type": "regex", "regex": "a+"}}, Structured(regex="a+")),
        ({"response_format": {"type": "choice", "choice": ["a"]}}, Structured(choice=["a"])),
        ({"response_format": {"type": "grammar", "grammar": "g"}}, Structured(grammar="g")),
        ({"guided_json": SCHEMA}, JSON),
        ({"guided_json": '{"type": "object", "properties": {"a": {"type": "integer"}}}'}, JSON),
        ({"guided_json_object": True}, ANY_JSON),
        ({"guided_json_object": False}, None),
        ({"guided_regex": "a+"}, Structured(regex="a+")),
        ({"guided_choice": ["a", "b"]}, Structured(choice=["a", "b"])),
        ({"guided_grammar": "g"}, Structured(grammar="g")),
        ({"structured_outputs": {"json": SCHEMA, "regex": None}}, JSON),
        ({"structured_outputs": {"json_object": True, "disable_fallback": False}}, ANY_JSON),
        ({"structured_outputs": {"regex": "a+"}}, Structured(regex="a+")),
        ({"structured_outputs": {"choice": ["a"]}}, Structured(choice=["a"])),
        ({"structured_outputs": {}}, None),
        ({"response_format": {"type": "text"}, "guided_regex": "a"}, Structured(regex="a")),
    ],
    ids=str,
)
def test_every_name_gives_its_form(fields: dict[str, Any], expected: Structured | None) -> None:
    assert structured_of(fields) == expected


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"response_format": {"type": "xml"}}, r'must be an object whose type is text, .* "xml"'),
        ({"response_format": "json_object"}, r'must be an object .*, not "json_object"'),
        ({"response_format": {"type": "json_schema"}}, r"json_schema\.schema is missing"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": [1]}}},
            r"^response_format\.json_schema\.schema must be a JSON object, not \[1\]",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": False}}},
            r"^response_format\.json_schema\.schema cannot be false",
        ),
        ({"response_format": {"type": "regex"}}, r"response_format\.regex is missing"),
        ({"guided_json": "{"}, r"^guided_json is not JSON"),
        ({"guided_choice": "a"}, r"^guided_choice must be a sequence of strings, not 'a'"),
        ({"guided_json_object": 1}, r"^guided_json_object must be True or False, not 1"),
        ({"structured_outputs": []}, r"structured_outputs must be an object, not \[\]"),
        ({"structured_outputs": {"regex": 1}}, r"^structured_outputs\.regex must be a string"),
        ({"structured_outputs": {"structural_tag": "x"}}, r"has structural_tag; supported are"),
        (
            {"structured_outputs": {"regex": "a", "choice": ["a"]}},
            r"not choice and regex|regex and",
        ),
        (
            {"response_format": {"type": "json_object"}, "guided_regex": "a"},
            r"response_format and guided_regex ask for several",
        ),
    ],
    ids=str,
)
def test_what_is_malformed_is_refused_by_its_name(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        structured_of(fields)
