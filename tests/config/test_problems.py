"""What a user reads when a recipe is wrong: the key, the value, the place, and the mend."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from strop.config.elsewhere import MENDS
from strop.config.explain import find, places
from strop.config.loading import load_config
from strop.errors import ConfigError, UserError

BASE = """\
model: {path: m}
data: {train: {path: d.jsonl}}
rewards: {verifiers: [{kind: exact}]}
"""


def found(*overrides: str, data: dict[str, Any] | None = None) -> list[UserError]:
    with pytest.raises(ConfigError) as caught:
        load_config(None, overrides, data=data if data is not None else yaml.safe_load(BASE))
    return caught.value.problems


@pytest.mark.parametrize(
    ("override", "mend"),
    [
        ("run.stpes=3", "did you mean `run.steps`?"),
        ("trainer={}", "did you mean `cluster.trainer`?"),
        ("rollout.groupsize=3", "did you mean `rollout.group_size`?"),
        ("learning_rate=1", "did you mean `training.optimizer.learning_rate`?"),
        ("training.learning_rate=1", "did you mean `training.optimizer.learning_rate`?"),
        ("optimizer.learning_rate=1", "did you mean `training.optimizer`?"),
        ("kl_coef=1", "did you mean `algorithm.kl_coef`?"),
        ("algorithm.group_size=1", "did you mean `rollout.group_size`?"),
        ("training.seed=1", "did you mean `run.seed`?"),
        ("rewards.verifiers.0.wieght=1", "did you mean `rewards.verifiers.0.weight`?"),
        ("rewards.verifiers.0.tolerance=1", "`tolerance` belongs to `rewards.verifiers` of kind numeric"),
        ("training.optimizer.epsilon=1", "use `eps`"),
        ("training.optimizer.beta=1", "did you mean `training.optimizer.beta"),
        ("run.qqqq=1", "the keys of this section are steps, seed, name, folder"),
    ],
)
def test_an_unknown_key_names_the_nearest(override: str, mend: str) -> None:
    [problem] = found(override)
    assert problem.what.startswith("unknown key `")
    assert mend in problem.mend
    assert problem.where == f"command line: {override}"


@pytest.mark.parametrize(
    ("key", "mend"),
    [
        ("rollout.top_p", "temperature"),
        ("rollout.top_k", "temperature"),
        ("rollout.min_p", "temperature"),
        ("rollout.repetition_penalty", "temperature"),
        ("lr", "`training.optimizer.learning_rate`"),
        ("training.batch_size", "`rollout.groups_per_step`"),
        ("num_generations", "`rollout.group_size`"),
        ("rollout.n", "`rollout.group_size`"),
        ("beta", "`algorithm.kl_coef`"),
        ("algorithm.epsilon", "`algorithm.clip_low`"),
        ("max_completion_length", "`rollout.max_new_tokens`"),
        ("training.max_steps", "`run.steps`"),
        ("rollout.rollout_batch_size", "`rollout.groups_per_step`"),
    ],
)
def test_names_from_other_frameworks(key: str, mend: str) -> None:
    [problem] = found(f"{key}=1")
    assert mend in problem.mend


def test_every_mend_names_keys_that_exist() -> None:
    named = {key for mend in MENDS.values() for key in re.findall(r"`([a-z_]+(?:\.[a-z_0-9]+)+)`", mend)}
    assert len(named) > 10
    assert [key for key in named if find(key) is None] == []


def test_no_special_mend_hides_a_key_that_exists() -> None:
    assert load_config(None, ["warmup.batch_size=3"], data=yaml.safe_load(BASE)).warmup.batch_size == 3  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("override", "what", "mend"),
    [
        ("run.steps=x", "`run.steps` must be a whole number above 0, got \"x\"", "explain run.steps"),
        ("run.steps=true", "`run.steps` must be a whole number above 0, got true", ""),
        ("run.steps=1e2", "`run.steps` must be a whole number above 0, got 100.0", "write 100"),
        ("run.steps=0", "`run.steps` must be a whole number above 0, got 0", ""),
        ("run.steps='5'", "`run.steps` must be a whole number above 0, got \"5\"", "without quotes"),
        ("rollout.temperature=-1", "`rollout.temperature` must be a number above 0, got -1", ""),
        ("rollout.temperature=.nan", "`rollout.temperature` must be a number above 0, got nan", ""),
        ("rollout.temperature=null", "`rollout.temperature` must be a number above 0, got null", ""),
        ("rewards.max_error_share=2", "must be a number from 0 to 1, got 2", ""),
        ("data.shuffle=yes", "`data.shuffle` must be true or false, got \"yes\"", "write true"),
        ("algorithm.name=grppo", "must be one of \"grpo\", \"dr_grpo\"", "did you mean \"grpo\"?"),
        ("algorithm.name=GRPO", "got \"GRPO\"", "did you mean \"grpo\"?"),
        ("hardware.threads=many", "a whole number above 0 or \"auto\", got \"many\"", ""),
        ("hardware.threads=atuo", "got \"atuo\"", "did you mean \"auto\"?"),
        ("model.lora.targets=[1]", "`model.lora.targets` must be a list of texts or \"all-linear\", got [1]", ""),
        ("rollout.stop=x", "`rollout.stop` must be a list of texts, got \"x\"", "write a list: [x]"),
        ("rollout.stop=[1]", "`rollout.stop.0` must be a text, got 1", "put it in quotes: \"1\""),
        ("rollout.stop=['']", "an empty stop text would end every completion at once", ""),
        ("rollout.engine.pack_weights=3", "must be true or false, or \"auto\", got 3", ""),
        ("warmup=3", "`warmup` must be a section or null, got 3", ""),
        ("rewards.verifiers=[]", "a list of 1 or more entries, got []", ""),
        ("rewards.verifiers=[3]", "`rewards.verifiers.0` must be a section with a `kind`, got 3", ""),
        ("rewards.verifiers=[{}]", "`rewards.verifiers.0.kind` is missing", "kind: exact"),
        ("rewards.verifiers=[{kind: numric}]", "must be one of exact, numeric, math", "did you mean \"numeric\"?"),
        ("rewards.verifiers=[{kind: regex}]", "`rewards.verifiers.0.pattern` is missing; it must be a text", "explain"),
        ("rewards.verifiers=[{kind: numeric, tolerance: x}]", "`rewards.verifiers.0.tolerance` must be a number", ""),
        ("data.train.path=null", "`data.train.path` must be a text, got null", ""),
    ],
)  # fmt: skip
def test_a_wrong_value_says_what_it_must_be(override: str, what: str, mend: str) -> None:
    if override == "data.train.path=null":
        [problem] = found(data=yaml.safe_load(BASE.replace("d.jsonl", "null")))
    else:
        [problem] = found(override)
        assert problem.where == f"command line: {override}"
    assert what in problem.what
    assert mend in problem.mend
    for jargon in ("Input should", "union", "constrained", "literal", "pydantic", "Value error"):
        assert jargon not in problem.block()


def test_several_problems_come_at_once_each_with_its_line(tmp_path: Path) -> None:
    recipe = tmp_path / "r.yaml"
    recipe.write_text(
        "model:\n  path: m\n  dtyp: auto\n"
        "data:\n  train: {}\n"
        "rewards:\n  verifiers:\n    - kind: exakt\n    - kind: numeric\n      tolerance: -1\n      foo: 1\n"
        "rollout:\n  temperature: hot\n  temperature: 1\n"
    )
    with pytest.raises(ConfigError) as caught:
        load_config(recipe, ["nonsense", "run.steps=0", "algorithm.clip=3"])
    error = caught.value
    assert [problem.where.split("r.yaml, ")[-1] for problem in error.problems] == [
        "lines 13 and 14",
        "command line: nonsense",
        "line 3",
        "line 5",
        "line 8",
        "line 10",
        "line 11",
        "command line: algorithm.clip=3",
        "command line: run.steps=0",
    ]
    assert error.block().startswith("9 problems:")
    for key in (
        "model.dtyp",
        "data.train.path",
        "rewards.verifiers.0.kind",
        "rewards.verifiers.1.tolerance",
        "run.steps",
    ):
        assert f"`{key}`" in error.block()


def test_a_missing_key_points_at_its_section(tmp_path: Path) -> None:
    recipe = tmp_path / "r.yaml"
    recipe.write_text("model: {path: m}\nrewards: {verifiers: [{kind: exact}]}\ndata:\n  train:\n    split: x\n")
    with pytest.raises(ConfigError) as caught:
        load_config(recipe)
    [problem] = caught.value.problems
    assert problem.what.startswith("`data.train.path` is missing; it must be a text: A `.jsonl` or `.parquet` file")
    assert problem.where == f"{recipe}, line 4"


def test_a_rule_across_sections_names_both_places(tmp_path: Path) -> None:
    recipe = tmp_path / "r.yaml"
    recipe.write_text(BASE + "rollout:\n  groups_per_step: 3\n")
    with pytest.raises(ConfigError) as caught:
        load_config(recipe, ["training.mini_batches=2"])
    [problem] = caught.value.problems
    assert "rollout.groups_per_step (3) cannot be divided" in problem.what
    assert problem.where == f"{recipe}, line 5; command line: training.mini_batches=2"


def test_a_rule_of_a_section_names_the_section() -> None:
    [problem] = found(data=yaml.safe_load(BASE.replace("{path: m}", "{path: m, create: {}}")))
    assert problem.what.startswith("`model`: set exactly one of `path`")
    [problem] = found("rewards.verifiers.1={kind: exact}")
    assert "two verifiers are called 'exact'" in problem.what


def test_a_character_that_occurs_twice_is_named() -> None:
    [problem] = found(data=yaml.safe_load(BASE) | {"model": {"create": {"characters": "0123+=2"}}})
    assert "characters holds the character '2' twice" in problem.what


def test_an_empty_mapping_lists_what_a_recipe_needs() -> None:
    assert [problem.what.split(";")[0] for problem in found(data={})] == [
        "`model` is missing",
        "`data` is missing",
    ]
    [problem] = found(data={"model": {"create": {}}, "data": {"train": {"path": "rows.jsonl"}}})
    assert problem.what.startswith("`rewards` is missing")


def test_a_long_value_is_shortened() -> None:
    [problem] = found(data={**yaml.safe_load(BASE), "run": {"steps": "x" * 5000}})
    assert len(problem.what) < 200


def test_a_mapping_that_is_no_mapping() -> None:
    [problem] = found(data=[1, 2])  # type: ignore[arg-type]
    assert problem.what == "a recipe is a mapping, got [1, 2]"


def test_keys_that_are_not_texts_are_refused(tmp_path: Path) -> None:
    recipe = tmp_path / "r.yaml"
    recipe.write_text(BASE + "run:\n  1: x\n")
    with pytest.raises(ConfigError) as caught:
        load_config(recipe)
    [problem] = caught.value.problems
    assert "`run.1`" in problem.what
    assert problem.where == f"{recipe}, line 5"


junk = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=5) | st.integers(), inner, max_size=2),
    max_leaves=4,
)
known_keys = st.sampled_from([re.sub(r"\[\w+\]", ".0", place.path) for place in places()])
written = st.tuples(known_keys | st.text(max_size=8), st.text(max_size=8) | junk.map(lambda value: f"{value}"))


@settings(max_examples=150, deadline=None)
@given(st.lists(written, max_size=3), st.dictionaries(known_keys, junk, max_size=3))
def test_whatever_is_written_is_taken_or_refused_in_words(texts: list[tuple[str, str]], values: dict[str, Any]) -> None:
    data = yaml.safe_load(BASE)
    for key, value in values.items():
        section = data
        *above, last = key.split(".")
        for part in above:
            section = section.setdefault(part, {}) if isinstance(section, dict) else {}
        if isinstance(section, dict):
            section[last] = value
    refused: list[UserError] = []
    try:
        load_config(None, [f"{key}={value}" for key, value in texts], data=data)
    except ConfigError as error:
        refused = error.problems
    assert all(problem.what and problem.where for problem in refused)
    assert not any("Input should" in problem.what for problem in refused)


@settings(max_examples=100, deadline=None)
@given(st.text(alphabet="abc:-[]{}#&*!|>'\"%@`,?\n\t 1.e~<", max_size=30))
def test_whatever_a_file_holds_is_read_or_refused_in_words(tmp_path_factory: Any, text: str) -> None:
    recipe = tmp_path_factory.getbasetemp() / "fuzzed.yaml"
    recipe.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_config(recipe)
    assert all(problem.what and "fuzzed.yaml" in problem.where for problem in caught.value.problems)
