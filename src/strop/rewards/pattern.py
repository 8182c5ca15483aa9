"""`regex`: a pattern matches the completion. It runs in a worker process, for a match may backtrack without end."""

from __future__ import annotations

from collections.abc import Sequence

import regex  # type: ignore[import-untyped]

from strop.config.rewards import RegexVerifier
from strop.errors import UserError
from strop.rewards.exact import answer_text
from strop.rewards.protocol import Completed, Verdict


class Pattern:
    """1 if the pattern is found in the completion, else 0.

    With a group named `answer` the last match decides: 1 if that group equals the answer, white space around both
    dropped. Patterns are Python's, with what the `regex` package adds to them.

    Args:
        settings: the pattern.
        timeout: seconds that one completion may take. The package gives up a little earlier, which costs less than a
            new worker; it looks at the clock between steps of a match only.
        where: key path of the settings, for messages.

    Raises:
        UserError: the pattern does not compile; the message shows the position.
    """

    def __init__(self, settings: RegexVerifier, *, timeout: float = 30.0, where: str = "rewards.verifiers") -> None:
        self.name = settings.name or settings.kind
        self._seconds = 0.9 * timeout
        self.pattern = compile_pattern(settings.pattern, where=f"{where}.pattern")
        self.compares = "answer" in self.pattern.groupindex

    def verify(self, completed: Sequence[Completed]) -> list[Verdict]:
        return [self._verdict(item) for item in completed]

    def _verdict(self, item: Completed) -> Verdict:
        try:
            return self._match(item)
        except TimeoutError:
            detail = f"the pattern did not come to an end within {self._seconds:.2g} s; it backtracks too much"
            return Verdict(None, "timeout", detail)

    def _match(self, item: Completed) -> Verdict:
        if not self.compares:
            return Verdict(float(self.pattern.search(item.completion, timeout=self._seconds) is not None))
        try:
            answer = answer_text(item.answer).strip()
        except ValueError as error:
            return Verdict(None, "verifier_error", str(error))
        last = None
        for match in self.pattern.finditer(item.completion, timeout=self._seconds):
            last = match
        found = None if last is None else last["answer"]
        return Verdict(float(found is not None and found.strip() == answer))


def compile_pattern(pattern: str, *, where: str) -> regex.Pattern[str]:
    """Compile a pattern of a recipe.

    Raises:
        UserError: it does not compile; the message shows the position.
    """
    try:
        return regex.compile(pattern)
    except regex.error as error:
        raise UserError(
            f"the pattern does not compile: {_with_position(pattern, error)}",
            where=where,
            mend="write a Python regular expression; a bracket that is meant literally needs a backslash",
        ) from None


def _with_position(pattern: str, error: regex.error) -> str:
    """The message and, below, the line of the pattern with a mark under the position."""
    if error.pos is None:
        return f"{error.msg}: {pattern!r}"
    start = pattern.rfind("\n", 0, error.pos) + 1
    line = pattern[start:].split("\n", 1)[0]
    return f"{error.msg} at position {error.pos}\n    {line}\n    {' ' * (error.pos - start)}^"
