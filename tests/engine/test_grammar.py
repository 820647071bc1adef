"""Forms become masks of tokens: for every kind of vocabulary, and within limits."""

from __future__ import annotations

import importlib.util
import random
import re
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import jllm
from jllm.engine import grammar_compiler
from jllm.engine.grammar import Grammars, Matcher
from jllm.tokenizer import Tokenizer
from tests.tokenizers_for_tests import (
    byte_level_tokenizer,
    demo_tokenizer,
    sentencepiece_tokenizer,
    word_tokenizer,
)

VOCABULARIES: dict[str, Callable[[], Tokenizer]] = {
    "byte-level": byte_level_tokenizer,
    "sentencepiece": sentencepiece_tokenizer,
    "sentencepiece-no-space": lambda: sentencepiece_tokenizer(add_space_prefix=False),
    "demo": demo_tokenizer,
}


def grammars(tokenizer: Tokenizer, extra: int = 5) -> Grammars:
    """For a model with a few rows more than there are tokens."""
    assert tokenizer.eos_token_id is not None
    return Grammars(tokenizer, tokenizer.vocab_size + extra, (tokenizer.eos_token_id,))


def allowed(found: Grammars, matcher: Matcher) -> list[int]:
    bits = found.masks(3, [(1, matcher)])
    assert (bits[[0, 2]] == 0xFFFFFFFF).all()  # rows of others
    return np.flatnonzero(np.unpackbits(bits[1].view(np.uint8), bitorder="little")).tolist()


def walk(tokenizer: Tokenizer, found: Grammars, form: jllm.Structured, seed: int) -> str:
    """A text drawn uniformly among the tokens that are allowed."""
    rng, matcher = random.Random(seed), found.matcher(form)
    tokens: list[int] = []
    while len(tokens) < 200:
        token = rng.choice(allowed(found, matcher))
        assert tokenizer.token_bytes(token)
        if token == tokenizer.eos_token_id:
            break
        tokens.append(token)
        if matcher.ends_with(token):
            break
    assert matcher.error is None
    return tokenizer.decode(tokens)


@pytest.mark.parametrize("vocabulary", VOCABULARIES)
@pytest.mark.parametrize(
    ("options", "pattern"),
    [
        ({"regex": r"[a-f]{2,5}(, | é)\s?/[^a]"}, r"[a-f]{2,5}(, | é)\s?/[^a]"),
        ({"regex": "^(the|in)g?$"}, "(the|in)g?"),
        ({"regex": " {2}x"}, " {2}x"),
        ({"regex": ""}, ""),
        ({"choice": ["the", " the", "a/b\n", '"é"', ""]}, r' ?the|a/b\n|"é"|'),
        ({"grammar": 'start: "a" start "b" | "he"'}, "(a*)he(b*)"),
        ({"grammar": 'root ::= "a" root | "he"'}, "a*he"),
        ({"json_schema": {"const": {"aa": [1]}}}, r'\{\s*"aa"\s*:\s*\[\s*1\s*\]\s*\}'),
    ],
    ids=lambda value: str(value)[:30] if isinstance(value, dict) else "",
)
def test_whatever_is_drawn_has_the_form(
    vocabulary: str, options: dict[str, Any], pattern: str
) -> None:
    tokenizer = VOCABULARIES[vocabulary]()
    found, form = grammars(tokenizer), jllm.Structured(**options)
    texts = {walk(tokenizer, found, form, seed) for seed in range(60)}
    for text in texts:
        assert re.fullmatch(pattern, text), repr(text)
    if "choice" in options:
        assert texts == set(options["choice"])


def test_every_spelling_of_an_allowed_text_is_allowed() -> None:
    tokenizer = byte_level_tokenizer()
    found = grammars(tokenizer)
    matcher = found.matcher(jllm.Structured(choice=["hell"]))
    assert [tokenizer.token_bytes(t) for t in allowed(found, matcher)] == [b"h", b"he", b"hell"]


def test_whitespace_in_json_is_bounded() -> None:
    tokenizer = byte_level_tokenizer()
    found = grammars(tokenizer)
    matcher = found.matcher(jllm.Structured(json_object=True))
    for token in tokenizer.encode("{\n" + " " * 32):
        assert token in allowed(found, matcher)
        matcher.ends_with(token)
    assert tokenizer.encode(" ")[0] not in allowed(found, matcher)


