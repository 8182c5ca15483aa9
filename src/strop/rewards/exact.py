"""`exact`: the completion is the answer, letter for letter."""

from __future__ import annotations

import numbers
from collections.abc import Sequence
from typing import Any

from strop.config.rewards import ExactVerifier
from strop.rewards.protocol import Completed, Verdict


def answer_text(answer: Any) -> str:
    """A reference answer as a text.

    Raises:
        ValueError: there is no answer, or it is a list or another thing that has no obvious spelling.
    """
    if answer is None:
        raise ValueError("the row has no answer to compare with")
    if isinstance(answer, str | numbers.Number):
        return str(answer)
    raise ValueError(f"the answer is a {type(answer).__name__}; a text or a number is needed")


class Exact:
    """1 if the completion equals the answer, else 0. A row without an answer is a verifier error, not a 0."""

    def __init__(self, settings: ExactVerifier) -> None:
        self.name = settings.name or settings.kind
        self.settings = settings

    def verify(self, completed: Sequence[Completed]) -> list[Verdict]:
        return [self._verdict(item) for item in completed]

    def _verdict(self, item: Completed) -> Verdict:
        try:
            answer = answer_text(item.answer)
        except ValueError as error:
            return Verdict(None, "verifier_error", str(error))
        return Verdict(float(self._plain(item.completion) == self._plain(answer)))

    def _plain(self, text: str) -> str:
        if self.settings.strip:
            text = text.strip()
        return text.casefold() if self.settings.ignore_case else text
