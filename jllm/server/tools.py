"""The tools that a request offers, and what it wants the model to do with them.

``plan_answer`` turns ``tools``, ``tool_choice`` and the form asked for into what the chat template
is given, what the text must look like, and how calls are found in it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from jllm.engine.grammar_compiler import JSON_OPTIONS
from jllm.server.call_formats import CallFormat
from jllm.server.shown import shown
from jllm.server.tool_calls import CallParser
from jllm.structured import Structured

NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")
MAX_TOOLS = 128


class AnswerPlan(NamedTuple):
    """How a request with tools is answered.

    Attributes:
      template_options: for the chat template.
      structured: the form that the text must have, for ``SamplingParams.structured``.
      format: how calls are written, None where none are looked for. Then
        ``SamplingParams.skip_special_tokens`` must be False: some models write calls with those.
      tools: the names that can be called.
    """

    template_options: dict[str, Any]
    structured: Structured | None
    format: CallFormat | None
    tools: tuple[str, ...]

    def parser(self) -> CallParser | None:
        """A parser for one sample, if calls are looked for."""
        return None if self.format is None else CallParser(self.format, self.tools)


def plan_answer(
    tools: Sequence[Any] | None,
    tool_choice: Any,
    structured: Structured | None,
    *,
    format: CallFormat | None,
    chat_template: str | None,
    parallel_tool_calls: bool = True,
    special_tokens: Collection[str] = (),
) -> AnswerPlan:
    """What to do about a request's tools.

    Args:
      tools: as in OpenAI's API: ``{"type": "function", "function": {"name", "description",
        "parameters"}}``, in plain JSON.
      tool_choice: ``none``, ``auto``, ``required``, or ``{"type": "function", "function":
        {"name"}}``; None is ``auto`` where there are tools. With ``required`` or a name the text
        must be calls that fit the schemas; with ``none`` the model is not told of the tools.
      structured: the form asked for otherwise. With ``auto`` the text has that form or is calls.
      format: how the model writes calls; None if that is not known.
      chat_template: the model's; it must show the tools.
      parallel_tool_calls: whether a forced answer may have several calls.
      special_tokens: the texts of the tokenizer's special tokens.

    Raises:
      ValueError: a tool or the choice is malformed, or the model cannot be given tools.
    """
    functions = _functions([] if tools is None else tools)
    wanted = _wanted(tool_choice, list(functions))
    if wanted == "none":
        return AnswerPlan({}, structured, None, ())
    if "tools" not in (chat_template or ""):
        raise ValueError("tools cannot be used: the chat template does not show them to the model.")
    if format is None:
        raise ValueError(
            "tools cannot be used: it is not known how this model writes calls. The server can be "
            "told by --tool-call-parser."
        )
    dialect = _Dialect(format, parallel_tool_calls, special_tokens)
    if wanted != "auto":
        rules = dialect.calls({name: functions[name] for name in wanted})
        structured = Structured(grammar=f"start: calls\n{rules}")
    elif structured is not None:
        structured = _calls_or(structured, functions, dialect)
    return AnswerPlan({"tools": list(tools or ())}, structured, format, tuple(functions))


def messages_for_template(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Messages in which earlier calls have their arguments as objects, as chat templates want them,
    and not as JSON, as the API has them.

    Raises ValueError for a call that is malformed.
    """
    plain = [dict(message) for message in messages]
    for message in plain:
        if message.get("tool_calls"):
            message["tool_calls"] = [_for_template(call) for call in message["tool_calls"]]
    return plain


def _for_template(call: Any) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise ValueError(
            f"A tool call of a message must have a function with a name, not {shown(call)}."
        )
    arguments = function.get("arguments") or {}
    try:
        if isinstance(arguments, str):
            arguments = json.loads(arguments)
    except (ValueError, RecursionError) as error:
        raise ValueError(
            f"The arguments of a tool call must be JSON, not {shown(arguments)}."
        ) from error
    if not isinstance(arguments, Mapping):
        raise ValueError(
            f"The arguments of a tool call must be a JSON object, not {shown(arguments)}."
        )
    return {**call, "function": {**function, "arguments": arguments}}


