"""The update rules that `training.optimizer.name` chooses from, as optimizers of torch and bitsandbytes."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from strop.config.training import OptimizerSettings
from strop.errors import MissingExtra
from strop.models.adapters import without_adapters


def update_rules(
    settings: OptimizerSettings,
    masters: Mapping[str, nn.Parameter],
    outer: Collection[str] = (),
    scales: Mapping[str, float] | None = None,
) -> list[Optimizer]:
    """The optimizers that together update every master once.

    Args:
        masters: the float32 weights by name.
        outer: names of the weights of input and output layers, which Muon leaves to AdamW (see `outer_weights`).
        scales: what the learning rate of a weight is multiplied with, by its name; such weights are in parameter groups
            of their own, with the factor under `rate_scale`, and Muon leaves them to AdamW too.

    Raises:
        MissingExtra: 8-bit AdamW without bitsandbytes.
    """
    scales = scales or {}
    if settings.name == "muon":
        return _muon(settings, masters, outer, scales)
    groups = _groups(settings, masters, scales)
    if settings.name == "adafactor":
        return [torch.optim.Adafactor(groups, lr=settings.learning_rate)]
    if settings.name == "adamw_8bit":
        return [_adamw_8bit(settings, groups)]
    return [_adamw(settings, groups)]


def outer_weights(model: nn.Module) -> set[str]:
    """Names of the weights of a causal model's embeddings, output head and scalar head, and of the singular values of
    adapters, which are columns and no matrices."""
    base = without_adapters(model)
    layers: list[Any] = [module for module in base.modules() if isinstance(module, nn.Embedding)]
    layers += [base.get_output_embeddings(), getattr(base, "score", None)]
    weights = {id(parameter) for layer in layers if layer is not None for parameter in layer.parameters(recurse=False)}
    return {name for name, weight in model.named_parameters() if id(weight) in weights or ".lora_E." in name}


def _adamw(settings: OptimizerSettings, groups: list[dict[str, Any]]) -> Optimizer:
    return torch.optim.AdamW(
        groups,
        lr=settings.learning_rate,
        betas=(settings.beta1, settings.beta2),
        eps=settings.eps,
        fused=True,
    )


def _muon(
    settings: OptimizerSettings,
    masters: Mapping[str, nn.Parameter],
    outer: Collection[str],
    scales: Mapping[str, float],
) -> list[Optimizer]:
    """Muon for the hidden matrices, AdamW for the rest.

    An orthogonal update has another size than AdamW's. Scaling it to the root mean square of AdamW's (arXiv 2502.16982,
    section 2.2) lets both share one learning rate, schedule and weight decay.
    """
    hidden = {name: master for name, master in masters.items() if master.ndim == 2 and name not in {*outer, *scales}}
    others = {name: master for name, master in masters.items() if name not in hidden}
    rules: list[Optimizer] = []
    if hidden:
        rules.append(
            torch.optim.Muon(
                hidden.values(),
                lr=settings.learning_rate,
                weight_decay=settings.weight_decay,
                adjust_lr_fn="match_rms_adamw",
            )
        )
    if others:
        rules.append(_adamw(settings, _groups(settings, others, scales)))
    return rules


def _adamw_8bit(settings: OptimizerSettings, groups: list[dict[str, Any]]) -> Optimizer:
    try:
        from bitsandbytes.optim import AdamW8bit
    except ImportError as error:
        raise MissingExtra("bitsandbytes", extra="bnb", needed_for="the optimizer adamw_8bit") from error
    optimizer: Optimizer = AdamW8bit(
        groups,
        lr=settings.learning_rate,
        betas=(settings.beta1, settings.beta2),
        eps=settings.eps,
    )
    return optimizer


def _groups(
    settings: OptimizerSettings, masters: Mapping[str, nn.Parameter], scales: Mapping[str, float]
) -> list[dict[str, Any]]:
    """Matrices, which are decayed, and norms and biases, which are not; apart by the scale of their learning rate."""
    groups: dict[tuple[bool, float], dict[str, Any]] = {}
    for name, master in masters.items():
        decayed, scale = master.ndim >= 2, scales.get(name, 1.0)
        decay = settings.weight_decay if decayed else 0.0
        group = groups.setdefault((decayed, scale), {"params": [], "weight_decay": decay, "rate_scale": scale})
        group["params"].append(master)
    return list(groups.values())
