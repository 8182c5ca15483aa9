"""Every key of a recipe that holds free text is one that an operator may set, one that is looked into, or refused."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
from pydantic import BaseModel

from strop.config import Config
from strop.config.base import StrictModel
from strop.errors import UserError
from strop.serve.api.access import Role
from strop.serve.api.admission import (
    FILES,
    FORBIDDEN,
    MODELS,
    OR_FUNCTIONS,
    PLAIN,
    PYTHON_SOURCES,
    Refused,
    admit,
    free_text,
)

REFUSED = {
    ("AlgorithmSettings", "arguments"),
    ("ClusterSettings", "address"),
    ("FunctionTool", "path"),
    ("GymnasiumEnvironment", "actions"),
    ("GymnasiumEnvironment", "arguments"),
    ("GymnasiumEnvironment", "id"),
    ("GymnasiumEnvironment", "observation"),
    ("GymnasiumEnvironment", "opening"),
    ("GymnasiumEnvironment", "seed"),
    ("HttpVerifier", "api_key_env"),
    ("HttpVerifier", "columns"),
    ("HttpVerifier", "url"),
    ("JudgeVerifier", "api_key_env"),
    ("JudgeVerifier", "arguments"),
    ("JudgeVerifier", "base_url"),
    ("JudgeVerifier", "cache"),
    ("JudgeVerifier", "model"),
    ("JudgeVerifier", "pattern"),
    ("JudgeVerifier", "rubric"),
    ("JudgeVerifier", "score_key"),
    ("JudgeVerifier", "system"),
    ("McpTools", "command"),
    ("McpTools", "url"),
    ("OpenEnvEnvironment", "action"),
    ("OpenEnvEnvironment", "actions"),
    ("OpenEnvEnvironment", "arguments"),
    ("OpenEnvEnvironment", "observation"),
    ("OpenEnvEnvironment", "opening"),
    ("OpenEnvEnvironment", "seed"),
    ("OpenEnvEnvironment", "show"),
    ("OpenEnvEnvironment", "url"),
    ("PublishingSettings", "folder"),
    ("PythonEnvironment", "arguments"),
    ("PythonEnvironment", "factory"),
    ("PythonVerifier", "arguments"),
    ("PythonVerifier", "function"),
    ("SandboxSettings", "python"),
    ("SandboxSettings", "token_variable"),
    ("SandboxSettings", "url"),
    ("SelfPlayEnvironment", "arguments"),
    ("SelfPlayEnvironment", "factory"),
    ("ServerSettings", "api_key_env"),
    ("ServerSettings", "folder"),
    ("ServerSettings", "model"),
    ("ServerSettings", "urls"),
    ("SlimeEnvironment", "arguments"),
    ("SlimeEnvironment", "generate"),
    ("SlimeVerifier", "arguments"),
    ("SlimeVerifier", "function"),
    ("SlimeVerifier", "reward_key"),
    ("TrackingSettings", "mlflow_uri"),
    ("TrackingSettings", "wandb_project"),
    ("VerifiersEnvironment", "arguments"),
    ("VerifiersEnvironment", "settings"),
    ("VerifiersEnvironment", "taskset"),
}
"""What only administrators may set. A key that is new in the schema is refused as well, and this test then asks for a
decision: here, or in the tables of `admission.py`."""
LOOKED_INTO = {("DataSource", "path"), ("RunSettings", "folder"), *OR_FUNCTIONS}


def sections(kind: type[BaseModel] = Config, seen: set[type[BaseModel]] | None = None) -> Iterator[type[BaseModel]]:
    """The classes of all sections of a recipe."""
    seen = set() if seen is None else seen
    if kind in seen:
        return
    seen.add(kind)
    yield kind
    for field in kind.model_fields.values():
        for part in parts(field.annotation):
            if isinstance(part, type) and issubclass(part, BaseModel):
                yield from sections(part, seen)


def parts(annotation: Any) -> Iterator[Any]:
    """All types in an annotation."""
    annotation = getattr(annotation, "__value__", annotation)
    yield annotation
    for part in get_args(annotation):
        yield from parts(part)


def test_every_key_with_free_text_is_decided() -> None:
    free = {
        (kind.__name__, key)
        for kind in sections()
        for key, field in kind.model_fields.items()
        if free_text(field.annotation)
        and not (kind.__name__.endswith("Verifier") and key in ("name", "when", "requires"))
    }
    decided = {(kind, key) for table in (PLAIN, MODELS, FILES) for kind, keys in table.items() for key in keys}
    assert len(free) > 60
    assert free - decided - LOOKED_INTO == REFUSED
    assert decided - free == set(), "the tables name keys that are not there"
    assert not decided & REFUSED


def test_what_is_forbidden_is_there() -> None:
    kinds = {kind.__name__: kind for kind in sections()}
    assert all(key in kinds[kind].model_fields for kind, key in FORBIDDEN)


def test_the_python_sources_are_there() -> None:
    import importlib

    for source in PYTHON_SOURCES:
        module, function = source.split(":")
        assert callable(getattr(importlib.import_module(module), function))


def test_a_key_that_is_new_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the schema had one more: a name of somebody's program."""
    from strop.config.run import RunSettings
    from strop.serve.api.admission import Guard

    class Newer(RunSettings):
        program: str | None = None

    class Recipe(StrictModel):
        run: Newer

    guard = Guard(tmp_path, (), False)
    guard.check(Recipe(run=Newer()))  # type: ignore[arg-type]
    with pytest.raises(Refused, match=r"run\.program"):
        guard.check(Recipe(run=Newer(program="sh")))  # type: ignore[arg-type]


