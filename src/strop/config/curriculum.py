"""`data.curriculum:` which training prompts are tried, by how often they have been passed."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from strop.config.base import Auto, PositiveInt, Share, StrictModel


class CurriculumSettings(StrictModel):
    """`data.curriculum:` which training prompts are tried, by how often they have been passed."""

    solved_at: Share | None = 1.0
    """Pass rate from which a prompt is solved and, but for `floor`, not tried any more; `null` keeps them all."""
    failed_at: Share | None = 0.0
    """Pass rate up to which a prompt is beyond the policy and, but for `floor`, not tried any more; `null` keeps them
    all."""
    floor: Annotated[float, Field(gt=0, lt=1)] = 0.1
    """Probability with which a prompt that would not be tried is tried all the same when its turn comes, so that it
    comes back once the policy can do it, or can do it no more."""
    memory: PositiveInt = 2
    """The pass rate is that of the last so many tries of a prompt; a try is a whole group."""
    min_attempts: PositiveInt | Auto = "auto"
    """Scored completions within that memory from which the pass rate is believed; `auto` is `rollout.group_size`."""
    passes_at: float | None = None
    """Total reward from which a completion has passed. When not set, one has passed that is correct
    (`rewards.correct_at`)."""
    prefer: Literal["any", "uncertain"] = "any"
    """What of the other prompts is tried: `any`, or the `uncertain` ones rather, each with a probability of four times
    its pass rate times its rate of failure, at least `floor`."""

    @model_validator(mode="after")
    def _leaves_something(self) -> Self:
        if self.solved_at is not None and self.failed_at is not None and self.failed_at >= self.solved_at:
            raise ValueError(
                f"failed_at ({self.failed_at:g}) is not below solved_at ({self.solved_at:g}): a prompt would be both"
            )
        if self.solved_at is None and self.failed_at is None and self.prefer == "any":
            raise ValueError("neither solved nor failed prompts are dropped, so the section has no effect: remove it")
        return self
