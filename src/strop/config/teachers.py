"""Teachers: models that a student learns from, by distillation."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from strop.config.base import ModelPath, PositiveFloat, StrictModel

Divergence = Literal["forward_kl", "reverse_kl", "jensen_shannon"]
OpenShare = Annotated[float, Field(gt=0, lt=1)]


class TeacherSettings(StrictModel):
    """One of several teachers. What the student learns is the mean of their probabilities, by weight."""

    path: ModelPath
    """The model: whatever `model.path` may be, with the tokenizer of the model that is trained."""
    weight: PositiveFloat = 1.0
    """Its weight; all weights are divided by their sum."""
