"""The trainer: exactly on-policy at first, the gradient of the paper's formula, roles, and resuming bit for bit."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from strop.algorithms.base import LossTerms
from strop.algorithms.batch import TokenBatch
from strop.algorithms.named import build_algorithm
from strop.algorithms.supervised import CrossEntropy
from strop.config.model import LoraConfig
from strop.config.training import OptimizerSettings
from strop.errors import RunFailure
from strop.models import few_rows
from strop.models.blocks import ChangedBlocks
from strop.models.forward import score_streams
from strop.models.load import add_lora
from strop.training.batching import micro_batches, token_batch
from strop.training.single import SingleDeviceTrainer

Make = Callable[..., Any]
TEMPERATURE = 0.7


@dataclass(frozen=True)
class Stream:
    tokens: np.ndarray
    loss_mask: np.ndarray
    logprobs: np.ndarray
    versions: np.ndarray


def batch_of(model: Any, *, groups: int = 3, size: int = 4, seed: int = 0, masked: tuple[int, ...] = ()) -> TokenBatch:
    """Random completions with the log-probabilities that the model gives them; groups in `masked` train nothing."""
    rng = np.random.default_rng(seed)
    tokens, starts, ids = [], [], []
    for group in range(groups):
        prompt = rng.integers(3, 45, rng.integers(2, 12))
        for _ in range(size):
            tokens.append(np.concatenate([prompt, rng.integers(3, 45, rng.integers(1, 10))]))
            starts.append(len(prompt) if group not in masked else 10_000)
            ids.append(group)
    streams = []
    for ids_of, start, scores in zip(
        tokens, starts, score_streams(model.eval(), tokens, temperature=TEMPERATURE), strict=True
    ):
        mask = np.arange(len(ids_of)) >= start
        streams.append(Stream(ids_of, mask, np.where(mask, scores, np.nan), np.where(mask, 0, -1)))
    rewards = rng.integers(0, 3, len(tokens)).astype(float)
    batch = token_batch(streams, rewards=rewards.tolist(), group_ids=ids, truncated=[False] * len(ids))
    batch.advantages = grpo().advantages(batch)
    return batch


def grpo(**choices: Any) -> Any:
    return build_algorithm("grpo", group_size=4, max_new_tokens=16, **choices)


def trainer_of(model: Any, *, rate: float = 1e-3, rule: str = "adamw", **options: Any) -> SingleDeviceTrainer:
    settings = OptimizerSettings(name=rule, learning_rate=rate, schedule="cosine", warmup_steps=1)
    return SingleDeviceTrainer(
        model, settings, **{"total_updates": 20, "temperature": TEMPERATURE, "budget": 60, **options}
    )


def with_lora(model: Any, **choices: Any) -> Any:
    return add_lora(model, LoraConfig(rank=4, **choices), seed=0)


def weights(model: Any) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


class Watched:
    """An objective that notes what it is given."""

    def __init__(self, objective: Any) -> None:
        self.objective = objective
        self.needs_entropy = objective.needs_entropy
        self.seen: list[tuple[TokenBatch, torch.Tensor, torch.Tensor]] = []

    def loss(self, batch: TokenBatch, logprobs: torch.Tensor, entropy: torch.Tensor) -> LossTerms:
        self.seen.append((batch, logprobs.detach(), entropy))
        return self.objective.loss(batch, logprobs, entropy)  # type: ignore[no-any-return]

    def denominators(self, batch: TokenBatch) -> Any:
        return self.objective.denominators(batch)

    def reduce(self, per_token: torch.Tensor, batch: TokenBatch, denominator: float) -> torch.Tensor:
        return self.objective.reduce(per_token, batch, denominator)  # type: ignore[no-any-return]


def gradients_of(trainer: SingleDeviceTrainer, batch: TokenBatch, objective: Any) -> dict[str, torch.Tensor]:
    """Gradients of the first update, which is not made."""
    found: dict[str, torch.Tensor] = {}

    def step() -> dict[str, Any]:
        if not found:
            found.update({n: m.grad.clone() for n, m in trainer.optimizer.masters.items() if m.grad is not None})
        trainer.optimizer.zero_grad()
        return {"grad_norm": torch.zeros(()), "learning_rate": 0.0}

    before, trainer.optimizer.step = trainer.optimizer.step, step  # type: ignore[method-assign]
    try:
        trainer.update(batch, objective)
    finally:
        trainer.optimizer.step = before  # type: ignore[method-assign]
    return found


# On-policy.


@pytest.mark.parametrize("family", ["llama", "gemma2"])
@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize("recompute", [False, True], ids=["kept", "recomputed"])
def test_old_logprobs_are_bit_for_bit_those_of_the_first_pass(
    tiny_model: Make, family: str, lora: bool, recompute: bool
) -> None:
    model = with_lora(tiny_model(family)) if lora else tiny_model(family)
    batch = batch_of(model)
    trainer = trainer_of(model, parts=2, epochs=2, recompute=recompute)
    watched = Watched(grpo())
    stats = trainer.update(batch, watched)
    assert batch.old_logprobs is not None
    # The passes of the first mini-batch come before any update.
    of_first = [seen for seen in watched.seen if set(seen[0].group_ids.tolist()) <= {0, 1}]
    assert len(of_first) // 2 >= 2
    for cut, logprobs, _ in of_first[: len(of_first) // 2]:
        assert torch.equal(logprobs, cut.old_logprobs)
    later = of_first[-1]
    assert not torch.equal(later[1], later[0].old_logprobs)
    assert stats["learning_rate"] > 0


def test_one_update_is_exactly_on_policy(tiny_model: Make) -> None:
    model = tiny_model()
    batch = batch_of(model)
    stats = trainer_of(model).update(batch, grpo())
    assert stats["policy/ratio"] == 1.0
    assert stats["policy/ratio_max"] == 1.0
    assert stats["policy/clip_fraction"] == 0.0
    assert batch.old_logprobs is None, "one pass needs no scoring before it"


def test_what_the_sampler_said_is_compared_with_the_policy_before_the_update(tiny_model: Make) -> None:
    model = tiny_model()
    batch = batch_of(model)
    stats = trainer_of(copy.deepcopy(model), parts=2, epochs=2).update(batch, grpo())
    assert 0 <= stats["mismatch/mean"] <= stats["mismatch/max"] < 1e-5
    shifted = batch_of(model)
    shifted.sampler_logprobs = shifted.sampler_logprobs - 0.25
    stats = trainer_of(copy.deepcopy(model), parts=2, epochs=2).update(shifted, grpo())
    assert stats["mismatch/mean"] == pytest.approx(0.25, abs=1e-5)
    assert stats["mismatch/max"] == pytest.approx(0.25, abs=1e-4)
    assert stats["kl/sampler"] == pytest.approx(np.exp(0.25) - 1.25, abs=1e-5)


def test_logprobs_are_those_of_the_model_at_the_sampling_temperature(tiny_model: Make) -> None:
    model = tiny_model()
    batch = batch_of(model)
    trainer = trainer_of(model, parts=2)
    found = trainer.logprobs(batch)
    assert (found[~batch.loss_mask] == 0).all()
    assert (found - batch.sampler_logprobs)[batch.loss_mask].abs().max() < 1e-5
    trainer.update(batch, grpo())
    assert torch.equal(batch.extra["logprobs"][batch.seq_ids < 8], found[batch.seq_ids < 8])


# The loss.


def paper_gradient(model: Any, reference: Any, batch: TokenBatch, *, kl: float, entropy: float) -> dict[str, Any]:
    """GRPO (arXiv 2402.03300, eq. 3 and 4) in plain torch, one unpacked sequence at a time."""
    terms = []
    for sequence in range(batch.sequences):
        inside = batch.seq_ids == sequence
        ids, mask = batch.input_ids[inside], batch.loss_mask[inside][1:]
        logits = model(input_ids=ids[None], use_cache=False).logits[0, :-1] / TEMPERATURE
        logp = torch.log_softmax(logits, -1)
        with torch.no_grad():
            ref = torch.log_softmax(reference(input_ids=ids[None], use_cache=False).logits[0, :-1] / TEMPERATURE, -1)
            ref = ref.gather(1, ids[1:, None])[:, 0]
        mine = logp.gather(1, ids[1:, None])[:, 0]
        old = batch.old_logprobs[inside][1:]  # type: ignore[index]
        group = batch.rewards[batch.group_ids == batch.group_ids[sequence]]
        if group.max() == group.min():
            advantage = torch.zeros(())
        else:
            advantage = (batch.rewards[sequence] - group.mean()) / (group.std() + 1e-6)
        ratio = torch.exp(mine - old)
        surrogate = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
        divergence = torch.exp(ref - mine) - (ref - mine) - 1
        spread = -(logp.exp() * logp).sum(-1)
        each = surrogate - kl * divergence + entropy * spread
        terms.append(each[mask].mean())
    model.zero_grad()
    (-torch.stack(terms).mean()).backward()
    found = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    return found


@pytest.mark.parametrize(("kl", "entropy"), [(0.0, 0.0), (0.3, 0.0), (0.2, 0.1)])
def test_the_gradient_is_that_of_the_paper(tiny_model: Make, kl: float, entropy: float) -> None:
    model, reference = tiny_model(), tiny_model()
    with torch.no_grad():
        for p in reference.parameters():
            p.mul_(0.97)
    batch = batch_of(model)
    # Ratios on both sides of the clip.
    noise = torch.randn(len(batch.input_ids), generator=torch.Generator().manual_seed(3)) * 0.3
    batch.old_logprobs = torch.where(batch.loss_mask, batch.sampler_logprobs + noise, 0.0)
    if kl:
        batch.ref_logprobs = trainer_of(reference).logprobs(batch)
    expected = paper_gradient(model, reference, batch, kl=kl, entropy=entropy)
    objective = grpo(**({"kl_coef": kl} if kl else {}), entropy_coef=entropy)
    for budget in (25, 60, 10_000):
        found = gradients_of(trainer_of(model, budget=budget), batch, objective)
        for name, gradient in expected.items():
            assert (found[name] - gradient).abs().max() <= 2e-6 * max(1.0, float(gradient.abs().max())), name
    assert max(float(g.abs().max()) for g in expected.values()) > 1e-2


def test_entropy_has_a_graph_only_where_it_is_in_the_loss(tiny_model: Make) -> None:
    model = tiny_model()
    for coefficient, graph in ((0.0, False), (0.01, True)):
        watched = Watched(grpo(entropy_coef=coefficient))
        stats = trainer_of(model).update(batch_of(model), watched)
        assert {entropy.requires_grad for _, _, entropy in watched.seen} == {graph}
        # It is measured either way.
        assert 0.5 < stats["policy/entropy"] < np.log(48)


def test_metrics_do_not_depend_on_the_micro_batches(tiny_model: Make) -> None:
    model = tiny_model()
    found = [trainer_of(copy.deepcopy(model), budget=b).update(batch_of(model), grpo()) for b in (25, 60, 10_000)]
    for stats in found[1:]:
        assert stats.keys() == found[0].keys()
        for name, value in stats.items():
            if not name.startswith("throughput/"):
                assert value == pytest.approx(found[0][name], rel=1e-4, abs=1e-5), name
        # A prompt whose group is divided is computed once in each pass.
        assert stats["throughput/packed_tokens"] <= found[0]["throughput/packed_tokens"]


def test_what_a_step_computes_is_counted(tiny_model: Make) -> None:
    """Tokens of the packed rows and pairs that see each other, over all passes of all epochs."""
    model = tiny_model()
    batch = batch_of(model)
    micros = micro_batches(batch, 10_000, torch.device("cpu"))
    assert len(micros) == 1
    tokens = micros[0].inputs.tokens
    one = trainer_of(copy.deepcopy(model), budget=10_000).update(batch_of(model), grpo())
    assert one["throughput/packed_tokens"] == tokens < len(batch.input_ids)
    # Each token sees those before it in its stream; a token that streams share is there once.
    visible = {}
    edges = np.concatenate([[0], np.cumsum(batch.lengths().numpy())])
    for start, end in pairwise(edges):
        ids = batch.input_ids[start:end].tolist()
        visible |= {tuple(ids[: at + 1]): at + 1 for at in range(len(ids))}
    assert one["throughput/attention_pairs"] <= sum(int(length) * (int(length) + 1) // 2 for length in batch.lengths())
    assert one["throughput/attention_pairs"] >= sum(visible.values())
    twice = trainer_of(copy.deepcopy(model), budget=10_000, epochs=2).update(batch_of(model), grpo())
    for name in ("throughput/packed_tokens", "throughput/attention_pairs"):
        assert twice[name] == 2 * one[name]


def test_micro_batches_add_up_in_float32_under_bfloat16(tiny_model: Make) -> None:
    model = tiny_model().to(torch.bfloat16)
    batch = batch_of(model)
    trainer = trainer_of(model, budget=25)
    found = gradients_of(trainer, batch, CrossEntropy())
    assert {g.dtype for g in found.values()} == {torch.float32}
    # A sum of float32 has digits that no bfloat16 has.
    finer = [(g != g.bfloat16().float()).float().mean() for g in found.values()]
    assert float(torch.stack(finer).mean()) > 0.5
    whole = gradients_of(trainer_of(model.float(), budget=10_000), batch, CrossEntropy())
    for name, gradient in whole.items():
        assert (found[name] - gradient).norm() < 0.1 * gradient.norm(), name


@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
def test_recomputed_activations_give_the_same_gradients_bit_for_bit(tiny_model: Make, lora: bool) -> None:
    model = with_lora(tiny_model()) if lora else tiny_model()
    batch = batch_of(model)
    kept = gradients_of(trainer_of(copy.deepcopy(model)), batch, grpo())
    recomputing = trainer_of(model, recompute=True)
    calls = []
    layer = next(m for n, m in model.named_modules() if n.endswith("layers.1.mlp"))
    layer.register_forward_pre_hook(lambda *_: calls.append(1))
    recomputed = gradients_of(recomputing, batch, grpo())
    assert any(bool((g != 0).any()) for g in kept.values())
    assert equal(kept, recomputed)
    watched = Watched(grpo())
    calls.clear()
    recomputing.update(batch, watched)
    assert len(calls) == 2 * len(watched.seen), "each block runs once forward and once more in the backward pass"


# Roles.


def test_the_reference_of_adapters_is_the_model_without_them(tiny_model: Make) -> None:
    base = tiny_model()
    model = with_lora(copy.deepcopy(base))
    trainer = trainer_of(model, reference=True, rate=1e-2)
    assert trainer._reference is None, "no second copy"
    batch = batch_of(model)
    start = trainer_of(base).logprobs(batch)
    assert torch.equal(trainer.logprobs(batch, role="reference"), start)
    for _ in range(3):
        trainer.update(batch, grpo())
    assert (trainer.logprobs(batch) - start).abs().max() > 0.05
    assert torch.equal(trainer.logprobs(batch, role="reference"), start)


def test_the_reference_of_a_whole_model_is_a_frozen_copy(tiny_model: Make) -> None:
    model = tiny_model()
    trainer = trainer_of(model, reference=True, rate=1e-2)
    batch = batch_of(model)
    start = trainer.logprobs(batch)
    assert torch.equal(trainer.logprobs(batch, role="reference"), start)
    for _ in range(3):
        trainer.update(batch, grpo())
    assert (trainer.logprobs(batch) - start).abs().max() > 0.05
    assert torch.equal(trainer.logprobs(batch, role="reference"), start)
    with pytest.raises(ValueError, match="without a reference"):
        trainer_of(model).logprobs(batch, role="reference")


def test_adapters_leave_the_base_as_it_was(tiny_model: Make) -> None:
    model = with_lora(tiny_model())
    before = weights(model)
    trainer_of(model, rate=1e-2).update(batch_of(model), grpo())
    moved = {name for name, value in weights(model).items() if not torch.equal(value, before[name])}
    assert moved
    assert all("lora_" in name for name in moved)


def test_an_adapter_on_the_output_head_is_trained(tiny_model: Make) -> None:
    model = add_lora(tiny_model(), LoraConfig(rank=4, targets=["lm_head"]), seed=0)
    trainer = trainer_of(model, rate=1e-2)
    batch = batch_of(model)
    for _ in range(2):
        trainer.update(batch, grpo())
    ids = batch.input_ids[batch.seq_ids == 0][None]
    with torch.no_grad():
        logp = torch.log_softmax(model.eval()(input_ids=ids).logits[0, :-1] / TEMPERATURE, -1)
    expected = logp.gather(1, ids[0, 1:, None])[:, 0]
    inside = batch.loss_mask[batch.seq_ids == 0]
    after = trainer.logprobs(batch)[batch.seq_ids == 0]
    assert (after[inside] - expected[inside[1:]]).abs().max() < 1e-5
    assert (after - torch.nan_to_num(batch.sampler_logprobs[batch.seq_ids == 0])).abs().max() > 1e-3


# Resuming.


@pytest.mark.parametrize(
    ("kind", "rule"),
    [
        ("float32", "adamw"),
        ("bfloat16", "adamw"),
        ("lora", "adamw"),
        ("lora-bfloat16", "adamw"),
        ("float32", "muon"),
        ("lora-bfloat16", "muon"),
        ("lora-dora-bfloat16", "muon"),
        ("bfloat16", "adafactor"),
        pytest.param(
            "bfloat16",
            "adamw_8bit",
            marks=pytest.mark.skipif(find_spec("bitsandbytes") is None, reason="needs strop[bnb]"),
        ),
    ],
)
def test_a_resumed_trainer_goes_on_bit_for_bit(tiny_model: Make, tmp_path: Path, kind: str, rule: str) -> None:
    def fresh() -> Any:
        model = tiny_model()
        if "bfloat16" in kind:
            model = model.to(torch.bfloat16)
        return with_lora(model, dora="dora" in kind) if "lora" in kind else model

    batches = [batch_of(fresh(), seed=seed) for seed in range(6)]

    def steps(trainer: SingleDeviceTrainer, chosen: list[TokenBatch]) -> list[dict[str, float]]:
        return [trainer.update(copy.deepcopy(batch), grpo()) for batch in chosen]

    straight = trainer_of(fresh(), parts=2, rule=rule)
    expected = steps(straight, batches)[3:]
    first = trainer_of(fresh(), parts=2, rule=rule)
    steps(first, batches[:3])
    state = first.save(tmp_path)
    second = trainer_of(fresh(), parts=2, rule=rule)
    second.load(tmp_path, state)
    assert equal(weights(second.model), weights(first.model))
    assert steps(second, batches[3:]) == expected
    assert equal(weights(second.model), weights(straight.model))
    assert equal(second.optimizer.state(), straight.optimizer.state())


def test_a_trainer_that_did_nothing_yet_can_be_saved_and_loaded(tiny_model: Make, tmp_path: Path) -> None:
    trainer = trainer_of(tiny_model())
    state = trainer.save(tmp_path)
    again = trainer_of(tiny_model())
    again.load(tmp_path, state)
    batch = batch_of(tiny_model())
    assert trainer.update(copy.deepcopy(batch), grpo()) == again.update(copy.deepcopy(batch), grpo())


# What goes wrong.


def test_an_update_that_is_not_finite_stops_the_run(tiny_model: Make) -> None:
    model = tiny_model()
    batch = batch_of(model)
    assert batch.advantages is not None
    batch.advantages[torch.nonzero(batch.loss_mask)[5]] = torch.nan
    with pytest.raises(RunFailure, match="not finite"):
        trainer_of(model).update(batch, grpo())


def test_nothing_to_train_changes_nothing(tiny_model: Make) -> None:
    model = tiny_model()
    before = weights(model)
    trainer = trainer_of(model, parts=2)
    stats = trainer.update(batch_of(model, masked=(0, 1, 2)), grpo())
    assert equal(weights(model), before)
    assert trainer.optimizer.updates == 0
    assert all(np.isfinite(value) for value in stats.values())


def test_a_mini_batch_with_nothing_to_train_is_left_out(tiny_model: Make) -> None:
    model = tiny_model()
    batch = batch_of(model, groups=2, masked=(0,))
    trainer = trainer_of(copy.deepcopy(model), parts=2)
    stats = trainer.update(batch, grpo())
    assert trainer.optimizer.updates == 1
    assert all(np.isfinite(value) for value in stats.values())
    # The other half is trained as if it were alone, and the sampler is still compared with the policy before it.
    alone = trainer_of(copy.deepcopy(model), parts=1)
    cut = batch_of(model, groups=2, masked=(0,)).select(torch.tensor([4, 5, 6, 7]))
    cut.old_logprobs = alone.logprobs(cut)
    expected = alone.update(cut, grpo())
    assert stats.keys() == expected.keys()
    assert equal(weights(trainer.model), weights(alone.model))


def test_equal_rewards_have_no_gradient(tiny_model: Make) -> None:
    model = tiny_model()
    batch = batch_of(model)
    batch.rewards[:] = 0.7
    batch.advantages = grpo().advantages(batch)
    assert all(bool((g == 0).all()) for g in gradients_of(trainer_of(model), batch, grpo()).values())


def test_named_weights_have_hugging_face_names_and_adapters_merged(tiny_model: Make) -> None:
    base = tiny_model()
    model = with_lora(copy.deepcopy(base))
    trainer = trainer_of(model, rate=1e-2)
    batch = batch_of(model)
    for _ in range(2):
        trainer.update(batch, grpo())
    plain = copy.deepcopy(base)
    plain.load_state_dict(dict(trainer.named_weights()), strict=True)
    assert (trainer_of(plain).logprobs(batch) - trainer.logprobs(batch)).abs().max() < 1e-5
    assert not equal(weights(plain), weights(base))


@pytest.mark.parametrize("lora", [False, True])
def test_the_probe_is_scored_by_products_of_a_few_rows(
    tiny_model: Make, monkeypatch: pytest.MonkeyPatch, lora: bool
) -> None:
    """Of the same values as any pass; and not where blocks are compiled, which would be compiled anew for them."""
    monkeypatch.setattr(few_rows, "SMALLEST", 1)
    fits, products = few_rows._fits, []
    monkeypatch.setattr(few_rows, "_fits", lambda *given: products.append(given) or fits(*given))
    model = with_lora(tiny_model()) if lora else tiny_model()
    expected = score_streams(model.eval(), [np.array([3, 4, 5, 6])], temperature=1.0)[0]
    [found] = trainer_of(model).score([[3, 4, 5, 6]])
    # Seven layers in each of two blocks, and the head.
    assert len(products) == 2 * 7 + 1
    with torch.no_grad():
        assert all(fits(*given) for given in products)
    np.testing.assert_allclose(found[1:], expected[1:], atol=1e-5)

    monkeypatch.setattr(ChangedBlocks, "used", nullcontext)
    trainer_of(model, compiled=True).score([[3, 4, 5, 6]])
    assert len(products) == 2 * 7 + 1
