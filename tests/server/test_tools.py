"""What a request's tools and tool_choice mean for the prompt and for the text."""

from __future__ import annotations

import dataclasses
import functools
import json
from typing import Any

import jsonschema
import pytest

import jllm
from jllm.server.call_formats import FORMATS
from jllm.server.tool_calls import parse
from jllm.server.tools import AnswerPlan, messages_for_template, plan_answer
from tests.engine.test_grammar import VOCABULARIES, grammars, walk
from tests.tiny_model import run, tiny_model
from tests.tokenizers_for_tests import byte_level_tokenizer, demo_tokenizer

TEMPLATE = "{{ messages }} {{ tools }}"
UNIT = {"enum": ["C", "F"]}
WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 5},
        "unit": {"$ref": "#/$defs/unit"},
    },
    "required": ["city", "unit"],
    "additionalProperties": False,
    "$defs": {"unit": UNIT},
}


NONE = {"properties": {"n": UNIT}, "additionalProperties": False}


def tool(name: str, parameters: Any = None, **more: Any) -> dict[str, Any]:
    function = {"name": name, "description": "x", "parameters": parameters, **more}
    return {"type": "function", "function": function}


TOOLS = [tool("weather", WEATHER), tool("now"), tool("none", NONE)]


def plan(tools: Any = TOOLS, choice: Any = None, form: Any = None, **options: Any) -> AnswerPlan:
    options = {"format": FORMATS["hermes"], "chat_template": TEMPLATE, **options}
    structured = None if form is None else jllm.Structured(**form)
    return plan_answer(tools, choice, structured, **options)


