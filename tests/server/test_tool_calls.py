"""Tool calls are found in a model's text, and the same ones however the text is cut."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from jllm.server.call_formats import FORMATS, guess_format
from jllm.server.tool_calls import CallDelta, CallParser, parse

TOOLS = {"weather", "say"}
HERMES, LLAMA = FORMATS["hermes"], FORMATS["llama3_json"]
Found = tuple[str | None, list[tuple[str, Any]]]


def found(text: str, name: str) -> Found:
    """The content, and of each call the name and the arguments, read as JSON where they are."""
    content, calls = parse(text, FORMATS[name], TOOLS)
    assert len({call.id for call in calls}) == len(calls)
    assert all(call.id.startswith("call_") and len(call.id) > 20 for call in calls)
    return content, [(call.name, read(call.arguments)) for call in calls]


def read(arguments: str) -> Any:
    try:
        return json.loads(arguments)
    except ValueError:
        return arguments


OSLO = ("weather", {"city": "Oslo"})
NAME, ARGUMENTS = '"name": "weather"', '"arguments": {"city": "Oslo"}'
CALL = f"<tool_call>\n{{{NAME}, {ARGUMENTS}}}\n</tool_call>"
JSON_CALL = '{"name": "weather", "parameters": {"city": "Oslo"}}'
TRICKY = '{"text": "}{ \\" ]</tool_call> é\\\\"}'


def unchanged(text: str) -> tuple[str, Found]:
    return text, (text, [])


HERMES_CASES: dict[str, tuple[str, Found]] = {
    "text": unchanged("Nothing to call.\n "),
    "nothing": unchanged(""),
    "call": (CALL, (None, [OSLO])),
    "white space around": (f"\n {CALL}\n", (None, [OSLO])),
    "no white space": (CALL.replace("\n", "").replace(" ", ""), (None, [OSLO])),
    "text before": (f"Let me look. \n{CALL}", ("Let me look.", [OSLO])),
    "text after": (f"{CALL}\nDone.\n", ("Done.", [OSLO])),
    "two": (f"{CALL}\n{CALL}", (None, [OSLO, OSLO])),
    "two and text": (f"a {CALL} b {CALL} c", ("abc", [OSLO, OSLO])),
    "no end tag": (CALL.removesuffix("\n</tool_call>"), (None, [OSLO])),
    "half an end tag": (CALL[:-5], (None, [OSLO])),
    "missing brace": (CALL.replace("}}", "}") + CALL, (None, [OSLO, OSLO])),
    "arguments first": (
        f"<tool_call>{{{ARGUMENTS}, {NAME}}}</tool_call>",
        (None, [OSLO]),
    ),
    "further keys": (
        f'<tool_call>{{"id": [1], {NAME}, {ARGUMENTS}, "x": {{"y": 1}}}}</tool_call>',
        (None, [OSLO]),
    ),
    "arguments as a string": (
        '<tool_call>{"name": "say", "arguments": "{\\"a\\": 1}"}</tool_call>',
        (None, [("say", {"a": 1})]),
    ),
    "no arguments": ('<tool_call>{"name": "say"}</tool_call>', (None, [("say", {})])),
    "brackets and tags in strings": (
        f'<tool_call>{{"name": "say", "arguments": {TRICKY}}}</tool_call>',
        (None, [("say", json.loads(TRICKY))]),
    ),
    "cut in the arguments": (CALL[: CALL.index('"Oslo')], (None, [("weather", '{"city": ')])),
    "broken arguments": (
        CALL.replace('"Oslo"', "Oslo"),
        (None, [("weather", '{"city": Oslo}')]),
    ),
    "broken arguments without end": (
        CALL.replace("}}", "") + CALL,
        (None, [("weather", '{"city": "Oslo"\n'), OSLO]),
    ),
    "cut in the name": unchanged(CALL[:25]),
    "unknown tool": unchanged(CALL.replace("weather", "rm")),
    "no JSON": unchanged("<tool_call>weather()</tool_call>"),
    "no object": unchanged("<tool_call>[1]</tool_call>"),
    "broken JSON": unchanged("<tool_call>{'name': 1}</tool_call>"),
    "start in a start": (f"<tool_call><tool_call{CALL}", ("<tool_call><tool_call", [OSLO])),
    "broken, then good": (f"<tool_call>{{ {CALL}", ("<tool_call>{", [OSLO])),
    "almost a tag": unchanged("a <tool_cal l> <b>"),
}
LLAMA_CASES: dict[str, tuple[str, Found]] = {
    "text": unchanged(" Nothing to call. "),
    "nothing": unchanged(""),
    "call": (JSON_CALL, (None, [OSLO])),
    "white space around": (f"\n\n{JSON_CALL}\n", (None, [OSLO])),
    "python tag": (f"<|python_tag|>{JSON_CALL}", (None, [OSLO])),
    "half a python tag": unchanged("<|python"),
    "type first": (
        JSON_CALL.replace("{", '{"type": "function", ', 1),
        (None, [OSLO]),
    ),
    "other key": (JSON_CALL.replace("parameters", "arguments"), (None, [OSLO])),
    "two": (f"{JSON_CALL}; {JSON_CALL}", (None, [OSLO, OSLO])),
    "two lines": (f"{JSON_CALL}\n{JSON_CALL}; ", (None, [OSLO, OSLO])),
    "two, the first without its brace": (
        f"{JSON_CALL[:-1]}; {JSON_CALL}",
        (None, [OSLO, OSLO]),
    ),
    "text after": (f"{JSON_CALL}\nDone.", ("Done.", [OSLO])),
    "text before": unchanged(f"So: {JSON_CALL}"),
    "other JSON": unchanged('{"name": "Ada", "age": {"years": 36}}'),
    "unknown tool": unchanged(JSON_CALL.replace("weather", "rm")),
    "cut in the arguments": (JSON_CALL[:-4], (None, [("weather", '{"city": "Osl')])),
}
CASES = [("hermes", *case) for case in HERMES_CASES.values()]
CASES += [("llama3_json", *case) for case in LLAMA_CASES.values()]
IDS = [f"hermes-{name}" for name in HERMES_CASES] + [f"llama-{name}" for name in LLAMA_CASES]


@pytest.mark.parametrize(("name", "text", "expected"), CASES, ids=IDS)
def test_calls_are_found_and_the_rest_stays_content(name: str, text: str, expected: Found) -> None:
    assert found(text, name) == expected


def streamed(pieces: list[str], name: str) -> tuple[str, list[tuple[str, str]]]:
    """What the deltas add up to, as a client adds them."""
    parser = CallParser(FORMATS[name], TOOLS)
    content, calls = "", list[list[str]]()
    for delta in [*map(parser.push, pieces), parser.flush()]:
        content += delta.content
        for call in delta.calls:
            if call.name is not None:
                assert call.id and call.index == len(calls)
                calls.append([call.name, ""])
            assert call.index == len(calls) - 1
            calls[-1][1] += call.arguments
    assert parser.num_calls == len(calls)
    return content, [(tool, arguments) for tool, arguments in calls]


def whole(text: str, name: str) -> tuple[str, list[tuple[str, str]]]:
    content, calls = parse(text, FORMATS[name], TOOLS)
    return content or "", [(call.name, call.arguments) for call in calls]


@pytest.mark.parametrize(("name", "text", "expected"), CASES, ids=IDS)
def test_every_cut_in_two_and_into_characters_gives_the_same(
    name: str, text: str, expected: Found
) -> None:
    assert streamed(list(text), name) == whole(text, name)
    for cut in range(len(text)):
        assert streamed([text[:cut], text[cut:]], name) == whole(text, name)


PARTS = [
    *(case[0] for case in (*HERMES_CASES.values(), *LLAMA_CASES.values())),
    *("<tool_call>", "</tool_call>", "<tool", "{", "}", '"', "\\", " ", "\n", ";", "[", "]", ","),
    *('"name": "say"', '"arguments": {', '"parameters": {}', "<|python_tag|>", "é", "x"),
]
TEXTS = st.lists(st.sampled_from(PARTS) | st.text(max_size=4), max_size=8).map("".join)


@given(st.sampled_from(sorted(FORMATS)), TEXTS, st.lists(st.integers(0, 400), max_size=12))
@example("hermes", "<tool_call>{<tool_call>", [11, 12])
def test_any_text_gives_the_same_however_it_is_cut(name: str, text: str, cuts: list[int]) -> None:
    places = sorted({min(cut, len(text)) for cut in cuts} | {0, len(text)})
    pieces = [text[a:b] for a, b in itertools.pairwise(places)]
    assert streamed(pieces, name) == whole(text, name)


@given(st.sampled_from(sorted(FORMATS)), TEXTS)
def test_a_text_without_calls_is_content_as_it_is(name: str, text: str) -> None:
    content, calls = parse(text, FORMATS[name], TOOLS)
    if not calls:
        assert content == text


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)


@given(st.sampled_from(sorted(FORMATS)), st.dictionaries(st.text(), JSON, max_size=4), st.data())
def test_any_arguments_are_read_as_they_were_written(
    name: str, arguments: dict[str, Any], data: st.DataObject
) -> None:
    format = FORMATS[name]
    call = {"name": "say", format.arguments: arguments}
    if data.draw(st.booleans()):
        call = dict(reversed(call.items()))
    body = json.dumps(
        call, ensure_ascii=data.draw(st.booleans()), indent=data.draw(st.none() | st.just(1))
    )
    text = format.between.join([format.start + body + format.end] * 2)
    assert found(text, name) == (None, [("say", arguments)] * 2)


def test_the_name_comes_at_once_and_the_arguments_as_they_are_written() -> None:
    parser = CallParser(HERMES, TOOLS)
    seen = [parser.push(char) for char in CALL]
    head = CALL.index('{"city')
    assert not any(delta.calls for delta in seen[:head])
    [first] = seen[head].calls
    assert (first.index, first.name, first.arguments) == (0, "weather", "{")
    for char, delta in zip('"city": "Oslo"}', seen[head + 1 :], strict=False):
        assert delta.calls == [CallDelta(0, None, None, char)]
    assert first.as_json() == {
        "index": 0,
        "id": first.id,
        "type": "function",
        "function": {"name": "weather", "arguments": "{"},
    }
    assert CallDelta(0, None, None, "x").as_json() == {"index": 0, "function": {"arguments": "x"}}


def test_content_is_not_held_back_longer_than_it_could_begin_a_call() -> None:
    parser = CallParser(HERMES, TOOLS)
    assert parser.push("a <b> <tool_c").content == "a <b>"
    assert parser.push("at").content == " <tool_cat"
    parser = CallParser(LLAMA, TOOLS)
    assert parser.push(" W").content == " W"


QWEN = 'within <tool_call></tool_call>: {"name": <function-name>, "arguments": <args-json-object>}'
LLAMA_TEMPLATE = '<|start_header_id|> {"name": function name, "parameters": dictionary}'


@pytest.mark.parametrize(
    ("template", "format"),
    [
        (QWEN, HERMES),
        (LLAMA_TEMPLATE, LLAMA),
        (QWEN + "<function=name>", None),
        (QWEN + "<arg_key>", None),
        ("{{ messages }}", None),
        (None, None),
    ],
    ids=str,
)
def test_the_format_is_guessed_from_the_template(template: str | None, format: Any) -> None:
    assert guess_format(template) == format
