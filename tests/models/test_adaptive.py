"""AdaLoRA: against its formulas, as peft schedules it, and whole when it is saved at any moment."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from strop.algorithms.supervised import CrossEntropy
from strop.config.model import AdaptiveSettings, LoraConfig, NewModel
from strop.config.training import OptimizerSettings
from strop.data.examples import Example, ExampleRow
from strop.loops.supervised_run import batch_of
from strop.models.adapters import adapter_delta
from strop.models.adaptive import adaptive_ranks
from strop.models.create import create_model
from strop.models.export import export_model
from strop.models.load import add_lora
from strop.models.save import merged_weights, save_model
from strop.training.single import SingleDeviceTrainer

TINY = NewModel(hidden_size=16, layers=2, heads=2, context=32)
IDS = torch.tensor([[4, 5, 20, 13, 6, 7]])
UPDATES = 12
ADAPTERS = 2 * 7


def settings(**changes: Any) -> LoraConfig:
    adaptive = {"target_rank": 2, "tinit": 2, "tfinal": 4, "delta_t": 1, **changes}
    return LoraConfig(rank=4, alpha=4, adaptive=AdaptiveSettings(**adaptive))


def adapted(**changes: Any) -> Any:
    return add_lora(create_model(TINY, seed=0)[0], settings(**changes), seed=1, updates=UPDATES)


def trainer_of(model: Any, **changes: Any) -> SingleDeviceTrainer:
    optimizer = OptimizerSettings(learning_rate=3e-2, max_grad_norm=None, **changes)
    return SingleDeviceTrainer(model, optimizer, total_updates=UPDATES, moving_ranks=True)


def some_batch(seed: int) -> Any:
    import numpy as np

    drawn = np.random.default_rng(seed).integers(3, 40, size=(3, 9)).astype(np.int64)
    return batch_of([ExampleRow("", (Example(ids, np.arange(9) > 1),), (0.0,)) for ids in drawn])


def singular(model: Any) -> dict[str, torch.Tensor]:
    return {n: p for n, p in model.named_parameters() if "lora_E" in n}


def kept(model: Any) -> int:
    return sum(int((value != 0).sum()) for value in singular(model).values())


def test_adapters_start_at_nothing_and_train_alone() -> None:
    plain, _ = create_model(TINY, seed=0)
    model = adapted()
    torch.testing.assert_close(model(IDS).logits, plain(IDS).logits)
    trained = {name.split(".")[-2] for name, weight in model.named_parameters() if weight.requires_grad}
    assert trained == {"lora_A", "lora_B", "lora_E"}
    assert len(singular(model)) == ADAPTERS
    assert adaptive_ranks(add_lora(create_model(TINY, seed=0)[0], LoraConfig(rank=2), seed=1)) is None


def test_the_budget_falls_from_the_first_rank_to_the_last() -> None:
    model = adapted()
    trainer = trainer_of(model)
    found = []
    for update in range(UPDATES):
        trainer.update(some_batch(update), CrossEntropy())
        found.append(kept(model))
    # Updates 1 and 2 are the beginning; at update 8 = 12 - 4 the budget is that of the end, where it stays.
    assert found[:2] == [4 * ADAPTERS] * 2
    expected = []
    for update in range(3, UPDATES + 1):
        left = max(0.0, 1 - (update - 2) / 6) ** 3
        expected.append(int((4 - 2) * ADAPTERS * left + 2 * ADAPTERS))
    assert found[2:] == expected
    assert found[-1] == 2 * ADAPTERS
    # Not every adapter has lost the same.
    assert len({int((value != 0).sum()) for value in singular(model).values()}) > 1


def test_what_matters_least_is_set_to_nothing() -> None:
    """Importance written out: the paper's eq. 8 to 10, with the smoothing of each weight, and means over vectors."""
    beta1, beta2 = 0.6, 0.7
    model = adapted(beta1=beta1, beta2=beta2)
    trainer = trainer_of(model)
    ranks = trainer._ranks
    assert ranks is not None
    weights = {n: p for n, p in model.base_model.model.named_parameters() if "lora_" in n}
    level = {name: torch.zeros_like(weight) for name, weight in weights.items()}
    stray = {name: torch.zeros_like(weight) for name, weight in weights.items()}
    reallocate = ranks.reallocate

    def watching() -> None:
        for name, weight in weights.items():
            importance = (weight * weight.grad).abs().detach()
            level[name] = beta1 * level[name] + (1 - beta1) * importance
            stray[name] = beta2 * stray[name] + (1 - beta2) * (importance - level[name]).abs()
        reallocate()

    ranks.reallocate = watching  # type: ignore[method-assign]
    for update in range(3):
        trainer.update(some_batch(update), CrossEntropy())
    scores = {}
    for name in [n for n in weights if "lora_E" in n]:
        parts = [name, name.replace("lora_E", "lora_A"), name.replace("lora_E", "lora_B")]
        e, a, b = (level[part] * stray[part] for part in parts)
        scores[name] = e[:, 0] + a.mean(1) + b.mean(0)
    order = torch.cat(list(scores.values())).sort().values
    budget = int(2 * ADAPTERS * (5 / 6) ** 3 + 2 * ADAPTERS)
    threshold = order[4 * ADAPTERS - budget - 1]
    for name, score in scores.items():
        assert ((score > threshold) == (weights[name][:, 0] != 0)).all(), name


