"""A trained reward model as a verifier."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

from strop.config.rewards import RewardModelVerifier
from strop.models.find import resolve_model
from strop.models.folder import check_model_folder
from strop.rewards.protocol import Completed, Verdict


class RewardModel:
    """The score of a reward model, batched, by one thread at a time.

    Args:
        settings: which model, and how it reads prompts.

    Raises:
        ModelError: there is no such model, or it has no scalar head.
    """

    def __init__(self, settings: RewardModelVerifier) -> None:
        self.name = settings.name or settings.kind
        self._settings = settings
        self._folder = resolve_model(settings.path)
        self._model: Any = None
        self._lock = threading.Lock()
        check_model_folder(self._folder, scalar=True)

    def load(self) -> None:
        """Read the model into memory, unless it is there."""
        with self._lock:
            if self._model is None:
                from strop.models.scoring import ScoringModel

                self._model = ScoringModel.load(
                    self._folder, render=self._settings.render, device=self._settings.device
                )

    def verify(self, completed: Sequence[Completed]) -> list[Verdict]:
        """One verdict for each completion."""
        self.load()
        with self._lock:
            scores = self._model.score([(one.prompt, one.completion, one.finish == "stop") for one in completed])
        return [Verdict(float(score)) for score in scores]
