"""Token ids to text, one step at a time: complete characters only, and stop strings held back.

``Tokenizer.decode`` is one push and a flush of the class below, so streamed text and whole text
cannot differ. It follows Hugging Face's fast tokenizers, with one exception: where a run of
SentencePiece byte tokens is not valid UTF-8, Hugging Face replaces the whole run, valid characters
before the fault included, which no stream can do that has already sent them. Here only the bytes
at fault become U+FFFD.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jllm.tokenizer import Tokenizer

__all__ = ["IncrementalDetokenizer", "StopStringMatcher"]


class IncrementalDetokenizer:
    """Turns the ids of one output into text as they come, in constant time per token.

    Tokens are bytes, and a character may be spread over several tokens, so the state is that of a
    UTF-8 decoder: at most the three bytes of a character that can still be completed.

    Args:
      tokenizer: whose tokens these are.
      skip_special_tokens: leave control tokens out of the text.
      spaces_between_special_tokens: see ``Tokenizer.decode``.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        skip_special_tokens: bool = True,
        spaces_between_special_tokens: bool = True,
    ) -> None:
        self._tokenizer = tokenizer
        self._spelling = tokenizer.spelling
        self._skip_special = skip_special_tokens
        self._space_after_special = spaces_between_special_tokens
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._at_start = True
        self._after_special = False

    def push(self, ids: Iterable[int]) -> str:
        """The text that became certain with these ids, possibly empty."""
        data = bytearray()
        for token_id in ids:
            special = token_id in self._tokenizer.special_ids
            if special and self._skip_special:
                continue
            token = self._tokenizer.token_bytes(token_id)
            if not token:
                continue
            if self._at_start:
                if self._spelling.strips_first_space:
                    token = token.removeprefix(b" ")
            elif self._spelling.joined_by_spaces and (
                self._space_after_special or not (special and self._after_special)
            ):
                data += b" "
            data += token
            self._at_start = False
            self._after_special = special
        return self._utf8.decode(bytes(data))

    def flush(self) -> str:
        """What is held at the end of the output: U+FFFD for a character that stayed incomplete."""
        return self._utf8.decode(b"", final=True)


class StopStringMatcher:
    """Finds stop strings in text that arrives in pieces, however it is cut.

    Text is held back only as far as it is the beginning of a stop string: at most one character
    less than the longest. The stop string that is complete first wins; of several that end at the
    same character, the longest.

        matcher = StopStringMatcher(["DEF"])
        matcher.push("ABCD")  # ("ABC", None)
        matcher.push("EX")    # ("DEX", None)
        matcher.push("DEFG")  # ("", "DEF")

    Args:
      stops: non-empty strings.
      include_stop: let the text end after the stop string instead of before it.

    Raises:
      ValueError: a stop string is empty.
    """

    def __init__(self, stops: Sequence[str], include_stop: bool = False) -> None:
        if any(not stop for stop in stops):
            raise ValueError("A stop string must have at least one character.")
        # Longest first, so that the first one found complete at a character is the longest.
        self._stops = sorted(set(stops), key=lambda stop: (-len(stop), stop))
        self._borders = [_borders(stop) for stop in self._stops]
        # How many characters of each stop string the text so far ends with (Knuth-Morris-Pratt),
        # so the cost of a character does not grow with the length of the stop strings.
        self._matched = [0] * len(self._stops)
        self._include_stop = include_stop
        self._held = ""
        self._stop: str | None = None

    def push(self, text: str) -> tuple[str, str | None]:
        """Text that is safe to show, and the stop string if one is complete now.

        After a match everything further is dropped and the same stop string is returned.
        """
        if self._stop is not None:
            return "", self._stop
        if not self._stops:
            return text, None
        end = len(self._held)
        buffer = self._held + text
        for char in text:
            end += 1
            stop = self._advance(char)
            if stop is not None:
                self._stop, self._held = stop, ""
                return buffer[: end if self._include_stop else end - len(stop)], stop
        safe = len(buffer) - max(self._matched)
        self._held = buffer[safe:]
        return buffer[:safe], None

    def flush(self) -> str:
        """What is still held when the output ends for another reason."""
        held, self._held = self._held, ""
        self._matched = [0] * len(self._stops)
        return held

    def _advance(self, char: str) -> str | None:
        complete = None
        for i, stop in enumerate(self._stops):
            length = self._matched[i]
            while length and stop[length] != char:
                length = self._borders[i][length - 1]
            if stop[length] == char:
                length += 1
            if length == len(stop) and complete is None:
                complete = stop
            self._matched[i] = length if length < len(stop) else 0
        return complete


def _borders(stop: str) -> list[int]:
    """For each beginning of ``stop``, the length of its longest proper prefix that also ends it.

    ``"ABAB"`` gives ``[0, 0, 1, 2]``.
    """
    borders = [0]
    for char in stop[1:]:
        length = borders[-1]
        while length and stop[length] != char:
            length = borders[length - 1]
        borders.append(length + 1 if stop[length] == char else 0)
    return borders
