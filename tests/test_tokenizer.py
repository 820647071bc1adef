"""The tokenizer against Hugging Face's ids, against plain algorithms, and as a static field."""

import copy
import dataclasses
import json
import pickle
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import jax
import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, processors

from jllm.tokenizer import Tokenizer
from tests.tokenizers_for_tests import (
    byte_level_metadata,
    byte_level_tokenizer,
    demo_tokenizer,
    sentencepiece_metadata,
    sentencepiece_tokenizer,
    word_tokenizer,
)

GOLDENS = json.loads((Path(__file__).parent / "goldens/tokenizer_smollm2.json").read_text())

# Character by character, then as one of these: letters, runs, digits, scripts, control tokens.
TEXTS = st.lists(
    st.one_of(
        st.sampled_from(["hello", " the", "  ", "\n\n", "12", "é", "你好", "🦙", "<s>", "</s>"]),
        st.characters(exclude_categories=["Cs"]),
    )
).map("".join)


# --------------------------------------------------------------------------------- the ids


def test_ids_of_the_demo_model_are_those_of_transformers() -> None:
    tokenizer = demo_tokenizer()
    wrong = {
        case["text"]: (tokenizer.encode(case["text"]), case["ids"])
        for case in GOLDENS["texts"]
        if tokenizer.encode(case["text"]) != case["ids"]
    }
    assert len(GOLDENS["texts"]) > 40 and not wrong


def test_chat_prompts_of_the_demo_model_are_those_of_transformers() -> None:
    for case in GOLDENS["chats"]:
        assert demo_tokenizer().apply_chat_template(case["messages"]) == case["ids"]


@pytest.mark.reference
def test_the_goldens_are_still_what_transformers_computes() -> None:
    pytest.importorskip("torch")
    script = Path(__file__).parent / "goldens/make_tokenizer_goldens.py"
    subprocess.run([sys.executable, script, "--check"], check=True)


@given(TEXTS)
def test_decoding_what_was_encoded_gives_the_text_back(text: str) -> None:
    for tokenizer in (byte_level_tokenizer(), byte_level_tokenizer("llama-bpe")):
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert tokenizer.decode(ids, skip_special_tokens=False) == text


@given(st.lists(st.integers(0, 263)), st.booleans())
def test_decoding_any_ids_agrees_with_the_tokenizers_library(ids: list[int], skip: bool) -> None:
    tokenizer = byte_level_tokenizer()
    expected = tokenizer.backend.decode(ids, skip_special_tokens=skip)
    assert tokenizer.decode(ids, skip_special_tokens=skip) == expected


@pytest.mark.parametrize(
    ("pre", "text", "words"),
    [
        pytest.param("gpt-2", "I'm 1234  x", "I|'m|Ġ1234|Ġ|Ġx", id="gpt-2"),
        pytest.param("default", "a<=1234", "a|<=|123|4", id="default"),
        pytest.param("smollm", "a  12", "a|ĠĠ|1|2", id="smollm-spaces-before-digits"),
        pytest.param("llama-bpe", "I'M 12345!\n\nx", "I|'M|Ġ|123|45|!ĊĊ|x", id="llama-bpe"),
        pytest.param("llama3", "(x) 12345", "(x|)|Ġ|123|45", id="llama3"),
        pytest.param("llama-v3", "(x) 12345", "(x|)|Ġ|123|45", id="llama-v3"),
        pytest.param("qwen2", "I'LL 123", "I|'LL|Ġ|1|2|3", id="qwen2"),
        pytest.param("deepseek-r1-qwen", "I'LL 123", "I|'LL|Ġ|1|2|3", id="deepseek-r1-qwen"),
        pytest.param("tekken", "someWord 12", "some|Word|Ġ|1|2", id="tekken"),
    ],
)
def test_each_pre_tokenizer_splits_words_in_its_own_way(pre: str, text: str, words: str) -> None:
    pre_tokenizer = byte_level_tokenizer(pre).backend.pre_tokenizer
    assert pre_tokenizer is not None
    assert "|".join(word for word, _ in pre_tokenizer.pre_tokenize_str(text)) == words


