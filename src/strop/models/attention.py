"""Attention over packed token streams and over caches, plugged into unmodified Hugging Face models.

`running(model, plan)` routes a model's attention through `plan.attend` for the length of a forward (and backward) pass;
outside it the model is plain Hugging Face. Models reach this through transformers' attention interface, so any
architecture that supports it works, with grouped heads, sliding windows, logit soft-capping and attention sinks.

Two files compute it: `attention_flash.py` on GPUs in half precision, `attention_padded.py` everywhere else; and in the
consistent mode `attention_consistent.py` on GPUs.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor, nn

from strop.errors import ModelError
from strop.models.attention_flash import FlashAttention, usable
from strop.models.attention_padded import PaddedAttention
from strop.models.consistent import with_gradient_of
from strop.models.consistent_mode import exchanged
from strop.models.layout import Layout
from strop.models.moving import moved
from strop.models.scores import Scores

NAME = "strop"


class Plan(Protocol):
    """What `running` routes a model's attention to. Tensors are [1, heads, T, head size]."""

    def attend(self, layer: nn.Module, query: Tensor, key: Tensor, value: Tensor, scores: Scores) -> Tensor:
        """[1, T, heads, head size]."""
        ...


# By the config of a layer: its plan, and whether its model computes consistently.
_PLANS: dict[int, tuple[Plan, bool]] = {}
_CONFIGS: WeakKeyDictionary[nn.Module, dict[int, Any]] = WeakKeyDictionary()


def _attention_interface(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    config: Any = module.config
    plan, consistent = _PLANS[id(config)]
    scores = Scores(
        scaling=query.shape[-1] ** -0.5 if scaling is None else scaling,
        window=kwargs.get("sliding_window"),
        softcap=kwargs.get("softcap"),
        sinks=kwargs.get("s_aux"),
        consistent=consistent,
    )
    if dropout:
        raise ModelError("attention dropout is not supported", mend="set attention_dropout to 0 in the model's config")
    if kwargs.get("position_bias") is not None:
        raise ModelError(f"{type(module).__name__} biases attention by position, which packing does not support")
    return plan.attend(module, query, key, value, scores), None


def compiled_around() -> None:
    """Let torch.compile leave attention out of what it compiles, in this process: a plan is another in each pass."""
    from transformers import AttentionInterface

    _REGISTERED["function"] = torch.compiler.disable(_attention_interface)
    AttentionInterface.register(NAME, _REGISTERED["function"])


def _configs(model: nn.Module) -> dict[int, Any]:
    """Every config that the model's layers read; looked up once a model, since a decoding step has no time for it."""
    if model not in _CONFIGS:
        from transformers import AttentionInterface

        AttentionInterface.register(NAME, _REGISTERED["function"])
        found = (getattr(module, "config", None) for module in model.modules())
        _CONFIGS[model] = {id(c): c for c in found if c is not None and hasattr(c, "_attn_implementation")}
    return _CONFIGS[model]


# What transformers calls; a function that is left out of compiling costs something at each call.
_REGISTERED: dict[str, Any] = {"function": _attention_interface}


@contextmanager
def running(model: nn.Module, plan: Plan) -> Iterator[None]:
    """Route the model's attention through a plan; keep it open over the backward pass when blocks are recomputed."""
    configs = _configs(model)
    before = {key: config._attn_implementation for key, config in configs.items()}
    try:
        with exchanged(model) as consistent:
            for key, config in configs.items():
                # The property setter would also reach sub-configs and validate the name on each call.
                config._attn_implementation_internal = NAME
                _PLANS[key] = plan, consistent
            yield
    finally:
        for key, config in configs.items():
            config._attn_implementation_internal = before[key]
            _PLANS.pop(key, None)


def check_supported(model: nn.Module) -> None:
    """Raise ModelError for architectures that mix tokens elsewhere than in the attention interface."""
    name = type(model).__name__
    if not getattr(model, "_supports_attention_backend", False):
        raise ModelError(
            f"{name} does not use transformers' attention interface, so its token streams cannot be packed",
            mend="use a model whose attention can be exchanged, such as Llama, Qwen, Mistral, Gemma, OLMo or GPT-2",
        )
    if getattr(model, "_is_stateful", False):
        raise ModelError(f"{name} carries a recurrent state from token to token, which packing would mix up")


class PackedAttention:
    """Attention within a layout: each token sees its segment's prefix and the earlier tokens of its segment."""

    def __init__(self, layout: Layout, device: torch.device) -> None:
        self.device = device
        self._layout = layout
        # Made when the first layer asks, which shows its number format.
        self._flash: FlashAttention | None = None
        self._padded: PaddedAttention | None = None
        self._tiles: Any = None

    def attend(self, layer: nn.Module, query: Tensor, key: Tensor, value: Tensor, scores: Scores) -> Tensor:
        """[1, T, heads, head size] from query [1, heads, T, d], key and value [1, kv heads, T, d]."""
        if scores.consistent and query.is_cuda:
            return self._consistent(layer, query, key, value, scores)
        if usable(query, scores):
            if self._flash is None:
                self._flash = FlashAttention(self._layout, self.device)
            return self._flash.attend(query, key, value, scores)
        if self._padded is None:
            self._padded = PaddedAttention(self._layout, self.device)
        return self._padded.attend(query, key, value, scores)

    def _consistent(self, layer: nn.Module, query: Tensor, key: Tensor, value: Tensor, scores: Scores) -> Tensor:
        """The same by kernels that are consistent; the gradient is that of the others."""
        if self._tiles is None:
            from strop.models.attention_consistent import PackedTiles

            self._tiles = PackedTiles(self._layout, self.device)
        tiles, ordinary = self._tiles, replace(scores, consistent=False)

        def plain(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            return PackedAttention.attend(self, layer, query, key, value, ordinary)

        def compute(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            return tiles.attend(query, key, value, scores)

        return with_gradient_of(plain, compute, query, key, value)

    def _tensor(self, array: np.ndarray) -> Tensor:
        return moved(torch.from_numpy(np.ascontiguousarray(array)), self.device)


__all__ = ["PackedAttention", "Plan", "Scores", "check_supported", "compiled_around", "running"]
