"""`regex`: a pattern matches the completion, within a bounded time."""

from __future__ import annotations

import time
from collections.abc import Sequence

import regex  # type: ignore[import-untyped]

from strop.config.rewards import RegexVerifier
from strop.errors import UserError
from strop.rewards.exact import answer_text
from strop.rewards.protocol import Completed, Verdict


class Pattern:
    """1 if the pattern is found in the completion, else 0.

    With a group named `answer` the last match decides: 1 if that group equals the answer, white space around both
    dropped. Patterns are Python's; they run in the `regex` package, which can stop a match that backtracks without end.

    Args:
        settings: the pattern.
        timeout: seconds that a whole call of `verify` may take. Half of it is shared out among the completions, and a
            match that uses up its share is a `timeout` of that completion alone. The package counts processor time of
            the process, so a busy process reaches the limit somewhat earlier.
        where: key path of the settings, for messages.

    Raises:
        UserError: the pattern does not compile; the message shows the position.
    """

    def __init__(self, settings: RegexVerifier, *, timeout: float = 30.0, where: str = "rewards.verifiers") -> None:
        self.name = settings.name or settings.kind
        self.timeout = timeout
        try:
            self.pattern = regex.compile(settings.pattern)
        except regex.error as error:
            raise UserError(
                f"the pattern does not compile: {_with_position(settings.pattern, error)}",
                where=f"{where}.pattern",
                mend="write a Python regular expression; a bracket that is meant literally needs a backslash",
            ) from None
        self.compares = "answer" in self.pattern.groupindex

    def verify(self, completed: Sequence[Completed]) -> list[Verdict]:
        end = time.monotonic() + self.timeout / 2
        verdicts = []
        for done, item in enumerate(completed):
            share = max((end - time.monotonic()) / (len(completed) - done), 1e-3)
            try:
                verdicts.append(self._verdict(item, share))
            except TimeoutError:
                detail = f"the pattern did not come to an end within {share:.2g} s; it backtracks too much"
                verdicts.append(Verdict(None, "timeout", detail))
        return verdicts

    def _verdict(self, item: Completed, seconds: float) -> Verdict:
        if not self.compares:
            return Verdict(float(self.pattern.search(item.completion, timeout=seconds) is not None))
        try:
            answer = answer_text(item.answer).strip()
        except ValueError as error:
            return Verdict(None, "verifier_error", str(error))
        last = None
        for match in self.pattern.finditer(item.completion, timeout=seconds):
            last = match
        found = None if last is None else last["answer"]
        return Verdict(float(found is not None and found.strip() == answer))


def _with_position(pattern: str, error: regex.error) -> str:
    """The message and, below, the line of the pattern with a mark under the position."""
    if error.pos is None:
        return f"{error.msg}: {pattern!r}"
    start = pattern.rfind("\n", 0, error.pos) + 1
    line = pattern[start:].split("\n", 1)[0]
    return f"{error.msg} at position {error.pos}\n    {line}\n    {' ' * (error.pos - start)}^"