def named(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


def test_without_tools_only_the_form_is_left() -> None:
    for tools in (None, []):
        for choice in (None, "none", "auto"):
            found = plan(tools, choice, {"regex": "a"}, format=None, chat_template=None)
            assert found == ({}, jllm.Structured(regex="a"), None, ())
            assert found.parser() is None


def test_tool_choice_none_tells_the_model_nothing_of_the_tools() -> None:
    assert plan(choice="none", chat_template=None) == ({}, None, None, ())


@pytest.mark.parametrize("choice", [None, "auto"])
def test_auto_leaves_the_text_free_and_looks_for_calls(choice: str | None) -> None:
    found = plan(choice=choice)
    assert found == ({"tools": TOOLS}, None, FORMATS["hermes"], ("weather", "now", "none"))
    parser = found.parser()
    assert parser is not None
    assert parser.push('<tool_call>{"name": "now"}</tool_call>').calls[0].name == "now"


def calls_of(found: AnswerPlan, text: str) -> list[tuple[str, Any]]:
    """Calls of a text that is nothing but calls, with arguments that fit the schemas."""
    assert found.format is not None
    content, calls = parse(text, found.format, found.tools)
    assert content is None, text
    schemas = {"weather": WEATHER, "now": {"maxProperties": 0}, "none": NONE}
    for call in calls:
        jsonschema.validate(json.loads(call.arguments), schemas[call.name])
    return [(call.name, json.loads(call.arguments)) for call in calls]


@pytest.mark.parametrize("vocabulary", VOCABULARIES)
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize(
    ("choice", "names"),
    [("required", {"weather", "now", "none"}), (named("weather"), {"weather"})],
    ids=["required", "named"],
)
def test_a_forced_text_is_calls_that_fit_the_schemas(
    vocabulary: str, format: str, choice: Any, names: set[str]
) -> None:
    tokenizer = VOCABULARIES[vocabulary]()
    grammar = grammars(tokenizer)
    found = plan(choice=choice, format=FORMATS[format], parallel_tool_calls=False)
    assert found.structured is not None
    seen = set()
    for seed in range(30):
        text = walk(tokenizer, grammar, found.structured, seed)
        [(name, _)] = calls_of(found, text)
        seen.add(name)
    assert seen == names


@pytest.mark.parametrize("format", FORMATS)
def test_a_forced_text_may_have_several_calls_if_the_request_allows_it(format: str) -> None:
    tokenizer = byte_level_tokenizer()
    grammar = grammars(tokenizer)
    found = plan(choice=named("now"), format=FORMATS[format])
    assert found.structured is not None
    texts = [walk(tokenizer, grammar, found.structured, seed) for seed in range(12)]
    counts = set()
    for text in texts:
        if text.endswith(("}", "</tool_call>")):  # not cut short
            counts.add(len(calls_of(found, text)))
    assert 1 in counts and max(counts) > 1


def test_tags_that_are_special_tokens_are_forced_as_such() -> None:
    tokenizer = demo_tokenizer()
    format = FORMATS["hermes"]._replace(start="<|im_start|>", end="\n<|im_end|>")
    special = ["<|im_start|>", "<|im_end|>"]
    found = plan(choice=named("now"), format=format, special_tokens=special)
    assert found.structured is not None and found.structured.grammar is not None
    assert 'call: <|im_start|> (call_0) "\\n" <|im_end|>' in found.structured.grammar
    matcher = grammars(tokenizer).matcher(found.structured)
    for token in tokenizer.encode('<|im_start|>{"name": "now", "arguments": {}}'):
        assert not matcher.ends_with(token) and matcher.error is None


@pytest.mark.parametrize("form", [{"json_object": True}, {"json_schema": {"const": {"a": 1}}}])
def test_auto_with_json_gives_calls_or_that_json(form: dict[str, Any]) -> None:
    tokenizer = byte_level_tokenizer()
    grammar = grammars(tokenizer)
    found = plan(tools=[tool("now")], form=form, parallel_tool_calls=False)
    assert found.structured is not None and found.format is not None
    kinds = set()
    for seed in range(30):
        content, calls = parse(
            walk(tokenizer, grammar, found.structured, seed), found.format, found.tools
        )
        kinds.add(bool(calls))
        if content is not None and content.endswith("}"):
            assert isinstance(json.loads(content), dict)
    assert kinds == {True, False}


def test_a_forced_call_wins_over_a_form() -> None:
    assert plan(choice="required", form={"regex": "a"}) == plan(choice="required")


@functools.cache
def engine() -> jllm.Engine:
    tokenizer = byte_level_tokenizer()
    params = dataclasses.replace(tiny_model(), tokenizer=tokenizer)
    config = dataclasses.replace(params.config, eos_token_ids=(tokenizer.eos_token_id,))
    sizes = dict(max_num_seqs=4, num_kv_blocks=128, max_model_len=512)
    return jllm.Engine(
        dataclasses.replace(params, config=config),
        jllm.EngineConfig(**sizes, decode_buckets=(4,), prefill_buckets=(16,)),
    )


@pytest.mark.parametrize("format", FORMATS)
def test_even_a_random_model_calls_when_it_must(format: str) -> None:
    found = plan(choice=named("weather"), format=FORMATS[format], parallel_tool_calls=False)
    params = jllm.SamplingParams(
        n=4, seed=1, max_tokens=400, structured=found.structured, skip_special_tokens=False
    )
    name = engine().add_request([5, 6, 7], params, stream=False)
    for output in run(engine())[name].outputs:
        assert output.finish_reason == "stop"
        assert [call[0] for call in calls_of(found, output.text)] == ["weather"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"tools": {}}, r"tools must be a list"),
        ({"tools": [5]}, r"tools\[0\] must be an object of type 'function', not 5"),
        ({"tools": [{"type": "code"}]}, r"tools\[0\] must be an object of type 'function'"),
        ({"tools": [{"type": "function"}]}, r"tools\[0\] must have a function with a name"),
        ({"tools": [tool("a b")]}, r'tools\[0\].function.name must be 1 to 64 .*, not "a b"'),
        ({"tools": [tool("x" * 65)]}, r"tools\[0\].function.name must be 1 to 64"),
        ({"tools": [tool("a"), tool("a")]}, r"tools\[1\].function.name is 'a', which is taken"),
        ({"tools": [tool("a", [])]}, r"tools\[0\].function.parameters must be a JSON schema"),
        ({"tools": [tool("a", {"type": "string"})]}, r"schema of type 'object', not"),
        ({"tools": [tool("a")] * 129}, r"tools has 129 entries; at most 128"),
        ({"tools": [], "choice": "required"}, r"tool_choice is 'required', but there are no tools"),
        ({"choice": named("x")}, r'tool_choice asks for "x", which is not among tools'),
        ({"choice": "weather"}, r"tool_choice must be 'none', 'auto', 'required' or .*\"weather\""),
        ({"choice": {"type": "function"}}, r"or an object that names a function, not"),
        ({"chat_template": None}, r"the chat template does not show them"),
        ({"chat_template": "{{ messages }}"}, r"the chat template does not show them"),
        ({"format": None}, r"not known how this model writes calls.*--tool-call-parser"),
        ({"form": {"regex": "a"}}, r"'auto', a text can only be asked to be JSON"),
    ],
    ids=str,
)
def test_what_cannot_be_is_refused_in_a_sentence(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        plan(**arguments)


def test_templates_see_the_arguments_of_earlier_calls_as_objects() -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    bare = {"function": {"name": "g", "arguments": ""}}
    messages = [{"role": "user", "content": "x"}, {"role": "assistant", "tool_calls": [call, bare]}]
    found = messages_for_template(messages)
    assert found[0] == messages[0]
    first, second = found[1]["tool_calls"]
    assert first == {**call, "function": {"name": "f", "arguments": {"a": 1}}}
    assert second["function"]["arguments"] == {}
    assert call["function"]["arguments"] == '{"a": 1}'  # what was given stays as it was
    for wrong, message in [
        ({"function": {"name": "f", "arguments": "{"}}, "must be JSON"),
        ({"function": {"name": "f", "arguments": "[1]"}}, r"must be a JSON object, not \[1\]"),
        ({"function": {"name": "f", "arguments": 5}}, "must be a JSON object, not 5"),
        ({"name": "f"}, "must have a function with a name"),
    ]:
        with pytest.raises(ValueError, match=message):
            messages_for_template([{"role": "assistant", "tool_calls": [wrong]}])
