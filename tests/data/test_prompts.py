from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

from strop.config.data import Columns, DataSettings, DataSource
from strop.config.model import NewModel
from strop.data import Cursor, OverlongPrompt, PromptDataset, PromptStream, RowsSource, open_source
from strop.errors import DataError, ModelError, UserError
from strop.models.create import create_tokenizer

CHAT = [{"role": "user", "content": "2+2?"}]


def dataset(
    rows: list[dict[str, Any]], tokenizer: Any, *, limit: int = 1000, columns: Columns | None = None, **keys: Any
) -> PromptDataset:
    source = RowsSource(rows)
    source.mapping = columns or Columns()
    return PromptDataset(source, DataSettings(train=DataSource(path="unused"), **keys), tokenizer, limit)


def error_of(rows: list[dict[str, Any]], tokenizer: Any, **keys: Any) -> UserError:
    with pytest.raises(UserError) as error:
        dataset(rows, tokenizer, **keys).check()
    return error.value


# Rendering


def test_a_text_prompt_keeps_its_row(tokenizer: Any) -> None:
    row = {"q": "1+1=", "solution": "2", "level": 3}
    prompts = dataset([{"q": "0"}, row], tokenizer, columns=Columns(prompt="q", answer="solution"))
    prompt = prompts.prompt(1)
    assert (prompt.prompt_id, prompt.prompt, prompt.answer, prompt.text) == ("row-000001", "1+1=", "2", "1+1=")
    assert prompt.row == row
    assert tokenizer.decode(prompt.tokens) == "<s>1+1="
    assert prompts.prompt(0).answer is None


@pytest.mark.parametrize("bos", [True, False])
@pytest.mark.parametrize("eos", [True, False])
def test_text_gets_the_bos_that_the_tokenizer_adds_once_and_never_an_eos(
    tokenizer_with: Callable[..., Any], bos: bool, eos: bool
) -> None:
    tokenizer = tokenizer_with(bos=bos, eos=eos)
    start = "<s>" if bos else ""
    prompts = dataset([{"prompt": "1+1="}, {"prompt": "<s>1+1="}, {"prompt": "a</s>"}], tokenizer)
    decoded = [tokenizer.decode(prompt.tokens) for prompt in prompts]
    assert decoded == [f"{start}1+1=", "<s>1+1=", f"{start}a</s>"]


@pytest.mark.parametrize("bos", [True, False])
def test_chat_tokens_are_those_of_the_library_with_one_bos_and_one_generation_prompt(
    tokenizer_with: Callable[..., Any], bos: bool
) -> None:
    tokenizer = tokenizer_with(bos=bos)
    messages = [*CHAT, {"role": "assistant", "content": "4"}, {"role": "user", "content": "sure?"}]
    prompt = dataset([{"prompt": messages}], tokenizer).prompt(0)
    library = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=True)
    assert prompt.tokens == library["input_ids"]
    assert prompt.tokens.count(tokenizer.bos_token_id) == 1
    assert prompt.text.count("<|im_start|>assistant\n") == 2
    assert prompt.text.endswith("<|im_end|>\n<|im_start|>assistant\n")
    assert tokenizer.decode(prompt.tokens) == prompt.text
    assert prompt.prompt == messages


def test_render_chat_makes_a_text_a_user_message(tokenizer: Any) -> None:
    as_text = dataset([{"prompt": "2+2?"}], tokenizer, render="chat").prompt(0)
    assert as_text.tokens == dataset([{"prompt": CHAT}], tokenizer).prompt(0).tokens
    assert as_text.prompt == "2+2?"


def test_a_system_prompt_is_put_before_chats_that_have_none(tokenizer: Any) -> None:
    own = [{"role": "system", "content": "own"}, *CHAT]
    prompts = list(dataset([{"prompt": CHAT}, {"prompt": own}], tokenizer, system_prompt="Be brief."))
    assert prompts[0].text.startswith("<s><|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user")
    assert prompts[0].prompt == CHAT
    assert "Be brief" not in prompts[1].text
    text = dataset([{"prompt": "hi"}], tokenizer, system_prompt="Be brief.", render="chat").prompt(0)
    assert "Be brief." in text.text


def test_a_prompt_template_is_filled_from_all_columns(tokenizer: Any) -> None:
    row = {"question": "1 {+} 1", "hints": {"first": "two"}, "n": 3.14159}
    prompts = dataset([row], tokenizer, prompt_template="Q{n:.1f}: {question} ({hints[first]}) {{}}\nA:")
    assert prompts.prompt(0).prompt == "Q3.1: 1 {+} 1 (two) {}\nA:"
    chat = dataset([row], tokenizer, prompt_template="{question}", render="chat").prompt(0)
    assert chat.text.startswith("<s><|im_start|>user\n1 {+} 1<|im_end|>")


