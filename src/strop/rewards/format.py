"""`format`: the completion has the tags that were asked for."""

from __future__ import annotations

from collections.abc import Sequence

from strop.config.rewards import FormatVerifier
from strop.errors import UserError
from strop.rewards.protocol import Completed, Verdict


class Format:
    """Share of the tags that occur exactly once, are closed exactly once, and come after the tags listed before them.

    A tag inside another one is not after it. Only the completion is looked at: a tag that the chat template opens in
    the prompt does not count as opened.

    Raises:
        UserError: a tag is written with brackets, is empty, or is listed twice.
    """

    def __init__(self, settings: FormatVerifier, *, where: str = "rewards.verifiers") -> None:
        self.name = settings.name or settings.kind
        self.tags = settings.tags
        for tag in self.tags:
            plain = tag.strip().strip("<>/").strip()
            if not plain or tag != plain:
                raise UserError(
                    f"{tag!r} is not the name of a tag",
                    where=f"{where}.tags",
                    mend=f"write {plain or 'think'!r}, without brackets and spaces",
                )
            if self.tags.count(tag) > 1:
                raise UserError(
                    f"the tag {tag!r} is listed twice, and each tag may occur once",
                    where=f"{where}.tags",
                    mend=f"list {tag!r} once",
                )

    def verify(self, completed: Sequence[Completed]) -> list[Verdict]:
        return [self._verdict(item.completion) for item in completed]

    def _verdict(self, text: str) -> Verdict:
        good, end = 0, 0
        for tag in self.tags:
            opening, closing = f"<{tag}>", f"</{tag}>"
            if text.count(opening) != 1 or text.count(closing) != 1:
                continue
            start, stop = text.find(opening), text.find(closing)
            if end <= start < stop:
                good += 1
                end = stop + len(closing)
        return Verdict(good / len(self.tags))
