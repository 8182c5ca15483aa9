"""Updates of float32 masters from float32 gradient sums, whatever the model computes in."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from strop.config.training import OptimizerSettings
from strop.errors import RunFailure
from strop.training.parallel.gradients import Gradients, PlainGradients
from strop.training.parked import Parked
from strop.training.schedule import learning_rate
from strop.training.update_rules import update_rules

MASTER = "master"
"""What the keys of float32 copies begin with in the optimizer's state."""
# Tables that bitsandbytes shares between all weights; they hold no state.
_CODES = {"qmap1": "dynamic", "qmap2": "udynamic"}


class MasterOptimizer:
    """The chosen optimizer over float32 masters.

    A float32 parameter is its own master. For any other parameter the master is a float32 copy: gradients of each
    micro-batch are added in float32 and the parameter is rounded from the master after each update, so that updates
    smaller than a bfloat16 step are not lost. With `offload` every master is a copy on the CPU; gradients are added
    there, and it is there that the update is computed.

    Args:
        parameters: (name, parameter) of what is trained. total: optimizer updates of the whole run, for the schedule.
        outer: names of the weights of input and output layers, which Muon leaves to AdamW.
        scales: what the learning rate of a weight is multiplied with, by its name; 1 where it is not named.
        gradients: how gradients become those of the whole batch; of one process when None.

    Raises:
        MissingExtra: the optimizer needs a package that is not installed.
    """

    def __init__(
        self,
        parameters: Iterable[tuple[str, nn.Parameter]],
        settings: OptimizerSettings,
        total: int,
        outer: Collection[str] = (),
        scales: Mapping[str, float] | None = None,
        gradients: Gradients | None = None,
    ) -> None:
        self.settings = settings
        self._gradients = PlainGradients() if gradients is None else gradients
        self.total = total
        self.updates = 0
        self.parameters = {name: p for name, p in parameters if p.requires_grad}
        self.masters: dict[str, nn.Parameter] = {}
        self._hooks: list[Any] = []
        for name, parameter in self.parameters.items():
            if parameter.dtype == torch.float32 and not settings.offload:
                self.masters[name] = parameter
            else:
                copied = parameter.detach().to(
                    "cpu" if settings.offload else parameter.device, torch.float32, copy=True
                )
                master = nn.Parameter(copied)
                self.masters[name] = master
                self._hooks.append(parameter.register_post_accumulate_grad_hook(_add_to(master)))
        self.rules = update_rules(settings, self.masters, outer, scales)
        self._rule_of = {p: rule for rule in self.rules for group in rule.param_groups for p in group["params"]}
        self.home = next((master.device for master in self.masters.values()), torch.device("cpu"))
        """Where updates are computed."""
        self.parked = Parked(self)
        """Moves the state away between updates; it has to be back before gradients are added up."""

    def zero_grad(self) -> None:
        for master in self.masters.values():
            master.grad = None
        for parameter in self.parameters.values():
            parameter.grad = None

    def step(self, after: Callable[[], None] | None = None) -> dict[str, Tensor | float]:
        """Clip, update, round to the parameters. Returns the norm before clipping (a tensor) and the learning rate.

        Args:
            after: called when the parameters are updated and their gradients are still there; it may change parameters
                that are float32.

        Raises:
            RunFailure: the gradient is not finite; nothing was changed.
        """
        assert not self.parked.away, "gradients were added up while the masters were away"
        with torch.no_grad():
            self._gradients.reduce(self.masters)
            norm = self._gradients.norm(self.masters)
            if not bool(torch.isfinite(norm)):
                self.zero_grad()
                raise RunFailure(
                    f"the gradient of update {self.updates} is not finite (norm {float(norm)})",
                    mend="lower the learning rate; the weights are those from before this update",
                )
            if self.settings.max_grad_norm is not None:
                self._gradients.clip(self.masters, self.settings.max_grad_norm, norm)
            rate = learning_rate(self.settings, self.updates, self.total)
            for rule in self.rules:
                for group in rule.param_groups:
                    group["lr"] = rate * group.get("rate_scale", 1.0)
                rule.step()
            for name, parameter in self.parameters.items():
                if self.masters[name] is not parameter:
                    parameter.copy_(self.masters[name])
            if after is not None:
                self._look(after)
        self.updates += 1
        self.zero_grad()
        return {"grad_norm": norm, "learning_rate": rate}

    def _look(self, after: Callable[[], None]) -> None:
        """Let somebody see and change parameters whose gradients, and masters, may be elsewhere."""
        apart = [(p, self.masters[name]) for name, p in self.parameters.items() if self.masters[name] is not p]
        for parameter, master in apart:
            if master.grad is not None:
                parameter.grad = master.grad.to(parameter.device, parameter.dtype)
        after()
        for parameter, master in apart:
            if parameter.dtype == torch.float32:
                master.copy_(parameter)

    def close(self) -> None:
        """Take the hooks off the parameters."""
        for hook in self._hooks:
            hook.remove()
        self.zero_grad()

    def state(self) -> dict[str, Tensor]:
        """State by parameter name (`exp_avg/NAME`, ...), and masters that are not parameters (`master/NAME`)."""
        found: dict[str, Tensor] = {}
        for name, master in self.masters.items():
            for key, value in self._rule_of[master].state.get(master, {}).items():
                if key not in _CODES:
                    found[f"{key}/{name}"] = torch.as_tensor(value).detach()
            if master is not self.parameters[name]:
                found[f"{MASTER}/{name}"] = master.detach()
        return found

    def apart(self) -> Iterator[tuple[str, Any]]:
        """(key, value) of the state, of masters that are not parameters, and of their gradients: the things themselves,
        which `training/parked.py` moves."""
        for name, master in self.masters.items():
            for key, value in self._rule_of[master].state.get(master, {}).items():
                if key not in _CODES:
                    yield f"{key}/{name}", value
            if master is not self.parameters[name]:
                yield f"{MASTER}/{name}", master
                if master.grad is not None:
                    yield f"grad/{name}", master.grad

    def load(self, tensors: dict[str, Tensor], updates: int) -> None:
        """Take back what `state` gave."""
        self.parked.reload()
        self.updates = updates
        by_name: dict[str, dict[str, Tensor]] = {}
        for key, value in tensors.items():
            kind, _, name = key.partition("/")
            by_name.setdefault(name, {})[kind] = value
        with torch.no_grad():
            for name, master in self.masters.items():
                kinds = by_name.get(name, {})
                if master is not self.parameters[name]:
                    master.copy_(kinds.pop(MASTER))
                    self.parameters[name].copy_(master)
                if kinds:
                    self._rule_of[master].state[master] = _taken_back(self._rule_of[master], master, kinds)


def _taken_back(rule: Any, master: Tensor, kinds: dict[str, Tensor]) -> dict[str, Any]:
    """The state of one master as its optimizer holds it; each optimizer has its own place for the count of updates."""
    state: dict[str, Any] = {kind: value.to(master.device).clone() for kind, value in kinds.items()}
    if isinstance(rule, torch.optim.Adafactor):
        state["step"] = kinds["step"].cpu().clone()
    elif hasattr(rule, "name2qmap"):  # of bitsandbytes
        state["step"] = int(kinds["step"])
        if state["state1"].dtype == torch.uint8:
            for kind, code in _CODES.items():
                rule.name2qmap[code] = rule.name2qmap[code].to(master.device)
                state[kind] = rule.name2qmap[code]
    return state


def _add_to(master: nn.Parameter) -> Any:
    def add(parameter: Tensor) -> None:
        if parameter.grad is None:
            return
        if master.grad is None:
            master.grad = parameter.grad.to(master.device, torch.float32)
        else:
            master.grad += parameter.grad.to(master.device)
        parameter.grad = None

    return add
