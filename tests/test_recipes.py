"""Every recipe of the repository runs: two small steps of each, in the order in which they build on each other."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

import strop
from strop.config import Config
from strop.config.loading import load_config

RECIPES = Path(__file__).parents[1] / "recipes"
QUIET = [
    "run.steps=2",
    "checkpoint.every=100",
    "tracking.display=off",
    "tracking.tensorboard=false",
    "hardware.threads=1",
    "hardware.device=cpu",
]
CREATED = ["model.create.hidden_size=32", "model.create.layers=1"]
EXAMPLES = ["supervised.batch_size=4", "data.eval.arguments.count=6"]
SAMPLED = [
    "rollout.groups_per_step=4",
    "warmup.steps=2",
    "warmup.batch_size=4",
    "data.eval.arguments.count=6",
]
SMOLLM2 = ["model.path=stand-in"]


@dataclass(frozen=True)
class Case:
    """How a recipe is made small. after: recipes whose runs it begins with."""

    overrides: tuple[str, ...]
    after: tuple[str, ...] = ()


CASES: dict[str, Case] = {
    "quickstart": Case((*CREATED, *SAMPLED, "rollout.group_size=4")),
    "calculator-tool": Case((*CREATED, *SAMPLED, "rollout.group_size=4")),
    "code": Case((*CREATED, *SAMPLED, "rollout.group_size=4")),
    "reasoning-gym": Case(
        (
            *CREATED,
            *(override for override in SAMPLED if "data.eval" not in override),
            "rollout.group_size=4",
            "data.train.arguments.size=40",
            "data.eval.arguments.size=6",
        )
    ),
    "ppo-tiny": Case((*CREATED, *SAMPLED, "critic.warmup_steps=1")),
    "sft-tiny": Case((*CREATED, *EXAMPLES)),
    "dpo-tiny": Case(tuple(EXAMPLES), ("sft-tiny",)),
    "kto-tiny": Case(tuple(EXAMPLES), ("sft-tiny",)),
    "reward-model-tiny": Case(tuple(EXAMPLES), ("sft-tiny",)),
    "process-reward-tiny": Case((*CREATED, *EXAMPLES)),
    "ppo-reward-model-tiny": Case((*CREATED, *SAMPLED, "critic.warmup_steps=1"), ("sft-tiny", "reward-model-tiny")),
    "distill-tiny": Case((*CREATED, *EXAMPLES), ("quickstart",)),
    "offline-tiny": Case(("rollout.groups_per_step=4", "data.eval.arguments.count=6"), ("quickstart",)),
    "smollm2-cpu": Case((*SMOLLM2, "rollout.groups_per_step=4", "data.eval.arguments.count=6")),
    "ppo-smollm2": Case(
        (*SMOLLM2, "rollout.groups_per_step=4", "data.eval.arguments.count=6", "critic.warmup_steps=1")
    ),
    "sft-smollm2": Case((*SMOLLM2, *EXAMPLES)),
    "dpo-smollm2": Case((*SMOLLM2, *EXAMPLES)),
    "kto-smollm2": Case((*SMOLLM2, *EXAMPLES)),
    "reward-model-smollm2": Case((*SMOLLM2, *EXAMPLES)),
}
VARIANTS = ["cdpo", "robust_dpo", "ipo", "simpo", "orpo"]


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The working folder of all runs, with a model that stands in for SmolLM2."""
    folder = tmp_path_factory.mktemp("recipes")
    patch = pytest.MonkeyPatch()
    patch.chdir(folder)
    patch.setattr("os.fsync", lambda _: None)
    _stand_in(folder / "stand-in")
    yield folder
    patch.undo()


def _stand_in(folder: Path) -> None:
    from string import ascii_letters, digits

    from strop.config.model import NewModel
    from strop.models.create import create_model
    from strop.models.save import save_model

    settings = NewModel(characters=f"{ascii_letters}{digits} +=?\n", hidden_size=32, layers=1, heads=2, context=128)
    model, tokenizer = create_model(settings, seed=0)
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m['role'] + '\\n' + m['content'] + '<eos>\\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'assistant\\n' }}{% endif %}"
    )
    save_model(model, tokenizer, folder)


def config_of(name: str, *overrides: str) -> Config:
    return load_config(RECIPES / f"{name}.yaml", [*QUIET, *CASES[name].overrides, *overrides])


_DONE: dict[str, Any] = {}


def _sampled() -> None:
    """The model and the file of completions that `offline-tiny` begins with, as the comment in it says."""
    from strop.loops.rollout import rollout

    config = config_of("quickstart", "run.name=careless", "run.steps=1")
    strop.train(config)
    rollout(config, "careless.parquet", run=Path("runs/careless"), checkpoint=0, prompts=8, samples=4)


def trained(name: str) -> Any:
    """The run of a recipe, and before it of those that it begins with; once for all tests."""
    if name not in _DONE:
        for other in CASES[name].after:
            trained(other)
        if name == "offline-tiny":
            _sampled()
        _DONE[name] = strop.train(config_of(name), recipe=f"{name}.yaml")
    return _DONE[name]


def test_every_recipe_has_a_case_and_a_line_in_the_page() -> None:
    names = sorted(path.stem for path in RECIPES.glob("*.yaml"))
    # That of several stages is run by tests/loops/test_pipeline_runs.py.
    assert sorted([*CASES, "pipeline-tiny"]) == names
    page = (RECIPES.parent / "docs" / "recipes.md").read_text(encoding="utf-8")
    assert [name for name in names if f"`recipes/{name}.yaml`" not in page] == []


def test_every_recipe_loads_as_it_is_and_says_what_comes_first() -> None:
    for name, case in CASES.items():
        load_config(RECIPES / f"{name}.yaml")
        text = (RECIPES / f"{name}.yaml").read_text(encoding="utf-8")
        assert text.startswith("# ")
        first = [other for other in re.findall(r"strop train recipes/([\w-]+)\.yaml", text) if other != name]
        assert tuple(first) == case.after, name
        assert ("strop models fetch smollm2-135m" in text) == ("smollm2" in name), name


@pytest.mark.parametrize("name", CASES)
def test_a_recipe_runs(name: str, workplace: Path) -> None:
    summary = trained(name)
    assert summary.steps == 2
    assert summary.folder.name == name
    assert summary.after
    assert all(math.isfinite(value) for value in summary.after.values() if value is not None)
    assert load_file(summary.model / "model.safetensors")


@pytest.mark.parametrize("method", VARIANTS)
def test_other_ways_with_pairs_are_an_override_away(method: str, workplace: Path) -> None:
    trained("sft-tiny")
    summary = strop.train(config_of("dpo-tiny", f"supervised.method={method}", f"run.name={method}"))
    assert summary.steps == 2
    assert math.isfinite(summary.after["loss"])


def test_the_critic_of_ppo_may_be_shared(workplace: Path) -> None:
    summary = strop.train(config_of("ppo-tiny", "critic.shared=true", "run.name=shared"))
    assert summary.steps == 2
    assert not (summary.folder / "checkpoints" / "step-000002" / "state" / "critic").exists()