def test_only_qwen2_composes_characters() -> None:
    decomposed, composed = "e\u0301", "é"
    assert byte_level_tokenizer("qwen2").encode(decomposed) == byte_level_tokenizer().encode(
        composed
    )
    assert byte_level_tokenizer().decode(byte_level_tokenizer().encode(decomposed)) == decomposed


def test_a_whole_word_in_the_vocabulary_needs_no_merges_where_the_model_says_so() -> None:
    no_merges = {"merges": [], "add_bos_token": False}
    tokens = byte_level_metadata()["tokenizer.ggml.tokens"]
    assert byte_level_tokenizer("llama-bpe", **no_merges).encode("hell") == [tokens.index("hell")]
    assert len(byte_level_tokenizer("gpt-2", **no_merges).encode("hell")) == 4


def sentencepiece_oracle(text: str, tokens: list[str], scores: list[float]) -> list[int]:
    """SentencePiece as it is defined: join the neighbours that make the best piece, until none."""
    ids = {token: i for i, token in enumerate(tokens)}
    symbols = list(("▁" + text).replace(" ", "▁")) if text else []
    while True:
        pairs = [a + b for a, b in pairwise(symbols)]
        known = [(-scores[ids[pair]], i) for i, pair in enumerate(pairs) if pair in ids]
        if not known:
            break
        i = min(known)[1]
        symbols[i : i + 2] = [pairs[i]]
    return [
        token
        for symbol in symbols
        for token in (
            [ids[symbol]] if symbol in ids else [ids[f"<0x{b:02X}>"] for b in symbol.encode()]
        )
    ]


@given(st.lists(st.sampled_from([*"aehint ", "the", " ", "   ", "aaaa", "é", "🦙"])).map("".join))
def test_sentencepiece_merges_by_score_and_falls_back_to_bytes(text: str) -> None:
    metadata = sentencepiece_metadata()
    tokens, scores = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.scores"]
    tokenizer = Tokenizer.from_gguf(metadata)
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert ids == sentencepiece_oracle(text, tokens, scores)
    assert tokenizer.decode(ids) == text


def test_sentencepiece_puts_a_space_in_front_only_where_the_model_wants_one() -> None:
    bare = sentencepiece_tokenizer(add_space_prefix=False, add_bos_token=False)
    assert [bare.token_string(i) for i in bare.encode("the")] == ["t", "he"]
    assert bare.decode(bare.encode(" the")) == " the"
    assert [sentencepiece_tokenizer().token_string(i) for i in bare.encode(" the")] == [" the"]


# ------------------------------------------------------------------------- special tokens


@pytest.mark.parametrize(
    ("tokenizer", "expected"),
    [
        pytest.param(byte_level_tokenizer("gpt-2"), [], id="gpt-2-default"),
        pytest.param(byte_level_tokenizer("gpt-2", add_bos_token=True), [0], id="gpt-2-asked"),
        pytest.param(byte_level_tokenizer("llama-bpe"), [0], id="llama-bpe-default"),
        pytest.param(byte_level_tokenizer("llama3", add_bos_token=False), [], id="llama3-refused"),
        pytest.param(sentencepiece_tokenizer(), [1], id="sentencepiece-default"),
        pytest.param(sentencepiece_tokenizer(add_bos_token=False), [], id="sentencepiece-refused"),
        pytest.param(sentencepiece_tokenizer(add_eos_token=True), [1, 2], id="bos-and-eos"),
    ],
)
def test_bos_is_added_only_where_the_tokenizer_is_configured_to(
    tokenizer: Tokenizer, expected: list[int]
) -> None:
    assert tokenizer.encode("") == expected  # CASES 1: an empty prompt may be BOS alone
    assert tokenizer.encode("", add_special_tokens=False) == []