def test_empty_fields_of_parquet_messages_are_dropped(tokenizer: Any) -> None:
    messages = [{"role": "user", "content": "2+2?", "tool_calls": None, "name": None}]
    assert dataset([{"prompt": messages}], tokenizer).prompt(0).prompt == CHAT


# What is refused


@pytest.mark.parametrize(
    ("value", "what", "mend"),
    [
        (5, "holds int, neither", "data.prompt_template"),
        (None, "holds NoneType, neither", "data.prompt_template"),
        ("", "no tokens", "Delete the row"),
        ([], "empty list of messages", "at least one"),
        (["hi"], "message 0 is not an object but str", "role"),
        ([{"from": "human", "value": "hi"}], "has no `role`", "Rename `from`"),
        ([{"role": "user"}], "has no `content`", "content"),
        ([{"role": "user", "content": 3}], "not a text but int", "content"),
        ([*CHAT, {"role": "assistant", "content": "4"}], "last message is the assistant's", "Leave it out"),
        ([{"role": "critic", "content": "no"}], "refuses the messages (roles: critic): no critics here", "order"),
    ],
)
def test_rows_that_cannot_be_prompts_are_named(
    tokenizer_with: Callable[..., Any], value: Any, what: str, mend: str
) -> None:
    rows = [{"prompt": "a"}] * 600 + [{"prompt": value}]
    error = error_of(rows, tokenizer_with(bos=False, chat_template=CRITICS))
    assert isinstance(error, DataError)
    assert what in error.what
    assert mend in error.mend
    assert error.where == "rows, row 600 counted from 0"


CRITICS = (
    "{% for m in messages %}{% if m.role == 'critic' %}{{ raise_exception('no critics here') }}{% endif %}{% endfor %}"
)


@pytest.mark.parametrize(
    ("keys", "what", "mend"),
    [
        ({"prompt_template": "{questoin}"}, "uses a column 'questoin'; the columns are prompt, question", "'question'"),
        ({"prompt_template": "{}"}, "field without a name", "{question}"),
        ({"prompt_template": "{0}"}, "field without a name", "{question}"),
        ({"prompt_template": "{question"}, "malformed", "{question}"),
        ({"prompt_template": "none"}, "every prompt would be the same", "{question}"),
        ({"prompt_template": "{question:d}"}, "cannot be filled", "formats"),
        ({"prompt_template": "{later}"}, "the row has no column 'later'", "Give every row"),
        ({"columns": Columns(prompt="promt")}, "no column 'promt'; the columns are prompt, question", "'prompt'"),
        ({"columns": Columns(prompt="later")}, "the row has no column 'later'", "Give every row"),
        ({"system_prompt": "s", "render": "text"}, "would be ignored", "render: chat"),
        ({"system_prompt": "s"}, "would be ignored", "render: chat"),
    ],
)
def test_settings_that_do_not_fit_the_rows(tokenizer: Any, keys: dict[str, Any], what: str, mend: str) -> None:
    error = error_of(
        [{"prompt": "a", "question": "b"}, {"prompt": "a", "question": "c", "later": "d"}], tokenizer, **keys
    )
    assert what in error.what
    assert mend in error.mend


def test_messages_with_render_text_are_refused(tokenizer: Any) -> None:
    error = error_of([{"prompt": CHAT}], tokenizer, render="text")
    assert "data.render is `text`" in error.what


def test_chat_without_a_chat_template_is_refused_and_text_is_not(tokenizer_with: Callable[..., Any]) -> None:
    tokenizer = tokenizer_with(chat_template=None)
    for rows, keys in (([{"prompt": CHAT}], {}), ([{"prompt": "a"}], {"render": "chat"})):
        error = error_of(rows, tokenizer, **keys)
        assert isinstance(error, ModelError)
        assert "instruction-tuned" in error.mend
    assert dataset([{"prompt": "a"}], tokenizer).check().rows == 1


# Length


def test_an_overlong_prompt_is_refused_with_its_length_and_the_limit(tokenizer: Any) -> None:
    rows = [{"prompt": "x" * 9}, {"prompt": "x" * 10}]
    error = error_of(rows, tokenizer, limit=10)
    assert "11 tokens, and at most 10" in error.what
    assert error.where == "rows, row 1 counted from 0"
    assert "overlong_prompts: skip" in error.mend
    with pytest.raises(OverlongPrompt):
        list(dataset(rows, tokenizer, limit=10))


