"""What a run that samples ahead has trained: which prompts in which steps, and how old their tokens were."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from strop.tracking.episodes import EpisodeRecord, read_episodes


def by_step(run: Path) -> dict[int, list[EpisodeRecord]]:
    return {
        int(path.stem[5:11]): list(read_episodes(path))
        for path in sorted((run / "episodes").glob("step-??????.parquet"))
    }


def trained(run: Path) -> list[tuple[int, int, str, int]]:
    """(step, group, prompt, completions) in order."""
    found = []
    for step, records in by_step(run).items():
        groups = {record.group: record.prompt_id for record in records}
        for group, prompt in sorted(groups.items()):
            samples = [record.sample for record in records if record.group == group]
            assert len(samples) == len(set(samples)), (step, group)
            found.append((step, group, prompt, len(samples)))
    return found


def ages(run: Path) -> list[int]:
    """How old each sampled token was when it was trained."""
    found: list[int] = []
    for step, records in by_step(run).items():
        for record in records:
            assert record.versions is not None
            found += (step - 1 - record.versions[record.loss_mask]).tolist()
    return found


def versions_of(run: Path) -> list[list[int]]:
    """Of each completion."""
    records = [record for records in by_step(run).values() for record in records]
    return [np.asarray(record.versions)[record.loss_mask].tolist() for record in records]
