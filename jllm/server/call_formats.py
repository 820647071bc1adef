"""The ways in which models write tool calls.

Models in the manner of Hermes and Qwen write each call between tags, after text if they like; Llama
3 writes calls and nothing else:

    <tool_call>
    {"name": "weather", "arguments": {"city": "Oslo"}}
    </tool_call>

    {"name": "weather", "parameters": {"city": "Oslo"}}
"""

from __future__ import annotations

import re
from typing import NamedTuple

PYTHON_TAG = "<|python_tag|>"  # Llama 3.1 may write it before its calls


class CallFormat(NamedTuple):
    """How a model writes calls.

    Attributes:
      arguments: the key of the arguments.
      start, end: what stands before and after the JSON object.
      between: what separates two calls.
      only_calls: a text consists of calls alone; one that begins otherwise has none.
    """

    arguments: str
    start: str
    end: str
    between: str
    only_calls: bool


FORMATS: dict[str, CallFormat] = {
    "hermes": CallFormat("arguments", "<tool_call>\n", "\n</tool_call>", "\n", only_calls=False),
    "llama3_json": CallFormat("parameters", "", "", "; ", only_calls=True),
}


def guess_format(chat_template: str | None) -> CallFormat | None:
    """The format that a chat template teaches, if it is one of these."""
    template = chat_template or ""
    if "<tool_call>" in template and '"arguments"' in template:
        # Others put XML between the same tags.
        return None if re.search("<function=|<arg_key>", template) else FORMATS["hermes"]
    if "<|start_header_id|>" in template and '"parameters"' in template:
        return FORMATS["llama3_json"]
    return None
