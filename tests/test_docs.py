"""What the documents say is true of the code: keys exist, recipes load, links lead somewhere, names can be imported."""

from __future__ import annotations

import ast
import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from strop.config import Config
from strop.config import explain as keys
from strop.config.loading import load_config
from strop.config.pipeline_loading import load_pipeline

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]
BASE: dict[str, Any] = {
    "model": {"path": "smollm2-135m"},
    "data": {"train": {"path": "questions.jsonl"}},
    "rewards": {"verifiers": [{"kind": "exact"}]},
}
SECTIONS = "|".join(Config.model_fields)
NOT_KEYS = {"supervised.py", "run.step", "run.json", "run.lock"}
"""An attribute and two files that look like keys of the section `run`."""


def blocks(language: str) -> list[Any]:
    """The fenced blocks of all pages in a language, each named by its page and line."""
    found = []
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for match in re.finditer(rf"^```{language}\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
            line = text[: match.start()].count("\n") + 1
            found.append(pytest.param(match[1], id=f"{page.name}:{line}"))
    return found


def names(path: Path) -> set[str]:
    """What a module defines or imports at its top."""
    found: set[str] = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ImportFrom | ast.Import):
            found |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
    return found


def sentences(path: Path) -> list[str]:
    """The texts in a module, each f-string as one, with `…` for what is filled in."""
    found = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.JoinedStr):
            found.append("".join(str(p.value) if isinstance(p, ast.Constant) else "…" for p in node.values))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.append(node.value)
    return found


@pytest.fixture
def generate(monkeypatch: pytest.MonkeyPatch) -> Any:
    """`docs/generate.py`, which finds the modules beside it."""
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    spec = importlib.util.spec_from_file_location("generate", ROOT / "docs" / "generate.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_of_all_keys_is_current(generate: Any) -> None:
    page = generate.page()
    assert generate.PAGE.read_text(encoding="utf-8") == page, "run: python docs/generate.py"
    for leaf in keys.leaves():
        assert f"| `{leaf.path}` |" in page


def test_what_was_measured_on_gpus_is_current(generate: Any) -> None:
    page = generate.MEASURED.read_text(encoding="utf-8")
    assert generate.measured.with_section(page) == page, "run: python docs/generate.py"
    for name in generate.measured.TABLES:
        there = (generate.measured.RESULTS / f"{name}.json").exists()
        assert (f"benchmarks/results/{name}.json`)." in page) == there
    with pytest.raises(ValueError, match="needs the lines"):
        generate.measured.with_section("# A page without a place for it")


@pytest.mark.parametrize("text", blocks("yaml"))
def test_recipes_in_the_pages_load(text: str) -> None:
    """A fragment stands for a recipe whose other sections are the least that a recipe needs; a pipeline is whole."""
    fragment = yaml.safe_load(text)
    if "stages" in fragment:
        load_pipeline(None, data=fragment)
        return
    base = {key: value for key, value in BASE.items() if key != "rewards" or "supervised" not in fragment}
    load_config(None, data={**base, **fragment})


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_keys_named_in_a_page_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for named in re.findall(rf"`((?:{SECTIONS})\.[a-z0-9_.]+)(?:=[^`]*|: [^`]*)?`", text):
        assert named in NOT_KEYS or keys.find(named.rstrip(".")) is not None, f"{page.name}: {named}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_overrides_in_commands_load(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for given in re.findall(rf"(?<![\w.])((?:{SECTIONS})\.[a-z0-9_.]+=[^\s`\"\])]+)", text):
        base = {key: value for key, value in BASE.items() if key != "rewards" or not given.startswith("supervised")}
        load_config(None, [given.rstrip(",.;")], data=base)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_and_files_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    links = [link.split("#")[0] for link in re.findall(r"\]\(([^)]+)\)", text) if "://" not in link]
    for link in links:
        assert (page.parent / link).exists(), f"{page.name} links to {link}"
    for file in re.findall(r"\b((?:recipes|examples|benchmarks|tests|docs)/[\w/]+\.(?:py|yaml|md))\b", text):
        assert (ROOT / file).exists(), f"{page.name} names {file}"
    for module in re.findall(r"`((?:config|models|data|rewards|rollout|algorithms|training|loops)/[\w/]+\.py)`", text):
        assert (ROOT / "src" / "strop" / module).exists(), f"{page.name} names {module}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_python_functions_named_for_recipes_exist(page: Path) -> None:
    for module, function in re.findall(r"\b(strop(?:\.\w+)+):(\w+)", page.read_text(encoding="utf-8")):
        path = ROOT / "src" / Path(*module.split(".")).with_suffix(".py")
        assert function in names(path), f"{page.name}: {module}:{function}"


def test_messages_in_the_troubleshooting_page_are_those_of_the_code() -> None:
    said = [text for path in (ROOT / "src").rglob("*.py") for text in sentences(path)]
    page = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    table = page.split("## It stops")[1].split("## ")[0]
    messages = re.findall(r"^\| `([^`]+)` \|", table, re.MULTILINE)
    assert len(messages) > 10
    for message in messages:
        # A gap of the page may stand for words of the code, and the code's gaps for words of the page.
        pattern = ".*".join(re.escape(part.strip()) for part in message.split("…"))
        assert any(re.search(pattern, text) for text in said), message


def test_metrics_named_in_the_pages_are_logged() -> None:
    source = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "src").rglob("*.py"))
    kinds = "time|reward|completion|advantage|errors|kl|mismatch|policy|publish"
    named = {
        name for page in PAGES for name in re.findall(rf"`((?:{kinds})/[a-z_]+)`", page.read_text(encoding="utf-8"))
    }
    assert len(named) > 10
    assert not {name for name in named if f'"{name}"' not in source}


def test_steps_named_in_the_pages_are_those_of_the_quickstart() -> None:
    steps = load_config(ROOT / "recipes" / "quickstart.yaml").run.steps
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    more = re.search(r"quickstart\.yaml run\.steps=(\d+) # go on for (\d+) more", readme)
    assert more is not None
    assert int(more[1]) - int(more[2]) == steps
    assert f"step-{steps:06d}/model" in (ROOT / "docs" / "checkpoints.md").read_text(encoding="utf-8")


def test_the_loop_in_the_readme_is_that_of_the_example() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    shown = re.search(r"^async with strop\.open_run.*?^```", readme, re.MULTILINE | re.DOTALL)
    assert shown is not None
    example = [line.strip() for line in (ROOT / "examples" / "quickstart.py").read_text().splitlines()]
    for line in shown[0].removesuffix("```").splitlines():
        assert line.strip() in example, line


def test_the_loop_in_the_architecture_is_the_loop() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    shown = re.search(r"^async with open_run\(.*?^```", page, re.MULTILINE | re.DOTALL)
    assert shown is not None
    code = (ROOT / "src/strop/loops/online.py").read_text(encoding="utf-8")
    lines = [f"    {line}\n" for line in shown[0].removesuffix("```").rstrip().splitlines()]
    assert "".join(lines) in code
