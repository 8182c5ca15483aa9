"""`alarms:` signs that a reward is being hacked."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from strop.config.base import PositiveFloat, PositiveInt, StrictModel
from strop.config.rewards import Verifiers, check_names

OpenShare = Annotated[float, Field(gt=0, lt=1)]
Factor = Annotated[float, Field(gt=1)]


class SecondOpinionSettings(StrictModel):
    """Verifiers that are asked about a sample of what the reward calls right, and train nothing."""

    verifiers: Verifiers
    """Who is asked, the kinds of `rewards.verifiers`; the first one that a row is for decides. Time-outs, retries and
    `max_error_share` are those of `rewards`."""
    correct_at: float = 1.0
    """Score of the first of these verifiers from which it agrees that a completion is right."""
    share: Annotated[float, Field(gt=0, le=1)] = 0.1
    """Share of a step's right completions that it is asked about."""
    disagreement: OpenShare = 0.2
    """Alarm when it calls more than this share of them wrong, as far as the number asked in the last 20 steps can
    tell."""

    @model_validator(mode="after")
    def _names_differ(self) -> Self:
        check_names(self.verifiers)
        return self


class AlarmSettings(StrictModel):
    """`alarms:` signs that a reward is being hacked. Each is a statistic of a step's completions, mostly of the
    rewarded ones, those worth the step's mean or more, against what is usual in this run; docs/alarms.md has them
    all."""

    action: Literal["warn", "stop", "off"] = "warn"
    """What an alarm does: it is shown and noted in the run's folder, or the run stops as well; `off` looks at
    nothing."""
    baseline_steps: PositiveInt = 5
    """Steps that are looked at before anything can be unusual."""
    half_life: PositiveInt = 100
    """Steps after which what was usual counts half; what an alarm is about never becomes usual."""
    patience: PositiveInt = 3
    """Steps in a row that a statistic has to be beyond its limit. Jumps, held-out scores and second opinions have
    measures of their own."""
    repetition: OpenShare | None = 0.25
    """Alarm when the share of repeated 4-grams of tokens in rewarded completions is so much above the usual; null for
    never."""
    stuffing: PositiveFloat | None = 1.0
    """Alarm when rewarded completions have so many more different answers than usual, boxed, stated or listed in a row;
    null for never."""
    length: Factor | None = 1.6
    """Alarm when rewarded completions are so many times as long as usual; null for never."""
    sameness: OpenShare | None = 0.3
    """Alarm when the share of equal rewarded completions, among pairs to prompts with different answers, is so much
    above the usual; null for never."""
    dominance: OpenShare | None = 0.9
    """Alarm when another verifier than the one that decides `correct` makes so large a share of the differences within
    groups, and the reward rises while that one's score does not; null for never."""
    jump: OpenShare | None = 0.3
    """Alarm when the mean reward rises by so large a share of the range of rewards within three steps, after steps in
    which it hardly moved; null for never."""
    held_out: OpenShare | None = 0.15
    """Alarm when held-out accuracy is so much below its best in two evaluations in a row, and the training reward is
    higher than it was then by a tenth of its range; null for never."""
    second_opinion: SecondOpinionSettings | None = None
    """Other verifiers for a sample of what counts as correct; none when not set."""
