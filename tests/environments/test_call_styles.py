"""Reading calls out of turns: each style's own way, and what a model gets wrong."""

from __future__ import annotations

import pytest

from strop.environments.call_styles import Call, CallStyle, Hermes, Llama3, Mistral, Tags, style_of_template
from strop.environments.driven import Policy

HERMES = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'


def test_hermes_reads_every_block() -> None:
    assert Hermes().calls("No call here.") == []
    assert Hermes().calls(f"Let me see.\n{HERMES}\n{HERMES}") == [Call("add", {"a": 1})] * 2


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("<tool_call>{", "not closed"),
        ("<tool_call>{</tool_call>", "not valid JSON"),
        ("<tool_call>[1]</tool_call>", "an object with"),
        ('<tool_call>{"name": 1}</tool_call>', "an object with"),
        ('<tool_call>{"name": "add", "arguments": [1]}</tool_call>', "must be an object"),
        ("<tool_call>" + "[" * 100_000 + "</tool_call>", "not valid JSON"),
    ],
)
def test_hermes_says_what_is_wrong_with_a_call(text: str, problem: str) -> None:
    (call,) = Hermes().calls(text)
    assert problem in (call.problem or "")


def test_an_open_call_does_not_swallow_the_next_one() -> None:
    first, second = Hermes().calls(f"<tool_call>oops {HERMES}")
    assert first.problem is not None
    assert second == Call("add", {"a": 1})


def test_arguments_that_are_json_within_json_are_read() -> None:
    (call,) = Hermes().calls('<tool_call>{"name": "add", "arguments": "{\\"a\\": 1}"}</tool_call>')
    assert call == Call("add", {"a": 1})


def test_llama_reads_one_or_several_objects() -> None:
    one = '{"name": "add", "parameters": {"a": 1}}'
    assert Llama3().calls(one) == [Call("add", {"a": 1})]
    assert Llama3().calls(f"<|python_tag|>{one}; {one}") == [Call("add", {"a": 1})] * 2
    assert Llama3().calls("The answer is {3}.") == []
    (call,) = Llama3().calls('{"name": "add", "parameters": {')
    assert "not valid JSON" in (call.problem or "")


def test_mistral_reads_a_list_with_or_without_its_marker() -> None:
    text = '[{"name": "add", "arguments": {"a": 1}}, {"name": "add", "arguments": {"a": 2}}]'
    for given in (text, f"[TOOL_CALLS] {text}"):
        assert Mistral().calls(given) == [Call("add", {"a": 1}), Call("add", {"a": 2})]
    assert Mistral().calls("[see above]") == []
    calls = Mistral().calls(text)
    message = Mistral().message(text, calls)
    assert message is not None
    results = Mistral().results(calls, ["1", "2"])
    assert [r["tool_call_id"] for r in results] == [c["id"] for c in message["tool_calls"]]
    assert {len(r["tool_call_id"]) for r in results} == {9}
    broken = Mistral().calls('[{"name": ')
    assert Mistral().message("", broken) is None
    assert Mistral().results(broken, ["error"])[0]["role"] == "user"


def test_tags_are_the_names_of_the_tools_in_order_of_their_place() -> None:
    style = Tags(["add", "mul"], result="<result>{result}</result>")
    assert style.calls("<mul>2 3</mul> then <add>1 2</add>") == [Call("mul", "2 3"), Call("add", "1 2")]
    assert style.stop == ["</add>", "</mul>"]
    assert style.results([Call("add", "")], ["3"]) == [{"role": "user", "content": "<result>3</result>"}]
    (call,) = style.calls("<add>1 2")
    assert "not closed" in (call.problem or "")


def test_a_single_tool_may_have_texts_of_its_own() -> None:
    style = Tags(["calculator"], opening="[", closing="]")
    assert style.calls("[1+2][3+4]") == [Call("calculator", "1+2"), Call("calculator", "3+4")]
    assert style.stop == ["]"]


@pytest.mark.parametrize(
    ("template", "style"),
    [
        (None, "tag"),
        ("{{ messages }}", "tag"),
        ("... [TOOL_CALLS] ...", "mistral"),
        ("... <tool_call> ...", "hermes"),
        ("... <|python_tag|> ...", "llama3"),
    ],
)
def test_the_style_is_read_off_the_template(template: str | None, style: str) -> None:
    assert style_of_template(template) == style


def test_styles_and_policies_of_ones_own_may_derive_from_the_protocols() -> None:
    class Style(CallStyle):
        def __init__(self) -> None:
            self.template_tells, self.stop = False, ["</call>"]

    class Stand(Policy):
        def __init__(self) -> None:
            self.tokens, self.max_new_tokens = [1], 3

    assert Style().stop == ["</call>"]  # type: ignore[abstract]
    assert Stand().tokens == [1]  # type: ignore[abstract]