def test_the_first_problem_is_reported_even_when_a_later_row_cannot_be_rendered(tokenizer: Any) -> None:
    rows = [{"prompt": "a"}, {"prompt": "x" * 50}, {"prompt": 3}]
    assert "row 1 " in error_of(rows, tokenizer, limit=10).where
    assert "row 2 " in error_of(rows, tokenizer, limit=10, overlong_prompts="skip").where


def test_skipped_prompts_are_counted(tokenizer: Any) -> None:
    rows = [{"prompt": "x" * (20 if i % 3 == 0 else 5)} for i in range(30)]
    prompts = dataset(rows, tokenizer, limit=10, overlong_prompts="skip")
    checked = prompts.check()
    assert (checked.rows, checked.of, checked.overlong, checked.longest) == (30, 30, 10, 21)
    assert len(list(prompts)) == 20
    stream = PromptStream(prompts, Cursor(prompts.source, seed=0))
    first = [stream.next() for _ in range(20)]
    assert {epoch for _, epoch in first} == {0}
    assert len({prompt.prompt_id for prompt, _ in first}) == 20
    assert stream.next()[1] == 1
    assert stream.skipped >= 10


def test_usable_prompts_may_lie_almost_two_epochs_apart(tokenizer: Any) -> None:
    prompts = dataset([{"prompt": "a"}] + [{"prompt": "x" * 20}] * 7, tokenizer, limit=10, overlong_prompts="skip")
    stream = PromptStream(prompts, Cursor(prompts.source, seed=0))
    assert [stream.next()[1] for _ in range(200)] == list(range(200))


def test_a_source_of_overlong_prompts_only_is_refused_not_waited_for(tokenizer: Any) -> None:
    prompts = dataset([{"prompt": "x" * 20}] * 5, tokenizer, limit=10, overlong_prompts="skip")
    with pytest.raises(DataError, match="would be skipped"):
        prompts.check()
    with pytest.raises(DataError, match="every prompt is overlong"):
        PromptStream(prompts, Cursor(prompts.source, seed=0)).next()


def test_a_long_source_is_checked_at_its_head(tokenizer: Any) -> None:
    rows = [{"prompt": "a"}] * 5001
    assert dataset(rows, tokenizer).check().rows == 1000
    assert dataset(rows[1:], tokenizer).check().rows == 5000
    assert dataset(rows, tokenizer).check(first=7).rows == 7


def test_what_check_measures_is_what_prompts_give(tokenizer: Any) -> None:
    rows = [{"prompt": "x" * (i % 7 + 1)} if i % 2 else {"prompt": CHAT} for i in range(40)]
    prompts = dataset(rows, tokenizer)
    lengths = [len(prompt.tokens) for prompt in prompts]
    checked = prompts.check()
    assert checked.longest == max(lengths)
    assert checked.mean_length == pytest.approx(sum(lengths) / 40)


def test_characters_that_the_tokenizer_does_not_know_are_counted(tokenizer: Any) -> None:
    checked = dataset([{"prompt": "a"}, {"prompt": "3 × 4 ÷ 2"}, {"prompt": "é"}], tokenizer).check()
    assert (checked.unknown, checked.unknown_at) == (2, "rows, row 1 counted from 0")
    assert dataset([{"prompt": "a"}], tokenizer).check().unknown == 0


# Resume


@settings(max_examples=60, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 14), min_size=1, max_size=25).filter(lambda sizes: min(sizes) <= 9),
    before=st.integers(0, 40),
    after=st.integers(1, 40),
    seed=st.integers(0, 1000),
)
def test_a_stream_resumes_in_the_middle_of_an_epoch_with_skips(
    tokenizer: Any, sizes: list[int], before: int, after: int, seed: int
) -> None:
    rows = [{"prompt": "x" * size} for size in sizes]

    def fresh() -> PromptStream:
        prompts = dataset(rows, tokenizer, limit=10, overlong_prompts="skip")
        return PromptStream(prompts, Cursor(prompts.source, seed=seed))

    stream = fresh()
    for _ in range(before):
        stream.next()
    state = json.loads(json.dumps(stream.state()))
    expected = [stream.next() for _ in range(after)]
    again = fresh()
    again.load(state)
    assert [again.next() for _ in range(after)] == expected
    assert again.skipped == stream.skipped


@settings(max_examples=60, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 14), min_size=1, max_size=25).filter(lambda sizes: min(sizes) <= 9),
    counts=st.lists(st.integers(0, 12), max_size=8),
    seed=st.integers(0, 1000),
)
def test_prompts_that_are_taken_together_are_those_that_come_one_by_one(
    tokenizer: Any, sizes: list[int], counts: list[int], seed: int
) -> None:
    rows = [{"prompt": "x" * size} if size % 2 else {"prompt": CHAT if size > 9 else "y" * size} for size in sizes]
    prompts = dataset(rows, tokenizer, limit=10, overlong_prompts="skip")
    together, alone = (PromptStream(prompts, Cursor(prompts.source, seed=seed)) for _ in range(2))
    for count in counts:
        assert together.take(count) == [alone.next()[0] for _ in range(count)]
        assert together.state() == alone.state()


