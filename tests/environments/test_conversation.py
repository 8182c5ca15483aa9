"""How new messages become tokens behind sampled ones, on the chat templates of real models."""

from __future__ import annotations

from typing import Any

import pytest
from tokenizers_for_chat import SPECIAL, tokenizer_of

from strop.config.data import DataSettings, DataSource
from strop.data.rendering import Renderer
from strop.environments.conversation import Conversation

ASKED = [{"role": "user", "content": "What is 1 + 2?"}]


def conversation(name: str, messages: list[dict[str, Any]] = ASKED, **options: Any) -> Conversation:
    tokenizer = tokenizer_of(name)
    renderer = Renderer(DataSettings(train=DataSource(path="unused")), tokenizer)
    return Conversation(renderer, messages, chat=True, end_ids=frozenset([tokenizer.eos_token_id]), **options)


def say(talk: Conversation, name: str, text: str, place: int, *, end: bool = True) -> list[int]:
    """The policy writes a text; returns its tokens."""
    tokenizer = tokenizer_of(name)
    tokens = tokenizer(text, add_special_tokens=False)["input_ids"] + ([tokenizer.eos_token_id] if end else [])
    talk.said(text, tokens, place)
    return list(tokens)


@pytest.mark.parametrize("name", ["qwen2_5", "qwen3", "smollm2"])
@pytest.mark.parametrize("end", [True, False])
def test_what_is_appended_makes_the_template_s_own_text(name: str, end: bool) -> None:
    tokenizer = tokenizer_of(name)
    talk = conversation(name)
    tokens = talk.begin()
    talk.place(0)
    tokens += say(talk, name, "It is 3.", 1, end=end)
    found = talk.extend([{"role": "user", "content": "And 2 + 3?"}])
    assert not found.forked
    assert found.parent == 1
    messages = [*ASKED, {"role": "assistant", "content": "It is 3."}, {"role": "user", "content": "And 2 + 3?"}]
    whole = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert tokenizer.decode(tokens + found.tokens) == whole
    assert talk.messages[-3:] == messages


def test_the_end_of_turn_token_that_the_policy_wrote_is_not_written_again() -> None:
    name = "qwen2_5"
    end = tokenizer_of(name).eos_token_id
    for wrote_it in (True, False):
        talk = conversation(name)
        talk.begin()
        say(talk, name, "3", 1, end=wrote_it)
        found = talk.extend([{"role": "user", "content": "?"}])
        assert (found.tokens[0] == end) is not wrote_it
        assert found.tokens.count(end) == (1 if wrote_it else 2)


def test_a_template_that_drops_thinking_forks_behind_the_prompt() -> None:
    talk = conversation("qwen3")
    talk.begin()
    talk.place(0)
    say(talk, "qwen3", "<think>\nhm\n</think>\n\nIt is 3.", 1)
    found = talk.extend([{"role": "user", "content": "Sure?"}])
    assert found.forked
    assert found.parent == 0
    text = tokenizer_of("qwen3").decode(found.tokens)
    assert text.startswith("It is 3.<|im_end|>\n")
    assert "think" not in text
    # The next turn goes on behind the branch, which is the history now.
    talk.place(2)
    say(talk, "qwen3", "Yes.", 3)
    again = talk.extend([{"role": "user", "content": "Good."}])
    assert (again.forked, again.parent) == (False, 3)


def test_with_keep_history_nothing_forks() -> None:
    talk = conversation("qwen3", keep_history=True)
    talk.begin()
    talk.place(0)
    say(talk, "qwen3", "<think>\nhm\n</think>\n\nIt is 3.", 1)
    found = talk.extend([{"role": "user", "content": "Sure?"}])
    assert (found.forked, found.parent) == (False, 1)


