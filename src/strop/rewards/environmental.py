"""`environment`: what the environment itself gave for the episode."""

from __future__ import annotations

from collections.abc import Sequence

from strop.config.rewards import EnvironmentVerifier
from strop.rewards.protocol import Completed, Verdict


class Environmental:
    """The sum of what the environment gave for the turns; where it gave nothing, the verifier does not apply."""

    def __init__(self, settings: EnvironmentVerifier) -> None:
        self.name = settings.name or settings.kind

    def verify(self, completed: Sequence[Completed]) -> list[Verdict]:
        return [Verdict(item.environment_reward) for item in completed]