def test_special_tokens_written_in_the_text_are_parsed() -> None:
    tokenizer = byte_level_tokenizer()
    assert tokenizer.encode("<s>he</s>") == [0, *tokenizer.encode("he"), 1]


def test_bos_and_eos_are_special_even_where_the_gguf_has_no_token_types() -> None:
    metadata = byte_level_metadata()
    del metadata["tokenizer.ggml.token_type"]
    assert Tokenizer.from_gguf(metadata).special_ids == {0, 1}


def test_added_tokens_are_whole_but_only_control_tokens_are_special() -> None:
    tokenizer = byte_level_tokenizer()
    (tool,) = tokenizer.encode("<tool>")
    assert tokenizer.special_ids == {0, 1}
    assert tokenizer.decode([0, tool, 1]) == "<tool>"
    assert tokenizer.decode([0, tool, 1], skip_special_tokens=False) == "<s><tool></s>"


def test_spaces_between_special_tokens_can_be_left_out() -> None:
    tokenizer = word_tokenizer()
    ids = [0, 2, 1, 1, 3]
    assert tokenizer.decode(ids) == "one two"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "<s> one </s> </s> two"
    assert (
        tokenizer.decode(ids, skip_special_tokens=False, spaces_between_special_tokens=False)
        == "<s> one </s></s> two"
    )


def test_bos_and_eos_are_known_by_text_and_id() -> None:
    tokenizer = byte_level_tokenizer()
    assert (tokenizer.bos_token, tokenizer.bos_token_id) == ("<s>", 0)
    assert (tokenizer.eos_token, tokenizer.eos_token_id) == ("</s>", 1)
    assert Tokenizer(tokenizer.backend).bos_token_id is None


# -------------------------------------------------------------------------- bytes of a token


@pytest.mark.parametrize("text", ["naïve", "🦙", "你好 world", "a\n\n b", "\x00\x7f"])
def test_the_bytes_of_tokens_are_the_bytes_of_the_text(text: str) -> None:
    for tokenizer in (demo_tokenizer(), byte_level_tokenizer()):
        pieces = [tokenizer.token_bytes(i) for i in tokenizer.encode(text)]
        assert b"".join(pieces) == text.encode()


def test_part_of_a_character_has_true_bytes_and_shows_as_a_replacement() -> None:
    for tokenizer in (byte_level_tokenizer(), sentencepiece_tokenizer()):
        ids = tokenizer.encode("🦙", add_special_tokens=False)[-4:]
        assert [tokenizer.token_bytes(i) for i in ids] == [b"\xf0", b"\x9f", b"\xa6", b"\x99"]
        assert tokenizer.token_string(ids[0]) == "\ufffd"


def test_an_id_without_a_token_has_no_bytes_and_decodes_to_nothing() -> None:
    tokenizer = byte_level_tokenizer()
    assert tokenizer.vocab_size == 262
    assert tokenizer.token_bytes(262) == b""
    assert tokenizer.decode([262, *tokenizer.encode("hell"), 10**9]) == "hell"


# ----------------------------------------------------------------------------------- errors


def test_a_lone_surrogate_is_refused() -> None:
    with pytest.raises(ValueError, match=r"lone surrogate, '\\ud83e', at position 2"):
        byte_level_tokenizer().encode("ab\ud83e")


def test_only_a_string_can_be_encoded() -> None:
    with pytest.raises(ValueError, match="Only a string can be encoded, not list"):
        byte_level_tokenizer().encode([1, 2])  # type: ignore[arg-type]


