"""Reading recipes: YAML, `extends`, overrides, and what comes out of a configuration again."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from strop.config import Config
from strop.config.dialect import dump, read
from strop.config.loading import config_hash, differences, load_config, resolved_yaml
from strop.errors import ConfigError, UserError

MINIMAL = """\
model: {path: m}
data: {train: {path: d.jsonl}}
rewards: {verifiers: [{kind: exact}]}
"""


def write(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def problems(path: Path | None, *overrides: str, data: dict[str, Any] | None = None) -> list[UserError]:
    with pytest.raises(ConfigError) as caught:
        load_config(path, overrides, data=data)
    assert caught.value.exit_code == 2
    return caught.value.problems


# --- the dialect ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-6", 1e-6),
        ("5E3", 5000.0),
        ("-1.5e+2", -150.0),
        (".5", 0.5),
        ("1_000", 1000),
        ("010", 10),
        ("0x1F", 31),
        ("0o17", 15),
        ("-7", -7),
        ("true", True),
        ("off", "off"),
        ("no", "no"),
        ("12:30", "12:30"),
        ("2026-01-01", "2026-01-01"),
        ("~", None),
        ("", None),
        ("e5", "e5"),
        ("1.2.3", "1.2.3"),
        ('"1e-6"', "1e-6"),
    ],
)
def test_plain_values(text: str, value: Any) -> None:
    got = read(text, name="x").value
    assert got == value
    assert type(got) is type(value)


plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=12),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=150, deadline=None)
@given(plain)
@example("\x85")
@example("a\r\nb\u2028")
@example({"1e-6": ["1e-6", "off", 1e-6]})
def test_what_is_dumped_reads_back_here_and_elsewhere(value: Any) -> None:
    text = dump({"key": value})
    assert read(text, name="x").value == {"key": value}
    assert yaml.safe_load(text) == {"key": value}


@pytest.mark.parametrize("text", ["1e-6", "off", "yes", "0o17", "2026-01-01", "null", "1:30", "- a", "a: b", "\n", " "])
def test_texts_that_look_like_something_else_stay_texts(text: str) -> None:
    assert read(dump({"key": text}), name="x").value == {"key": text}


# --- files ---------------------------------------------------------------------------------------------------------


def test_a_recipe_gets_its_defaults(tmp_path: Path) -> None:
    config = load_config(write(tmp_path, "r.yaml", MINIMAL + "training: {optimizer: {learning_rate: 1e-6}}\n"))
    assert config.training.optimizer.learning_rate == 1e-6
    assert config.rollout == Config.model_fields["rollout"].default


def test_off_is_a_text_where_the_schema_says_off(tmp_path: Path) -> None:
    assert load_config(write(tmp_path, "r.yaml", MINIMAL + "tracking: {display: off}\n")).tracking.display == "off"


@pytest.mark.parametrize(
    ("content", "what"),
    [
        (b"", "is empty"),
        (b"# only a comment\n", "is empty"),
        (b"- a\n- b\n", "not a mapping"),
        (b"just words\n", "not a mapping"),
        (b"\xff\xfe\x00", "not a text file"),
        (b"a: [1, 2\nb: 3\n", "not valid YAML"),
        (b"a: &x [*x]\n", "contains itself"),
        (b"a: 1\n---\nb: 2\n", "not valid YAML"),
        (b"a: \x01\n", "not a text file with YAML"),
    ],
)
def test_files_that_are_no_recipes(tmp_path: Path, content: bytes, what: str) -> None:
    path = tmp_path / "r.yaml"
    path.write_bytes(content)
    [problem] = problems(path)
    assert what in problem.what
    assert "r.yaml" in problem.where


def test_broken_yaml_names_line_and_column(tmp_path: Path) -> None:
    [problem] = problems(write(tmp_path, "r.yaml", "model:\n  path: x\n\tdtype: auto\n"))
    assert problem.where.endswith("r.yaml, line 3, column 1")
    assert "tabs" in problem.mend


def test_a_missing_file_names_its_neighbour(tmp_path: Path) -> None:
    write(tmp_path, "quickstart.yaml", MINIMAL)
    [problem] = problems(tmp_path / "quickstrt.yaml")
    assert "there is no recipe" in problem.what
    assert "did you mean" in problem.mend
    assert "quickstart.yaml" in problem.mend


def test_a_folder_is_not_a_recipe(tmp_path: Path) -> None:
    [problem] = problems(tmp_path)
    assert "is a folder" in problem.what


def test_repeated_keys_are_refused_with_both_lines(tmp_path: Path) -> None:
    found = problems(write(tmp_path, "r.yaml", MINIMAL + "run:\n  steps: 3\n  seed: 1\n  steps: 4\n"))
    assert [problem.what for problem in found] == ["the key `steps` is written twice in the same section"]
    assert found[0].where.endswith("lines 5 and 7")


def test_merge_keys_and_anchors_work(tmp_path: Path) -> None:
    text = MINIMAL + "training: {optimizer: &o {beta1: 0.8, eps: 1e-7}}\nwarmup: {optimizer: {<<: *o, eps: 1e-5}}\n"
    config = load_config(write(tmp_path, "r.yaml", text), ["training.optimizer.beta1=0.7"])
    assert config.training.optimizer.beta1 == 0.7
    assert config.warmup is not None
    assert (config.warmup.optimizer.beta1, config.warmup.optimizer.eps) == (0.8, 1e-5)


# --- extends -------------------------------------------------------------------------------------------------------


def test_extends_merges_deeply_and_the_nearer_file_wins(tmp_path: Path) -> None:
    write(tmp_path, "base/base.yaml", MINIMAL + "run: {steps: 1, seed: 1}\nrollout: {stop: [a, b]}\n")
    write(tmp_path, "base/mid.yaml", "extends: base.yaml\nrun: {steps: 2}\nrollout: {group_size: 2}\n")
    write(tmp_path, "other.yaml", "run: {steps: 3, name: other}\n")
    top = write(tmp_path, "top.yaml", "extends: [base/mid.yaml, other.yaml]\nrollout: {stop: [c]}\n")
    config = load_config(top)
    assert (config.run.steps, config.run.seed, config.run.name) == (3, 1, "other")
    assert config.rollout.group_size == 2
    assert config.rollout.stop == ["c"]


def test_null_removes_a_section(tmp_path: Path) -> None:
    write(tmp_path, "base.yaml", MINIMAL + "warmup: {steps: 5}\nrollout: {group_size: 2}\n")
    config = load_config(write(tmp_path, "top.yaml", "extends: base.yaml\nwarmup: null\nrollout:\n"))
    assert config.warmup is None
    assert config.rollout.group_size == Config.model_fields["rollout"].default.group_size


def test_null_removes_a_mapping_of_ones_own(tmp_path: Path) -> None:
    base = MINIMAL + "algorithm: {arguments: {strength: 1}}\n"
    write(tmp_path, "base.yaml", base)
    config = load_config(write(tmp_path, "top.yaml", "extends: base.yaml\nalgorithm: {arguments: null}\n"))
    assert config.algorithm.arguments == {}
    assert load_config(tmp_path / "base.yaml", ["algorithm.arguments=null"]).algorithm.arguments == {}


def test_null_for_a_required_section_is_a_missing_section(tmp_path: Path) -> None:
    write(tmp_path, "base.yaml", MINIMAL)
    [problem] = problems(write(tmp_path, "top.yaml", "extends: base.yaml\ndata: null\n"))
    assert problem.what.startswith("`data` is missing")


def test_a_circle_of_extends_is_named(tmp_path: Path) -> None:
    write(tmp_path, "a.yaml", "extends: b.yaml\n")
    write(tmp_path, "b.yaml", "# b\nextends: [c.yaml]\n")
    write(tmp_path, "c.yaml", "extends: b.yaml\n")
    [problem] = problems(tmp_path / "a.yaml")
    assert problem.what == "recipes extend each other in a circle: b.yaml -> c.yaml -> b.yaml"
    assert problem.where.endswith("c.yaml, line 1")


def test_a_diamond_is_no_circle(tmp_path: Path) -> None:
    write(tmp_path, "base.yaml", MINIMAL)
    write(tmp_path, "l.yaml", "extends: base.yaml\nrun: {steps: 7}\n")
    write(tmp_path, "r.yaml", "extends: base.yaml\nrun: {seed: 7}\n")
    config = load_config(write(tmp_path, "top.yaml", "extends: [l.yaml, r.yaml]\n"))
    assert (config.run.steps, config.run.seed) == (7, 7)


@pytest.mark.parametrize(("extends", "what"), [("gone.yaml", "does not exist"), ("3", "must be a file name")])
def test_extends_that_leads_nowhere(tmp_path: Path, extends: str, what: str) -> None:
    [problem] = problems(write(tmp_path, "r.yaml", f"run: {{steps: 1}}\nextends: {extends}\n"))
    assert what in problem.what
    assert problem.where.endswith("r.yaml, line 2")


def test_a_problem_names_the_file_that_wrote_the_value(tmp_path: Path) -> None:
    write(tmp_path, "base.yaml", MINIMAL + "run:\n  steps: -1\n  seed: -2\n")
    found = problems(write(tmp_path, "top.yaml", "extends: base.yaml\nrun: {seed: -3}\n"))
    where = {problem.what.split("`")[1]: problem.where.rsplit("/", 1)[-1] for problem in found}
    assert where == {"run.steps": "base.yaml, line 5", "run.seed": "top.yaml, line 2"}


# --- overrides -----------------------------------------------------------------------------------------------------


def test_overrides_of_every_form(tmp_path: Path) -> None:
    recipe = write(tmp_path, "r.yaml", MINIMAL)
    config = load_config(
        recipe,
        [
            "training.optimizer.learning_rate=1e-5",
            "rewards.verifiers.0.weight=2",
            "rewards.verifiers.1={kind: regex, pattern: x}",
            "rollout.stop=[a, 'b']",
            "warmup.steps=3",
            "data.prompt_template=Q: {question}",
            "run.name=2026",
            "data.system_prompt=null",
            "tracking.wandb_project=a=b",
        ],
    )
    assert config.training.optimizer.learning_rate == 1e-5
    assert [verifier.weight for verifier in config.rewards.verifiers] == [2, 1]
    assert config.rewards.verifiers[1].kind == "regex"
    assert config.rollout.stop == ["a", "b"]
    assert config.warmup is not None
    assert config.warmup.steps == 3
    assert config.data.prompt_template == "Q: {question}"
    assert config.run.name == "2026"
    assert config.data.system_prompt is None
    assert config.tracking.wandb_project == "a=b"


def test_the_last_override_wins(tmp_path: Path) -> None:
    assert load_config(write(tmp_path, "r.yaml", MINIMAL), ["run.steps=3", "run.steps=4"]).run.steps == 4


@pytest.mark.parametrize(
    ("override", "what", "mend"),
    [
        ("nothing", "is not an override", "section.key=value"),
        ("=3", "is not an override", "section.key=value"),
        ("run..steps=3", "is not an override", "section.key=value"),
        ("rewards.verifiers.4.weight=1", "entries 0 to 0", "`rewards.verifiers.1` appends"),
        ("rewards.verifiers.exact.weight=1", "entries 0 to 0", "`rewards.verifiers.0`"),
        ("run.steps=[1", "not valid YAML", "quotes"),
        ("run.steps=many", "must be a whole number above 0", "explain run.steps"),
        ("run.stpes=3", "unknown key `run.stpes`", "did you mean `run.steps`?"),
        ("run.steps.x=3", "`run.steps` must be a whole number", "explain run.steps"),
    ],
)
def test_overrides_that_are_wrong(tmp_path: Path, override: str, what: str, mend: str) -> None:
    [problem] = problems(write(tmp_path, "r.yaml", MINIMAL), override)
    assert what in problem.what
    assert mend in problem.mend
    assert problem.where == f"command line: {override}"


def test_a_section_keeps_its_own_defaults_when_one_key_is_set(tmp_path: Path) -> None:
    """`warmup.optimizer` begins with other values than `training.optimizer`."""
    recipe = write(tmp_path, "r.yaml", MINIMAL + "warmup: {}\n")
    before, after = load_config(recipe), load_config(recipe, ["warmup.optimizer.weight_decay=0.1"])
    assert differences(before, after) == [("warmup.optimizer.weight_decay", 0.0, 0.1)]


def test_python_mappings_are_read_and_left_alone() -> None:
    data = yaml.safe_load(MINIMAL)
    before = copy.deepcopy(data)
    config = load_config(None, ["rewards.verifiers.0.weight=3", "run.steps=2"], data=data)
    assert (config.rewards.verifiers[0].weight, config.run.steps) == (3, 2)
    assert data == before


def test_a_python_mapping_goes_over_the_file(tmp_path: Path) -> None:
    recipe = write(tmp_path, "r.yaml", MINIMAL + "run: {steps: 3, seed: 4}\n")
    config = load_config(recipe, data={"run": {"steps": 5}})
    assert (config.run.steps, config.run.seed) == (5, 4)


# --- out again -----------------------------------------------------------------------------------------------------

texts = st.text(max_size=8)
numbers = st.floats(allow_nan=False, allow_infinity=False)
verifiers = st.one_of(
    st.fixed_dictionaries({"kind": st.just("exact"), "weight": numbers}),
    st.fixed_dictionaries({"kind": st.just("regex"), "pattern": texts}),
    st.fixed_dictionaries({"kind": st.just("numeric"), "tolerance": st.floats(0, 1e9)}),
    st.fixed_dictionaries(
        {"kind": st.just("python"), "function": texts, "arguments": st.dictionaries(texts, plain, max_size=2)}
    ),
)
recipes = st.fixed_dictionaries(
    {
        "model": st.fixed_dictionaries({"path": texts}),
        "data": st.fixed_dictionaries(
            {"train": st.fixed_dictionaries({"path": texts})},
            optional={"system_prompt": texts | st.none(), "prompt_template": texts},
        ),
        "rewards": st.fixed_dictionaries(
            {"verifiers": st.lists(verifiers, min_size=1, max_size=3, unique_by=lambda verifier: verifier["kind"])}
        ),
    },
    optional={
        "training": st.fixed_dictionaries(
            {"optimizer": st.fixed_dictionaries({"learning_rate": st.floats(1e-12, 10), "eps": st.floats(1e-300, 1)})}
        ),
        "warmup": st.none() | st.fixed_dictionaries({"steps": st.integers(1, 9)}),
        "rollout": st.fixed_dictionaries({"stop": st.lists(st.text(min_size=1, max_size=4), max_size=3)}),
    },
)
quick = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@quick
@given(recipes)
def test_resolved_yaml_loads_back_as_an_equal_configuration(tmp_path_factory: Any, data: dict[str, Any]) -> None:
    config = load_config(None, data=data)
    path = write(tmp_path_factory.mktemp("resolved"), "config.yaml", resolved_yaml(config))
    again = load_config(path)
    assert again == config
    assert config_hash(again) == config_hash(config)
    assert differences(again, config) == []


@quick
@given(recipes, recipes)
def test_hash_and_differences_agree_with_equality(a: dict[str, Any], b: dict[str, Any]) -> None:
    first, second = load_config(None, data=a), load_config(None, data=b)
    assert (differences(first, second) == []) == (first == second)
    if first == second:
        return
    assert config_hash(first) != config_hash(second)
    # Both ways name the same keys, with the values swapped.
    swapped = [(key, old, new) for key, new, old in differences(second, first)]
    assert sorted(map(repr, swapped)) == sorted(map(repr, differences(first, second)))


def test_differences_name_leaf_keys() -> None:
    base = yaml.safe_load(MINIMAL)
    a = load_config(None, data=base)
    b = load_config(None, ["warmup.steps=7", "rewards.verifiers.1={kind: numeric}", "run.seed=5"], data=base)
    found = {key: (old, new) for key, old, new in differences(a, b)}
    assert found["run.seed"] == (0, 5)
    assert found["warmup.steps"] == (None, 7)
    assert found["rewards.verifiers.1.kind"] == (None, "numeric")
    assert not any(key in found for key in ("warmup", "rewards", "rewards.verifiers", "run.steps"))


def test_arguments_that_yaml_cannot_hold_are_refused() -> None:
    data = yaml.safe_load(MINIMAL)
    data["data"]["train"]["arguments"] = {"x": object()}
    with pytest.raises(UserError, match="cannot be written to a recipe"):
        resolved_yaml(load_config(None, data=data))
