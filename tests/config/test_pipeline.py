"""Reading pipelines: defaults, `extends` and overrides below each stage, references between stages, and mistakes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import ValidationError

from strop.config import Config
from strop.config.explain import explain, leaves
from strop.config.loading import load_config
from strop.config.pipeline import PipelineConfig, inputs, model_paths, reference_of, with_paths
from strop.config.pipeline_loading import load_pipeline, load_recipe, resolved_pipeline
from strop.config.schema import schema
from strop.errors import ConfigError, UserError

THREE = """\
defaults:
  data: {train: {path: d.jsonl}}
  run: {seed: 3, steps: 7}
stages:
  sft:
    model: {path: m}
    supervised: {method: sft}
  judge:
    model: {path: "stage:sft"}
    supervised: {method: reward_model}
  ppo:
    model: {path: "stage:sft"}
    rewards:
      verifiers:
        - {kind: exact}
        - {kind: reward_model, path: "stage:judge"}
    run: {steps: 9}
"""


def write(folder: Path, text: str, name: str = "p.yaml") -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def problems(path: Path | None, *overrides: str, data: dict[str, Any] | None = None) -> list[UserError]:
    with pytest.raises(ConfigError) as caught:
        load_pipeline(path, overrides, data=data)
    return caught.value.problems


# --- what comes out ------------------------------------------------------------------------------------------------


def test_defaults_lie_below_every_stage(tmp_path: Path) -> None:
    config = load_pipeline(write(tmp_path, THREE))
    assert list(config.stages) == ["sft", "judge", "ppo"]
    assert [stage.run.steps for stage in config.stages.values()] == [7, 7, 9]
    assert {stage.run.seed for stage in config.stages.values()} == {3}
    assert {stage.data.train.path for stage in config.stages.values()} == {"d.jsonl"}
    assert config.folder == "runs"


def test_a_stage_extends_files_beside_the_pipeline_and_wins_over_them(tmp_path: Path) -> None:
    write(tmp_path, "model: {path: m}\ndata: {train: {path: d}}\nrun: {seed: 5, steps: 5}\n", "base.yaml")
    text = "defaults: {run: {seed: 1, steps: 1}, hardware: {threads: 2}}\n"
    text += "stages: {a: {extends: base.yaml, supervised: {}, run: {steps: 6}}}\n"
    stage = load_pipeline(write(tmp_path, text, "deeper/../p.yaml")).stages["a"]
    assert (stage.run.seed, stage.run.steps, stage.hardware.threads) == (5, 6, 2)


def test_a_pipeline_extends_another(tmp_path: Path) -> None:
    write(tmp_path, THREE, "base.yaml")
    text = "extends: base.yaml\ndefaults: {run: {seed: 4}}\nstages: {judge: {run: {steps: 2}}, ppo: null}\n"
    config = load_pipeline(write(tmp_path, text))
    assert {name: (stage.run.steps, stage.run.seed) for name, stage in config.stages.items()} == {
        "sft": (7, 4),
        "judge": (2, 4),
    }


def test_overrides_of_one_stage_and_of_all(tmp_path: Path) -> None:
    path = write(tmp_path, THREE)
    config = load_pipeline(
        path,
        [
            "stages.sft.run.steps=20",
            "defaults.run.steps=8",
            "stages.ppo.rewards.verifiers.1.weight=0.5",
            "defaults.data.train.columns.answer=right",
            "name=mine",
        ],
    )
    assert [stage.run.steps for stage in config.stages.values()] == [20, 8, 9]
    assert config.stages["ppo"].rewards is not None
    assert [verifier.weight for verifier in config.stages["ppo"].rewards.verifiers] == [1, 0.5]
    assert {stage.data.train.columns.answer for stage in config.stages.values()} == {"right"}
    assert config.name == "mine"


def test_an_override_of_a_list_in_the_defaults_replaces_the_whole_list() -> None:
    data = yaml.safe_load(THREE)
    data["defaults"]["rollout"] = {"stop": ["a", "b"]}
    data["stages"] = {"ppo": {**data["stages"]["ppo"], "model": {"path": "m"}}}
    data["stages"]["ppo"]["rewards"] = {"verifiers": [{"kind": "exact"}]}
    config = load_pipeline(None, ["defaults.rollout.stop.1=c"], data=data)
    assert config.stages["ppo"].rollout.stop == ["a", "c"]


def test_what_is_shown_reads_back_as_an_equal_pipeline(tmp_path: Path) -> None:
    config = load_pipeline(write(tmp_path, THREE))
    assert load_pipeline(write(tmp_path, resolved_pipeline(config), "again.yaml")) == config


def test_either_kind_of_file_is_read(tmp_path: Path) -> None:
    single = write(tmp_path, "model: {path: m}\ndata: {train: {path: d}}\nsupervised: {}\n", "single.yaml")
    assert isinstance(load_recipe(single, ["run.steps=3"]), Config)
    assert isinstance(load_recipe(write(tmp_path, THREE), ["stages.sft.run.steps=3"]), PipelineConfig)


def test_a_recipe_that_is_no_pipeline_is_told_what_the_keys_of_one_are() -> None:
    data = {"model": {"path": "m"}, "data": {"train": {"path": "d"}}, "supervised": {}}
    for key in ("defaults", "stage"):
        with pytest.raises(ConfigError) as caught:
            load_config(None, [f"{key}.run.steps=3"], data=data)
        assert "strop config explain stages" in caught.value.mend


def test_where_one_recipe_is_wanted_a_pipeline_is_answered_with_its_stages(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="pipeline of several recipes \\(sft, judge, ppo\\)") as caught:
        load_config(write(tmp_path, THREE))
    assert "runs/p/ppo" in caught.value.mend


# --- references ----------------------------------------------------------------------------------------------------


def test_references_are_found_and_replaced_wherever_a_model_is_named(tmp_path: Path) -> None:
    text = THREE + "    critic: {path: 'stage:judge'}\n    algorithm: {name: ppo, teacher: there}\n"
    ppo = load_pipeline(write(tmp_path, text)).stages["ppo"]
    assert model_paths(ppo) == {
        "model.path": "stage:sft",
        "algorithm.teacher": "there",
        "critic.path": "stage:judge",
        "rewards.verifiers.1.path": "stage:judge",
    }
    assert inputs(ppo) == ["sft", "judge"]
    changed = with_paths(ppo, lambda path: path.replace("stage:", "runs/p/"))
    assert model_paths(changed)["rewards.verifiers.1.path"] == "runs/p/judge"
    assert changed.run == ppo.run
    assert model_paths(ppo)["model.path"] == "stage:sft"


def test_every_key_that_names_a_model_can_name_a_stage() -> None:
    """A key with the name of one that is not marked as such would be forgotten by pipelines and by lineage."""
    sounds_like_one = {
        leaf.path
        for leaf in leaves()
        if leaf.path.rpartition(".")[2] in ("path", "teacher", "reference", "model")
        and leaf.path.split(".")[-2] not in ("train", "eval", "data")
        and "Literal" not in repr(leaf.annotation)
        # Names of something at a server, and of a Python function.
        and not leaf.path.endswith(("[judge].model", ".server.model", "[function].path"))
    }
    marked = {leaf.path for leaf in leaves() if "NamesModel" in repr(leaf.annotation)}
    assert sounds_like_one <= marked
    assert marked >= {"model.path", "critic.path", "algorithm.teacher", "rewards.verifiers[reward_model].path"}


def test_the_forms_of_a_reference() -> None:
    assert reference_of("runs/sft") is None
    last, best = reference_of("stage:sft"), reference_of("stage:sft@best")
    assert last is not None
    assert best is not None
    assert (last.stage, last.best, best.stage, best.best) == ("sft", False, "sft", True)
    with pytest.raises(ValueError, match="@best"):
        reference_of("stage:sft@20")


@pytest.mark.parametrize(
    ("override", "what", "mend"),
    [
        ("stages.judge.model.path=stage:sfd", "names the stage 'sfd', and there is none", "did you mean stage:sft?"),
        ("stages.sft.model.path=stage:judge", "'judge', which is not trained before", "put judge before sft"),
        ("stages.sft.model.path=stage:sft", "which is not trained before", "name an earlier stage"),
        ("stages.judge.model.path=stage:sft@best", "keeps only its newest", "stages.sft.checkpoint.best"),
        ("stages.judge.model.path=stage:sft@7", "write stage:sft for the last", "choose"),
        ("stages.ppo.model.path=stage:judge", "wants a language model", "trains one"),
        ("stages.ppo.rewards.verifiers.1.path=stage:sft", "wants a reward model", "reward_model"),
        ("stages.ppo.run.name=mine", "has the stage's name", "null"),
        ("stages.ppo.run.folder=elsewhere", "that of the first stage 'runs'", "defaults.run.folder"),
        ("stages.ppo.run.stpes=3", "unknown key `run.stpes`", "did you mean `run.steps`?"),
        ("stages.ppo.run.steps=0", "must be a whole number above 0", "explain run.steps"),
    ],
)
def test_a_mistake_in_a_stage_names_the_stage(tmp_path: Path, override: str, what: str, mend: str) -> None:
    [problem] = problems(write(tmp_path, THREE), override)
    assert problem.what.startswith(f"stage {override.split('.')[1]}: ")
    assert what in problem.what
    assert mend in problem.mend
    assert problem.where == f"command line: {override}"


def test_a_best_checkpoint_can_be_named_where_it_is_kept(tmp_path: Path) -> None:
    keeps = "stages.sft.checkpoint.best={metric: eval/loss}"
    config = load_pipeline(write(tmp_path, THREE), [keeps, "stages.judge.model.path=stage:sft@best"])
    assert config.stages["judge"].model.path == "stage:sft@best"


# --- mistakes ------------------------------------------------------------------------------------------------------


def test_problems_of_all_stages_come_at_once_each_with_its_line(tmp_path: Path) -> None:
    write(tmp_path, "model: {path: m}\nsupervised: {}\ntraining:\n  epoks: 2\n", "sft.yaml")
    text = "defaults:\n  run: {stpes: 3}\nstages:\n  a:\n    extends: sft.yaml\n    data: {train: {path: d}}\n"
    text += "  b:\n    model: {path: m}\n    data: {train: {path: d}}\n    supervised: {beta: x}\n"
    found = problems(write(tmp_path, text))
    assert [(problem.what.split(",")[0], problem.where.rpartition("/")[2]) for problem in found] == [
        ("stage a: unknown key `training.epoks`", "sft.yaml, line 4"),
        ("stage a: unknown key `run.stpes`", "p.yaml, line 2"),
        ("stage b: `supervised.beta` must be a number above 0 or null", "p.yaml, line 10"),
        ("stage b: unknown key `run.stpes`", "p.yaml, line 2"),
    ]


@pytest.mark.parametrize(
    ("text", "what", "mend"),
    [
        ("stages: [a, b]\n", "`stages` must be a mapping", "a name for each"),
        ("stages: {a: 3}\n", "`stages.a` must be a recipe, got 3", "extends"),
        ("stages: {}\n", "needs at least one stage", "below `stages`"),
        ("stages: {1: {}}\n", "a stage's name must be a text", "a letter"),
        ("stages: {a: {stages: {}}}\n", "has `stages` of its own", "put its stages here"),
        ("model: {path: m}\nstages: {a: {}}\n", "unknown key `model`", "defaults: {model: ...}"),
        ("default: {}\nstages: {a: {}}\n", "unknown key `default`", "did you mean `defaults`?"),
        ("name: 3\nstages: {a: {}}\n", "`name` must be a text, got 3", "quotes"),
        ("stages: {a: {extends: gone.yaml}}\n", "extends gone.yaml, which does not exist", ""),
        ("defaults: {extends: gone.yaml}\nstages: {a: {}}\n", "extends gone.yaml, which does not exist", ""),
        ("stages: {a: {extends: p.yaml}}\n", "in a circle: p.yaml -> p.yaml", "remove"),
    ],
)
def test_files_that_are_no_pipelines(tmp_path: Path, text: str, what: str, mend: str) -> None:
    found = problems(write(tmp_path, text))
    assert what in found[0].what
    assert mend in found[0].mend


def test_names_that_are_no_folders(tmp_path: Path) -> None:
    text = THREE.replace("sft:\n", "s.f:\n").replace("stage:sft", "m")
    [problem] = problems(write(tmp_path, text))
    assert "a stage cannot be called 's.f'" in problem.what
    [problem] = problems(write(tmp_path, "name: a/b\n" + THREE))
    assert "one folder name" in problem.what


@pytest.mark.parametrize(
    ("override", "what", "mend"),
    [
        ("run.steps=3", "a pipeline has no key `run.steps`", "stages.sft.run.steps=3"),
        ("stages.sfd.run.steps=3", "there is no stage 'sfd'", "did you mean stages.sft?"),
        ("stages.x.run.steps=3", "there is no stage 'x'", "the stages are sft, judge, ppo"),
        ("stages.sft=3", "names no key of the stage", "the stages are"),
        ("defaults.run.steps=[1", "not valid YAML", "quotes"),
        ("nonsense", "a pipeline has no key `nonsense`", "defaults.nonsense"),
    ],
)
def test_overrides_that_are_wrong(tmp_path: Path, override: str, what: str, mend: str) -> None:
    [problem] = problems(write(tmp_path, THREE), override)
    assert what in problem.what
    assert mend in problem.mend
    assert problem.where == f"command line: {override}"


def test_a_pipeline_made_in_python_is_looked_at_too() -> None:
    stage = load_config(None, data={"model": {"path": "m"}, "data": {"train": {"path": "d"}}, "supervised": {}})
    assert PipelineConfig(stages={"sft": stage}).folder == "runs"
    later = with_paths(stage, lambda _: "stage:gone")
    with pytest.raises(ValidationError, match="none of that name"):
        PipelineConfig(stages={"sft": stage, "dpo": later})


# --- in words ------------------------------------------------------------------------------------------------------


def test_keys_of_pipelines_explain_themselves() -> None:
    for key in ("stages", "defaults", "name"):
        text = explain(key)
        assert text.splitlines()[0] == key
        assert "stage:sft" in text
    assert explain("stages.sft.run.steps") == explain("defaults.run.steps") == explain("run.steps")
    assert explain("stages.sft") == explain("")
    assert "strop config explain stages" in explain("")


def test_the_example_of_a_pipeline_is_one(tmp_path: Path) -> None:
    text = explain("stages").split("a pipeline:\n")[1].rpartition("\n\n")[0]
    least = {"model": {"path": "m"}, "data": {"train": {"path": "d"}}}
    for name, more in {
        "sft": {"supervised": {}},
        "judge": {"supervised": {"method": "reward_model"}},
        "ppo": {},
    }.items():
        write(tmp_path, json.dumps({**least, **more}), f"{name}.yaml")
    config = load_pipeline(write(tmp_path, text))
    assert [inputs(stage) for stage in config.stages.values()] == [[], ["sft"], ["sft", "judge"]]


def test_the_json_schema_knows_pipelines() -> None:
    found = schema()
    assert {"name", "defaults", "stages", "extends", "model"} <= found["properties"].keys()
    part = found["$defs"]["StagePart"]
    assert "required" not in part
    assert part["properties"].keys() == {*Config.model_fields, "extends"}
    assert found["properties"]["stages"]["additionalProperties"]["anyOf"][0] == {"$ref": "#/$defs/StagePart"}
    # `defaults: {data: {eval: ...}}` need not have `train`, and an entry of a list must have all that it needs.
    assert "required" not in found["$defs"]["DataSettingsPart"]
    assert found["$defs"]["DataSettings"]["required"] == ["train"]
    items = found["$defs"]["RewardSettingsPart"]["properties"]["verifiers"]["items"]
    assert items["discriminator"]["mapping"]["regex"] == "#/$defs/RegexVerifier"


RECIPES = sorted((Path(__file__).parents[2] / "recipes").glob("*.yaml"))


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_the_recipes_here_are_read(path: Path) -> None:
    found = load_recipe(path)
    assert isinstance(found, PipelineConfig) == path.stem.startswith("pipeline")