def _functions(tools: Any) -> dict[str, dict[str, Any]]:
    """The schema of the arguments of each tool, by name."""
    if isinstance(tools, str | Mapping) or not isinstance(tools, Sequence):
        raise ValueError(f"tools must be a list, not {shown(tools)}.")
    if len(tools) > MAX_TOOLS:
        raise ValueError(f"tools has {len(tools)} entries; at most {MAX_TOOLS} are allowed.")
    functions: dict[str, dict[str, Any]] = {}
    for index, tool in enumerate(tools):
        where = f"tools[{index}]"
        if not isinstance(tool, Mapping) or tool.get("type", "function") != "function":
            raise ValueError(f"{where} must be an object of type 'function', not {shown(tool)}.")
        function = tool.get("function")
        name = function.get("name") if isinstance(function, Mapping) else None
        if not isinstance(function, Mapping) or name is None:
            raise ValueError(f"{where} must have a function with a name, not {shown(tool)}.")
        if not isinstance(name, str) or not NAME.fullmatch(name):
            raise ValueError(
                f"{where}.function.name must be 1 to 64 letters, digits, dashes and underscores, "
                f"not {shown(name)}."
            )
        if name in functions:
            raise ValueError(f"{where}.function.name is {name!r}, which is taken already.")
        functions[name] = _schema(f"{where}.function.parameters", function.get("parameters"))
    return functions


def _schema(where: str, parameters: Any) -> dict[str, Any]:
    if parameters is None:  # then there are none
        return {"type": "object", "properties": {}, "additionalProperties": False}
    if not isinstance(parameters, Mapping) or parameters.get("type", "object") != "object":
        raise ValueError(
            f"{where} must be a JSON schema of type 'object', not {shown(parameters)}."
        )
    try:
        json.dumps(parameters)
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"{where} is not JSON: {error}.") from error
    return {"type": "object", **parameters}


def _wanted(choice: Any, names: Sequence[str]) -> Literal["none", "auto"] | Sequence[str]:
    """What ``tool_choice`` says; the names of which one must be called, if one must."""
    if choice is None or choice == "auto":
        return "auto" if names else "none"
    if choice == "none":
        return "none"
    if choice == "required":
        if not names:
            raise ValueError("tool_choice is 'required', but there are no tools.")
        return names
    function = choice.get("function") if isinstance(choice, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str):
        raise ValueError(
            "tool_choice must be 'none', 'auto', 'required' or an object that names a function, "
            f"not {shown(choice)}."
        )
    if name not in names:
        raise ValueError(f"tool_choice asks for {shown(name)}, which is not among tools.")
    return [name]


def _calls_or(
    structured: Structured, functions: Mapping[str, Any], dialect: _Dialect
) -> Structured:
    """Calls, or text of a form; grammars of both are joined where that form is JSON."""
    if structured.json_object:
        schema: Any = {"type": "object"}
    elif structured.json_schema is not None:
        schema = json.loads(str(structured.json_schema))
    else:
        raise ValueError(
            "With tools, and a tool_choice of 'auto', a text can only be asked to be JSON."
        )
    rules = dialect.calls(functions)
    return Structured(grammar=f"start: calls | answer\n{rules}answer: {_json(schema)}\n")


class _Dialect(NamedTuple):
    """Writes grammars of calls, in Lark's notation."""

    format: CallFormat
    several: bool  # calls in one answer
    special_tokens: Collection[str]

    def calls(self, functions: Mapping[str, Any]) -> str:
        """Rules for ``calls``, each of one of these functions."""
        start, end = self._tag(self.format.start), self._tag(self.format.end)
        more = f" ({json.dumps(self.format.between)} call)*" if self.several else ""
        names = " | ".join(f"call_{index}" for index in range(len(functions)))
        rules = [f"calls: call{more}", f"call: {start} ({names}) {end}"]
        for index, (name, schema) in enumerate(functions.items()):
            head = json.dumps(f'{{"name": "{name}", "{self.format.arguments}": ')
            rules.append(f'call_{index}: {head} arguments_{index} "}}"')
            rules.append(f"arguments_{index}: {_json(schema)}")
        return "\n".join(rules) + "\n"

    def _tag(self, text: str) -> str:
        """What stands before or after a call, which may be a token that text cannot spell."""
        tag = text.strip()
        if not tag or tag not in self.special_tokens:
            return json.dumps(text) if text else ""
        before, _, after = text.partition(tag)
        return " ".join(
            tag if part is tag else json.dumps(part) for part in (before, tag, after) if part
        )


def _json(schema: Mapping[str, Any]) -> str:
    """JSON of a schema, whose ``$ref`` start from it."""
    return "%json " + json.dumps({**schema, "x-guidance": JSON_OPTIONS}, ensure_ascii=False)