def test_directions_are_kept_apart() -> None:
    model = adapted(orth_reg_weight=0.3)
    ranks = adaptive_ranks(model)
    assert ranks is not None
    total, count = 0.0, 0
    for name, weight in model.named_parameters():
        if "lora_A" in name or "lora_B" in name:
            rows = (weight if "lora_A" in name else weight.T).detach().double()
            total += float((rows @ rows.T - torch.eye(4, dtype=torch.float64)).square().sum().sqrt())
            count += 1
    assert count == 2 * ADAPTERS
    assert float(ranks.penalty()) == pytest.approx(0.3 * total / count, rel=1e-5)
    # It is part of what is minimised.
    stats = trainer_of(model).update(some_batch(0), CrossEntropy())
    assert stats["loss/orthogonality"] == pytest.approx(0.3 * total / count, rel=1e-5)
    assert stats["loss"] == pytest.approx(stats["loss/nll"] + stats["loss/orthogonality"], rel=1e-6)
    # In the first update the values are 0: nothing else moves the vectors.
    assert any(float(p.grad.abs().max()) > 0 for p in _penalised(model))


def _penalised(model: Any) -> list[Any]:
    ranks = adaptive_ranks(model)
    assert ranks is not None
    ranks.penalty().backward()
    return [p for n, p in model.named_parameters() if "lora_A" in n]


@pytest.mark.parametrize("done", [1, 5, 10])
def test_a_resumed_trainer_goes_on_bit_for_bit(tmp_path: Path, done: int) -> None:
    whole = trainer_of(adapted(delta_t=2))
    for update in range(UPDATES):
        if update == done:
            state = whole.save(tmp_path)
        whole.update(some_batch(update), CrossEntropy())
    parts = trainer_of(adapted(delta_t=2))
    parts.load(tmp_path, state)
    for update in range(done, UPDATES):
        parts.update(some_batch(update), CrossEntropy())
    theirs = dict(parts.model.named_parameters())
    for name, weight in whole.model.named_parameters():
        assert torch.equal(weight, theirs[name]), name


def test_masters_elsewhere_make_no_difference() -> None:
    plain, offloaded = trainer_of(adapted()), trainer_of(adapted(), offload=True)
    for update in range(UPDATES):
        for trainer in (plain, offloaded):
            trainer.update(some_batch(update), CrossEntropy())
    theirs = dict(offloaded.model.named_parameters())
    for name, weight in plain.model.named_parameters():
        assert torch.equal(weight, theirs[name]), name


@pytest.mark.parametrize("rule", ["adamw", "muon", "adafactor"])
def test_every_optimizer_leaves_the_budget(rule: Any) -> None:
    model = adapted()
    trainer = trainer_of(model, name=rule)
    for update in range(UPDATES):
        trainer.update(some_batch(update), CrossEntropy())
    assert kept(model) == 2 * ADAPTERS


@pytest.mark.parametrize("updates", [0, 5, 7, UPDATES])
def test_an_adapter_on_its_base_and_the_merged_model_agree(tmp_path: Path, updates: int) -> None:
    """Saved before the first reallocation, right after one, between two, and at the end."""
    model = adapted(delta_t=4 if updates == 7 else 1)
    trainer = trainer_of(model)
    for update in range(updates):
        trainer.update(some_batch(update), CrossEntropy())
    if updates == 7:
        # Some have grown back since the ranks were last looked at.
        assert kept(model) == 4 * ADAPTERS
    model.eval()
    base, tokenizer = create_model(TINY, seed=0)
    save_model(base, tokenizer, tmp_path / "base")
    save_model(model, tokenizer, tmp_path / "run")
    expected = model(IDS).logits
    if updates:
        assert (base(IDS).logits - expected).abs().max() > 1e-2
    merged = AutoModelForCausalLM.from_pretrained(export_model(str(tmp_path / "run"), tmp_path / "whole"))(IDS).logits
    alone = export_model(str(tmp_path / "run"), tmp_path / "alone", adapter=True)
    shutil.rmtree(tmp_path / "run")
    with_adapter = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(tmp_path / "base"), alone)
    torch.testing.assert_close(with_adapter(IDS).logits, expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(merged, with_adapter(IDS).logits, atol=1e-4, rtol=1e-4)
    # Saving has changed nothing.
    trainer.update(some_batch(99), CrossEntropy())


def test_merged_weights_have_the_names_of_the_plain_model() -> None:
    assert merged_weights(adapted()).keys() == create_model(TINY, seed=0)[0].state_dict().keys()


def test_what_an_adapter_adds_is_what_peft_says() -> None:
    from peft.tuners.adalora import SVDLinear

    model = adapted()
    with torch.no_grad():
        for value in singular(model).values():
            value.normal_()
    layers = [module for module in model.modules() if isinstance(module, SVDLinear)]
    assert len(layers) == ADAPTERS
    for layer in layers:
        weight = layer.get_base_layer().weight
        torch.testing.assert_close(adapter_delta(layer, "default", weight), layer.get_delta_weight("default"))


def test_phases_follow_the_run_where_they_are_not_set() -> None:
    assert AdaptiveSettings().phases(1000) == (100, 500, 4)
    assert AdaptiveSettings().phases(20) == (2, 10, 1)
    assert AdaptiveSettings().phases(1) == (0, 0, 1)
    assert AdaptiveSettings(tinit=3, tfinal=4, delta_t=2).phases(1000) == (3, 4, 2)
    assert [AdaptiveSettings().rank_of(rank) for rank in (2, 3, 16)] == [1, 2, 10]
