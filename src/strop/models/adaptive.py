"""AdaLoRA through peft (arXiv 2303.10512): adapters whose ranks move, while they are trained, to where they matter.

An adapter is B diag(E) A. How much each entry of E matters is estimated from weights and gradients of every update, and
those that matter least are set to 0 until the budget holds.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from strop.config.model import LoraConfig

MOMENTS = ("exp_avg_ipt", "exp_avg_unc")
"""peft's names of what it remembers of every weight: smoothed sensitivity, and how far it strays."""


def adaptive_config(settings: LoraConfig, updates: int, **common: Any) -> Any:
    """peft's configuration of adapters with moving ranks.

    Args:
        updates: optimizer updates of the whole run. common: what it shares with that of plain adapters.
    """
    import peft

    assert settings.adaptive is not None
    tinit, tfinal, delta_t = settings.adaptive.phases(updates)
    return peft.AdaLoraConfig(
        init_r=settings.rank,
        target_r=settings.adaptive.rank_of(settings.rank),
        tinit=tinit,
        tfinal=tfinal,
        deltaT=delta_t,
        beta1=settings.adaptive.beta1,
        beta2=settings.adaptive.beta2,
        orth_reg_weight=settings.adaptive.orth_reg_weight,
        total_step=updates,
        **common,
    )


def adaptive_ranks(model: Any) -> AdaptiveRanks | None:
    """The ranks of a model's adapters; None where they do not move."""
    tuner = _tuner(model)
    return None if tuner is None else AdaptiveRanks(tuner)


class AdaptiveRanks:
    """What AdaLoRA does beside an optimizer. `adaptive_ranks` makes it.

    updates: how often ranks were looked at; the first time is 1, so that peft's last phase, of `tfinal` updates, begins
    at update total - tfinal and is reached in every run.
    """

    def __init__(self, tuner: Any) -> None:
        self.updates = 0
        self._tuner = tuner
        self._config = tuner.peft_config[tuner.trainable_adapter_name]
        self._allocator = tuner.rankallocator
        named = tuner.model.named_parameters()
        self._weights: dict[str, Any] = {n: p for n, p in named if "lora_" in n and tuner.trainable_adapter_name in n}

    def penalty(self) -> Tensor:
        """Scalar with a graph: `orth_reg_weight` times the mean of |A A' - 1| and |B' B - 1| over all adapters, which
        keeps the directions of an adapter apart. peft adds it to a loss of its own, which strop does not compute.

        Source: AdaLoRA (arXiv 2303.10512) eq. 4, without the square, as peft has it.
        """
        found = []
        for name, weight in self._weights.items():
            if "lora_E" in name:
                continue
            products = weight @ weight.T if "lora_A" in name else weight.T @ weight
            found.append(torch.linalg.norm(products - torch.eye(len(products), device=weight.device)))
        return torch.stack(found).mean() * self._config.orth_reg_weight

    def reallocate(self) -> None:
        """Look at weights and gradients, and set what matters least to 0; after an optimizer's update, before its
        gradients are forgotten."""
        self.updates += 1
        for weight in self._weights.values():
            if weight.grad is None:
                # Nothing of it was used; peft expects a gradient of everything.
                weight.grad = torch.zeros_like(weight)
        self._tuner.update_and_allocate(self.updates)

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """What `load` needs: tensors, and JSON-ready values."""
        tensors = {f"{kind}/{n}": t for kind in MOMENTS for n, t in getattr(self._allocator, kind).items()}
        return tensors, {"updates": self.updates, "rank_pattern": self._config.rank_pattern}

    def load(self, tensors: Mapping[str, Tensor], values: Mapping[str, Any]) -> None:
        """Take back what `state` gave."""
        self.updates = int(values["updates"])
        self._config.rank_pattern = values["rank_pattern"]
        self._allocator.reset_ipt()
        for key, tensor in tensors.items():
            kind, _, name = key.partition("/")
            getattr(self._allocator, kind)[name] = tensor.to(self._weights[name].device)
            # Computed anew at each update; that it is there tells peft that the others are.
            self._allocator.ipt[name] = torch.zeros_like(self._weights[name])


@contextmanager
def ranks_as_they_are(model: Any) -> Iterator[None]:
    """While a model is saved: peft leaves out the entries that its last reallocation set to 0, though an entry may have
    grown back since; inside, those stay."""
    tuner = _tuner(model)
    config = None if tuner is None else tuner.peft_config[tuner.trainable_adapter_name]
    if config is None or config.rank_pattern is None:
        yield
        return
    before = config.rank_pattern
    weights = dict(tuner.model.named_parameters())
    try:
        config.rank_pattern = {
            name: [bool(keep or value) for keep, value in zip(kept, weights[name].flatten().tolist(), strict=True)]
            for name, kept in before.items()
        }
        yield
    finally:
        config.rank_pattern = before


def _tuner(model: Any) -> Any:
    tuner = getattr(model, "base_model", None) if hasattr(model, "peft_config") else None
    return tuner if hasattr(tuner, "rankallocator") else None
