"""Chat templates: what transformers renders, and what is refused."""

from typing import Any

import pytest

from jllm import chat_template
from jllm.chat_template import render
from jllm.tokenizer import Tokenizer
from tests.tokenizers_for_tests import byte_level_tokenizer

USER = {"role": "user", "content": "Hi"}
PARTS = {
    "role": "user",
    "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}],
}
PLAIN = "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
CONCATENATES = "{% for m in messages %}{{ '[' + m.role + ']' + m.content }}{% endfor %}"
ITERATES = (
    "{% for m in messages %}[{{ m.role }}]{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content %}({{ part.text }}){% endfor %}{% endif %}{% endfor %}"
)
ALTERNATES = (
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate.') }}{% endif %}"
    "[{{ m.role }}]{{ m.content | trim }}</s>{% endfor %}"
    "{% if add_generation_prompt %}[A]{% endif %}"
)


def show(template: str | None, *messages: Any, **options: Any) -> str:
    options = {"bos_token": "<s>", "eos_token": "</s>", **options}
    return render(template, messages, **options)


def with_template(template: str) -> Tokenizer:
    """One that puts BOS in front by itself as well."""
    tokenizer = byte_level_tokenizer("llama-bpe")
    return Tokenizer(tokenizer.backend, "<s>", "</s>", template)


# ------------------------------------------------------------------------------- rendering


def test_the_generation_prompt_is_there_unless_it_is_declined() -> None:
    assert show(ALTERNATES, USER) == "[user]Hi</s>[A]"
    assert show(ALTERNATES, USER, add_generation_prompt=False) == "[user]Hi</s>"


def test_blocks_leave_no_blank_lines() -> None:
    template = (
        "{% for m in messages %}\n    {% if true %}\n{{ m.content }}\n    {% endif %}\n{% endfor %}"
    )
    assert show(template, USER) == "Hi\n"


def test_loop_controls_and_the_generation_tag_are_known() -> None:
    template = (
        "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}"
        "{% if loop.index == 1 %}{% break %}{% endif %}{% endfor %}"
    )
    assert show(template, USER, USER) == "Hi"


def test_tojson_keeps_letters_and_does_not_escape_for_html() -> None:
    tools = [{"name": "f", "description": "<b> & 'é'"}]
    assert show("{{ tools | tojson }}", USER, tools=tools) == (
        '[{"name": "f", "description": "<b> & \'é\'"}]'
    )
    assert show("{{ tools | tojson(indent=1) }}", USER, tools=[1]) == "[\n 1\n]"


def test_dates_and_extra_variables_reach_the_template() -> None:
    assert show("{{ strftime_now('%Y') | length }}", USER) == "4"
    assert show("{{ enable_thinking }}", USER, enable_thinking=False) == "False"


def test_a_missing_bos_token_is_undefined_and_absent_tools_are_none() -> None:
    template = "{{ bos_token is defined }} {{ tools is none }} {{ documents is none }}"
    assert show(template, USER, bos_token=None) == "False True True"


def test_fields_that_are_null_are_left_out_of_messages() -> None:
    call = {"role": "assistant", "content": None, "tool_calls": [{"name": "f"}]}
    assert show("{{ messages[0].content is defined }}", call) == "False"


def test_the_messages_of_the_caller_are_not_touched() -> None:
    messages = [PARTS, {"role": "assistant", "content": "x"}]
    render(
        PLAIN,
        messages,
        bos_token=None,
        eos_token=None,
        continue_final_message=True,
        add_generation_prompt=False,
    )
    assert len(PARTS["content"]) == 2 and messages[1]["content"] == "x"


# ----------------------------------------------------------------------------- text parts


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        pytest.param(PLAIN, "<s>[user]one\ntwo", id="prints-a-list-as-python"),
        pytest.param(CONCATENATES, "[user]one\ntwo", id="fails-on-a-list"),
        pytest.param("{{ messages[0].content | tojson }}", '"one\\ntwo"', id="prints-json"),
        pytest.param(ITERATES, "[user](one)(two)", id="knows-parts"),
    ],
)
def test_text_parts_are_joined_unless_the_template_knows_parts(
    template: str, expected: str
) -> None:
    assert show(template, PARTS) == expected  # CASES 18


def test_whether_parts_are_known_is_found_for_each_role() -> None:
    template = (
        "{% for m in messages %}{% if m.role == 'system' %}{{ m.content | trim }}"
        "{% else %}{% for part in m.content %}({{ part.text }}){% endfor %}{% endif %}{% endfor %}"
    )
    assert show(template, {**PARTS, "role": "system"}, PARTS) == "one\ntwo(one)(two)"


# ------------------------------------------------------------------- continuing a message


CONTINUE = {"continue_final_message": True, "add_generation_prompt": False}


