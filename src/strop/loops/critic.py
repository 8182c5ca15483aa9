"""The critic of PPO: a scalar head, on a second model or on the policy, that learns what is still to come."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from strop.algorithms.batch import TokenBatch
from strop.algorithms.supervised import Values, WithValues, explained_variance
from strop.config.model import ModelSettings
from strop.errors import ModelError
from strop.loops.assembly import Roles
from strop.loops.prepare import Prepared
from strop.models.find import resolve_model
from strop.models.folder import check_model_folder, is_scalar_folder
from strop.models.load import ModelFacts, load_model, load_scalar_model, load_tokenizer
from strop.models.scalar import with_scalar_head
from strop.training.parallel.ranks import Alone
from strop.training.single import SingleDeviceTrainer
from strop.training.snapshot import free_memory


class Critic:
    """Values of tokens, and updates towards the returns. All weights of its own backbone are trained."""

    def __init__(self, model: Any, prepared: Prepared, roles: Roles, ranks: Alone | None = None) -> None:
        config = prepared.config
        training = config.training
        model.requires_grad_(True)
        self.algorithm = prepared.algorithm
        self.objective = Values(prepared.algorithm)
        self.trainer = SingleDeviceTrainer(
            model,
            config.critic.optimizer,
            total_updates=config.run.steps * training.mini_batches * training.epochs,
            budget=roles.sizes.tokens_per_micro_batch,
            parts=training.mini_batches,
            epochs=training.epochs,
            recompute=roles.sizes.recompute,
            compiled=roles.sizes.trainer_compiles and not (ranks is not None and ranks.divides_layers),
            head="value",
            ranks=ranks,
        )

    def values(self, batch: TokenBatch) -> Tensor:
        """[T] float32: what is still to come, seen from before each trained token; 0 where the loss mask is False."""
        return self.trainer.logprobs(batch)

    def update(self, batch: TokenBatch) -> dict[str, float]:
        """All mini-batches and epochs of a step; returns metrics, among them how much of the returns' variance the
        values explained before the update (1 is all of it, 0 no more than their mean does)."""
        assert batch.values is not None
        assert batch.returns is not None
        # The policy's numbers of this step stay what they are.
        own = replace(batch, old_logprobs=torch.zeros_like(batch.values), extra={})
        stats = self.trainer.update(own, self.objective)
        kept = ("loss", "grad_norm", "learning_rate")
        found = {f"critic/{name}": stats[name] for name in kept if name in stats}
        found |= {name: value for name, value in stats.items() if name.startswith("value/")}
        found["critic/explained_variance"] = explained_variance(batch.values, batch.returns, batch.loss_mask)
        return found

    def update_both(self, batch: TokenBatch, policy: SingleDeviceTrainer, *, alone: bool) -> dict[str, float]:
        """Update the policy and the critic, or the critic alone; returns the metrics of what was updated."""
        stats: dict[str, float] = {}
        if alone:
            batch.extra["logprobs"] = policy.logprobs(batch)
        else:
            stats = policy.update(batch, self.algorithm)
        return stats | self.update(batch)

    def save(self, directory: Path) -> dict[str, Any]:
        """Write everything that resumes bit for bit."""
        directory.mkdir(exist_ok=True)
        return self.trainer.save(directory)

    def hold(self) -> Callable[[Path], dict[str, Any]]:
        """What `save` would write now, in copies that no update changes; the function that is returned writes it."""
        write = self.trainer.hold_state()

        def save(directory: Path) -> dict[str, Any]:
            directory.mkdir(exist_ok=True)
            return write(directory)

        return save

    def held_bytes(self) -> tuple[int, int]:
        """See `SingleDeviceTrainer.held_bytes`."""
        return self.trainer.held_bytes()

    def load(self, directory: Path, state: dict[str, Any]) -> None:
        self.trainer.load(directory, state)

    def offload(self) -> int:
        """See `SingleDeviceTrainer.offload`."""
        return self.trainer.offload()

    def reload(self) -> int:
        """See `SingleDeviceTrainer.reload`."""
        return self.trainer.reload()


def check_critic(path: str, policy: ModelFacts) -> None:
    """See that the model of `critic.path` is there and reads tokens as the policy does, without loading its weights.

    Raises:
        ModelError: it cannot be used.
    """
    folder = resolve_model(path)
    check_model_folder(folder, scalar=is_scalar_folder(folder))
    known = load_tokenizer(folder).get_vocab()
    if any(known.get(token) != number for token, number in policy.tokenizer.get_vocab().items()):
        raise ModelError(
            "the critic and the policy have different tokenizers, so the critic cannot read the policy's tokens",
            where=f"critic.path = {path}",
            mend="take a model of the policy's family, or leave the key out",
        )


class SharedCritic:
    """A scalar head on the policy's backbone, which the policy's trainer holds, updates and saves."""

    def __init__(self, prepared: Prepared, policy: SingleDeviceTrainer) -> None:
        self.settings = prepared.config.critic
        self.algorithm: Any = prepared.algorithm
        self.trainer = policy
        training = prepared.config.training
        several = training.mini_batches * training.epochs > 1
        self._fills_old = several or getattr(prepared.algorithm, "needs_old_logprobs", False)

    def values(self, batch: TokenBatch) -> Tensor:
        """As of `Critic`; the same pass fills `old_logprobs` where the step needs them."""
        logprobs, values = self.trainer.logprobs_and_values(batch)
        if self._fills_old:
            batch.old_logprobs = logprobs
        return values

    def update_both(self, batch: TokenBatch, policy: SingleDeviceTrainer, *, alone: bool) -> dict[str, float]:
        """As of `Critic`, in one update."""
        assert batch.values is not None
        assert batch.returns is not None
        coef = self.settings.value_coef
        stats = policy.update(batch, WithValues(self.algorithm, coef, head_alone=alone))
        if "loss/value" in stats:
            stats["critic/loss"] = stats.pop("loss/value") / coef
        if "learning_rate" in stats:
            share = self.settings.optimizer.learning_rate / policy.optimizer.settings.learning_rate
            stats["critic/learning_rate"] = share * stats["learning_rate"]
        if alone:
            # All of these are the head's.
            stats.pop("loss", None)
            stats.pop("learning_rate", None)
            if "grad_norm" in stats:
                stats["critic/grad_norm"] = stats.pop("grad_norm")
        stats["critic/explained_variance"] = explained_variance(batch.values, batch.returns, batch.loss_mask)
        return stats

    def save(self, directory: Path) -> dict[str, Any]:
        """Nothing: the head is among the policy's state."""
        return {}

    def hold(self) -> Callable[[Path], dict[str, Any]]:
        """Nothing, likewise."""
        return self.save

    def held_bytes(self) -> tuple[int, int]:
        """(0, the memory that is free)."""
        return 0, free_memory()

    def load(self, directory: Path, state: dict[str, Any]) -> None:
        """Nothing, likewise."""

    def offload(self) -> int:
        """0: the head's state goes with the policy's."""
        return 0

    def reload(self) -> int:
        """0, likewise."""
        return 0