def test_thinking_stays_while_tools_are_called() -> None:
    talk = conversation("qwen3")
    talk.begin()
    talk.place(0)
    said = '<think>\nhm\n</think>\n\n<tool_call>\n{"name": "add", "arguments": {}}\n</tool_call>'
    say(talk, "qwen3", said, 1)
    found = talk.extend([{"role": "tool", "name": "add", "content": "3"}])
    assert (found.forked, found.parent) == (False, 1)
    text = tokenizer_of("qwen3").decode(found.tokens)
    assert "<tool_response>\n3\n</tool_response>" in text


def test_a_template_that_rewrites_the_prompt_itself_begins_anew() -> None:
    # The prompt of DeepSeek's template ends with <think>, which is gone once the turn is history.
    name = "deepseek_r1_distill"
    talk = conversation(name)
    talk.begin()
    talk.place(0)
    say(talk, name, "hm\n</think>\n\n3", 1)
    found = talk.extend([{"role": "user", "content": "Sure?"}])
    assert (found.forked, found.parent) == (True, None)
    text = tokenizer_of(name).decode(found.tokens)
    assert text == SPECIAL[name][
        0
    ] + "<｜User｜>What is 1 + 2?<｜Assistant｜>\n\n3<｜end▁of▁sentence｜><｜User｜>Sure?" + (
        "<｜Assistant｜><think>\n"
    )


def test_white_space_that_a_template_trims_is_no_other_history() -> None:
    name = "qwen2_5"
    tokenizer = tokenizer_of(name)
    template = tokenizer.chat_template
    tokenizer.chat_template = (
        "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] | trim }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    try:
        talk = conversation(name)
        talk.begin()
        talk.place(0)
        say(talk, name, "  3 \n", 1)
        found = talk.extend([{"role": "user", "content": "?"}])
        assert (found.forked, found.parent) == (False, 1)
        talk.place(2)
        say(talk, name, "4", 3)
        assert not talk.extend([{"role": "user", "content": "!"}]).forked
    finally:
        tokenizer.chat_template = template


def test_calls_in_a_field_of_their_own_are_taken_as_sampled() -> None:
    """A template in Mistral's manner: it writes calls from `tool_calls`, in its own spelling."""
    name = "qwen2_5"
    tokenizer = tokenizer_of(name)
    template = tokenizer.chat_template
    tokenizer.chat_template = (
        "{% for m in messages %}{% if m['role'] == 'user' %}[INST]{{ m['content'] }}[/INST]"
        "{% elif m['tool_calls'] is defined %}[TOOL_CALLS]{{ m['tool_calls'] | tojson }}<|im_end|>"
        "{% elif m['role'] == 'tool' %}[TOOL_RESULTS]{{ m['content'] }}[/TOOL_RESULTS]"
        "{% else %} {{ m['content'] }}<|im_end|>{% endif %}{% endfor %}"
    )
    try:
        talk = conversation(name)
        talk.begin()
        talk.place(0)
        text = '[{"name":"add","arguments":{}}]'
        tokens = tokenizer(text)["input_ids"] + [tokenizer.eos_token_id]
        calls = [{"type": "function", "function": {"name": "add", "arguments": {}}}]
        talk.said(text, tokens, 1, {"role": "assistant", "content": "", "tool_calls": calls})
        found = talk.extend([{"role": "tool", "content": "3"}])
        assert tokenizer.decode(found.tokens) == "[TOOL_RESULTS]3[/TOOL_RESULTS]"
        assert (found.forked, found.parent) == (False, 1)
    finally:
        tokenizer.chat_template = template


def test_without_a_template_contents_are_joined_as_they_are() -> None:
    tokenizer = tokenizer_of("smollm2")
    renderer = Renderer(DataSettings(train=DataSource(path="unused"), render="text"), tokenizer)
    talk = Conversation(
        renderer, [{"role": "user", "content": "1+2="}], chat=False, end_ids=frozenset([tokenizer.eos_token_id])
    )
    assert tokenizer.decode(talk.begin()).endswith("1+2=")
    talk.said("<1+2>", [1, 2], 1)
    found = talk.extend([{"role": "user", "content": "3;"}])
    assert tokenizer.decode(found.tokens) == "3;"
    assert (found.forked, found.parent) == (False, 1)
