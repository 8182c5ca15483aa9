"""What every section of the configuration has in common."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

Auto = Literal["auto"]
"""The value of a setting that strop chooses itself, from the hardware or from other settings."""

PositiveInt = Annotated[int, Field(gt=0)]
NonNegativeInt = Annotated[int, Field(ge=0)]
PositiveFloat = Annotated[float, Field(gt=0)]
NonNegativeFloat = Annotated[float, Field(ge=0)]
Share = Annotated[float, Field(ge=0, le=1)]


@dataclass(frozen=True)
class NamesModel:
    """Marks a key whose text names a model, as `models/find.py` understands it. kind: what it may be, a language model
    (`text`), one with a scalar head (`scalar`), or either (`any`)."""

    kind: Literal["text", "scalar", "any"]


ModelPath = Annotated[str, NamesModel("text")]
ScalarModelPath = Annotated[str, NamesModel("scalar")]
AnyModelPath = Annotated[str, NamesModel("any")]


class StrictModel(BaseModel):
    """A section: unknown keys are refused, defaults are checked, and the text below a field is its documentation."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        validate_default=True,
        use_attribute_docstrings=True,
        protected_namespaces=(),
        allow_inf_nan=False,
    )
