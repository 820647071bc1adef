"""From a form that text must have to a compiled grammar, within limits.

Forms come from strangers. The library ``llguidance`` bounds most of its work; what it does not
bound is refused here, or left behind after a time.
"""

from __future__ import annotations

import itertools
import json
import math
import re
import threading
from decimal import Decimal, InvalidOperation
from typing import TYPE_CHECKING, Any

from jllm.structured import Structured

if TYPE_CHECKING:
    import llguidance

COMPILE_LIMIT_S = 10.0  # the limits below keep the worst that was found under half a second
# Symbols of productions: the time of a mask grows with the square of those at one place.
MAX_GRAMMAR_SIZE = 10_000
MAX_LEXER_STATES = 50_000  # 1 to 2 kB each, per request
# multipleOf compiles to as many states; 999,983 takes 4 s, and the library has no limit for it.
MAX_MULTIPLE = 10_000
MULTIPLE_OF = re.compile(r'"multipleOf"\s*:\s*(-?\d[0-9.eE+-]*)')
ESCAPE = re.compile(r"\\u([0-9a-fA-F]{4})")

# The library would allow only the tokenizer's own spelling of what is certain to come, which some
# tokenizers cannot give (they put a space before every text).
OPTIONS = '%llguidance {"no_forcing": true}\n'
# JSON allows whitespace without end, and models that lose the thread write it: at each place a
# space, or a new line and its indentation.
JSON_OPTIONS = {"whitespace_pattern": r"[ \t]|\r?\n[ \t]{0,32}"}


def compile_grammar(
    form: Structured, vocabulary: llguidance.LLTokenizer, *, begin_with_space: bool
) -> llguidance.LLMatcher:
    """A matcher at the beginning of the text, whose first mask was tried.

    Args:
      form: what the text must look like.
      vocabulary: the tokens.
      begin_with_space: the tokenizer takes a space from the beginning of every text.

    Raises ValueError: the form is not valid, not supported, matches no text, or is too complex.
    """
    import llguidance

    grammar = _grammar(form, begin_with_space)

    limits = llguidance.LLParserLimits(
        max_grammar_size=MAX_GRAMMAR_SIZE, max_lexer_states=MAX_LEXER_STATES, verbose_errors=False
    )
    # In a thread: the library cannot be interrupted, but it can be left behind.
    built: list[llguidance.LLMatcher] = []

    def build() -> None:
        matcher = llguidance.LLMatcher(vocabulary, grammar, log_level=0, limits=limits)
        if not matcher.is_error():
            matcher.compute_bitmask()
        built.append(matcher)

    thread = threading.Thread(target=build, daemon=True)
    thread.start()
    thread.join(COMPILE_LIMIT_S)
    if not built:
        raise ValueError(f"compiling it takes more than {COMPILE_LIMIT_S:g} s.")
    matcher = built[0]
    if matcher.is_error():
        reason = one_line(matcher.get_error())
        raise ValueError("it matches no text." if reason == "NoExtensionBias." else reason)
    return matcher


def _grammar(form: Structured, begin_with_space: bool) -> str:
    """A form in the library's notation."""
    _check_multiples(form)
    start = 'start: " " @text' if begin_with_space else "start: @text"
    outer = {"lark_grammar": OPTIONS + start}
    return json.dumps({"grammars": [outer, {"name": "text", **_text_grammar(form)}]})


def _text_grammar(form: Structured) -> dict[str, Any]:
    import llguidance

    if form.grammar is not None:
        return {"lark_grammar": OPTIONS + llguidance.grammar_from("grammar", form.grammar)}
    if form.regex is not None:
        if (len(form.regex) - len(form.regex.rstrip("\\"))) % 2:
            raise ValueError("it ends with a backslash.")  # the library drops it
        source = json.loads(llguidance.grammar_from("regex", form.regex))
        return {"lark_grammar": OPTIONS + source["grammars"][0]["lark_grammar"]}
    if form.choice is not None:
        texts = " | ".join(json.dumps(choice) for choice in dict.fromkeys(form.choice))
        return {"lark_grammar": f"{OPTIONS}start: CHOICE\nCHOICE: {texts}"}
    schema: dict[str, Any] = {"type": "object"}
    if form.json_schema is not None:
        assert isinstance(form.json_schema, str)
        schema = json.loads(form.json_schema)
    return {"json_schema": {**schema, "x-guidance": JSON_OPTIONS}}


def _check_multiples(form: Structured) -> None:
    """Raises ValueError if ``multipleOf`` of a schema would take too long to compile. Powers of
    ten cost nothing."""
    text = ESCAPE.sub(lambda match: chr(int(match[1], 16)), form.grammar or str(form.json_schema))
    multiple = 1
    for number in MULTIPLE_OF.findall(text):
        try:
            digits = Decimal(number).as_tuple().digits
        except InvalidOperation:
            continue  # no number: for the library to refuse
        multiple = math.lcm(multiple, int("".join(map(str, digits)).rstrip("0") or 1))
        if multiple > MAX_MULTIPLE:
            raise ValueError(
                "the least common multiple of its multipleOf, without powers of ten, is more than "
                f"{MAX_MULTIPLE}."
            )


def one_line(message: str) -> str:
    """The first line of a library's message, as a sentence."""
    lines = [line.strip() for line in message.splitlines()]
    first = " ".join(itertools.takewhile(lambda line: not re.match(r"<|\d+ \|", line), lines))
    return first.rstrip(".") + "."