@pytest.mark.parametrize("bad", [-1, 2**32])
def test_an_impossible_id_is_refused(bad: int) -> None:
    with pytest.raises(ValueError, match=str(bad)):
        byte_level_tokenizer().decode([5, bad])


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        pytest.param({"tokenizer.ggml.model": "t5"}, "model 't5'.*'gpt2', 'llama'", id="model"),
        pytest.param({}, "model None", id="no-model"),
        pytest.param(byte_level_metadata("bloom"), "pre 'bloom'.*'smollm'", id="pre"),
        pytest.param(
            byte_level_metadata(add_bos_token=True, bos_token_id=None),
            "no tokenizer.ggml.bos_token_id",
            id="missing-bos",
        ),
        pytest.param(
            byte_level_metadata(eos_token_id=262), "eos_token_id is 262.* 262 tokens", id="eos"
        ),
        pytest.param(
            {"tokenizer.ggml.model": "gpt2"}, "no tokenizer.ggml.merges", id="missing-merges"
        ),
        pytest.param(
            {"tokenizer.ggml.model": "llama"}, "no tokenizer.ggml.tokens", id="missing-tokens"
        ),
    ],
)
def test_a_gguf_that_cannot_be_read_says_what_is_known(
    metadata: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        Tokenizer.from_gguf(metadata)


def test_a_decoder_that_cannot_be_continued_token_by_token_is_refused() -> None:
    backend = tokenizers.Tokenizer(models.WordPiece({"a": 0}))
    backend.decoder = decoders.WordPiece()
    with pytest.raises(ValueError, match="decodes with WordPiece; supported are ByteLevel"):
        Tokenizer(backend)


# --------------------------------------------------------------------------- static field


def test_two_loads_of_one_model_are_equal_and_hash_the_same() -> None:
    first, second = byte_level_tokenizer(), byte_level_tokenizer()
    assert first == second and hash(first) == hash(second)
    for clone in (copy.deepcopy(first), pickle.loads(pickle.dumps(first))):
        assert clone == first and clone.encode("hell") == first.encode("hell")


def test_whatever_changes_the_ids_or_the_text_makes_tokenizers_unequal() -> None:
    base = byte_level_tokenizer()
    others = [
        byte_level_tokenizer("smollm"),
        byte_level_tokenizer(merges=["h e", "l l"]),
        byte_level_tokenizer(add_bos_token=True),
        byte_level_tokenizer(eos_token_id=5),
        byte_level_tokenizer(token_type=[3, 3, 3]),
        dataclasses.replace(base, eos_token=None),
        dataclasses.replace(base, bos_token="</s>"),
        dataclasses.replace(base, chat_template="x"),
    ]
    assert len({base, *others}) == 1 + len(others)


def test_an_equal_tokenizer_does_not_retrace_a_jitted_function() -> None:
    traces = []

    def f(x: jax.Array, tokenizer: Tokenizer) -> jax.Array:
        traces.append(tokenizer)
        return x + tokenizer.vocab_size

    jitted = jax.jit(f, static_argnums=1)
    assert jitted(1, byte_level_tokenizer()) == jitted(1, byte_level_tokenizer()) == 263
    assert len(traces) == 1


def test_it_cannot_be_changed_and_prints_short() -> None:
    tokenizer = byte_level_tokenizer()
    with pytest.raises(dataclasses.FrozenInstanceError):
        tokenizer.eos_token = "x"  # type: ignore[misc]
    expected = "Tokenizer(vocab_size=262, bos='<s>', eos='</s>', chat_template=no)"
    assert repr(tokenizer) == expected


def test_importing_the_tokenizer_loads_nothing_heavy() -> None:
    heavy = {"jax", "torch", "transformers", "jinja2"}
    code = f"import sys, jllm.tokenizer; print({heavy} & {{*sys.modules}})"
    root = Path(__file__).parent.parent
    run = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True)
    assert run.stdout == "set()\n", run.stderr


# ------------------------------------------------------------------------------- from a folder


def save(folder: Path, config: dict[str, Any] | None = None, **files: Any) -> Path:
    """A folder with the small byte-level tokenizer.json and whatever else is given."""
    byte_level_tokenizer().backend.save(str(folder / "tokenizer.json"))
    if config is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


def load(folder: Path) -> Tokenizer:
    tokenizer = Tokenizer.from_folder(folder)
    assert tokenizer is not None
    return tokenizer


def test_a_folder_without_tokenizer_files_gives_none(tmp_path: Path) -> None:
    assert Tokenizer.from_folder(tmp_path) is None


