"""The schema in words."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from strop.config import Config
from strop.config.base import StrictModel
from strop.config.explain import describe, explain, find, leaves, models_of, places
from strop.config.loading import load_config
from strop.config.problems import look_up
from strop.config.schema import schema
from strop.errors import UserError

MINIMAL: dict[str, Any] = {
    "model": {"create": {}},
    "data": {"train": {"path": "d.jsonl"}},
    "rewards": {"verifiers": [{"kind": "exact"}]},
    "warmup": {},
}


def test_every_key_and_section_is_documented() -> None:
    assert [place.path for place in places() if len(place.description) < 5] == []
    assert [model.__name__ for model in every_model() if not (model.__doc__ or "").strip()] == []


def every_model() -> list[type[StrictModel]]:
    found: list[type[StrictModel]] = []

    def visit(model: type[StrictModel]) -> None:
        for child in model.__subclasses__():
            found.append(child)
            visit(child)

    visit(StrictModel)
    return [model for model in found if model.__module__.startswith("strop.config")]


def test_leaves_reach_every_field_of_every_section() -> None:
    """Optional sections and all kinds of list entries included: no field of any model is missing from the walk."""
    walked = {path.rsplit(".", 1)[-1] for path in (place.path for place in places())}
    # A pipeline is not part of a recipe; tests/config/test_pipeline.py looks at its keys.
    abstract = {"Verifier", "PipelineConfig"}
    for model in every_model():
        if model.__name__ not in abstract:
            assert set(model.model_fields) <= walked, model
    paths = [leaf.path for leaf in leaves()]
    assert len(set(paths)) == len(paths)
    for expected in (
        "warmup.optimizer.learning_rate",
        "model.lora.rank",
        "model.create.layers",
        "data.eval.columns.prompt",
        "rewards.verifiers[numeric].tolerance",
        "rewards.verifiers[python].arguments",
        "rollout.engine.kind",
    ):
        assert expected in paths
    assert not any(models_of(leaf.annotation) for leaf in leaves())


def test_defaults_of_leaves_are_what_loading_gives() -> None:
    config = load_config(None, data=MINIMAL).model_dump()
    checked = 0
    for leaf in leaves():
        parent = leaf.path.rsplit(".", 1)[0].split(".")
        if leaf.required or "[" in leaf.path or not isinstance(look_up(config, parent), dict):
            continue
        if leaf.path.startswith(("model.path", "data.train.path")):
            continue
        checked += 1
        assert look_up(config, leaf.path.split(".")) == leaf.default, leaf.path
    assert checked > 60
    assert {leaf.path: leaf.default for leaf in leaves()}["warmup.optimizer.learning_rate"] == 1e-3


def test_every_key_explains_itself_under_every_spelling() -> None:
    for place in places():
        text = explain(place.path)
        assert text.splitlines()[0] == place.path
        assert place.description.split("\n")[0] in text
    spellings = ("verifiers[exact]", "verifiers.exact", "verifiers.0", "verifiers", "verifiers[3]")
    pages = {explain(f"rewards.{spelling}.strip") for spelling in spellings}
    assert len(pages) == 1


def test_a_leaf_says_type_default_and_meaning() -> None:
    assert explain("training.optimizer.max_grad_norm").splitlines() == [
        "training.optimizer.max_grad_norm",
        "  Gradients are scaled down to this global norm; `null` leaves them as they are.",
        "  type:    a number above 0 or null",
        "  default: 1.0",
    ]
    assert 'one of "none", "std", "population_std" or "mean", or null' in explain("algorithm.scale")
    assert "it must be set" in explain("data.train.path")


def test_a_section_lists_its_keys_with_defaults() -> None:
    text = explain("rollout")
    for name in Config.model_fields["rollout"].default.__class__.model_fields:
        assert f"\n  {name} " in text
    assert "[1.0]" in text
    assert "[required]" in explain("data.train")
    everything = explain("")
    assert all(f"\n  {name} " in everything for name in Config.model_fields)


def test_a_list_of_kinds_lists_each_kind() -> None:
    text = explain("rewards.verifiers")
    assert all(f"kind: {kind} " in text for kind in ("exact", "numeric", "regex", "format", "python"))
    assert "tolerance" in explain("rewards.verifiers.numeric")
    assert "pattern" not in explain("rewards.verifiers.numeric")
    kinds = [
        "exact",
        "numeric",
        "math",
        "choice",
        "regex",
        "format",
        "python",
        "code",
        "reward_model",
        "judge",
        "http",
        "reasoning_gym",
        "slime",
        "environment",
    ]
    listed = ", ".join(f'"{kind}"' for kind in kinds[:-1])
    assert f'one of {listed} or "{kinds[-1]}"' in explain("rewards.verifiers.kind")


@pytest.mark.parametrize(
    ("key", "mend"),
    [
        ("rollout.tempreature", "rollout.temperature"),
        ("learning_rate", "training.optimizer.learning_rate"),
        ("top_p", "rollout.temperature"),
        ("zzz", "lists the sections"),
    ],
)
def test_an_unknown_key_names_the_nearest(key: str, mend: str) -> None:
    assert find(key) is None
    with pytest.raises(UserError) as caught:
        explain(key)
    assert mend in caught.value.mend


def test_types_in_words() -> None:
    words = {leaf.path: describe(leaf.annotation) for leaf in leaves()}
    assert words["hardware.threads"] == 'a whole number above 0 or "auto"'
    assert words["rewards.max_error_share"] == "a number from 0 to 1"
    assert words["rewards.verifiers[format].tags"] == "a list of 1 or more texts, or null"
    assert words["rewards.verifiers[judge].scale"] == "a list of 2 numbers"
    assert words["rewards.clip"] == "a list of 2 numbers or null"
    assert words["model.lora.targets"] == 'a list of texts or "all-linear"'
    assert words["data.train.arguments"] == "a mapping of names to values"
    assert not any(text == "a value" for text in words.values())


def test_the_json_schema_has_every_description() -> None:
    text = json.dumps(schema(), ensure_ascii=False)
    for leaf in leaves():
        assert json.dumps(leaf.description.split("\n")[0], ensure_ascii=False)[1:-1] in text, leaf.path
    assert schema()["additionalProperties"] is False
    assert set(schema()["else"]["else"]["required"]) == {"model", "data"}


def test_configuration_does_not_import_torch() -> None:
    code = (
        "import sys, strop, strop.config, strop.config.loading, strop.config.explain; strop.load_config; "
        "print([m for m in ('torch', 'transformers', 'datasets', 'pyarrow') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
