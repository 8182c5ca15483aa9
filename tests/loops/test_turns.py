"""Trainer and engine in turn: a run in which each gives its memory to the other is the same bit for bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_runs import HELD_OUT, put, recipe, steps_of, weights_of

from strop.config.loading import load_config
from strop.errors import ConfigError
from strop.loops.engine_choices import BESIDE_THE_TRAINER, IN_TURN, check_engine, engine_memory, share_beside_trainer
from strop.loops.online import open_run
from strop.loops.prepare import prepare
from strop.loops.rank_host import RankHost, Task
from strop.loops.remote_trainer import RemoteCritic, RemoteTrainer
from strop.loops.train import train

WARMUP = {"steps": 3, "batch_size": 4, "optimizer": {"learning_rate": 1e-2}}
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "bfloat16": {"model.dtype": "bfloat16"},
    "warm-up and evaluations": {"warmup": WARMUP, "data.eval": HELD_OUT, "evaluation.every": 1},
    "critic": {"algorithm.name": "ppo", "training.mini_batches": 2},
    "shared critic": {"algorithm.name": "ppo", "critic.shared": True},
    "saved behind": {"checkpoint": {"every": 1, "in_background": True}},
}


@pytest.fixture(autouse=True)
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("os.fsync", lambda _: None)
    # On a CPU a move frees nothing, and is refused; that it changes nothing can be seen all the same.
    monkeypatch.setattr("strop.loops.prepare.check_optimizers", lambda *_: None)
    return tmp_path


def data_of(name: str, *, turns: bool, **changes: Any) -> dict[str, Any]:
    data = recipe(**{"run.name": name, "run.steps": 4, "checkpoint.every": 1, **changes})
    if turns:
        put(data, "rollout.engine.sleep", "always")
        put(data, "training.offload", True)
    return data


def train_lines(run: Path) -> list[dict[str, float]]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line["metrics"] for line in lines if line["kind"] == "train"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_in_turns_is_the_same_bit_for_bit(kind: str) -> None:
    apart, turns = (
        train(load_config(None, data=data_of(name, turns=name == "turns", **KINDS[kind])), fresh=True).folder
        for name in ("apart", "turns")
    )
    assert steps_of(turns) == steps_of(apart)
    assert weights_of(turns) == weights_of(apart)
    for folder in sorted((apart / "checkpoints").glob("step-*")):
        for state in sorted((folder / "state").rglob("*.safetensors")):
            other = turns / state.relative_to(apart)
            assert other.read_bytes() == state.read_bytes(), state
    names = {"time/sleep", "time/wake", "time/offload", "time/reload", "memory/trainer_offloaded_gib"}
    for line in train_lines(turns):
        assert names <= line.keys()
        assert line["memory/trainer_offloaded_gib"] > 0 or line["learning_rate"] > 0
    assert train_lines(turns)[-1]["memory/trainer_offloaded_gib"] > 0
    assert not any(names & line.keys() for line in train_lines(apart))


def test_a_run_goes_on_from_a_checkpoint_that_was_saved_while_the_state_was_away() -> None:
    whole = train(load_config(None, data=data_of("whole", turns=False)), fresh=True).folder
    part = data_of("part", turns=True)
    train(load_config(None, data={**part, "run": {**part["run"], "steps": 2}}), fresh=True)
    found = train(load_config(None, data=part), fresh=False).folder
    assert weights_of(found) == weights_of(whole)


async def test_whose_turn_it_is() -> None:
    """The engine is awake when it is asked, and the state is here when it is updated, in any order of the verbs."""
    with prepare(load_config(None, data=data_of("order", turns=True, **{"data.eval": HELD_OUT}))) as prepared:
        prepared.close()
    async with open_run(load_config(None, data=data_of("order", turns=True, **{"data.eval": HELD_OUT}))) as run:
        said: list[str] = []
        parked = lambda: run.trainer.optimizer.parked.away  # noqa: E731

        for verb in ("sleep", "wake", "generate", "update_weights"):

            def noting(verb: str = verb, call: Any = getattr(run.engine, verb)) -> Any:
                async def note(*arguments: Any) -> Any:
                    said.append(verb)
                    if verb == "generate":
                        assert not run._turns.asleep
                        assert parked()
                    return await call(*arguments)

                return note

            setattr(run.engine, verb, noting())
        await run.begin()
        assert "sleep" not in said
        groups = await run.collect()
        assert said[-1] == "sleep"
        # No update, and nothing published: the engine gets the weights as they are.
        said.clear()
        await run.evaluate()
        assert said[:3] == ["wake", "update_weights", "generate"]
        batch = await run.build_batch(groups)
        assert parked()
        stats = await run.update(batch)
        assert stats["learning_rate"] > 0
        assert not parked()
        run.step += 1
        said.clear()
        await run.publish()
        assert parked()
        await run.collect()
        assert run._turns.asleep
        said.clear()
        await run._turns.engine_done()
        assert said == []


def test_a_trainer_in_another_process_is_told_too() -> None:
    """What is sent to a rank, here in this process, does it to the rank's trainer and critic."""
    data = data_of("ranks", turns=True, **KINDS["critic"])
    with prepare(load_config(None, data=data)) as prepared:
        host = RankHost(Task(prepared.config, 8, prepared.needs_reference, False, prepared.algorithm), colocated=True)

    def ask(method: str, *arguments: Any, **_: Any) -> Any:
        return getattr(host, method)(*arguments)

    host.make_trainer(prepared.config.training.optimizer, 4, True)
    trainer: Any = RemoteTrainer(ask, prepared.config.training.optimizer)  # type: ignore[arg-type]
    critic = RemoteCritic(ask, prepared.algorithm)  # type: ignore[arg-type]
    assert host.critic is not None
    both = [host.trainer.optimizer, host.critic.trainer.optimizer]
    for optimizer in both:
        for weight in optimizer.parameters.values():
            weight.grad = torch.ones_like(weight)
        optimizer.step()
    moved = trainer.offload() + critic.offload()
    assert moved == sum(value.nbytes for one in both for value in one.state().values() if value.numel() > 1)
    assert [one.parked.away for one in both] == [True, True]
    assert trainer.reload() + critic.reload() == moved
    assert [one.parked.away for one in both] == [False, False]


