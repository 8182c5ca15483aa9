"""A verifier whose work is done in worker processes."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

from strop.config.adapted_rewards import ReasoningGymVerifier, SlimeVerifier
from strop.config.rewards import PythonVerifier, VerifierSettings
from strop.rewards.pool import Check, WorkerPool
from strop.rewards.protocol import Completed, Verdict


class Isolated:
    """Sends completions to a pool of workers, each completion as an item of its own.

    A Python function that wants the completions of a group together gets them as one item: what it does to one of them
    it does to all.

    Args:
        settings: what the workers check. pool: which it may share with others. timeout: seconds for one item.
    """

    def __init__(self, settings: VerifierSettings, pool: WorkerPool, *, timeout: float) -> None:
        self.name = settings.name or settings.kind
        self._pool = pool
        self._check = Check(settings, timeout)
        self._needs_rows = isinstance(settings, PythonVerifier | SlimeVerifier | ReasoningGymVerifier)
        self._in_groups = isinstance(settings, PythonVerifier | SlimeVerifier) and settings.call_with == "group"

    async def ask(self, completed: Sequence[Completed]) -> list[Verdict]:
        """One verdict for each completion, in order.

        Raises:
            StropError: the check raised one, or a row cannot be sent to another process.
        """
        if not self._needs_rows:
            # Only what is looked at travels.
            completed = [replace(one, prompt="", row={}, completion_ids=()) for one in completed]
        items = [completed] if self._in_groups else [[one] for one in completed]
        answers = await asyncio.wrap_future(self._pool.submit(self._check, items))
        return [verdict for answer in answers for verdict in answer]

    async def close(self) -> None:
        """End the pool, also for those who share it."""
        await asyncio.to_thread(self._pool.close)
