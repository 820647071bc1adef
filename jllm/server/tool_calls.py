"""Tool calls in a model's text: found as the text comes, however it is cut.

A call is a JSON object that names a tool the request offers; everything else stays text. Where the
name comes first, as it should, the arguments are passed on while they come, and so also when they
turn out to be no JSON or are cut short, as in OpenAI's API. Otherwise the whole object is awaited.
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

from jllm.server.call_formats import PYTHON_TAG, CallFormat

# A call whose name comes first, up to the brace that opens its arguments.
HEAD = re.compile(
    r'\{\s*(?:"type"\s*:\s*"function"\s*,\s*)?"name"\s*:\s*"([^"\\]*)"\s*,'
    r'\s*"(?:arguments|parameters)"\s*:\s*'
)


@dataclass(slots=True)
class ToolCall:
    """A complete call; ``arguments`` is JSON, if the model wrote JSON."""

    id: str
    name: str
    arguments: str

    def as_json(self) -> dict[str, Any]:
        """An entry of ``message.tool_calls``."""
        function = {"name": self.name, "arguments": self.arguments}
        return {"id": self.id, "type": "function", "function": function}


@dataclass(slots=True)
class CallDelta:
    """What is new of a call: its first has id and name, all have a piece of the arguments."""

    index: int
    id: str | None
    name: str | None
    arguments: str

    def as_json(self) -> dict[str, Any]:
        """An entry of ``delta.tool_calls``."""
        function = {"arguments": self.arguments}
        if self.name is None:
            return {"index": self.index, "function": function}
        function = {"name": self.name, **function}
        return {"index": self.index, "id": self.id, "type": "function", "function": function}


@dataclass(slots=True)
class Delta:
    """What is new of a message."""

    content: str = ""
    calls: list[CallDelta] = field(default_factory=list)


def parse(
    text: str, format: CallFormat, tools: Collection[str]
) -> tuple[str | None, list[ToolCall]]:
    """A whole message: its content, None where there are only calls, and its calls."""
    parser = CallParser(format, tools)
    content, calls = "", list[ToolCall]()
    for delta in (parser.push(text), parser.flush()):
        content += delta.content
        for call in delta.calls:
            if call.name is not None:
                calls.append(ToolCall(call.id or "", call.name, ""))
            calls[call.index].arguments += call.arguments
    return None if calls and not content else content, calls


class CallParser:
    """Separates calls from content in text that comes in pieces.

        parser = CallParser(FORMATS["hermes"], {"weather"})
        for text in pieces:
            delta = parser.push(text)
        delta = parser.flush()

    Together the deltas are the same for every way to cut the text. White space around a call
    belongs to neither; a text without calls is content as it is.

    Args:
      format: how the model writes calls.
      tools: the names that can be called.

    Attributes:
      num_calls: calls that have begun.
    """

    def __init__(self, format: CallFormat, tools: Collection[str]) -> None:
        self.num_calls = 0
        self._format = format
        self._start, self._end = format.start.strip(), format.end.strip()
        self._tools = frozenset(tools)
        self._state = self._in_opening if format.only_calls else self._in_text
        self._held = ""  # read, and not yet known to be content or part of a call
        self._opened_at = self._object_at = 0  # where in it the start of a call ends, and its JSON
        self._brackets = _Brackets()
        self._after_call = False  # no content since
        self._delta = Delta()

    def push(self, text: str) -> Delta:
        """What becomes certain with a piece of the text."""
        self._delta = Delta()
        while text:
            text = self._state(text)
        return self._delta

    def flush(self) -> Delta:
        """What is left at the end: a call whose name did not come is content after all."""
        self._delta = Delta()
        held, self._held = self._held, ""
        between_calls = self.num_calls and not held.strip("; \n\r\t")
        if self._state != self._in_end and not between_calls:
            self._add_content(held)
        return self._delta

    # Each state takes text and returns what it leaves to the next.

    def _in_text(self, text: str) -> str:
        """Content, up to the start of a call."""
        text, self._held = self._held + text, ""
        before, found, after = text.partition(self._start)
        content = before.rstrip()
        if found:
            self._add_content(content)
            self._held = before[len(content) :] + found
            self._opened_at = len(self._held)
            self._state = self._in_opening
            return after
        # What may be the beginning of a start waits, and so does white space before it.
        lengths = range(len(self._start) - 1, 0, -1)
        beginning = next((n for n in lengths if text.endswith(self._start[:n])), 0)
        content = text[: len(text) - beginning].rstrip()
        self._add_content(content)
        self._held = text[len(content) :]
        return ""

    def _in_content(self, text: str) -> str:
        """Content, up to the end of the text."""
        self._add_content(text)
        return ""

    def _in_opening(self, text: str) -> str:
        """Between the start of a call and the brace of its JSON."""
        for index, char in enumerate(text):
            if char == "{":
                self._object_at = len(self._held)
                self._brackets = _Brackets()
                self._state = self._in_object
                return text[index:]
            self._held += char
            opening = self._held[self._opened_at :].strip()
            if self._format.only_calls and self.num_calls:
                opening = opening.lstrip("; \n\r\t")
            tag = PYTHON_TAG if self._format.only_calls else ""
            if not tag.startswith(opening):
                return self._give_up(text[index + 1 :])
        return ""

    def _in_object(self, text: str) -> str:
        """In the JSON of a call, before it is known to be one."""
        for index, char in enumerate(text):
            if self._brackets.excludes(char):
                return self._give_up(text[index:])
            depth = self._brackets.take(char)
            if depth == 2 and char == "{":  # those of the arguments, if the head is before it
                head = HEAD.fullmatch(self._held, self._object_at)
                if head is not None and head[1] in self._tools:
                    self._begin_call(head[1])
                    self._add_arguments("{")
                    self._state = self._in_arguments
                    return text[index + 1 :]
            self._held += char
            if depth == 0:
                call = _whole_call(self._held[self._object_at :])
                if call is None or call[0] not in self._tools:
                    return self._give_up(text[index + 1 :])
                self._begin_call(call[0])
                self._add_arguments(call[1])
                return self._end_call(text[index + 1 :])
        return ""

    def _in_arguments(self, text: str) -> str:
        """In the arguments of a call, which are passed on."""
        for index, char in enumerate(text):
            if self._brackets.excludes(char):
                self._add_arguments(text[:index])
                return self._end_call(text[index:])
            if self._brackets.take(char) == 1:
                self._add_arguments(text[: index + 1])
                self._state = self._in_rest
                return text[index + 1 :]
        self._add_arguments(text)
        return ""

    def _in_rest(self, text: str) -> str:
        """In the JSON of a call, after its arguments."""
        for index, char in enumerate(text):
            if self._brackets.excludes(char):
                return self._end_call(text[index:])
            if self._brackets.take(char) == 0:
                return self._end_call(text[index + 1 :])
        return ""

    def _in_end(self, text: str) -> str:
        """After the JSON of a call, where its end should be; if it is not, that is no harm."""
        for index, char in enumerate(text):
            self._held += char
            end = self._held.lstrip()
            if not self._end.startswith(end):
                held, self._held = self._held, ""
                self._state = self._in_text
                return held + text[index + 1 :]
            if end == self._end:
                self._held = ""
                self._state = self._in_text
                return text[index + 1 :]
        return ""

    def _give_up(self, text: str) -> str:
        """What is held is no call; all but its start is looked at again."""
        held, self._held = self._held, ""
        if self._format.only_calls:
            self._state = self._in_content
            return held + text
        self._state = self._in_text
        self._add_content(held[: self._opened_at])
        return held[self._opened_at :] + text

    def _begin_call(self, name: str) -> None:
        id = f"call_{uuid.uuid4().hex[:24]}"
        self._delta.calls.append(CallDelta(self.num_calls, id, name, ""))
        self.num_calls += 1
        self._held = ""

    def _end_call(self, text: str) -> str:
        self._held, self._opened_at, self._after_call = "", 0, True
        self._state = self._in_opening if self._format.only_calls else self._in_end
        return text

    def _add_arguments(self, text: str) -> None:
        calls = self._delta.calls
        if calls and calls[-1].index == self.num_calls - 1:
            calls[-1].arguments += text
        elif text:
            calls.append(CallDelta(self.num_calls - 1, None, None, text))

    def _add_content(self, text: str) -> None:
        if self._after_call:
            text = text.lstrip()
            self._after_call = not text
        self._delta.content += text


class _Brackets:
    """How deep in JSON's brackets a text is, without looking at the rest of its grammar."""

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = self._escaped = False

    def take(self, char: str) -> int:
        """The depth after the next character."""
        if self._in_string:
            if self._escaped:
                self._escaped = False
            elif char == "\\":
                self._escaped = True
            elif char == '"':
                self._in_string = False
        elif char == '"':
            self._in_string = True
        elif char in "{[":
            self._depth += 1
        elif char in "}]":
            self._depth -= 1
        return self._depth

    def excludes(self, char: str) -> bool:
        """Whether the character shows that the JSON ended before its brackets were closed."""
        return char in "<;" and not self._in_string


def _whole_call(text: str) -> tuple[str, str] | None:
    """The name and the arguments of a call in any order of keys; None if it is none."""
    try:
        call = json.loads(text, strict=False)  # models put line breaks into strings
        name = call.get("name")
        arguments = call.get("arguments", call.get("parameters", {}))
        if isinstance(arguments, str):
            arguments = json.loads(arguments, strict=False)
    except (ValueError, RecursionError):
        return None
    if not isinstance(name, str) or not isinstance(arguments, dict):
        return None
    return name, json.dumps(arguments, ensure_ascii=False)
