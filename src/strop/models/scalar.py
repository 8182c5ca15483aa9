"""Models that give a number where a causal model gives a distribution: reward models and critics."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from strop.errors import ModelError
from strop.models.adapters import without_adapters
from strop.models.global_state import quiet, seeded

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def with_scalar_head(causal: PreTrainedModel, *, pad_id: int | None = None) -> PreTrainedModel:
    """A `...ForSequenceClassification` with one label on the backbone of a causal model, which is moved, not copied.

    The head is all zeros, so that the first score of everything is 0 and no seed is needed: it learns first, and the
    backbone from the second update on.

    Args:
        pad_id: written to the configuration where it names none: transformers' own forward finds the last token of a
            row by the padding after it.

    Raises:
        ModelError: transformers has no such class for the architecture.
    """
    from transformers import AutoModelForSequenceClassification

    config = copy.deepcopy(causal.config)
    config.num_labels = 1
    parameter = next(causal.parameters())
    try:
        with torch.device("meta"), seeded(0), quiet():
            loader: Any = AutoModelForSequenceClassification
            model: Any = loader.from_config(config)
    except ValueError as error:
        raise ModelError(
            f"transformers has no model with a scalar head for {type(causal).__name__}",
            mend="take a model of another family, such as Llama, Qwen or Gemma",
        ) from error
    prefix = model.base_model_prefix
    if not hasattr(causal, prefix) or not isinstance(getattr(model, "score", None), nn.Linear):
        raise ModelError(
            f"{type(model).__name__} is built otherwise than strop expects",
            mend="take a model of another family, such as Llama, Qwen or Gemma",
        )
    setattr(model, prefix, getattr(causal, prefix))
    score = nn.Linear(model.score.in_features, 1, bias=model.score.bias is not None)
    for weight in score.parameters():
        nn.init.zeros_(weight)
    model.score = score.to(device=parameter.device, dtype=parameter.dtype)
    if model.config.pad_token_id is None:
        model.config.pad_token_id = pad_id
    return model.train(causal.training)


def value_head(model: Any) -> nn.Linear:
    """A scalar head beside a causal model, float32 and all zeros, which is no part of the model."""
    weight = model.get_output_embeddings().weight
    head = nn.Linear(weight.shape[1], 1, bias=False, device=weight.device, dtype=torch.float32)
    nn.init.zeros_(head.weight)
    return head


def packed_scores(model: nn.Module, hidden: Tensor) -> Tensor:
    """[N] float32: what the scalar head makes of hidden states [N, H]."""
    base = without_adapters(model)
    head: nn.Linear = base.score
    scores: Tensor = nn.functional.linear(hidden, head.weight, head.bias)[:, 0]
    # A tensor of its own, for FSDP warns of views.
    return scores.to(torch.float32, copy=True)
