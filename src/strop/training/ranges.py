"""Names for the parts of training in a profile (`strop train --profile`); nothing where no profile is made."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from strop.models.attention import Plan, Scores

PARTS = ("packing", "blocks", "attention", "output head", "loss", "gradients", "optimizer")
"""What a pass and an update consist of. Where one is inside of another, the inner one counts: the blocks are without
their attention. Gradients are what it takes to add them up, not to compute them."""

_recording = False


def record_ranges(on: bool) -> None:
    """From now on a profile is made in this process, or not."""
    global _recording
    _recording = on


def named(part: str) -> AbstractContextManager[Any]:
    """A range of the profile that is made at the moment."""
    # torch takes some microseconds to open a range that nobody records.
    return torch.profiler.record_function(part) if _recording else nullcontext()


def named_plan(plan: Plan) -> Plan:
    """A plan whose attention is a range of the profile, while one is made."""
    return _NamedPlan(plan) if _recording else plan


class _NamedPlan:
    def __init__(self, plan: Plan) -> None:
        self._plan = plan

    def attend(self, layer: nn.Module, query: Tensor, key: Tensor, value: Tensor, scores: Scores) -> Tensor:
        with named("attention"):
            return self._plan.attend(layer, query, key, value, scores)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._plan, name)