def test_a_tokenizer_json_alone_has_no_bos_and_no_template(tmp_path: Path) -> None:
    tokenizer = load(save(tmp_path))
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.chat_template) == (None,) * 3
    assert tokenizer.encode("hell") == byte_level_tokenizer().encode("hell")


@pytest.mark.parametrize("eos", ["</s>", {"content": "</s>", "lstrip": False}])
def test_named_tokens_may_be_strings_or_objects(tmp_path: Path, eos: Any) -> None:
    assert load(save(tmp_path, {"eos_token": eos, "bos_token": None})).eos_token_id == 1


def test_the_special_tokens_map_names_what_the_config_does_not(tmp_path: Path) -> None:
    tokenizer = load(save(tmp_path, {"eos_token": "</s>"}, special_tokens_map={"bos_token": "<s>"}))
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (0, 1)


def test_tokens_that_only_the_config_knows_are_added(tmp_path: Path) -> None:
    config = {
        "eos_token": "<|end|>",
        "added_tokens_decoder": {"262": {"content": "<|end|>", "special": True}},
        "additional_special_tokens": ["<|more|>"],
    }
    tokenizer = load(save(tmp_path, config))
    assert tokenizer.eos_token_id == 262
    assert tokenizer.encode("<|end|><|more|>") == [262, 263]
    assert tokenizer.special_ids == {0, 1, 262, 263}


def test_the_default_of_a_list_of_templates_is_taken(tmp_path: Path) -> None:
    templates = [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]
    assert load(save(tmp_path, {"chat_template": templates})).chat_template == "d"


def test_a_template_file_wins_over_the_config(tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_text("from the file")
    assert load(save(tmp_path, {"chat_template": "x"})).chat_template == "from the file"


def test_truncation_and_padding_of_a_tokenizer_json_are_off(tmp_path: Path) -> None:
    backend = byte_level_tokenizer().backend
    backend.enable_truncation(2)
    backend.enable_padding(length=9)
    backend.save(str(tmp_path / "tokenizer.json"))
    assert len(load(tmp_path).encode("abc")) == 3


def test_bos_of_the_post_processor_is_added(tmp_path: Path) -> None:
    backend = byte_level_tokenizer().backend
    backend.post_processor = processors.TemplateProcessing("<s> $A", None, [("<s>", 0)])
    backend.save(str(tmp_path / "tokenizer.json"))
    assert load(tmp_path).encode("he") == [0, *byte_level_tokenizer().encode("he")]


def test_a_damaged_tokenizer_json_is_named(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match=r"tokenizer\.json cannot be read"):
        Tokenizer.from_folder(tmp_path)


@pytest.mark.parametrize("content", ["{", "[]"])
def test_a_damaged_config_is_named(tmp_path: Path, content: str) -> None:
    (save(tmp_path) / "tokenizer_config.json").write_text(content)
    with pytest.raises(ValueError, match=r"tokenizer_config\.json (is not valid|must hold a) JSON"):
        Tokenizer.from_folder(tmp_path)


def test_a_vocabulary_with_merges_is_converted_by_transformers(tmp_path: Path) -> None:
    backend = byte_level_tokenizer().backend
    backend.model.save(str(tmp_path))
    assert {path.name for path in tmp_path.iterdir()} == {"vocab.json", "merges.txt"}
    config = {"tokenizer_class": "GPT2Tokenizer", "bos_token": "<s>", "eos_token": "</s>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config | {"unk_token": "</s>"}))
    tokenizer = load(tmp_path)
    text = "hello 12\n🦙</s>"
    assert tokenizer.encode(text) == byte_level_tokenizer().encode(text)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (0, 1)


def test_added_tokens_are_spelled_as_they_are_written() -> None:
    backend = byte_level_tokenizer().backend
    backend.add_tokens([AddedToken("Ġé", normalized=False)])  # both stand for bytes in GPT-2
    tokenizer = Tokenizer(backend)
    assert tokenizer.decode(tokenizer.encode("aĠéb")) == "aĠéb"
