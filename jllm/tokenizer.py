"""Text to token ids and back, for one model's vocabulary.

The work is done by Hugging Face's ``tokenizers``. What is added here is what an engine needs
besides: equality by content, the true bytes of a single token, and a decode that can be
continued token by token (``jllm.detokenizer``) with exactly the same result.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any, NamedTuple

import tokenizers

from jllm.detokenizer import IncrementalDetokenizer

__all__ = ["Tokenizer"]

SPACE_MARK = "▁"  # U+2581, SentencePiece's spelling of a space
BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")  # and of a byte that no piece covers

# How the decoder of a SentencePiece vocabulary is serialized.
SENTENCEPIECE_STEPS = [
    {"type": "Replace", "pattern": {"String": SPACE_MARK}, "content": " "},
    {"type": "ByteFallback"},
    {"type": "Fuse"},
]
STRIP_STEP = {"type": "Strip", "content": " ", "start": 1, "stop": 0}


class Spelling(NamedTuple):
    """How the tokens of a vocabulary spell text; at most one of the three is true."""

    byte_level: bool = False  # each character is a byte in GPT-2's alphabet: "Ġthe"
    joined_by_spaces: bool = False  # whole words: "the"
    strips_first_space: bool = False  # SentencePiece with a space put before every text: "▁the"


@dataclass(frozen=True, eq=False, repr=False)
class Tokenizer:
    """An immutable tokenizer that compares and hashes by content.

    It is a static field of ``Params``: two loads of one model are equal, so they share compiled
    programs.

    Attributes:
      backend: the ``tokenizers.Tokenizer``; nothing may change it after construction.
      bos_token: the text of the beginning-of-sequence token, or None.
      eos_token: the text of the end-of-sequence token, or None.
      chat_template: Jinja source, or None.
    """

    backend: tokenizers.Tokenizer
    bos_token: str | None = None
    eos_token: str | None = None
    chat_template: str | None = None

    def __post_init__(self) -> None:
        # A tokenizer.json may carry both; they would cut prompts and pad them without a word.
        self.backend.no_truncation()
        self.backend.no_padding()
        _ = self.spelling  # refuses an unknown decoder now rather than at the first token

    @classmethod
    def from_folder(cls, path: str | os.PathLike[str]) -> Tokenizer | None:
        """The tokenizer of a checkpoint folder; None when the folder holds no tokenizer files.

        Reads ``tokenizer.json``; where there is only ``tokenizer.model`` or ``vocab.json`` with
        ``merges.txt``, transformers converts it. BOS, EOS, added tokens and the chat template
        come from ``tokenizer_config.json``, ``special_tokens_map.json`` and
        ``chat_template.jinja``, which win in the order in which transformers lets them win.
        """
        from jllm.tokenizer_files import tokenizer_from_folder

        return tokenizer_from_folder(Path(path))

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any]) -> Tokenizer:
        """The tokenizer that a GGUF file describes in its ``tokenizer.*`` metadata.

        Raises:
          ValueError: a key is missing, or the model or pre-tokenizer is not a known one.
        """
        from jllm.tokenizer_files import tokenizer_from_gguf

        return tokenizer_from_gguf(metadata)

    @property
    def vocab_size(self) -> int:
        """Number of tokens, added ones included; a model's embedding may have more rows."""
        return self.backend.get_vocab_size(with_added_tokens=True)

    @cached_property
    def bos_token_id(self) -> int | None:
        return None if self.bos_token is None else self.backend.token_to_id(self.bos_token)

    @cached_property
    def eos_token_id(self) -> int | None:
        return None if self.eos_token is None else self.backend.token_to_id(self.eos_token)

    @cached_property
    def special_ids(self) -> frozenset[int]:
        """Ids that ``skip_special_tokens`` leaves out: control tokens, not merely added ones."""
        return frozenset(i for i, token in self._added.items() if token.special)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text.

        Special tokens written in the text become their ids. BOS is put in front only where the
        tokenizer is configured to do so, and never with ``add_special_tokens=False``.

        Raises:
          ValueError: the text is not a string, or holds a lone surrogate.
        """
        if not isinstance(text, str):
            raise ValueError(f"Only a string can be encoded, not {type(text).__name__}.")
        try:
            text.encode()  # the library would only say that it is no string
        except UnicodeEncodeError as error:
            raise ValueError(
                f"The text has a lone surrogate, {text[error.start]!r}, at position {error.start}; "
                "only valid Unicode can be encoded."
            ) from error
        # As a batch of one, for which the library lets go of the GIL: a text of 1 MB takes half a
        # second, and other threads must not stand still.
        return self.backend.encode_batch([text], add_special_tokens=add_special_tokens)[0].ids

    def decode(
        self,
        ids: Sequence[int],
        *,
        skip_special_tokens: bool = True,
        spaces_between_special_tokens: bool = True,
    ) -> str:
        """The text of token ids; invalid UTF-8 becomes U+FFFD, ids without a token become nothing.

        Spaces are not "cleaned up". ``spaces_between_special_tokens=False`` matters only for a
        vocabulary of whole words, whose tokens are joined by spaces: two special tokens in a row
        are then joined without one.
        """
        detokenizer = IncrementalDetokenizer(
            self,
            skip_special_tokens=skip_special_tokens,
            spaces_between_special_tokens=spaces_between_special_tokens,
        )
        return detokenizer.push(ids) + detokenizer.flush()

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that one token stands for, also where it is only a part of a character.

        An id without a token (padding rows of an embedding) has none.
        """
        known = self._token_bytes.get(token_id)
        return self._spell(token_id) if known is None else known

    def token_string(self, token_id: int) -> str:
        """One token as text, as logprobs show it: ``" the"``, not ``"Ġthe"``; parts of a character
        show as U+FFFD."""
        return self.token_bytes(token_id).decode("utf-8", "replace")

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        /,
        *,
        chat_template: str | None = None,
        **options: Any,
    ) -> list[int]:
        """Token ids of a conversation. BOS is there once, if the template writes it.

        Args:
          messages: ``{"role": ..., "content": ...}`` each.
          chat_template: used instead of the tokenizer's own.
          **options: those of ``jllm.chat_template.render``; the rest are variables of the template.

        Raises:
          ValueError: there is no template, it refuses the conversation, or a message is malformed.
        """
        from jllm.chat_template import render

        reserved = {"bos_token", "eos_token"} & options.keys()
        if reserved:
            raise ValueError(f"Chat template options cannot set {', '.join(sorted(reserved))}.")
        text = render(
            self.chat_template if chat_template is None else chat_template,
            messages,
            bos_token=self.bos_token,
            eos_token=self.eos_token,
            **options,
        )
        return self.encode(text, add_special_tokens=False)

    @cached_property
    def spelling(self) -> Spelling:
        """How tokens spell text, told by the decoder.

        Raises:
          ValueError: the decoder is not a known one.
        """
        decoder = self.backend.decoder
        if decoder is None:
            return Spelling(joined_by_spaces=True)
        state = json.loads(decoder.__getstate__())
        steps = state["decoders"] if state["type"] == "Sequence" else [state]
        kinds = [step["type"] for step in steps]
        if kinds == ["ByteLevel"]:
            return Spelling(byte_level=True)
        if steps in (SENTENCEPIECE_STEPS, [*SENTENCEPIECE_STEPS, STRIP_STEP]):
            return Spelling(strips_first_space=STRIP_STEP in steps)
        raise ValueError(
            f"The tokenizer decodes with {' + '.join(kinds)}; supported are ByteLevel, "
            "SentencePiece (Replace + ByteFallback + Fuse, with or without Strip) and no decoder."
        )

    @cached_property
    def _added(self) -> dict[int, tokenizers.AddedToken]:
        return self.backend.get_added_tokens_decoder()

    @cached_property
    def _token_bytes(self) -> dict[int, bytes]:
        return {}  # filled as tokens are met: a whole table takes 0.3 s for 128k tokens

    def _spell(self, token_id: int) -> bytes:
        if not 0 <= token_id < 1 << 32:
            raise ValueError(f"{token_id} cannot be a token id: ids are from 0 to 2**32 - 1.")
        token = self.backend.id_to_token(token_id)
        if token is None:
            return b""  # not kept: there are four billion of these
        spelled = token.encode()
        if self.spelling.byte_level:
            alphabet = byte_alphabet()
            # Added tokens are spelled as they are, even with characters of the alphabet.
            if token_id not in self._added and all(char in alphabet for char in token):
                spelled = bytes(alphabet[char] for char in token)
        elif not self.spelling.joined_by_spaces:
            byte = BYTE_TOKEN.fullmatch(token)
            spelled = bytes.fromhex(byte[1]) if byte else token.replace(SPACE_MARK, " ").encode()
        self._token_bytes[token_id] = spelled
        return spelled

    @cached_property
    def fingerprint(self) -> str:
        """A digest of everything that encode, decode and the chat template depend on."""
        parts = (self.backend.to_str(), self.bos_token, self.eos_token, self.chat_template)
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Tokenizer):
            return NotImplemented
        return self is other or self.fingerprint == other.fingerprint

    def __hash__(self) -> int:
        return hash(self.fingerprint)

    def __repr__(self) -> str:
        return (
            f"Tokenizer(vocab_size={self.vocab_size}, bos={self.bos_token!r}, "
            f"eos={self.eos_token!r}, chat_template={'yes' if self.chat_template else 'no'})"
        )


@cache
def byte_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-ins for the 256 bytes: themselves where printable, otherwise the
    characters from U+0100 on, in order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {
        chr(0x100 + i): byte for i, byte in enumerate(others)
    }