def test_what_vllm_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def settings(**changes: Any) -> Any:
        return load_config(None, data=recipe(**{"rollout.engine.kind": "vllm", **changes}))

    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    asked = settings(**{"rollout.engine.sleep": "always"})
    check_engine(asked, "cuda")
    with pytest.raises(ConfigError, match=r"vLLM gives memory back on CUDA only.*this is cpu") as caught:
        check_engine(asked, "cpu")
    assert caught.value.where == "rollout.engine.sleep"
    assert "local" in caught.value.mend
    assert engine_memory(settings(), sleeps=True) == BESIDE_THE_TRAINER
    away = settings(**{"training.offload": True})
    assert engine_memory(away) == BESIDE_THE_TRAINER
    assert engine_memory(away, sleeps=True) == IN_TURN
    assert engine_memory(settings(**{"training.offload": True, "rollout.engine.memory": 0.2}), sleeps=True) == 0.2
    assert share_beside_trainer(settings()) == BESIDE_THE_TRAINER
    elsewhere = {"kind": "ray", "engines": {"placement": "separate"}}
    assert share_beside_trainer(load_config(None, data={**recipe(), "cluster": elsewhere})) == 0.0


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"training.optimizer.offload": True}, r"with training\.optimizer\.offload"),
        ({"cluster": {"kind": "ray", "trainer": {"ranks": 2, "offload": True}}}, r"with cluster\.trainer\.offload"),
    ],
)
def test_a_state_that_is_always_away_has_nowhere_to_go(changes: dict[str, Any], why: str) -> None:
    data = recipe(**{"training.offload": True, **changes})
    with pytest.raises(ConfigError, match=why), prepare(load_config(None, data=data)):
        pass
