"""The critic of PPO: a second model, with a scalar head, that learns what the rest of a completion is worth."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from strop.algorithms.batch import TokenBatch
from strop.algorithms.supervised import Values, explained_variance
from strop.config.model import ModelSettings
from strop.errors import ModelError
from strop.loops.assembly import Roles
from strop.loops.prepare import Prepared
from strop.models.find import resolve_model
from strop.models.folder import check_model_folder, is_scalar_folder
from strop.models.load import ModelFacts, load_model, load_scalar_model, load_tokenizer
from strop.models.scalar import with_scalar_head
from strop.training.single import SingleDeviceTrainer


class Critic:
    """Values of tokens, and updates towards the returns. All weights of its own backbone are trained."""

    def __init__(self, model: Any, prepared: Prepared, roles: Roles) -> None:
        config = prepared.config
        training = config.training
        model.requires_grad_(True)
        self.objective = Values(prepared.algorithm)
        self.trainer = SingleDeviceTrainer(
            model,
            config.critic.optimizer,
            total_updates=config.run.steps * training.mini_batches * training.epochs,
            budget=roles.sizes.tokens_per_micro_batch,
            parts=training.mini_batches,
            epochs=training.epochs,
            recompute=config.model.activation_checkpointing,
            head="value",
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

    def save(self, directory: Path) -> dict[str, Any]:
        """Write everything that resumes bit for bit."""
        directory.mkdir()
        return self.trainer.save(directory)

    def load(self, directory: Path, state: dict[str, Any]) -> None:
        self.trainer.load(directory, state)


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


def make_critic(prepared: Prepared, roles: Roles) -> Critic | None:
    """The critic of a recipe, as it is before its first update; None where the algorithm needs none.

    It begins with the backbone of `critic.path`, with its head too if that is a reward model; else with the policy's as
    it is now, after a warm-up.
    """
    if not getattr(prepared.algorithm, "needs_critic", False):
        return None
    config, hardware = prepared.config, prepared.hardware
    path = config.critic.path
    if path is None and config.model.lora is None:
        return Critic(with_scalar_head(copy.deepcopy(roles.model)), prepared, roles)
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
    return Critic(model, prepared, roles)
