"""Streamed text against the whole text, and stop strings against a search by brute force."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jllm.detokenizer import IncrementalDetokenizer, StopStringMatcher
from jllm.tokenizer import Tokenizer
from tests.tokenizers_for_tests import (
    byte_level_tokenizer,
    demo_tokenizer,
    sentencepiece_tokenizer,
    word_tokenizer,
)

REPLACEMENT = "\ufffd"


def chunks[T](values: Sequence[T], sizes: Sequence[int]) -> list[Sequence[T]]:
    """Cuts values into pieces of these sizes, and what is left one by one."""
    pieces, start = [], 0
    for size in sizes:
        pieces.append(values[start : start + size])
        start += size
    return pieces + [values[i : i + 1] for i in range(start, len(values))]


def stream(
    tokenizer: Tokenizer, ids: list[int], sizes: Sequence[int] = (), **options: bool
) -> list[str]:
    detokenizer = IncrementalDetokenizer(tokenizer, **options)
    return [detokenizer.push(piece) for piece in chunks(ids, sizes)] + [detokenizer.flush()]


# Ids of parts of characters are rare in a vocabulary, so bytes are drawn as often as anything.
DEMO_IDS = st.lists(st.one_of(st.integers(0, 49151), st.integers(0, 272)), max_size=40)
SIZES = st.lists(st.integers(0, 4), max_size=10)


@given(DEMO_IDS, SIZES, st.booleans())
def test_streamed_text_of_random_ids_is_what_the_tokenizers_library_decodes(
    ids: list[int], sizes: list[int], skip: bool
) -> None:
    tokenizer = demo_tokenizer()
    pieces = stream(tokenizer, ids, sizes, skip_special_tokens=skip)
    assert "".join(pieces) == tokenizer.backend.decode(ids, skip_special_tokens=skip)


@pytest.mark.parametrize(
    "tokenizer",
    [
        pytest.param(byte_level_tokenizer(), id="byte-level"),
        pytest.param(sentencepiece_tokenizer(), id="sentencepiece"),
        pytest.param(sentencepiece_tokenizer(add_space_prefix=False), id="sentencepiece-bare"),
        pytest.param(word_tokenizer(), id="words"),
    ],
)
@given(data=st.data(), sizes=SIZES, skip=st.booleans(), spaces=st.booleans())
def test_streamed_text_equals_whole_text_for_every_kind_of_vocabulary(
    tokenizer: Tokenizer, data: st.DataObject, sizes: list[int], skip: bool, spaces: bool
) -> None:
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size)))
    options = {"skip_special_tokens": skip, "spaces_between_special_tokens": spaces}
    assert "".join(stream(tokenizer, ids, sizes, **options)) == tokenizer.decode(ids, **options)


@given(st.text(st.characters(exclude_categories=["Cs"], exclude_characters=REPLACEMENT)))
def test_valid_text_is_streamed_without_a_replacement_character(text: str) -> None:
    for tokenizer in (byte_level_tokenizer(), sentencepiece_tokenizer()):
        ids = tokenizer.encode(text, add_special_tokens=False)
        pieces = stream(tokenizer, ids, skip_special_tokens=False)
        assert "".join(pieces) == text and REPLACEMENT not in "".join(pieces)


@pytest.mark.parametrize("text", ["🦙", "你", "👩‍👧 é"])
def test_a_character_spread_over_tokens_comes_whole_with_its_last_token(text: str) -> None:
    tokenizer = byte_level_tokenizer()
    pieces = stream(tokenizer, tokenizer.encode(text))
    assert [piece for piece in pieces if piece] == list(text)


def test_a_character_that_stays_incomplete_is_replaced_at_the_end() -> None:
    tokenizer = byte_level_tokenizer()
    assert stream(tokenizer, tokenizer.encode("a🦙")[:-1]) == ["a", "", "", "", REPLACEMENT]


def test_no_more_than_three_bytes_are_held_however_long_the_fault_lasts() -> None:
    tokenizer = byte_level_tokenizer()
    (first, *_) = tokenizer.encode("🦙")
    detokenizer = IncrementalDetokenizer(tokenizer)
    shown = sum(len(detokenizer.push([first])) for _ in range(100))
    assert shown == 99 and detokenizer.flush() == REPLACEMENT


def test_sentencepiece_keeps_the_spaces_between_tokens_and_drops_only_its_own() -> None:
    tokenizer = sentencepiece_tokenizer()
    ids = tokenizer.encode("  in the", add_special_tokens=False)
    assert "".join(stream(tokenizer, ids)) == "  in the"
    assert stream(tokenizer, tokenizer.encode("the in"))[1:3] == ["the", " in"]


def test_sentencepiece_replaces_only_the_bytes_at_fault() -> None:
    tokenizer = sentencepiece_tokenizer(add_space_prefix=False, add_bos_token=False)
    good, bad = tokenizer.encode("é🦙"), tokenizer.encode("🦙")[:1]
    assert tokenizer.decode(good + bad + good) == "é🦙" + REPLACEMENT + "é🦙"


# ------------------------------------------------------------------------------ stop strings


def match(stops: list[str], text: str, sizes: list[int], include: bool) -> tuple[str, str | None]:
    """All that a matcher shows, checking on the way that nothing was shown or held wrongly."""
    matcher = StopStringMatcher(stops, include)
    shown = seen = ""
    for piece in chunks(text, sizes):
        assert isinstance(piece, str)
        new, stop = matcher.push(piece)
        shown, seen = shown + new, seen + piece
        if stop is not None:
            assert matcher.push("more") == ("", stop) and matcher.flush() == ""
            return shown, stop
        held = seen[len(shown) :]
        starts = [stop[:n] for stop in stops for n in range(len(stop)) if seen.endswith(stop[:n])]
        assert seen.startswith(shown) and held == max(starts, key=len, default="")
    return shown + matcher.flush(), None


def brute_force(stops: list[str], text: str, include: bool) -> tuple[str, str | None]:
    for end in range(len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            stop = max(complete, key=len)
            return text[: end if include else end - len(stop)], stop
    return text, None


STOPS = st.lists(st.text("ab", min_size=1, max_size=6), max_size=4)


@given(STOPS, st.text("abc", max_size=40), SIZES, st.booleans())
def test_stop_strings_are_found_as_by_brute_force(
    stops: list[str], text: str, sizes: list[int], include: bool
) -> None:
    assert match(stops, text, sizes, include) == brute_force(stops, text, include)


def test_a_stop_string_over_several_pushes_never_leaks_its_beginning() -> None:
    matcher = StopStringMatcher(["DEFGHIJ"])  # CASES 8
    pushed = [matcher.push(piece) for piece in ("ABC", "DEF", "GHI", "JKL")]
    assert pushed == [("ABC", None), ("", None), ("", None), ("", "DEFGHIJ")]


def test_text_held_for_a_stop_string_is_shown_when_generation_ends_otherwise() -> None:
    matcher = StopStringMatcher(["###", "END"])  # CASES 9
    assert matcher.push("a EN") == ("a ", None)
    assert matcher.flush() == "EN"
    assert matcher.flush() == ""


def test_a_beginning_that_does_not_go_on_is_released_at_once() -> None:
    matcher = StopStringMatcher(["\n\nUser:"])
    assert matcher.push("x\n\n") == ("x", None)
    assert matcher.push("Us") == ("", None)
    assert matcher.push("age") == ("\n\nUsage", None)


@pytest.mark.parametrize(
    ("stops", "expected"),
    [
        pytest.param(["abcd", "bc"], ("a", "bc"), id="complete-first-wins"),
        pytest.param(["bc", "abc"], ("", "abc"), id="longest-of-those-that-end-together"),
        pytest.param(["ab", "abcd"], ("", "ab"), id="shortest-of-those-that-start-together"),
    ],
)
def test_the_winner_of_several_does_not_depend_on_how_the_text_is_cut(
    stops: list[str], expected: tuple[str, str]
) -> None:
    for sizes in ([4], [1, 3], [2, 2], [3, 1], []):
        assert match(stops, "abcd", sizes, include=False) == expected


def test_the_stop_string_can_be_included() -> None:
    assert StopStringMatcher(["stop"], include_stop=True).push("do stop!") == ("do stop", "stop")


def test_without_stop_strings_everything_passes() -> None:
    assert StopStringMatcher([]).push("text") == ("text", None)


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one character"):
        StopStringMatcher(["a", ""])
