"""`math`: the final answer equals the reference answer as mathematics. It runs in a worker process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from strop.config.rewards import MathVerifier
from strop.rewards.exact import answer_text
from strop.rewards.failures import shorten
from strop.rewards.final_answer import boxed, different, last_mathematical, stated
from strop.rewards.math_compare import same
from strop.rewards.math_limits import LONGEST, too_large
from strop.rewards.math_text import clean
from strop.rewards.protocol import Completed, Verdict


class MathAnswer:
    """1 if the final answer of the completion equals the reference answer, else 0.

    Several answers are not a set of guesses: only the last one counts. How many different ones were given in the same
    way is the component `answers`; more than one is told in the verdict's detail.

    The answer column holds the bare answer, or a text with it in a box or after `####`; a list of texts holds answers
    that are all right. A row without an answer is a verifier error.
    """

    def __init__(self, settings: MathVerifier) -> None:
        self.name = settings.name or settings.kind
        self.settings = settings

    def verify(self, completed: Sequence[Completed]) -> list[Verdict]:
        return [self._verdict(item) for item in completed]

    def _verdict(self, item: Completed) -> Verdict:
        try:
            golds = reference_answers(item.answer)
        except ValueError as error:
            return Verdict(None, "verifier_error", str(error))
        answers = self._answers(item.completion)
        if not answers:
            missing = "boxed answer" if self.settings.take == "boxed" else "answer"
            return Verdict(0.0, detail=f"no {missing} in the completion", components={"answers": 0.0})
        count = different(answers)
        details = [f"{count} different answers; the last one counts"] if count > 1 else []
        score, why = self._score(golds, answers[-1])
        details += [why] if why else []
        return Verdict(score, detail="; ".join(details), components={"answers": float(count)})

    def _answers(self, text: str) -> list[str]:
        """The answers that are given in the way that counts, in order."""
        if self.settings.take != "last" and (found := boxed(text)):
            return found
        if self.settings.take == "boxed":
            return []
        if found := stated(text):
            return found
        last = last_mathematical(text)
        return [] if last is None else [last]

    def _score(self, golds: list[str], answer: str) -> tuple[float, str]:
        """The score, and why it is 0 where that is not plain to see."""
        if len(answer) > 4 * LONGEST:  # Cleaning takes time, too.
            return float(answer.strip() in golds), f"the answer has more than {LONGEST} characters"
        answer = clean(unboxed(answer))
        if any(same(clean(gold), answer, self.settings.tolerance) for gold in golds):
            return 1.0, ""
        why = too_large(answer)
        return 0.0, f"the answer was not computed: {why}" if why else ""


def unboxed(text: str) -> str:
    """What is in the innermost of boxes within boxes."""
    while inner := boxed(text):
        text = inner[-1]
    return text


def reference_answers(answer: Any) -> list[str]:
    """The right answers that an answer column names.

    Raises:
        ValueError: it names none.
    """
    given = answer if isinstance(answer, list | tuple) else [answer]
    if not given:
        raise ValueError("the row has an empty list of answers")
    found = []
    for one in given:
        text = answer_text(one)
        text = unboxed(text.rpartition("####")[2]).strip()
        if not text:
            raise ValueError(f"the answer {shorten(repr(one), 80)} is empty")
        found.append(text)
    return found
