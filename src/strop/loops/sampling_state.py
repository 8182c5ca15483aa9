"""What a checkpoint holds of sampling: where prompts are, what was begun and not trained, and past groups."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors.numpy import load_file as load_arrays
from safetensors.numpy import save_file as save_arrays

from strop.config import Config
from strop.data.prompts import PromptStream
from strop.loops.past import Past
from strop.rollout.journal import Journal, Note, as_arrays, from_arrays
from strop.rollout.windows import Admitted, Windows

CURRICULUM = "curriculum.safetensors"
"""The file of a checkpoint with the pass rates of the prompts."""
UNDER_WAY = "under-way.safetensors"
"""The file of a checkpoint with what was sampled for groups that were not trained."""
PAST = "past-groups.safetensors"
"""The file of a checkpoint with the past groups that are kept."""


class SamplingState:
    """Of the parts that sample, what has to be the same when a run goes on."""

    def __init__(
        self, config: Config, stream: PromptStream, collector: Windows[Any], journal: Journal, past: Past
    ) -> None:
        self._config = config
        self._stream, self._collector, self._journal, self._past = stream, collector, journal, past
        self._notes: dict[tuple[int, ...], Note] = {}

    async def note(self) -> None:
        """Ask the engine for what is under way, for the checkpoint that is written next."""
        if self._collector.under_way:
            self._notes = await self._journal.notes()

    def held(self) -> tuple[dict[str, Any], Callable[[Path], None]]:
        """(JSON-ready values, what writes files into the folder of a checkpoint's state), of this moment."""
        under_way = self._collector.under_way
        values = {
            "prompts": self._stream.state(),
            "started_groups": self._collector.admission.started,
            "under_way": [(number, one.prompt.prompt_id, one.version) for number, one in under_way.items()],
            "max_staleness": self._config.rollout.max_staleness,
        }
        files = {
            CURRICULUM: None if self._stream.curriculum is None else self._stream.curriculum.held(),
            PAST: self._past.arrays(),
        }
        if under_way:
            files[UNDER_WAY] = as_arrays({s: note for s, note in self._notes.items() if s[0] in under_way})

        def write(folder: Path) -> None:
            for name, arrays in files.items():
                if arrays is not None:
                    save_arrays(arrays, folder / name)

        return copy.deepcopy(values), write

    def take_back(self, folder: Path, state: dict[str, Any]) -> str:
        """Go to where `held` was asked; returns what there is to say.

        What was sampled of groups that were not trained counts, unless it may be older than the recipe allows now; what
        is to be of one version counts where it has ended.
        """
        self._stream.load(state["prompts"])
        if self._stream.curriculum is not None:
            self._stream.curriculum.load(folder / CURRICULUM)
        self._past.load(folder / PAST)
        self._collector.admission.started = int(state["started_groups"])
        found = state.get("under_way", [])
        self._collector.take_back({n: Admitted(self._stream.prompt(prompt), v) for n, prompt, v in found})
        rollout, path = self._config.rollout, folder / UNDER_WAY
        if path.exists() and state["max_staleness"] <= rollout.max_staleness:
            notes = from_arrays(load_arrays(path))
            self._journal.take_back({s: note for s, note in notes.items() if rollout.in_flight_updates or note.ended})
        return f"{len(found)} groups that were under way go on from where they were" if found else ""


__all__ = ["CURRICULUM", "PAST", "UNDER_WAY", "SamplingState"]
