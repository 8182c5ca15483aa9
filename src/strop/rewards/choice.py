"""`choice`: the letter that the completion chooses is the right one."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from strop.config.rewards import ChoiceVerifier
from strop.errors import UserError
from strop.rewards.failures import shorten
from strop.rewards.final_answer import boxed
from strop.rewards.protocol import Completed, Verdict


class Choice:
    """1 if the letter chosen is the answer, else 0, also when none is chosen.

    A letter is chosen, in this order: in a box; after "answer is", "answer:" and the like, or `####`; after "choose" or
    "option"; alone on a line; at the very beginning, as in "B. Paris"; in brackets. The first of these ways that occurs
    decides, and in it the last choice. Letters count as `letters` writes them; one that is alone may have another case.

    The component `answers` is how many different letters were chosen in that way. An answer that names no letter is a
    verifier error.

    Raises:
        UserError: the letters are not different letters or digits.
    """

    def __init__(self, settings: ChoiceVerifier, *, where: str = "rewards.verifiers") -> None:
        self.name = settings.name or settings.kind
        self.settings = settings
        letters = settings.letters
        if not letters.isalnum() or len(set(letters.casefold())) < len(letters):
            raise UserError(
                f"{letters!r} are not different letters or digits",
                where=f"{where}.letters",
                mend="write them one after the other, such as ABCD",
            )
        either = f"(?i:[{letters}])"
        # After a mark: emphasis, a bracket, the letter, and nothing that makes it the beginning of a word.
        marked = rf"[\s*_$]*(?:(?i:option|choice|letter)\s+)?(?:\\text\s*\{{)?[(\[{{*_]*([{letters}])(?![A-Za-z0-9'’])"
        self._ways = [
            re.compile(rf"(?:####|(?i:\b(?:answer|choice|option)\b)[^\n.:=]{{0,40}}?(?:(?i:\bis\b)|[:=])){marked}"),
            re.compile(rf"(?i:\b(?:choose|pick|select|option|choice)\b){marked}"),
            re.compile(rf"^[^\S\n]*[*_(\[]*({either})[)\]*_.]*[^\S\n]*$", re.MULTILINE),
            re.compile(rf"\A\s*[*_]*([{letters}])[*_]*[).:]"),
            re.compile(rf"[(\[]\s*([{letters}])\s*[)\]]"),
        ]
        self._in_a_box = re.compile(rf"(?:\\[a-z]+\s*\{{)?[\s(\[*]*({either})(?![A-Za-z0-9])")

    def verify(self, completed: Sequence[Completed]) -> list[Verdict]:
        return [self._verdict(item) for item in completed]

    def _verdict(self, item: Completed) -> Verdict:
        try:
            answer = self._right(item.answer)
        except ValueError as error:
            return Verdict(None, "verifier_error", str(error))
        chosen = self._chosen(item.completion)
        components = {"answers": float(len(set(chosen)))}
        if not chosen:
            return Verdict(0.0, detail="no choice in the completion", components=components)
        several = f"{len(set(chosen))} different choices" if len(set(chosen)) > 1 else ""
        if several and self.settings.take == "only":
            return Verdict(0.0, detail=several, components=components)
        detail = f"{several}; the last one counts" if several else ""
        return Verdict(float(chosen[-1] == answer), detail=detail, components=components)

    def _chosen(self, text: str) -> list[str]:
        """The letters chosen in the first way that occurs, in order, as `letters` writes them."""
        if found := [choice[1] for content in boxed(text) if (choice := self._in_a_box.match(content))]:
            return [self._as_listed(letter) for letter in found]
        for way in self._ways:
            if found := way.findall(text):
                return [self._as_listed(letter) for letter in found]
        return []

    def _as_listed(self, letter: str) -> str:
        return next(one for one in self.settings.letters if one.casefold() == letter.casefold())

    def _right(self, answer: Any) -> str:
        letters = self.settings.letters
        shown = shorten(repr(answer), 80)
        if answer is None or isinstance(answer, bool):
            raise ValueError("the row has no answer to compare with" if answer is None else f"the answer is {shown}")
        text = str(answer).strip().strip("()[].").strip()
        if self.settings.answers == "index":
            if not text.isdecimal() or int(text) >= len(letters):
                raise ValueError(f"the answer {shown} is no index of {letters}, counted from 0")
            return letters[int(text)]
        if len(text) != 1 or text.casefold() not in letters.casefold():
            raise ValueError(f"the answer {shown} is none of the letters {letters}")
        return self._as_listed(text)