def test_special_tokens_are_allowed_only_where_a_grammar_names_them() -> None:
    tokenizer = demo_tokenizer()
    found = grammars(tokenizer)
    matcher = found.matcher(jllm.Structured(regex="(.|\n)*"))
    assert set(allowed(found, matcher)) & tokenizer.special_ids == {tokenizer.eos_token_id}
    matcher = found.matcher(jllm.Structured(grammar='start: <|im_start|> "a"'))
    assert allowed(found, matcher) == tokenizer.encode("<|im_start|>")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"regex": "a("}, r"Structured.regex cannot be used: .*unclosed group"),
        ({"regex": "a(?=b)"}, r"look-ahead"),
        ({"regex": "a\\"}, "it ends with a backslash"),
        ({"json_schema": {"type": "strin"}}, "json_schema cannot be used: Invalid type: strin"),
        ({"json_schema": {"not": {}}}, 'Unimplemented keys: ."not"'),
        ({"json_schema": {"minimum": 5, "maximum": 3, "type": "integer"}}, "Unsatisfiable schema"),
        ({"json_schema": {"$ref": "http://example.org/a"}}, "Default retriever does not fetch"),
        ({"json_schema": {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}}, "no text"),
        ({"grammar": "start: foo"}, 'grammar cannot be used: .*unknown name: "foo"'),
        ({"grammar": "root ::= ("}, "grammar cannot be used: Failed to convert the grammar"),
        ({"grammar": "start: <|no_such_token|>"}, "grammar cannot be used: .*no_such_token"),
    ],
    ids=str,
)
def test_a_form_that_makes_no_sense_is_refused_in_a_sentence(
    options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        grammars(demo_tokenizer()).matcher(jllm.Structured(**options))
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 600


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    return schema


def multiples(*values: float) -> dict[str, Any]:
    return {"anyOf": [{"type": "number", "multipleOf": value} for value in values]}


NULLABLE = "\n".join(f'r{i}: "a" | ' for i in range(4000))
HOSTILE: dict[str, dict[str, Any]] = {
    "deep schema": {"json_schema": nested(400)},
    "deep regex": {"regex": "(" * 5000 + "a" + ")" * 5000},
    "large multiple": {"json_schema": multiples(999_983)},
    "large common multiple": {"json_schema": multiples(1009, 1013)},
    "multiple in a grammar": {"grammar": r'start: %json {"multiple\u004ff": 999983}'},
    "many optional properties": {
        "json_schema": {"type": "object", "properties": {f"p{i}": {} for i in range(3000)}}
    },
    "nothing but empty rules": {
        "grammar": f"start: {' '.join(f'r{i}?' for i in range(4000))}\n{NULLABLE}"
    },
    "exponential alternatives": {
        "json_schema": {
            "allOf": [
                {"anyOf": [{"properties": {f"{k}{i}": {"type": "string"}}} for k in "pq"]}
                for i in range(14)
            ]
        }
    },
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_form_is_refused_in_time(name: str) -> None:
    found = grammars(byte_level_tokenizer())
    start = time.monotonic()
    with pytest.raises(ValueError, match=r"Structured\.\w+ cannot be used: "):
        found.matcher(jllm.Structured(**HOSTILE[name]))
    assert time.monotonic() - start < 3


def test_a_common_multiple_counts_without_powers_of_ten() -> None:
    found = grammars(byte_level_tokenizer())
    found.matcher(jllm.Structured(json_schema=multiples(0.01, 5000, 60, 1e9, 7)))


def test_compiling_that_takes_too_long_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    found = grammars(byte_level_tokenizer())
    monkeypatch.setattr(grammar_compiler, "COMPILE_LIMIT_S", 1e-4)
    slow = jllm.Structured(choice=[f"choice {i}" for i in range(5000)])
    with pytest.raises(ValueError, match=r"choice cannot be used: compiling it takes more than"):
        found.matcher(slow)


def test_what_a_form_needs_is_named_when_it_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    form = jllm.Structured(regex="a")
    tokenizer = byte_level_tokenizer()
    for found, message in [
        (Grammars(None, 10, (1,)), "needs text, but the model has no tokenizer"),
        (Grammars(word_tokenizer(), 10, (1,)), "tokenizer of whole words"),
        (Grammars(tokenizer, 300, ()), "needs a model that has an eos token"),
    ]:
        with pytest.raises(ValueError, match=message):
            found.matcher(form)
        found.prepare()  # nothing to prepare, and nothing wrong
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=re.escape("pip install 'jllm[structured]'")):
        grammars(tokenizer).matcher(form)


def test_matchers_of_one_form_are_independent() -> None:
    tokenizer = byte_level_tokenizer()
    found, form = grammars(tokenizer), jllm.Structured(choice=["ab", "cd"])
    one, other = found.matcher(form), found.matcher(form)
    a, b = tokenizer.encode("ab")
    assert not one.ends_with(a) and one.ends_with(b)
    assert not other.ends_with(a) and not found.matcher(form).ends_with(a)
