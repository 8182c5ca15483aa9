"""Which engine samples, what it is told, and what is refused; needs no vLLM."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_runs import recipe

from strop.config.loading import load_config
from strop.errors import ConfigError, MissingExtra
from strop.loops import assembly
from strop.loops.engine_choices import ALONE, BESIDE_THE_TRAINER, check_engine, engine_memory
from strop.loops.prepare import prepare
from strop.rollout.engines.vllm_core import VllmSettings


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """What vLLM would be started with, by the changes of a recipe."""
    monkeypatch.chdir(tmp_path)
    found: dict[str, Any] = {}

    class Core:
        def __init__(self, config: Any, architecture: str, settings: VllmSettings) -> None:
            found.update(config=config, architecture=architecture, settings=settings)

        def push(self, weights: Any) -> None:
            found.update(pushed=set(weights))

    monkeypatch.setattr(assembly, "VllmCore", Core)
    monkeypatch.setattr("strop.loops.prepare.check_engine", lambda *_: None)

    def start(**changes: Any) -> dict[str, Any]:
        config = load_config(None, data=recipe(**{"rollout.engine.kind": "vllm", **changes}))
        with prepare(config) as prepared:
            assembly.make_engine(prepared, assembly.load_roles(prepared))
        return dict(found)

    return start


def test_vllm_is_told_what_the_recipe_says(told: Any) -> None:
    usual = told()
    assert usual["architecture"] == "LlamaForCausalLM"
    assert "model.embed_tokens.weight" in usual["pushed"]
    settings: VllmSettings = usual["settings"]
    assert settings.context == usual["config"].max_position_embeddings
    assert (settings.dtype, settings.eager, settings.prefix_caching) == (torch.float32, True, True)
    changed: VllmSettings = told(
        **{
            "rollout.engine.eager": False,
            "rollout.engine.prefix_caching": False,
            "rollout.engine.max_sequences": 3,
            "rollout.engine.prefill_tokens": 77,
            "rollout.engine.memory": 0.55,
        }
    )["settings"]
    assert (changed.eager, changed.prefix_caching, changed.max_sequences) == (False, False, 3)
    assert (changed.prefill_tokens, changed.memory) == (77, 0.55)


@pytest.mark.parametrize(
    ("cluster", "share"),
    [
        ({}, BESIDE_THE_TRAINER),
        ({"kind": "ray"}, BESIDE_THE_TRAINER),
        ({"kind": "ray", "engines": {"placement": "separate"}}, ALONE),
        ({"kind": "ray", "engines": {"count": 2}}, ALONE),
    ],
)
def test_memory_beside_the_trainer_and_alone(cluster: dict[str, Any], share: float) -> None:
    data = recipe(**{"rollout.engine.kind": "vllm"})
    assert engine_memory(load_config(None, data={**data, "cluster": cluster})) == share


def test_what_cannot_work_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def settings(**changes: Any) -> Any:
        return load_config(None, data=recipe(**{"rollout.engine.kind": "vllm", **changes}))

    there = object()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingExtra, match=r"pip install 'strop\[vllm\]'"):
        check_engine(settings(), "cpu")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: there)
    check_engine(settings(), "cpu")
    check_engine(settings(**{"rollout.engine.memory": 0.5}), "cuda")
    with pytest.raises(ConfigError, match="no effect without a GPU"):
        check_engine(settings(**{"rollout.engine.memory": 0.5}), "cpu")
    with pytest.raises(ConfigError, match="does not sample on mps"):
        check_engine(settings(), "mps")


def test_a_key_of_another_engine_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    data = recipe(**{"rollout.engine.kind": "vllm", "rollout.engine.pack_weights": False})
    with (
        pytest.raises(ConfigError, match=r"pack_weights` has no effect on the engine vllm"),
        prepare(load_config(None, data=data)),
    ):
        pass