def admitted(tmp_path: Path, text: str, role: Role = Role.operator, **more: Any) -> Any:
    return admit(
        text,
        more.pop("overrides", []),
        role=role,
        name=more.pop("name", None),
        fallback="run-1",
        root=tmp_path,
        scratch=tmp_path / "submitted.yaml",
        **more,
    )


def test_the_run_reads_what_was_checked(tmp_path: Path, quickstart: str) -> None:
    from strop.config.loading import load_config

    found = admitted(tmp_path, quickstart, overrides=["run.steps=7"])
    (tmp_path / "r.yaml").write_text(found.text)
    config = load_config(tmp_path / "r.yaml")
    assert (config.run.steps, config.run.name, config.run.folder) == (7, "run-1", str(tmp_path))
    assert admitted(tmp_path, quickstart, name="mine").name == "mine"
    assert admitted(tmp_path, quickstart + "  name: own\n").name == "own"


def test_a_pipeline_is_checked_stage_by_stage(tmp_path: Path, quickstart: str) -> None:
    import yaml

    one = yaml.safe_load(quickstart)
    bad = {**one, "rewards": {"verifiers": [{"kind": "python", "function": "os:system"}]}}
    with pytest.raises(Refused, match="only an administrator"):
        admitted(tmp_path, yaml.safe_dump({"stages": {"a": one, "b": bad}}))
    second = {key: value for key, value in one.items() if key != "warmup"} | {"model": {"path": "stage:a"}}
    found = admitted(tmp_path, yaml.safe_dump({"stages": {"a": one, "b": second}}), name="both")
    read = yaml.safe_load(found.text)
    assert read["name"] == "both"
    assert {stage["run"]["folder"] for stage in read["stages"].values()} == {str(tmp_path)}


def test_folders_and_the_hub_are_taken_where_the_service_was_told(tmp_path: Path, quickstart: str) -> None:
    root, shared = tmp_path / "runs", tmp_path / "shared"
    root.mkdir()
    shared.mkdir()
    (shared / "d.jsonl").write_text('{"prompt": "a", "answer": "b"}\n')
    override = [f"data.train={{path: {shared / 'd.jsonl'}}}"]
    with pytest.raises(Refused):
        admitted(root, quickstart, overrides=override)
    assert admitted(root, quickstart, overrides=override, allowed=[shared])
    with pytest.raises(Refused):
        admitted(root, quickstart, overrides=["data.train={path: some/data}"])
    assert admitted(root, quickstart, overrides=["data.train={path: some/data}"], allow_hub=True)


def test_problems_name_the_recipe_and_no_file_of_the_service(tmp_path: Path, quickstart: str) -> None:
    with pytest.raises(UserError) as caught:
        admitted(tmp_path, quickstart + "  stpes: 3\n")
    assert str(tmp_path) not in caught.value.block()
    assert "recipe, line" in caught.value.block()
