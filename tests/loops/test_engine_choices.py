"""Which engine samples, what it is told, and what is refused; needs no vLLM."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_runs import recipe

from strop.config.loading import load_config
from strop.errors import ConfigError, MissingExtra, UserError
from strop.loops import assembly
from strop.loops.engine_choices import ALONE, BESIDE_THE_TRAINER, check_adapters, check_engine, engine_memory
from strop.loops.prepare import prepare
from strop.rollout.engines.vllm_start import VllmSettings


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """What vLLM would be started with, by the changes of a recipe."""
    monkeypatch.chdir(tmp_path)
    found: dict[str, Any] = {}

    class Core:
        def __init__(self, config: Any, architecture: str, settings: VllmSettings, workers: Any) -> None:
            found.update(config=config, architecture=architecture, settings=settings, workers=workers)

        def push(self, weights: Any, adapters: Path | None = None) -> None:
            found.update(pushed=set(weights), adapters=None if adapters is None else list(adapters.glob("*.*n*")))

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


def test_an_engine_on_several_gpus_is_told_how_weights_get_there(told: Any) -> None:
    alone = told()
    assert (alone["settings"].tensor, alone["workers"]) == (1, None)
    several = told(**{"rollout.engine.tensor": 2})
    assert several["settings"].tensor == 2
    assert several["workers"].extension == "strop.publishing.into_vllm.WorkerExtension"
    with pytest.raises(UserError, match="2 attention heads cannot be divided among 3 GPUs"):
        told(**{"rollout.engine.tensor": 3})


def test_adapters_beside_the_weights(told: Any) -> None:
    lora = {"model.lora": {"rank": 24}}
    merged = told(**lora)
    assert merged["settings"].adapter_rank == 0
    beside = told(**lora, **{"rollout.engine.merge_adapters": False})
    assert beside["settings"].adapter_rank == 24
    assert beside["pushed"] == merged["pushed"]
    assert {path.name for path in beside["adapters"]} == {"adapter_config.json", "adapter_model.safetensors"}


@pytest.mark.parametrize(
    ("lora", "says"),
    [
        (None, "no effect without `model.lora`"),
        ({"dora": True}, "vLLM knows plain adapters only, and the recipe sets model.lora.dora"),
        ({"rank": 8, "adaptive": {"target_rank": 4}}, "the recipe sets model.lora.adaptive"),
    ],
)
def test_adapters_that_vllm_cannot_have_beside_the_weights(
    monkeypatch: pytest.MonkeyPatch, lora: dict[str, Any] | None, says: str
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    data = recipe(**{"rollout.engine.kind": "vllm", "rollout.engine.merge_adapters": False, "model.lora": lora})
    with pytest.raises(ConfigError, match=says):
        check_engine(load_config(None, data=data), "cpu")


def test_adapters_of_experts_are_merged_only(monkeypatch: pytest.MonkeyPatch) -> None:
    class Experts(torch.nn.Module):
        parameter_name = "gate_up_proj"

    data = recipe(**{"rollout.engine.kind": "vllm", "model.lora": {"rank": 2}})
    model = torch.nn.Sequential(Experts())
    check_adapters(load_config(None, data=data), model)
    data["rollout"]["engine"]["merge_adapters"] = False
    with pytest.raises(UserError, match="stacked experts"):
        check_adapters(load_config(None, data=data), model)


def test_several_gpus_that_are_not_there_or_sleep_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr("strop.loops.engine_choices._gpus", lambda: 2)

    def problems(**changes: Any) -> list[tuple[str, str]]:
        engine = {"rollout.engine.kind": "vllm", "rollout.engine.tensor": 4}
        with pytest.raises(ConfigError) as caught:
            check_engine(load_config(None, data=recipe(**{**engine, **changes})), "cuda")
        return [(problem.where, problem.what) for problem in caught.value.problems]

    [(where, what)] = problems()
    assert where == "rollout.engine.tensor"
    assert "asks for 4 GPUs, and this machine shows 2" in what
    asleep = problems(**{"rollout.engine.sleep": "always", "rollout.engine.tensor": 2})
    assert [where for where, _ in asleep] == ["rollout.engine.sleep"]


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