def make_critic(
    prepared: Prepared, roles: Roles, policy: SingleDeviceTrainer, *, ranks: Alone | None = None
) -> Critic | SharedCritic | None:
    """The critic of a recipe, as it is before its first update; None where the algorithm needs none.

    One with a backbone of its own begins with that of `critic.path`, with its head too if that is a reward model; else
    with the policy's as it is now, after a warm-up.

    Args:
        ranks: that its trainer is one of.
    """
    if not getattr(prepared.algorithm, "needs_critic", False):
        return None
    config, hardware = prepared.config, prepared.hardware
    if config.critic.shared:
        return SharedCritic(prepared, policy)
    path = config.critic.path
    if path is None and config.model.lora is None:
        return Critic(with_scalar_head(copy.deepcopy(roles.model)), prepared, roles, ranks)
    if path is not None and is_scalar_folder(resolve_model(path)):
        model: Any = load_scalar_model(resolve_model(path), device=hardware.device, dtype=hardware.dtype)
    else:
        settings = config.model.model_copy(update={"lora": None}) if path is None else ModelSettings(path=path)
        loaded = load_model(settings, device=hardware.device, dtype=hardware.dtype, seed=config.run.seed)
        model = with_scalar_head(loaded.model)
    rows, known = model.get_input_embeddings().weight.shape[0], roles.model.get_input_embeddings().weight.shape[0]
    if rows < known:
        raise ModelError(
            f"the critic knows {rows} tokens and the policy {known}: they have different tokenizers",
            where=f"critic.path = {path}",
            mend="take a model of the policy's family, or leave the key out",
        )
    return Critic(model, prepared, roles, ranks)
