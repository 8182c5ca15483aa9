"""`strop algorithms`: the list, the pages, and the generated page of the maths."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest
from typer.testing import CliRunner

from strop.algorithms.dialects import DIALECTS
from strop.algorithms.named import ALGORITHMS, build_algorithm
from strop.algorithms.policy_gradient import resolved
from strop.cli import app
from strop.cli_algorithms import page
from strop.config import explain
from strop.errors import UserError

ROOT = Path(__file__).parents[1]


def invoke(*arguments: str) -> str:
    result = CliRunner().invoke(app, ["algorithms", *arguments])
    assert result.exit_code == 0, result.output
    return result.output


def test_list_names_every_algorithm_and_its_paper() -> None:
    lines = invoke("list").splitlines()
    for name in ALGORITHMS:
        [line] = [line for line in lines if line.split() and line.split()[0] == name]
        assert any(mark in line for mark in ("arXiv", "doi", "http")), line


@pytest.mark.parametrize("name", ALGORITHMS)
def test_show_prints_every_choice_in_force_and_each_is_a_key(name: str) -> None:
    text = invoke("show", name)
    algorithm = build_algorithm(name, group_size=2, max_new_tokens=256)
    rows = {line.split()[0]: line.split()[1] for line in text.splitlines() if line.strip().startswith("algorithm.")}
    expected = {f"algorithm.{key}": value for key, value in resolved(algorithm).items()}
    for aside in ("algorithm.name", "algorithm.max_new_tokens"):
        expected.pop(aside, None)
    assert rows.keys() == expected.keys()
    for key, value in expected.items():
        shown = "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
        assert rows[key] == shown
        assert explain.find(key) is not None, key


@pytest.mark.parametrize("dialect", DIALECTS)
def test_show_says_what_a_dialect_changes(dialect: str) -> None:
    text = invoke("show", "grpo", "--dialect", dialect)
    before = resolved(build_algorithm("grpo", group_size=2, max_new_tokens=256))
    after = resolved(build_algorithm("grpo", group_size=2, max_new_tokens=256, dialect=dialect))
    changed = {key for key in before.keys() & after.keys() if before[key] != after[key]}
    marked = {
        line.split()[0].removeprefix("algorithm.")
        for line in text.splitlines()
        if line.startswith("  algorithm.") and f"{dialect} (else" in line
    }
    assert marked == changed


def test_a_wrong_name_is_answered_with_the_nearest() -> None:
    with pytest.raises(UserError, match="did you mean gspo"):
        page("gsop", None)
    with pytest.raises(UserError, match="did you mean verl"):
        page("grpo", "vrel")


def generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("generate_maths", ROOT / "docs" / "generate_maths.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_of_the_maths_is_current_and_whole() -> None:
    module = generator()
    text = module.page()
    assert module.PAGE.read_text(encoding="utf-8") == text, "run: python docs/generate_maths.py"
    for chapter in module.CHAPTERS.values():
        for function in module.functions(chapter):
            assert f"#### `{function.__name__}`" in text
            assert module.EXAMPLES[function.__name__], function.__name__
    for name in (*ALGORITHMS, *DIALECTS):
        assert name in text


def test_the_values_on_the_page_are_computed() -> None:
    module = generator()
    assert module.evaluate("group_relative(tensor([0.0, 1]), tensor([0, 0]))") == "[-0.5, 0.5]"
    assert module.evaluate("kl_estimate(tensor([-1.0]), tensor([0.0]), 'k3')") == "[0.7183]"
