"""What verifiers of every kind have in a recipe."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import AfterValidator, Field

from strop.config.base import PositiveFloat, StrictModel


def _in_order(bounds: list[Any]) -> list[Any]:
    low, high = bounds
    if low is None and high is None:
        raise ValueError("it bounds nothing; set one of the two")
    if low is not None and high is not None and low >= high:
        raise ValueError("the first number must be below the second")
    return bounds


Bounds = Annotated[list[float | None], Field(min_length=2, max_length=2), AfterValidator(_in_order)]
Scale = Annotated[list[float], Field(min_length=2, max_length=2), AfterValidator(_in_order)]


class Verifier(StrictModel):
    """What all verifiers have."""

    name: str | None = None
    """Name in metrics and episodes; the kind when not set."""
    weight: float = 1.0
    """Factor of the score in the total reward."""
    clip: Bounds | None = None
    """Lowest and highest number that the score counts as in the total, `[low, high]`; null leaves a side open."""
    when: dict[str, Any] = Field(default_factory=dict)
    """Score only rows whose columns have these values, `{source: gsm8k}`; a list stands for any of its values."""
    gate: bool = False
    """The other verifiers count only where this one passes."""
    requires: str | None = None
    """Name of a verifier that has to pass before this one counts."""
    passes_at: float = 1.0
    """Score from which this one passes, for `gate` and for the `requires` of others."""
    timeout: PositiveFloat | None = None
    """Seconds that it may take, instead of `rewards.timeout`."""
