"""Examples: which tokens of a row are trained, and what is refused."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from strop.config.data import Columns, DataSettings, DataSource
from strop.config.model import NewModel
from strop.config.supervised import ExampleColumns, SupervisedSettings
from strop.data.examples import ExampleDataset
from strop.data.sources import open_source
from strop.errors import DataError
from strop.models.create import create_tokenizer

CHATML = (
    "{% for m in messages %}{{ '[' + m['role'] + ':' + m['content'] + ']' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '[assistant:' }}{% endif %}"
)
FORGETFUL = (
    "{% for m in messages %}{% if m['role'] != 'assistant' or loop.last %}{{ '[' + m['role'] + ':' + m['content'] + ']'"
    "}}{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '[assistant:' }}{% endif %}"
)
EOS = 1


@pytest.fixture
def tokenizer() -> Any:
    made = copy.deepcopy(create_tokenizer(NewModel(characters="abcdefghijklmnopqrstuvwxyz0123456789+= :[]\n")))
    made.chat_template = CHATML
    return made


def dataset(tmp_path: Path, tokenizer: Any, rows: list[dict[str, Any]], **settings: Any) -> ExampleDataset:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    eos_ids = settings.pop("eos_ids", [EOS])
    data = settings.pop("data", {})
    columns = Columns(**settings.pop("mapping", {}))
    longest = settings.pop("longest", 200)
    source = open_source(DataSource(path=str(path), columns=columns))
    chosen = SupervisedSettings(columns=ExampleColumns(**settings.pop("columns", {})), **settings)
    train = DataSource(path=str(path))
    return ExampleDataset(source, DataSettings(train=train, **data), chosen, tokenizer, eos_ids, longest)


def trained(tokenizer: Any, example: Any) -> list[str]:
    """The runs of trained tokens as text, `<eos>` included."""
    found: list[str] = []
    before = False
    for token, inside in zip(example.tokens.tolist(), example.loss_mask.tolist(), strict=True):
        if inside:
            text = tokenizer.decode([token])
            found = [*found[:-1], found[-1] + text] if before else [*found, text]
        before = inside
    return found


def whole(tokenizer: Any, example: Any) -> str:
    return str(tokenizer.decode(example.tokens.tolist()))


def test_a_prompt_and_its_answer(tmp_path: Path, tokenizer: Any) -> None:
    rows = dataset(tmp_path, tokenizer, [{"prompt": "1+1=", "answer": "2"}])
    (example,) = rows[0].examples
    assert whole(tokenizer, example) == "1+1=2<eos>"
    assert trained(tokenizer, example) == ["2<eos>"]


def test_every_assistant_turn_of_a_conversation(tmp_path: Path, tokenizer: Any) -> None:
    messages = [
        {"role": "system", "content": "be kind"},
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "ho"},
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
    ]
    close = tokenizer.convert_tokens_to_ids("]")
    rows = dataset(tmp_path, tokenizer, [{"messages": messages}], eos_ids=[EOS, close])
    (example,) = rows[0].examples
    # The line end that the template writes after a turn is not trained: nothing would sample it.
    assert trained(tokenizer, example) == ["ho]", "b]"]
    assert whole(tokenizer, example) == "[system:be kind]\n[user:hi]\n[assistant:ho]\n[user:a]\n[assistant:b]\n"


def test_a_template_whose_turns_do_not_end_in_an_end_token_gets_one(tmp_path: Path, tokenizer: Any) -> None:
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]
    (example,) = dataset(tmp_path, tokenizer, [{"messages": messages}])[0].examples
    assert trained(tokenizer, example) == ["ho]\n<eos>"]


def test_a_template_that_rewrites_earlier_turns_is_refused(tmp_path: Path, tokenizer: Any) -> None:
    tokenizer.chat_template = FORGETFUL
    turn = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]
    rows = dataset(tmp_path, tokenizer, [{"messages": turn}, {"messages": [*turn, *turn]}])
    assert trained(tokenizer, rows[0].examples[0]) == ["ho]<eos>"]
    with pytest.raises(DataError, match="does not mark the assistant's turns") as caught:
        rows.check()
    assert "rows.jsonl:2" in caught.value.where
    assert "a row of its own" in caught.value.mend


def test_a_chat_prompt_and_an_answer(tmp_path: Path, tokenizer: Any) -> None:
    row = {"prompt": [{"role": "user", "content": "hi"}], "answer": "ho"}
    (example,) = dataset(tmp_path, tokenizer, [row])[0].examples
    assert whole(tokenizer, example) == "[user:hi]\n[assistant:ho]\n<eos>"
    assert trained(tokenizer, example) == ["ho]\n<eos>"]


PAIR = {"prompt": "1+1=", "chosen": "2", "rejected": "11"}


def test_a_pair_of_texts(tmp_path: Path, tokenizer: Any) -> None:
    row = dataset(tmp_path, tokenizer, [PAIR], method="dpo")[0]
    assert [whole(tokenizer, e) for e in row.examples] == ["1+1=2<eos>", "1+1=11<eos>"]
    assert [trained(tokenizer, e) for e in row.examples] == [["2<eos>"], ["11<eos>"]]


def test_a_pair_of_whole_conversations(tmp_path: Path, tokenizer: Any) -> None:
    start = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "c"},
    ]
    row = {name: [*start, {"role": "assistant", "content": name[0]}] for name in ("chosen", "rejected")}
    pair = dataset(tmp_path, tokenizer, [row], method="dpo")[0]
    # What both have said before is the prompt.
    assert [trained(tokenizer, e) for e in pair.examples] == [["c]\n<eos>"], ["r]\n<eos>"]]


def test_a_reward_model_looks_at_the_last_token(tmp_path: Path, tokenizer: Any) -> None:
    row = dataset(tmp_path, tokenizer, [{**PAIR, "by": 2}], method="reward_model", columns={"margin": "by"})[0]
    assert [trained(tokenizer, e) for e in row.examples] == [["<eos>"], ["<eos>"]]
    assert row.worth == (2.0, 0.0)


def test_a_ranking(tmp_path: Path, tokenizer: Any) -> None:
    rows = [{"prompt": "a", "best_first": ["b", "c", "d"]}]
    row = dataset(tmp_path, tokenizer, rows, method="reward_model", columns={"ranked": "best_first"})[0]
    assert [whole(tokenizer, e) for e in row.examples] == ["ab<eos>", "ac<eos>", "ad<eos>"]


def test_the_steps_of_a_solution(tmp_path: Path, tokenizer: Any) -> None:
    rows = [{"prompt": "q", "steps": ["ab", "c"], "labels": [True, False]}]
    (example,) = dataset(tmp_path, tokenizer, rows, method="process_reward")[0].examples
    assert whole(tokenizer, example) == "qab\nc\n"
    assert example.loss_mask.tolist() == [False, False, False, True, False, True]
    assert example.labels is not None
    assert example.labels.tolist() == [0, 0, 0, 1, 0, 0]


def test_judged_completions(tmp_path: Path, tokenizer: Any) -> None:
    rows = [{"prompt": "a", "completion": "b", "label": True}, {"prompt": "a", "completion": "c", "label": False}]
    found = dataset(tmp_path, tokenizer, rows, method="kto")
    assert [found[at].worth for at in range(2)] == [(1.0,), (0.0,)]


@pytest.mark.parametrize(
    ("method", "row", "says"),
    [
        ("sft", {"prompt": "a"}, "no column 'answer', or 'messages'"),
        ("dpo", {"prompt": "a", "chosen": "b"}, "no column 'rejected'"),
        ("dpo", {"prompt": "a", "chosen": "b", "rejected": "b"}, "are the same"),
        ("dpo", {"chosen": "b", "rejected": "c"}, "no column 'prompt'"),
        ("kto", {"prompt": "a", "completion": "b"}, "no column 'label'"),
        ("process_reward", {"prompt": "a", "steps": ["b"], "labels": [True, False]}, "as many labels"),
        ("kto", {"prompt": "a", "completion": "b", "label": "false"}, "a label is 'false', neither true nor false"),
        ("process_reward", {"prompt": "a", "steps": ["b"], "labels": [0.5]}, "a label is 0.5"),
        ("sft", {"messages": [{"role": "user", "content": "a"}]}, "no assistant turn"),
        ("sft", {"prompt": "a" * 300, "answer": "b"}, "at most 200"),
    ],
)
def test_what_cannot_be_learned_from(
    tmp_path: Path, tokenizer: Any, method: str, row: dict[str, Any], says: str
) -> None:
    with pytest.raises(DataError, match=says):
        dataset(tmp_path, tokenizer, [row], method=method).check()


def test_examples_that_are_too_long_are_skipped_if_asked(tmp_path: Path, tokenizer: Any) -> None:
    rows = [{"prompt": "a", "answer": "b"}, {"prompt": "a", "answer": "b" * 50}]
    found = dataset(tmp_path, tokenizer, rows, longest=10, data={"overlong_prompts": "skip"}).check()
    assert (found.rows, found.overlong, found.longest) == (2, 1, 3)
