"""Recorded completions: what a row may be, what it is refused for and where, and which rows are a group."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from strop.config.data import Columns, DataSettings, DataSource
from strop.config.model import NewModel
from strop.config.offline import OfflineSettings
from strop.data.order import Cursor
from strop.data.prompts import OverlongPrompt
from strop.data.rollouts import CheckedGroups, Limits, RolloutDataset
from strop.data.sources import open_source
from strop.errors import DataError

LIMITS = Limits(vocabulary=20, prompt=8, completion=6, temperature=1.0)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    from strop.models.create import create_tokenizer

    return create_tokenizer(NewModel(characters="0123456789+=", context=32))


def row(n: int = 0, **changes: Any) -> dict[str, Any]:
    """A row as `strop rollout` writes it: the answer "5" and the end-of-text token."""
    values: dict[str, Any] = {
        "prompt": "2+3=",
        "prompt_id": "row-000007",
        "group": n,
        "sample": 0,
        "prompt_ids": [5, 13, 6, 14],
        "completion": "5",
        "completion_ids": [8, 1],
        "logprobs": [-0.5, -1.25],
        "temperature": 1.0,
        "reward": 1.0,
        "correct": True,
        "components": {"exact": 1.0},
        "status": "stop",
        "detail": "fine",
        "answer": "5",
        "model_fingerprint": "abc",
        "weight_version": 3,
        "hint": "none",
        **changes,
    }
    return {name: value for name, value in values.items() if value is not ...}


def dataset(
    tmp_path: Path,
    tokenizer: Any,
    rows: list[dict[str, Any]],
    *,
    limits: Limits = LIMITS,
    data: dict[str, Any] | None = None,
    name: str = "rows.jsonl",
    **settings: Any,
) -> RolloutDataset:
    path = tmp_path / name
    if name.endswith(".parquet"):
        import pyarrow as pa
        import pyarrow.parquet as parquet

        parquet.write_table(pa.Table.from_pylist(rows), path)
    else:
        # Blank lines, so that a line is not its row's number.
        path.write_text("\n" + "".join(json.dumps(row) + "\n\n" for row in rows))
    source = open_source(DataSource(path=str(path)))
    whole = DataSettings(train=DataSource(path=str(path)), **(data or {}))
    return RolloutDataset(source, whole, OfflineSettings(**settings), tokenizer, [tokenizer.eos_token_id], limits)


def refused(*arguments: Any, **settings: Any) -> DataError:
    with pytest.raises(DataError) as caught:
        dataset(*arguments, **settings).check()
    return caught.value


# --- rows ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.parquet"])
def test_a_row_is_read_as_it_was_written(tmp_path: Path, tokenizer: Any, name: str) -> None:
    # Of a map a Parquet file written from dicts makes a struct.
    group = dataset(tmp_path, tokenizer, [row(), row(sample=1, status="length")], name=name)[0]
    assert (group.prompt.tokens, group.prompt.text, group.prompt.prompt) == ([5, 13, 6, 14], "2+3=", "2+3=")
    assert (group.prompt.prompt_id, group.prompt.answer) == ("row-000000", "5")
    first, second = group.completions
    assert first.tokens.tolist() == [8, 1]
    assert first.tokens.dtype == np.int64
    assert first.logprobs is not None
    assert first.logprobs.dtype == np.float32
    assert first.logprobs.tolist() == [-0.5, -1.25]
    assert (first.text, first.status, first.reward, first.correct) == ("5", "stop", 1.0, True)
    assert (first.components, first.detail) == ({"exact": 1.0}, "fine")
    assert (first.version, first.fingerprint, first.greedy) == (3, "abc", False)
    assert second.status == "length"
    # What the recording wrote of tokens and rewards is not a column of the row any more; the data's own columns are.
    assert first.row["hint"] == "none"
    assert not {"completion_ids", "prompt_ids", "logprobs", "reward", "status", "completion"} & first.row.keys()
    assert first.row.keys() == group.prompt.row.keys()


@pytest.mark.parametrize(
    ("changes", "what", "mend"),
    [
        ({"completion_ids": []}, "the column 'completion_ids' is an empty list", "Delete the row"),
        ({"completion_ids": [8, 20]}, "is the token 20, and the model knows 0 to 19", "its tokenizer"),
        ({"completion_ids": [-1, 1]}, "is the token -1", "tokenizer"),
        ({"completion_ids": ["8", "1"]}, "must hold a list of token ids", "whole numbers"),
        ({"completion_ids": [8.5, 1.0]}, "must hold a list of token ids", "whole numbers"),
        ({"completion_ids": [[8], [1, 2]]}, "must hold a list of token ids", "whole numbers"),
        ({"completion_ids": None}, "must hold a list of token ids, it holds None", "whole numbers"),
        ({"completion_ids": [8] * 7, "logprobs": [-1.0] * 7}, "7 tokens, and rollout.max_new_tokens is 6", "Raise"),
        ({"prompt_ids": [99]}, "entry 0 of 'prompt_ids' is the token 99", "tokenizer"),
        ({"logprobs": [-0.5]}, "has 1 log-probabilities for 2 tokens", "offline.logprobs: compute"),
        ({"logprobs": []}, "has 0 log-probabilities for 2 tokens", "offline.logprobs: compute"),
        ({"logprobs": None}, "no log-probabilities in the column 'logprobs'", "offline.logprobs: compute"),
        ({"logprobs": [-0.5, None]}, "must hold a list of numbers", "offline.logprobs: compute"),
        ({"logprobs": [-0.5, 0.5]}, "is 0.5, which is the logarithm of no probability", "at most 0"),
        ({"logprobs": [math.nan, -0.5]}, "entry 0 of 'logprobs' is nan", "at most 0"),
        ({"logprobs": [-0.5, -math.inf]}, "entry 1 of 'logprobs' is -inf", "at most 0"),
        ({"reward": math.nan}, "the reward in the column 'reward' is nan, not a number", "verifier_error"),
        ({"reward": None}, "the reward in the column 'reward' is None", "offline.rewards: verify"),
        ({"reward": math.inf}, "is inf, not a number", "Give every completion a reward"),
        ({"reward": "1"}, "is '1', not a number", "Give every completion a reward"),
        ({"status": "approved"}, "is 'approved', none of stop, length", "offline.columns.status"),
        ({"temperature": 0.7}, "at temperature 0.7, and rollout.temperature is 1", "Set rollout.temperature to 0.7."),
        ({"temperature": "warm"}, "is 'warm', not a number", "offline.columns.temperature"),
        ({"weight_version": -1}, "'weight_version' holds -1", "whole number"),
        ({"group": None}, "no value in 'group', which makes the groups", "offline.columns.group"),
        ({"group": 0, "prompt_ids": [5, 13, 7, 14]}, "another prompt than row-000000", "joined"),
    ],
)  # fmt: skip
def test_a_row_that_does_not_fit_is_refused_with_its_line(
    tmp_path: Path, tokenizer: Any, changes: dict[str, Any], what: str, mend: str
) -> None:
    error = refused(tmp_path, tokenizer, [row(0), row(1, **changes)])
    assert what in error.what
    assert mend in error.mend
    assert error.where == f"{tmp_path / 'rows.jsonl'}:4"


def test_a_parquet_row_is_named_by_its_number(tmp_path: Path, tokenizer: Any) -> None:
    error = refused(tmp_path, tokenizer, [row(0), row(1, logprobs=[-0.5, 3.0])], name="rows.parquet")
    assert error.where == f"{tmp_path / 'rows.parquet'}, row 1 counted from 0"


def test_what_could_not_be_scored_keeps_its_status_and_has_no_reward(tmp_path: Path, tokenizer: Any) -> None:
    rows = [row(0, status="verifier_error", reward=None), row(0, sample=1)]
    failed, fine = dataset(tmp_path, tokenizer, rows)[0].completions
    assert (failed.status, math.isnan(failed.reward)) == ("verifier_error", True)
    assert fine.reward == 1.0
    # To be scored now: how it ended is seen from its last token.
    scored = dataset(tmp_path, tokenizer, [rows[0], row(0, status="timeout", completion_ids=[8, 8])], rewards="verify")
    assert [(one.status, math.isnan(one.reward)) for one in scored[0].completions] == [("stop", True), ("length", True)]


# --- columns -------------------------------------------------------------------------------------------------------


def test_columns_may_have_other_names_or_be_ignored(tmp_path: Path, tokenizer: Any) -> None:
    mine = row(0, status="approved", temperature=0.7)
    for name in ("group", "prompt_ids", "completion", "completion_ids", "logprobs", "reward"):
        mine[f"my_{name}"] = mine.pop(name)
    columns = {
        name: f"my_{name}" for name in ("group", "prompt_ids", "completion", "completion_ids", "logprobs", "reward")
    }
    columns |= {"status": None, "temperature": None}
    [one] = dataset(tmp_path, tokenizer, [mine], columns=columns)[0].completions
    assert (one.tokens.tolist(), one.reward, one.status, one.text) == ([8, 1], 1.0, "stop", "5")
    # A column that is somebody else's travels with the row.
    assert (one.row["status"], one.row["temperature"]) == ("approved", 0.7)


@pytest.mark.parametrize(
    ("without", "settings", "what", "mend"),
    [
        ("reward", {}, "no column 'reward' with rewards", "offline.rewards: verify"),
        ("logprobs", {}, "no column 'logprobs' with the log-probabilities", "offline.logprobs: compute"),
        ("hint", {"columns": {"group": "grup"}}, "no column 'grup'", "Did you mean 'group'?"),
        ("hint", {"columns": {"completion_ids": "ids"}}, "no column 'ids'", "`offline.columns.completion_ids`"),
        ("hint", {"columns": {"status": "state"}}, "no column 'state'", "`offline.columns.status`"),
    ],
)
def test_a_column_that_is_needed_and_missing(
    tmp_path: Path, tokenizer: Any, without: str, settings: dict[str, Any], what: str, mend: str
) -> None:
    error = refused(tmp_path, tokenizer, [row(**{without: ...})], **settings)
    assert what in error.what
    assert mend in error.mend


def test_without_rewards_or_log_probabilities_where_they_are_not_wanted(tmp_path: Path, tokenizer: Any) -> None:
    made = dataset(tmp_path, tokenizer, [row(reward=..., logprobs=...)], rewards="verify", logprobs="compute")
    [one] = made[0].completions
    assert one.logprobs is None
    assert math.isnan(one.reward)


# --- groups --------------------------------------------------------------------------------------------------------


def rows_of(made: RolloutDataset) -> list[list[int]]:
    return [made.groups.rows(i) for i in range(len(made))]


def test_groups_are_made_by_a_column_and_never_by_equal_prompts(tmp_path: Path, tokenizer: Any) -> None:
    def made(rows: list[dict[str, Any]], **columns: Any) -> list[list[int]]:
        return rows_of(dataset(tmp_path, tokenizer, rows, columns=columns))

    # One prompt throughout. Rows of a group need not be neighbours, and groups may differ in size.
    ids = [(0, "a"), (1, "a"), (0, "b"), (0, "a")]
    rows = [row(group, prompt_id=prompt) for group, prompt in ids]
    assert made(rows) == [[0, 2, 3], [1]]
    without = [{name: value for name, value in one.items() if name != "group"} for one in rows]
    assert made(without) == [[0, 1, 3], [2]]
    alone = [{name: value for name, value in one.items() if name != "prompt_id"} for one in without]
    assert made(alone) == [[0], [1], [2], [3]]
    # Unless the user says so.
    assert made(alone, group="prompt") == [[0, 1, 2, 3]]
    assert made(rows, group="prompt_id") == [[0, 1, 3], [2]]


def test_what_is_seen_before_a_run(tmp_path: Path, tokenizer: Any) -> None:
    rows = [row(0), row(0, sample=-1), row(0, sample=1), row(1), row(2, prompt_ids=[5] * 9, prompt="2" * 9)]
    with pytest.raises(OverlongPrompt, match="9 tokens, and at most 8 fit"):
        dataset(tmp_path, tokenizer, rows).check()
    seen = dataset(tmp_path, tokenizer, rows, data={"overlong_prompts": "skip"}).check()
    assert seen == CheckedGroups(groups=3, of=3, rows=5, overlong=1, longest=4, alone=1, greedy=1)


def test_the_greedy_completion_is_a_baseline_and_no_sample(tmp_path: Path, tokenizer: Any) -> None:
    # It was taken at another temperature, and nobody asks what it was worth to the sampler.
    greedy = row(0, sample=-1, temperature=0.0, logprobs=None, reward=0.25)
    group = dataset(tmp_path, tokenizer, [row(0), greedy, row(0, sample=1)])[0]
    assert len(group.completions) == 2
    assert group.baseline is not None
    assert group.baseline.reward == 0.25
    assert "2 greedy ones" in refused(tmp_path, tokenizer, [row(0), greedy, greedy]).what
    assert "0 completions and 1 greedy" in refused(tmp_path, tokenizer, [greedy]).what


def test_the_order_of_groups_is_seeded_and_each_comes_once_an_epoch(tmp_path: Path, tokenizer: Any) -> None:
    made = dataset(tmp_path, tokenizer, [row(n // 2, sample=n % 2) for n in range(20)])
    first, again = (Cursor(made.groups, seed=3) for _ in range(2))
    epochs = [[first.next() for _ in range(10)] for _ in range(2)]
    assert [sorted(index for _, index in epoch) for epoch in epochs] == [list(range(10))] * 2
    assert epochs[0] != epochs[1]
    for _ in range(7):
        again.next()
    later = Cursor(made.groups, seed=3)
    later.load(again.state())
    assert [later.next() for _ in range(3)] == epochs[0][7:]
    # Other groups of the same rows are other data.
    others = dataset(tmp_path, tokenizer, [row(n // 2, sample=n % 2) for n in range(20)], columns={"group": "sample"})
    with pytest.raises(DataError, match="the data has changed"):
        Cursor(others.groups, seed=3).load(again.state())


# --- texts ---------------------------------------------------------------------------------------------------------


def text(completion: str, **changes: Any) -> dict[str, Any]:
    return row(completion=completion, prompt_ids=..., completion_ids=..., logprobs=..., **changes)


def test_a_text_is_tokenised_once_with_the_token_that_ends_it(tmp_path: Path, tokenizer: Any) -> None:
    rows = [text("50"), text("50", status="length"), text("50", status=None)]
    made = dataset(tmp_path, tokenizer, rows, logprobs="compute")
    assert made[0].prompt.tokens == [5, 13, 6, 14]
    assert [one.tokens.tolist() for one in made[0].completions] == [[8, 3, 1], [8, 3], [8, 3, 1]]
    assert made.check().remade == 3
    error = refused(tmp_path, tokenizer, [text("")], logprobs="compute")
    assert "is empty, so there is nothing to train" in error.what
    assert "row-" not in error.where
    assert error.where.endswith("rows.jsonl:2")
    # Log-probabilities of other tokens are refused by their number.
    error = refused(tmp_path, tokenizer, [{**text("50"), "logprobs": [-1.0]}])
    assert "1 log-probabilities for 3 tokens" in error.what
    assert "tokenised anew" in error.mend
    assert dataset(tmp_path, tokenizer, [text("5x")], logprobs="compute").check().unknown == 1


def test_a_text_answer_to_messages_ends_as_the_template_ends_it(tmp_path: Path) -> None:
    from strop.models.create import create_tokenizer

    chatty = create_tokenizer(NewModel(characters="0123456789+=ua:\n", context=32))
    chatty.chat_template = (
        "{% for m in messages %}{{ m['role'][0] + ':' + m['content'] + '<eos>\\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'a:' }}{% endif %}"
    )
    prompt = [{"role": "user", "content": "1"}]
    rows = [
        {"prompt": prompt, "completion": "2", "reward": 1, "group": 0},
        {"prompt": prompt, "completion": "2", "reward": 1, "group": 0, "status": "length"},
    ]
    limits = Limits(vocabulary=len(chatty), prompt=16, completion=6, temperature=1.0)
    group = dataset(tmp_path, chatty, rows, logprobs="none", limits=limits)[0]
    assert chatty.decode(group.prompt.tokens) == "u:1<eos>\na:"
    assert group.prompt.chat
    assert group.prompt.prompt == prompt
    # What the template writes behind the end-of-text token was never sampled.
    assert [chatty.decode(one.tokens) for one in group.completions] == ["2<eos>", "2"]


def test_prompts_of_a_group_are_compared_as_texts_where_there_are_no_ids(tmp_path: Path, tokenizer: Any) -> None:
    error = refused(tmp_path, tokenizer, [text("5"), text("5", prompt="9+9=")], logprobs="none")
    assert "another prompt than row-000000, and the same value in 'group'" in error.what


def test_the_answer_may_be_in_any_column(tmp_path: Path, tokenizer: Any) -> None:
    made = dataset(tmp_path, tokenizer, [row(answer=..., solution="5")])
    made.source.mapping = Columns(answer="solution")
    assert made[0].prompt.answer == "5"
