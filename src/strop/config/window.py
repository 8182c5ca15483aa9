"""`rollout.window:` which groups a step trains."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from strop.config.base import Auto, PositiveFloat, PositiveInt, StrictModel

OwnFunction = Annotated[str, Field(pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$")]


class PastSettings(StrictModel):
    """Replay: groups that were trained before are trained again, in addition to the step's own.

    Their tokens are off-policy, by up to `max_age` versions, and `algorithm.correction` is `truncate` at 2 unless it
    says otherwise. docs/window.md says what counts them and what does not."""

    groups: PositiveInt
    """Past groups that come to each step's own `rollout.groups_per_step`; fewer while fewer are kept."""
    keep: PositiveInt = 64
    """Groups that are kept, the latest that were trained; they are part of each checkpoint."""
    max_age: PositiveInt = 8
    """How many versions older than the trainer the weights may be that sampled a token of a past group; an older group
    is forgotten. It has to be more than `rollout.max_staleness`."""
    select: Literal["uniform", "priority", "stratified"] | OwnFunction = "uniform"
    """Which of the kept groups come: any, those rather that have a high `priority`, as many of each of `strata` pass
    rates, or what a function of your own says, as `module:function`. Draws are keyed by the run's seed and the step."""
    priority: Literal["spread", "advantage"] = "spread"
    """Of `priority`: the standard deviation of a group's rewards, or the mean of |advantage| over its tokens when it
    was last trained, which is nearly the same for all groups where advantages are divided by that deviation."""
    exponent: PositiveFloat = 1.0
    """Of `priority`: a group is drawn with a probability that grows with its priority to this power. Near 0 all are
    alike; a group of priority 0 comes when no other is left."""
    strata: Annotated[int, Field(ge=2)] = 4
    """Of `stratified`: equal parts of the pass rates from 0 to 1, of which each gives as many groups, as far as it
    has."""

    @model_validator(mode="after")
    def _keeps_enough(self) -> Self:
        if self.keep < self.groups:
            raise ValueError(
                f"keep ({self.keep}) is less than groups ({self.groups}), so that never as many could come"
            )
        return self


class WindowSettings(StrictModel):
    """Which groups a step trains (docs/window.md)."""

    order: Literal["admission", "ready"] | OwnFunction = "admission"
    """With `rollout.max_staleness` of 2 or more: which groups go first, of those that are under way. `admission`: first
    in, first out. `ready`: those that are complete, which favours short completions. Or what a function of your own
    says, as `module:function`. Whatever the order, no token gets older than the bound allows, and nothing is
    dropped."""
    slack: PositiveInt | Auto = "auto"
    """Of every other order than `admission`: how many steps a group may be passed over. Sampling then runs ahead of
    training by `rollout.max_staleness` less that, at least 1, so that the bound holds. `auto` is half of
    `rollout.max_staleness`."""
    past: PastSettings | None = None
    """Train past groups again; none when not set."""
