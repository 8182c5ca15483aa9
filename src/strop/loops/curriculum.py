"""What a step tells the curriculum, and what the curriculum tells of a step."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from strop.config import Config
from strop.data.curriculum import Curriculum
from strop.data.rows import row_number
from strop.rollout.episode import Episode, Group


def record_window(curriculum: Curriculum, groups: Sequence[Group], discarded: Sequence[Group], config: Config) -> None:
    """Take in a whole window: first the groups that dynamic sampling replaced, then the others in order of admission.

    That a prompt was replaced for having no spread is just what the curriculum is to know.
    """
    for group in (*discarded, *groups):
        verdicts = [has_passed(episode, config) for episode in group.episodes]
        known = [verdict for verdict in verdicts if verdict is not None]
        curriculum.record(row_number(group.prompt_id), sum(known), len(known))


def has_passed(episode: Episode, config: Config) -> bool | None:
    """Whether a completion has passed; None where it could not be verified, which tells nothing of the policy."""
    if episode.status is None or not episode.status.trainable or math.isnan(episode.reward):
        return None
    assert config.data.curriculum is not None
    assert config.rewards is not None
    passes_at = config.data.curriculum.passes_at
    if passes_at is None and episode.correct is not None:
        return episode.correct
    # The verifier that says what is correct may not apply to the row.
    return episode.reward >= (config.rewards.correct_at if passes_at is None else passes_at)


def nothing_left(metrics: Mapping[str, float], rows: int) -> str:
    """What to say when the curriculum has no prompt left that is worth trying; empty while it has some."""
    solved, failed = metrics["curriculum/solved"], metrics["curriculum/failed"]
    if not metrics["curriculum/forced"] and solved + failed < rows:
        return ""
    return (
        f"the curriculum has run out of prompts: of {rows:,}, it holds {solved:,.0f} for solved and {failed:,.0f} for "
        "beyond the policy; only a share of data.curriculum.floor of these is still tried"
    )
