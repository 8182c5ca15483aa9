"""Single turn: the prompt is all that the policy is told, and its first turn ends the episode."""

from __future__ import annotations

from typing import Literal

from strop.data.prompts import Prompt
from strop.environments.protocol import Done


class SingleTurn:
    """The environment of one completion of one prompt.

    Raises (from its methods):
        RuntimeError: a second reset, or a step outside of an episode. An environment serves one episode.
    """

    def __init__(self, prompt: Prompt) -> None:
        self._prompt = prompt
        self._stage: Literal["new", "open", "done"] = "new"

    async def reset(self) -> list[int]:
        """Token ids of the prompt; a list of its own, so that a caller may append to it."""
        if self._stage != "new":
            raise RuntimeError("this environment has been used; make a new one for each episode")
        self._stage = "open"
        return list(self._prompt.tokens)

    async def step(self, completion: str) -> Done:
        """The only turn."""
        if self._stage != "open":
            raise RuntimeError("this episode has ended" if self._stage == "done" else "reset the environment first")
        self._stage = "done"
        return Done()

    async def close(self) -> None:
        self._stage = "done"
