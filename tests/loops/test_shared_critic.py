"""A critic on the policy's backbone: one pass, one optimizer, a head that stays out of the model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tiny_runs import counted, recipe, steps_of, weights_of

from strop.algorithms.named import PPO
from strop.algorithms.supervised import WithValues
from strop.config.loading import load_config
from strop.errors import ConfigError
from strop.loops.critic import SharedCritic
from strop.loops.online import open_run
from strop.loops.train import train

SHARED = {
    "algorithm.name": "ppo",
    "critic": {"shared": True, "optimizer": {"learning_rate": 3e-2}},
    "training.mini_batches": 2,
}
HEAD = "value_head.weight"


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("os.fsync", lambda _: None)


def config_of(**changes: Any) -> Any:
    return load_config(None, data=recipe(**{**SHARED, **changes}))


def trained_lines(folder: Path) -> list[dict[str, Any]]:
    return [line for kind, _, line in steps_of(folder) if kind == "train"]


def state_of(summary: Any) -> dict[str, torch.Tensor]:
    folder = summary.folder / "checkpoints" / f"step-{summary.steps:06d}" / "state"
    assert not (folder / "critic").exists()
    return load_file(folder / "trainable.safetensors")


@pytest.mark.parametrize("lora", [None, {"rank": 2}])
def test_a_stopped_run_goes_on_bit_for_bit(lora: Any) -> None:
    # The first part ends within the critic's warm-up.
    changes = {"model.lora": lora, "critic.warmup_steps": 3}
    whole = train(config_of(**changes, **{"run.name": "whole", "run.steps": 5}))
    train(config_of(**changes, **{"run.name": "parts", "run.steps": 2}))
    parts = train(config_of(**changes, **{"run.name": "parts", "run.steps": 5}))
    assert weights_of(whole.folder) == weights_of(parts.folder)
    assert steps_of(whole.folder) == steps_of(parts.folder)
    ours, theirs = state_of(whole), state_of(parts)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert float(ours[HEAD].abs().max()) > 0


def test_the_head_is_in_the_state_and_not_in_the_model() -> None:
    from transformers import AutoModelForCausalLM

    summary = train(config_of())
    assert HEAD in state_of(summary)
    assert not [name for name in load_file(summary.model / "model.safetensors") if "value" in name]
    model, report = AutoModelForCausalLM.from_pretrained(summary.model, output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    # All that was trained is in the folder.
    state = state_of(summary)
    for name, weight in model.named_parameters():
        assert torch.equal(weight, state[name]), name


def test_while_the_head_warms_up_the_backbone_stays() -> None:
    still = train(config_of(**{"run.name": "still", "critic.warmup_steps": 2}))
    first = load_file(still.folder / "checkpoints" / "step-000000" / "model" / "model.safetensors")
    last = load_file(still.model / "model.safetensors")
    assert all(torch.equal(first[name], last[name]) for name in first)
    assert float(state_of(still)[HEAD].abs().max()) > 0
    for line in trained_lines(still.folder):
        assert {"critic/loss", "critic/grad_norm", "critic/learning_rate", "critic/explained_variance"} <= line.keys()
        assert "loss" not in line
        assert line["critic/learning_rate"] == pytest.approx(3e-2)
    moved = train(config_of(**{"run.name": "moved", "critic.warmup_steps": 1}))
    last = load_file(moved.model / "model.safetensors")
    assert not all(torch.equal(first[name], last[name]) for name in first)
    after = trained_lines(moved.folder)[-1]
    assert after["loss"] == pytest.approx(after["loss/policy"] + 0.1 * after["critic/loss"], abs=1e-6)


@pytest.mark.parametrize(
    "changes",
    [
        {"training.optimizer.learning_rate": 5e-3},
        # A constant or a larger rate leaps about, and where it is in the end hangs on the rounding of the processor.
        {
            "model.lora": {"rank": 8},
            "training.optimizer.learning_rate": 1e-2,
            "training.optimizer.schedule": "linear",
            "training.epochs": 2,
        },
    ],
    ids=["all-weights", "adapters"],
)
def test_the_head_learns_to_tell_what_is_to_come(changes: dict[str, Any]) -> None:
    """The reward is the first digit of the prompt: nothing that is sampled matters, and everything can be known."""
    summary = train(
        config_of(
            **{
                **changes,
                "rewards.verifiers": [{"kind": "python", "function": "tiny_rewards:first_digit"}],
                "run.steps": 30,
                "rollout.groups_per_step": 16,
                "algorithm.value_clip": 10.0,
                "critic.value_coef": 10.0,
                "critic.optimizer.learning_rate": 1e-2,
                "checkpoint.every": 100,
            }
        )
    )
    found = [line["critic/explained_variance"] for line in trained_lines(summary.folder)]
    assert abs(found[0]) < 0.05
    assert sum(found[-5:]) / 5 > 0.6


async def test_one_pass_gives_log_probabilities_and_values() -> None:
    async with open_run(config_of()) as opened:
        await opened.begin()
        critic = opened.critic
        assert isinstance(critic, SharedCritic)
        head = opened.trainer._value_head
        torch.nn.init.normal_(head.weight, generator=torch.Generator().manual_seed(0))
        groups = await opened.collect()
        with counted() as counts:
            batch = await opened.build_batch(groups)
        # One for each mini-batch, and none more for the old log-probabilities.
        assert len(counts["passes"]) == 2
        with counted() as counts:
            await opened.update(batch)
        assert len(counts["passes"]) == 2


async def test_values_are_the_head_before_each_token() -> None:
    async with open_run(config_of()) as opened:
        await opened.begin()
        head = opened.trainer._value_head
        torch.nn.init.normal_(head.weight, generator=torch.Generator().manual_seed(0))
        batch = await opened.build_batch(await opened.collect())
        assert batch.values is not None
        assert batch.old_logprobs is not None
        assert torch.equal(batch.old_logprobs, opened.trainer.logprobs(batch))
        for at in range(batch.sequences):
            inside = batch.seq_ids == at
            ids, mask = batch.input_ids[inside], batch.loss_mask[inside]
            with torch.no_grad():
                hidden = opened.roles.model.model(input_ids=ids[None], use_cache=False).last_hidden_state[0]
                expected = head(hidden)[:-1, 0]
            found = batch.values[inside]
            assert torch.allclose(found[1:][mask[1:]], expected[mask[1:]], atol=1e-5)
            assert not bool(found[~mask].any())


async def test_the_gradient_is_that_of_both_losses() -> None:
    """Against log-probabilities and values of transformers and a loss written out here."""
    coef = 0.7
    async with open_run(config_of(**{"training.mini_batches": 1, "algorithm.value_clip": None})) as opened:
        await opened.begin()
        trainer, model = opened.trainer, opened.roles.model
        head = trainer._value_head
        torch.nn.init.normal_(head.weight, generator=torch.Generator().manual_seed(0))
        batch = await opened.build_batch(await opened.collect())
        assert batch.returns is not None
        assert batch.advantages is not None
        count = int(batch.loss_mask.sum())
        loss = torch.zeros(())
        for at in range(batch.sequences):
            inside = batch.seq_ids == at
            ids, mask = batch.input_ids[inside], batch.loss_mask[inside][1:]
            hidden = model.model(input_ids=ids[None], use_cache=False).last_hidden_state[0, :-1]
            logprobs = torch.log_softmax(model.lm_head(hidden), -1).gather(1, ids[1:, None])[:, 0][mask]
            # At the first update the ratio is 1: the gradient is that of A log p.
            loss = loss - (batch.advantages[inside][1:][mask] * logprobs).sum() / count
            error = head(hidden)[:, 0][mask] - batch.returns[inside][1:][mask]
            loss = loss + coef * (error.square() / 2).sum() / count
        loss.backward()
        named = {**dict(model.named_parameters()), HEAD: head.weight}
        expected = {name: weight.grad.clone() for name, weight in named.items()}
        trainer.optimizer.zero_grad()
        objective: Any = WithValues(opened.algorithm, coef)
        denominators = objective.denominators(batch)
        from strop.models.attention import running

        for micro in trainer._cut(batch, objective):
            with running(model, micro.inputs.attention):
                _, _, terms, _ = trainer._loss(micro, objective, denominators)
                torch.stack(list(terms.values())).sum().backward()
        for name, weight in named.items():
            largest = max(1.0, float(expected[name].abs().max()))
            assert float((weight.grad - expected[name]).abs().max()) < 1e-5 * largest, name
        assert float(expected[HEAD].abs().max()) > 0
        trainer.optimizer.zero_grad()


async def test_the_head_has_a_learning_rate_of_its_own() -> None:
    """The first update of AdamW moves every weight with a gradient by its learning rate."""
    changes = {"training.mini_batches": 1, "training.optimizer.learning_rate": 1e-3}
    async with open_run(config_of(**changes)) as opened:
        await opened.begin()
        before = {name: weight.detach().clone() for name, weight in opened.trainer.optimizer.parameters.items()}
        await opened.update(await opened.build_batch(await opened.collect()))
        moved = {
            name: float((weight - before[name]).abs().max())
            for name, weight in opened.trainer.optimizer.parameters.items()
        }
        assert moved.pop(HEAD) == pytest.approx(3e-2, rel=1e-3)
        assert max(moved.values()) == pytest.approx(1e-3, rel=1e-2)


@pytest.mark.parametrize("optimizer", ["muon", "adafactor"])
def test_other_optimizers_train_the_head_too(optimizer: str) -> None:
    summary = train(config_of(**{"training.optimizer.name": optimizer, "critic.warmup_steps": 1}))
    assert float(state_of(summary)[HEAD].abs().max()) > 0


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"critic.path": "judge"}, "`critic.path` has no effect with critic.shared"),
        ({"critic.optimizer.beta1": 0.5}, "`critic.optimizer.beta1` has no effect with critic.shared"),
        ({"critic.optimizer.schedule": "linear"}, "set training.optimizer.schedule"),
        ({"critic.shared": False, "critic.value_coef": 0.3}, "`critic.value_coef` has no effect beside a critic"),
        ({"algorithm.name": "grpo"}, "critic has no effect with grpo"),
    ],
)
def test_settings_without_effect_are_refused(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        train(config_of(**changes))
    assert says in str(caught.value)
    assert not Path("runs").exists()


def test_the_value_loss_is_weighed_and_stands_beside_the_others() -> None:
    algorithm = PPO(max_new_tokens=4, value_clip=None)

    class Batch:
        loss_mask = torch.tensor([True, True])
        values = torch.tensor([0.0, 0.0])
        returns = torch.tensor([1.0, 3.0])
        extra = {"new_values": torch.tensor([2.0, 0.0])}  # noqa: RUF012

    alone: Any = WithValues(algorithm, 0.5, head_alone=True)
    terms = alone.loss(Batch(), torch.zeros(2), None).terms
    assert set(terms) == {"value"}
    assert terms["value"].tolist() == [0.25, 2.25]
    assert not alone.needs_entropy
