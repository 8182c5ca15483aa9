"""PPO with a critic: its numbers, its place in the loop, and that nothing of it is lost on resume."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tiny_runs import recipe, steps_of, weights_of

from strop.algorithms.supervised import Values, explained_variance
from strop.config.loading import load_config
from strop.errors import ModelError
from strop.loops.online import open_run
from strop.loops.train import train

PPO = {"algorithm.name": "ppo", "critic.optimizer.learning_rate": 1e-2, "training.mini_batches": 2}


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("os.fsync", lambda _: None)


def run(**changes: Any) -> Any:
    return train(load_config(None, data=recipe(**PPO, **changes)))


def test_a_stopped_run_goes_on_with_the_same_critic() -> None:
    whole = run(**{"run.name": "whole", "run.steps": 5})
    run(**{"run.name": "parts", "run.steps": 3})
    parts = run(**{"run.name": "parts", "run.steps": 5})
    assert weights_of(whole.folder) == weights_of(parts.folder)
    assert steps_of(whole.folder) == steps_of(parts.folder)
    ours, theirs = (
        load_file(found.folder / "checkpoints" / "step-000005" / "state" / "critic" / "trainable.safetensors")
        for found in (whole, parts)
    )
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert float(ours["score.weight"].abs().max()) > 0


def test_the_critic_learns_to_tell_what_is_to_come() -> None:
    """The reward is the first digit of the prompt: nothing that is sampled matters, and everything can be known."""
    summary = run(**{
        "rewards.verifiers": [{"kind": "python", "function": "tiny_rewards:first_digit"}],
        "run.steps": 30,
        "rollout.groups_per_step": 16,
        "algorithm.value_clip": 10.0,
        "checkpoint.every": 100,
    })  # fmt: skip
    found = [line["critic/explained_variance"] for kind, _, line in steps_of(summary.folder) if kind == "train"]
    assert abs(found[0]) < 0.05
    assert sum(found[-5:]) / 5 > 0.6


def test_while_the_critic_warms_up_the_policy_stays() -> None:
    still = run(**{"run.name": "still", "critic.warmup_steps": 2})
    first = load_file(still.folder / "checkpoints" / "step-000000" / "model" / "model.safetensors")
    last = load_file(still.model / "model.safetensors")
    assert all(torch.equal(first[name], last[name]) for name in first)
    lines = [line for kind, _, line in steps_of(still.folder) if kind == "train"]
    assert all("critic/loss" in line and "loss" not in line for line in lines)
    moved = run(**{"run.name": "moved", "critic.warmup_steps": 1})
    last = load_file(moved.model / "model.safetensors")
    assert not all(torch.equal(first[name], last[name]) for name in first)


async def test_values_are_the_scalar_head_before_each_token() -> None:
    async with open_run(load_config(None, data=recipe(**PPO))) as opened:
        await opened.begin()
        assert opened.critic is not None
        model = opened.critic.trainer.model
        torch.nn.init.normal_(model.score.weight, generator=torch.Generator().manual_seed(0))
        batch = await opened.build_batch(await opened.collect())
        assert batch.values is not None
        assert batch.returns is not None
        for at in range(batch.sequences):
            inside = batch.seq_ids == at
            ids, mask = batch.input_ids[inside], batch.loss_mask[inside]
            with torch.no_grad():
                hidden = model.model(input_ids=ids[None], use_cache=False).last_hidden_state[0]
            expected = torch.nn.functional.linear(hidden, model.score.weight)[:-1, 0]
            found = batch.values[inside]
            assert torch.allclose(found[1:][mask[1:]], expected[mask[1:]], atol=1e-5)
            assert not bool(found[~mask].any())
        # With gamma 1 and one reward at the end, advantage + value = return of each token.
        last = torch.cat([batch.seq_ids[1:] != batch.seq_ids[:-1], torch.tensor([True])]) & batch.loss_mask
        assert torch.allclose(batch.returns[last], batch.rewards, atol=1e-5)
        before = dict(batch.extra)
        opened.critic.update(batch)
        assert batch.extra == before
        assert batch.old_logprobs is None


def test_explained_variance_by_hand() -> None:
    values, returns = torch.tensor([1.0, 2.0, 9.0, 4.0]), torch.tensor([1.0, 3.0, 7.0, 5.0])
    mask = torch.tensor([True, True, False, True])
    errors, targets = [0.0, 1.0, 1.0], [1.0, 3.0, 5.0]

    def variance(numbers: list[float]) -> float:
        mean = sum(numbers) / len(numbers)
        return sum((number - mean) ** 2 for number in numbers)

    assert explained_variance(values, returns, mask) == pytest.approx(1 - variance(errors) / variance(targets))
    assert explained_variance(values, torch.ones(4), mask) == 0.0
    assert explained_variance(returns, returns, mask) == 1.0


def test_the_value_loss_is_a_mean_over_the_tokens_of_the_mini_batch() -> None:
    class Half:
        def value_loss(self, batch: Any, values: Any) -> Any:
            return (values - batch.returns).square() / 2, {}

    class Batch:
        loss_mask = torch.tensor([True, False, True])
        returns = torch.tensor([1.0, math.nan, 3.0])

    objective: Any = Values(Half())
    terms = objective.loss(Batch(), torch.tensor([0.0, 5.0, 1.0]), None).terms["value"]
    assert float(objective.reduce(terms, Batch(), objective.denominators(Batch())[""])) == (0.5 + 2.0) / 2


def test_a_critic_with_another_vocabulary_is_refused() -> None:
    from strop.config.model import NewModel
    from strop.models.create import create_model
    from strop.models.save import save_model

    save_model(*create_model(NewModel(characters="01", hidden_size=32, layers=1, heads=2), seed=0), "small")
    with pytest.raises(ModelError, match="different tokenizers"):
        run(**{"critic.path": "small"})


def test_adapters_of_the_policy_do_not_touch_the_critic() -> None:
    summary = run(**{"model.lora": {"rank": 2}})
    lines = [line for kind, _, line in steps_of(summary.folder) if kind == "train"]
    assert all(line["critic/grad_norm"] >= 0 for line in lines)