def test_of_prompts_taken_together_the_first_problem_is_told(
    tokenizer: Any, tokenizer_with: Callable[..., Any]
) -> None:
    good, long, bad, empty = {"prompt": "a"}, {"prompt": "x" * 20}, {"prompt": 3}, {"prompt": ""}
    chat = {"prompt": CHAT}

    without_bos = tokenizer_with(bos=False)

    def told(rows: list[dict[str, Any]], overlong: str) -> UserError:
        tokens = tokenizer if empty not in rows else without_bos
        if chat in rows:
            tokens = tokenizer_with(chat_template=None)
        prompts = dataset(rows, tokens, limit=10, overlong_prompts=overlong)
        errors = []
        for ask in (lambda stream: stream.take(4), lambda stream: [stream.next() for _ in range(4)]):
            with pytest.raises(UserError) as error:
                ask(PromptStream(prompts, Cursor(prompts.source, seed=0, shuffle=False)))
            errors.append(error.value)
        together, alone = errors
        assert (type(together), str(together), together.where) == (type(alone), str(alone), alone.where)
        return together

    assert "row 1 " in told([good, long, bad, good], "refuse").where
    assert "row 2 " in told([good, long, bad, good], "skip").where
    assert "row 1 " in told([good, empty, long, bad], "refuse").where
    assert "row 2 " in told([good, long, empty, bad], "skip").where
    assert "row 1 " in told([good, long, chat, good], "refuse").where
    assert "template" in str(told([good, long, chat, good], "skip"))
    assert "every prompt is overlong" in str(told([long, long, long], "skip"))


def test_a_source_of_one_usable_prompt_gives_it_as_often_as_is_asked(tokenizer: Any) -> None:
    prompts = dataset([{"prompt": "a"}] + [{"prompt": "x" * 20}] * 7, tokenizer, limit=10, overlong_prompts="skip")
    stream = PromptStream(prompts, Cursor(prompts.source, seed=0))
    assert {prompt.prompt_id for prompt in stream.take(50)} == {"row-000000"}


def word_pieces() -> Any:
    core = tokenizers.Tokenizer(tokenizers.models.WordPiece(unk_token="[UNK]"))
    core.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
    trainer = tokenizers.trainers.WordPieceTrainer(vocab_size=120, special_tokens=["[UNK]", "[PAD]"])
    core.train_from_iterator(["what is 37 plus 48", "größer als 漢字 🙂"] * 3, trainer)
    core.enable_padding(pad_token="[PAD]")
    core.enable_truncation(4)
    return transformers.PreTrainedTokenizerFast(tokenizer_object=core, unk_token="[UNK]", pad_token="[PAD]")


@pytest.mark.parametrize(
    "kind",
    [
        lambda: create_tokenizer(NewModel(characters="0123456789+= é", hidden_size=8, layers=1, heads=1, context=8)),
        word_pieces,
        transformers.ByT5Tokenizer,  # in Python
    ],
)
def test_a_text_among_others_has_the_tokens_that_it_has_alone(kind: Callable[[], Any]) -> None:
    rows = [{"prompt": text} for text in ("37+48=", "a", "what is 37 plus 48, größer?", " 1\n\n", "漢字 🙂", "what")]
    prompts = dataset(rows, kind())
    together = PromptStream(prompts, Cursor(prompts.source, seed=0, shuffle=False)).take(len(rows))
    assert [one.tokens for one in together] == [prompts.prompt(i).tokens for i in range(len(rows))]
    assert len({len(one.tokens) for one in together}) > 2


def test_a_file_of_prompts_from_end_to_end(tokenizer: Any, tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text('{"prompt": "a", "answer": "1"}\n\n{"prompt": [{"role": "user", "content": ""}], "answer": 2}\n')
    source = open_source(DataSource(path=str(path)))
    prompts = PromptDataset(source, DataSettings(train=DataSource(path=str(path))), tokenizer, 1000)
    assert prompts.check().rows == 2
    assert [prompt.answer for prompt in prompts] == ["1", 2]
    with pytest.raises(OverlongPrompt) as error:
        PromptDataset(source, DataSettings(train=DataSource(path=str(path))), tokenizer, 5).check()
    assert error.value.where == f"{path}:3"
