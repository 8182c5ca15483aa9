"""`format`: the completion has the tags that were asked for, and JSON that fits a schema."""

from __future__ import annotations

from collections.abc import Sequence

from strop.config.rewards import FormatVerifier
from strop.errors import UserError
from strop.rewards.json_format import SchemaCheck, json_text
from strop.rewards.protocol import Completed, Verdict


class Format:
    """Share of what was asked for: each tag is one part, and the JSON another.

    A tag counts if it occurs exactly once, is closed exactly once, and comes after the tags listed before it. A tag
    inside another one is not after it. Only the completion is looked at: a tag that the chat template opens in the
    prompt does not count as opened.

    JSON counts if the completion, its only fenced block, or the content of `json_tag`, fits the schema; NaN and
    Infinity are not JSON.

    Raises:
        UserError: a tag is written with brackets, is empty, or is listed twice; the schema is none.
    """

    def __init__(self, settings: FormatVerifier, *, where: str = "rewards.verifiers") -> None:
        self.name = settings.name or settings.kind
        self.tags = settings.tags or []
        self.json_tag = settings.json_tag
        for tag in self.tags:
            check_tag(tag, where=f"{where}.tags")
            if self.tags.count(tag) > 1:
                raise UserError(
                    f"the tag {tag!r} is listed twice, and each tag may occur once",
                    where=f"{where}.tags",
                    mend=f"list {tag!r} once",
                )
        if self.json_tag is not None:
            check_tag(self.json_tag, where=f"{where}.json_tag")
        schema = settings.json_schema
        self.schema = None if schema is None else SchemaCheck(schema, where=f"{where}.json_schema")

    def verify(self, completed: Sequence[Completed]) -> list[Verdict]:
        return [self._verdict(item.completion) for item in completed]

    def _verdict(self, text: str) -> Verdict:
        good, parts = self._tags_in_order(text), len(self.tags)
        detail = ""
        if self.schema is not None:
            detail = self._json_problem(text, self.schema)
            good, parts = good + (not detail), parts + 1
        return Verdict(good / parts, detail=detail)

    def _tags_in_order(self, text: str) -> int:
        good, end = 0, 0
        for tag in self.tags:
            place = only_content(text, tag)
            if place is not None and end <= place[0] - len(f"<{tag}>"):
                good += 1
                end = place[1] + len(f"</{tag}>")
        return good

    def _json_problem(self, text: str, schema: SchemaCheck) -> str:
        if self.json_tag is not None:
            place = only_content(text, self.json_tag)
            if place is None:
                return f"no JSON: <{self.json_tag}> does not occur exactly once, closed"
            text = text[slice(*place)]
        return schema.problem(json_text(text))


def only_content(text: str, tag: str) -> tuple[int, int] | None:
    """Where the content of a tag begins and ends, if the tag occurs exactly once and is closed exactly once."""
    opening, closing = f"<{tag}>", f"</{tag}>"
    if text.count(opening) != 1 or text.count(closing) != 1:
        return None
    start, stop = text.find(opening) + len(opening), text.find(closing)
    return (start, stop) if start <= stop else None


def check_tag(tag: str, *, where: str) -> None:
    """Raise UserError unless this is the bare name of a tag."""
    plain = tag.strip().strip("<>/").strip()
    if not plain or tag != plain:
        raise UserError(
            f"{tag!r} is not the name of a tag",
            where=where,
            mend=f"write {plain or 'think'!r}, without brackets and spaces",
        )
