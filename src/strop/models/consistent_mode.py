"""The consistent mode: what an engine notes while it samples is, bit for bit, what the trainer computes later.

The probability of a token differs between two passes over the same weights because sums are added up in another order
where other rows are beside it. A model that was made consistent is computed by operators whose results do not depend on
that (`consistent.py`), in the engine and in the trainer alike. Its weights and modules stay as they are: `running`
exchanges what the modules compute while a pass lasts.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from strop.errors import ModelError
from strop.models.adapters import without_adapters
from strop.models.consistent import linear, rms_norm, silu
from strop.models.replaced import replaced

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
"""`model_type` of the models whose layers are known to be made of nothing but these operators."""
ROTATIONS = ("default", "linear", "llama3", "yarn")
"""Rotary embeddings of which a position's does not depend on how long the longest stream is."""
WHERE = "rollout.engine.consistent"
# Of a table of rotations, which grows.
_POSITIONS = 256


class _Exchanged:
    """What the modules of one model compute in the consistent mode."""

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self._forwards: list[tuple[nn.Module, Callable[..., Any]]] = []
        for module in model.modules():
            forward = _forward_of(module)
            if forward is None and device.type == "cpu":
                forward = _forward_on_cpu(module)
            if forward is not None:
                self._forwards.append((module, forward))

    def used(self) -> AbstractContextManager[None]:
        return replaced(self._forwards)


_MODELS: WeakKeyDictionary[nn.Module, _Exchanged] = WeakKeyDictionary()


def make_consistent(model: nn.Module) -> None:
    """Compute a model in the consistent mode from now on, whenever it is `running`. Adapters must be there already.

    Raises:
        ModelError: a part of the model is not one of those that the mode knows; it says which.
    """
    device = next(model.parameters()).device
    _check_device(device)
    _check_model(without_adapters(model))
    _MODELS[model] = _Exchanged(model, device)


def is_consistent(model: nn.Module) -> bool:
    """Whether a model was made consistent."""
    return model in _MODELS


def frozen_copy(model: nn.Module) -> nn.Module:
    """A copy that is not trained, in eval mode; consistent where the model is."""
    held = copy.deepcopy(model).requires_grad_(False).eval()
    if is_consistent(model):
        make_consistent(held)
    return held


@contextmanager
def exchanged(model: nn.Module) -> Iterator[bool]:
    """Let the modules of a model compute consistently, where it was made so; whether it was is given."""
    found = _MODELS.get(model)
    if found is None:
        yield False
        return
    with found.used():
        yield True


class _Rotations:
    """What a rotary embedding gives for each position, computed once in blocks of one size. torch rounds a cosine at
    the end of an array in another way than in its middle."""

    def __init__(self, module: Any) -> None:
        self._compute = module.forward
        self._known: dict[torch.dtype, tuple[Tensor, Tensor]] = {}

    def __call__(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        known = self._known.get(x.dtype)
        missing = range(0 if known is None else len(known[0]), int(position_ids.max()) + 1, _POSITIONS)
        if missing or known is None:
            blocks = [self._compute(x, torch.arange(start, start + _POSITIONS)[None]) for start in missing]
            pieces = [*([] if known is None else [known]), *((cos[0], sin[0]) for cos, sin in blocks)]
            known = (torch.cat([cos for cos, _ in pieces]), torch.cat([sin for _, sin in pieces]))
            self._known[x.dtype] = known
        return known[0][position_ids], known[1][position_ids]


def _forward_of(module: Any) -> Callable[..., Any] | None:
    if isinstance(module, nn.Linear):
        # Adapters in float32 compute in the number format of their input, as `adapters.LikeInput` does.
        def multiply(x: Tensor) -> Tensor:
            bias = None if module.bias is None else module.bias.to(x.dtype)
            return linear(x, module.weight.to(x.dtype), bias)

        return multiply
    if _is_norm(module):
        return lambda x: rms_norm(x, module.weight, module.variance_epsilon)
    return None


def _forward_on_cpu(module: Any) -> Callable[..., Any] | None:
    if _is_rotary(module):
        return _Rotations(module)
    return silu if _is_silu(module) else None


def _is_norm(module: nn.Module) -> bool:
    return type(module).__name__.endswith("RMSNorm")


def _is_rotary(module: nn.Module) -> bool:
    return type(module).__name__.endswith("RotaryEmbedding")


def _is_silu(module: nn.Module) -> bool:
    return isinstance(module, nn.SiLU) or type(module).__name__ == "SiLUActivation"


def _check_device(device: torch.device) -> None:
    from torch.utils._triton import has_triton

    if device.type == "cpu" or (device.type == "cuda" and has_triton()):
        return
    lacks = "Triton is not there, or does not know this one" if device.type == "cuda" else "there are no kernels for it"
    raise ModelError(f"the consistent mode does not compute on {device.type}: {lacks}", where=WHERE, mend=_OR_FALSE)


_OR_FALSE = "set it to false, or use another model or device"


def _check_model(base: Any) -> None:
    """Raise ModelError for a model of which a part may compute a row in another way beside other rows."""
    config = base.config
    problem = check_family(config.model_type)
    if problem is not None:
        raise problem
    found = _unknown(base)
    if found is not None:
        raise ModelError(f"the consistent mode does not know {found}", where=WHERE, mend=_OR_FALSE)


def check_family(model_type: str) -> ModelError | None:
    """What is wrong with models of a type, as config.json names it; None for those that the mode knows."""
    if model_type in FAMILIES:
        return None
    return ModelError(
        f"the consistent mode knows the layers of {', '.join(FAMILIES)}, not those of {model_type}",
        where=WHERE,
        mend="set it to false, or use a model of one of these families",
    )


def _unknown(base: Any) -> str | None:
    """A part of a model that the mode does not know, in words."""
    head = base.get_output_embeddings()
    if hasattr(head, "base_layer"):
        return "an adapter on the output head"
    if type(head) is not nn.Linear:
        return f"an output head of the class {type(head).__name__}"
    for name, module in base.named_modules():
        kind = type(module)
        if kind.__module__.startswith("peft."):
            if kind.__name__ != "Linear" or module.lora_variant:
                return f"an adapter of this kind ({name}, {kind.__name__})"
        elif _is_rotary(module):
            if module.rope_type not in ROTATIONS:
                return f"the rotary embedding {module.rope_type}"
        elif isinstance(module, nn.Dropout):
            if module.p > 0:
                return f"dropout ({name}), with which two passes differ in any case"
        elif isinstance(module, nn.Linear):
            # Quantised layers are subclasses.
            if kind.forward is not nn.Linear.forward and kind.__name__ != "LikeInput":
                return f"a linear layer of the class {kind.__name__} ({name})"
        elif not (
            any(True for _ in module.children())
            or isinstance(module, nn.Embedding | nn.Identity | nn.ModuleDict | nn.ModuleList | nn.ParameterDict)
            or _is_norm(module)
            or _is_silu(module)
        ):
            return f"{name}, a {kind.__name__}"
    return None


__all__ = ["FAMILIES", "ROTATIONS", "check_family", "exchanged", "frozen_copy", "is_consistent", "make_consistent"]