@pytest.mark.parametrize(
    ("template", "content", "ending"),
    [
        pytest.param(PLAIN + "</s>", "Sure:", "[assistant]Sure:", id="nothing-follows"),
        pytest.param(PLAIN, "Sure: ", "[assistant]Sure: ", id="space-kept-as-the-template-does"),
        pytest.param(ALTERNATES, "Sure: ", "[assistant]Sure:", id="space-stripped-as-well"),
        pytest.param(
            ITERATES, [{"type": "text", "text": "Sure:"}], "[assistant](Sure:", id="last-part"
        ),
    ],
)
def test_the_last_message_can_be_continued(template: str, content: Any, ending: str) -> None:
    text = show(template, USER, {"role": "assistant", "content": content}, **CONTINUE)
    assert text.endswith(ending)


def test_a_message_that_is_not_shown_or_has_no_content_cannot_be_continued() -> None:
    with pytest.raises(ValueError, match="does not show the last message"):
        show("{{ messages[0].content }}", USER, USER, **CONTINUE)
    with pytest.raises(ValueError, match="needs a last message that has content"):
        show(PLAIN, {"role": "assistant", "tool_calls": [1]}, **CONTINUE)


def test_continuing_and_beginning_a_message_exclude_each_other() -> None:
    with pytest.raises(ValueError, match="cannot both be true"):
        show(PLAIN, USER, continue_final_message=True)


# --------------------------------------------------------------------------------- refusals


def test_without_a_template_messages_are_refused() -> None:
    with pytest.raises(ValueError, match="no chat template"):
        show(None, USER)
    with pytest.raises(ValueError, match="no chat template"):
        byte_level_tokenizer().apply_chat_template([USER])


def test_a_template_refuses_in_its_own_words() -> None:
    with pytest.raises(ValueError, match=r"^Conversation roles must alternate\.$"):
        show(ALTERNATES, USER, USER)  # CASES 17


@pytest.mark.parametrize(
    ("message", "error"),
    [
        pytest.param("Hi", "must be a dict with role and content, not 'Hi'", id="no-dict"),
        pytest.param({"content": "Hi"}, "must have a role", id="no-role"),
        pytest.param({"role": "user"}, "must have a content", id="no-content"),
        pytest.param({"role": "user", "content": None}, "must have a content", id="null"),
        pytest.param({"role": "user", "content": 5}, "not 5", id="number"),
        pytest.param(
            {"role": "user", "content": [{"type": "image_url"}]}, "type 'image_url'", id="image"
        ),
        pytest.param({"role": "user", "content": ["Hi"]}, "type 'Hi'", id="part-no-dict"),
        pytest.param({"role": "user", "content": [{"type": "text"}]}, "not a string", id="no-text"),
        pytest.param({"role": "user", "content": b"Hi"}, "plain JSON data", id="bytes"),
    ],
)
def test_a_malformed_message_is_refused_by_its_index(message: Any, error: str) -> None:
    with pytest.raises(ValueError, match=error) as caught:
        show(PLAIN, USER, message)
    assert "messages" in str(caught.value)


@pytest.mark.parametrize("messages", [[], {}, "Hi", None])
def test_a_conversation_is_a_list_of_messages(messages: Any) -> None:
    with pytest.raises(ValueError, match="list of at least one message"):
        render(PLAIN, messages, bos_token=None, eos_token=None)


@pytest.mark.parametrize(
    ("template", "error"),
    [
        pytest.param("{% for %}", "failed: Expected", id="syntax"),
        pytest.param("{{ nothing.here }}", "'nothing' is undefined", id="undefined"),
        pytest.param("{{ 1 // 0 }}", "failed: integer division", id="arithmetic"),
        pytest.param("{{ ''.__class__.__mro__ }}", "unsafe", id="sandbox"),
        pytest.param("{{ messages.append(1) }}", "failed: access to", id="immutable"),
        pytest.param("{% for i in range(10**6) %}{% endfor %}", "Range too big", id="range"),
        pytest.param(
            "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recursion", id="recursion"
        ),
    ],
)
def test_a_template_that_fails_is_a_value_error(template: str, error: str) -> None:
    with pytest.raises(ValueError, match=error):
        show(template, USER)


def test_a_template_that_never_stops_writing_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "MAX_CHARS", 1000)
    template = "{% for i in range(99999) %}{% for j in range(99999) %}x{% endfor %}{% endfor %}"
    with pytest.raises(ValueError, match="writes more than 1000 characters"):
        show(template, USER)


# ------------------------------------------------------------------------------- token ids


def test_a_conversation_has_one_bos() -> None:
    tokenizer = with_template(PLAIN)
    ids = tokenizer.apply_chat_template([USER])  # CASES 16
    assert ids == tokenizer.encode("[user]Hi") and ids.count(0) == 1


def test_another_template_can_be_given() -> None:
    tokenizer = with_template(PLAIN)
    ids = tokenizer.apply_chat_template([USER], chat_template=ALTERNATES)
    assert tokenizer.decode(ids) == "[user]Hi[A]"


@pytest.mark.parametrize("name", ["messages", "bos_token", "eos_token"])
def test_options_cannot_replace_what_the_conversation_and_the_model_say(name: str) -> None:
    with pytest.raises(ValueError, match=f"cannot set {name}"):
        with_template(PLAIN).apply_chat_template([USER], **{name: "x"})
