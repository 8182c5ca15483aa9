"""Whole runs in the consistent mode: sampler and trainer agree to the last bit at every step; and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tiny_runs import recipe

from strop.config.loading import load_config
from strop.errors import ConfigError
from strop.loops.prepare import prepare
from strop.loops.train import train

KEY = "rollout.engine.consistent"
MISMATCH = ("mismatch/mean", "mismatch/max", "kl/sampler", "publish/probe_gap")


@pytest.fixture(autouse=True)
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("os.fsync", lambda _: None)
    return tmp_path


def steps_of(**changes: Any) -> list[dict[str, float]]:
    """Metrics of the steps of a run."""
    found = train(load_config(None, data=recipe(**{"run.steps": 4, **changes})), fresh=True)
    lines = [json.loads(line) for line in (found.folder / "metrics.jsonl").read_text().splitlines()]
    return [line["metrics"] for line in lines if line["kind"] == "train"]


@pytest.mark.parametrize("lora", [None, {"rank": 4}])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_sampler_and_trainer_agree_to_the_last_bit(lora: dict[str, Any] | None, dtype: str) -> None:
    changes = {
        "model.lora": lora,
        "model.dtype": dtype,
        "model.activation_checkpointing": True,
        "training.tokens_per_micro_batch": 40,
        "rollout.engine.max_sequences": 5,
        "rollout.temperature": 0.9,
    }
    steps = steps_of(**{KEY: True}, **changes)
    assert len(steps) == 4
    for step in steps:
        assert {name: step[name] for name in MISMATCH} == dict.fromkeys(MISMATCH, 0.0)
        assert step["grad_norm"] > 0
    # Without the mode the same run has some.
    assert max(step["mismatch/max"] for step in steps_of(**changes)) > 0


def test_the_reference_computes_so_too() -> None:
    steps = steps_of(**{KEY: True, "algorithm.kl_coef": 0.1})
    assert steps[0]["kl/ref"] == 0
    assert steps[-1]["kl/ref"] > 0
    for step in steps:
        # One update a step, which is on-policy: the ratio is that to the sampler.
        assert (step["policy/ratio"], step["policy/ratio_max"], step["mismatch/weight_max"]) == (1.0, 1.0, 1.0)


def test_several_updates_of_a_step() -> None:
    for step in steps_of(**{KEY: True, "training.mini_batches": 2, "training.epochs": 2}):
        assert step["mismatch/max"] == 0
        assert step["policy/ratio_max"] > 1


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"rollout.engine.kind": "vllm"}, r"consistent` has no effect on the engine vllm"),
        ({"rollout.engine.pack_weights": True}, r"pack_weights` does not go with"),
        ({"training.compile": True}, r"training\.compile` does not go with"),
        ({"model.lora": {"rank": 2, "dropout": 0.1}}, r"model\.lora\.dropout` does not go with"),
        ({"model.lora": {"rank": 2, "dora": True}}, r"model\.lora\.dora` does not go with"),
        ({"model.lora": {"rank": 8, "adaptive": {}}}, r"model\.lora\.adaptive` does not go with"),
        ({"cluster": {"kind": "ray", "trainer": {"ranks": 2, "tensor": 2}}}, r"cluster\.trainer\.tensor` does not go"),
        ({"cluster": {"kind": "ray", "trainer": {"ranks": 2, "context": 2}}}, r"cluster\.trainer\.context` does not"),
    ],
)
def test_what_would_compute_otherwise_is_refused(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says), prepare(load_config(None, data=recipe(**{KEY: True, **changes}))):
        pass


def test_recorded_completions_are_refused(workplace: Path) -> None:
    row = {"prompt": "1+1=", "reward": 1.0, "group": 0}
    Path("rollouts.jsonl").write_text("".join(json.dumps({**row, "completion": c}) + "\n" for c in "123456"))
    data = recipe(
        **{
            "data": {"train": {"path": "rollouts.jsonl"}, "eval": recipe()["data"]["train"]},
            "offline": {"logprobs": "none", "columns": {"group": "group"}},
        }
    )
    del data["rollout"]["group_size"]
    data["rollout"]["engine"] = {"consistent": True}
    with (
        pytest.raises(ConfigError, match="consistent` has no effect with `offline`"),
        prepare(load_config(None, data=data)),
    ):
        pass


def test_a_family_that_the_mode_does_not_know_is_refused_before_it_is_loaded(
    workplace: Path, tiny_model: Any, character_tokenizer: Any
) -> None:
    tiny_model("gemma2").save_pretrained("other")
    character_tokenizer.save_pretrained("other")
    data = recipe(**{KEY: True, "model": {"path": "./other"}})
    with pytest.raises(ConfigError, match="not those of gemma2"), prepare(load_config(None, data=data)):
        pass
