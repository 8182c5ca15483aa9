"""AdamW with float32 masters and float32 gradient sums, whatever the model computes in."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from strop.config.training import OptimizerSettings
from strop.errors import RunFailure
from strop.training.schedule import learning_rate


class MasterOptimizer:
    """AdamW (arXiv 1711.05101) over float32 masters.

    A float32 parameter is its own master. For any other parameter the master is a float32 copy: gradients of each
    micro-batch are added in float32 and the parameter is rounded from the master after each update, so that updates
    smaller than a bfloat16 step are not lost.

    Args:
        parameters: (name, parameter) of what is trained. total: optimizer updates of the whole run, for the schedule.
    """

    def __init__(self, parameters: Iterable[tuple[str, nn.Parameter]], settings: OptimizerSettings, total: int) -> None:
        self.settings = settings
        self.total = total
        self.updates = 0
        self.parameters = {name: p for name, p in parameters if p.requires_grad}
        self.masters: dict[str, Tensor] = {}
        self._hooks: list[Any] = []
        for name, parameter in self.parameters.items():
            if parameter.dtype == torch.float32:
                self.masters[name] = parameter
            else:
                master = nn.Parameter(parameter.detach().float().clone())
                self.masters[name] = master
                self._hooks.append(parameter.register_post_accumulate_grad_hook(_add_to(master)))
        decayed = [m for m in self.masters.values() if m.ndim >= 2]
        plain = [m for m in self.masters.values() if m.ndim < 2]
        groups = [
            {"params": decayed, "weight_decay": settings.weight_decay},
            {"params": plain, "weight_decay": 0.0},
        ]
        self.adamw = torch.optim.AdamW(
            [group for group in groups if group["params"]],
            lr=settings.learning_rate,
            betas=(settings.beta1, settings.beta2),
            eps=settings.eps,
            fused=True,
        )

    def zero_grad(self) -> None:
        for master in self.masters.values():
            master.grad = None
        for parameter in self.parameters.values():
            parameter.grad = None

    def step(self) -> dict[str, Tensor | float]:
        """Clip, update, round to the parameters. Returns the norm before clipping (a tensor) and the learning rate.

        Raises:
            RunFailure: the gradient is not finite; nothing was changed.
        """
        with torch.no_grad():
            grads = [m.grad for m in self.masters.values() if m.grad is not None]
            norm = torch.nn.utils.get_total_norm(grads)
            if not bool(torch.isfinite(norm)):
                self.zero_grad()
                raise RunFailure(
                    f"the gradient of update {self.updates} is not finite (norm {float(norm)})",
                    mend="lower the learning rate; the weights are those from before this update",
                )
            if self.settings.max_grad_norm is not None:
                torch.nn.utils.clip_grads_with_norm_(list(self.masters.values()), self.settings.max_grad_norm, norm)
            rate = learning_rate(self.settings, self.updates, self.total)
            for group in self.adamw.param_groups:
                group["lr"] = rate
            self.adamw.step()
            for name, parameter in self.parameters.items():
                if self.masters[name] is not parameter:
                    parameter.copy_(self.masters[name])
        self.updates += 1
        self.zero_grad()
        return {"grad_norm": norm, "learning_rate": rate}

    def close(self) -> None:
        """Take the hooks off the parameters."""
        for hook in self._hooks:
            hook.remove()
        self.zero_grad()

    def state(self) -> dict[str, Tensor]:
        """Moments by parameter name (`exp_avg/NAME`, ...), and masters that are not parameters (`master/NAME`)."""
        found: dict[str, Tensor] = {}
        for name, master in self.masters.items():
            for key, value in self.adamw.state.get(master, {}).items():
                found[f"{key}/{name}"] = value.detach()
            if master is not self.parameters[name]:
                found[f"master/{name}"] = master.detach()
        return found

    def load(self, tensors: dict[str, Tensor], updates: int) -> None:
        """Take back what `state` gave."""
        self.updates = updates
        by_name: dict[str, dict[str, Tensor]] = {}
        for key, value in tensors.items():
            kind, _, name = key.partition("/")
            by_name.setdefault(name, {})[kind] = value
        with torch.no_grad():
            for name, master in self.masters.items():
                kinds = by_name.get(name, {})
                if master is not self.parameters[name]:
                    master.copy_(kinds.pop("master"))
                    self.parameters[name].copy_(master)
                if kinds:
                    self.adamw.state[master] = {
                        kind: value.clone() if kind == "step" else value.to(master.device).clone()
                        for kind, value in kinds.items()
                    }


def _add_to(master: nn.Parameter) -> Any:
    def add(parameter: Tensor) -> None:
        if parameter.grad is None:
            return
        if master.grad is None:
            master.grad = parameter.grad.float()
        else:
            master.grad += parameter.grad
        parameter.grad = None

    return add
