"""The `format` verifier with a JSON schema."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from strop.config.rewards import FormatVerifier, RewardSettings
from strop.errors import UserError
from strop.rewards.build import build_scorer
from strop.rewards.format import Format
from strop.rewards.protocol import Completed, Verdict

PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer", "minimum": 0}, "boss": {"$ref": "#"}},
    "required": ["name"],
    "additionalProperties": False,
}


def verdict(completion: str, schema: Any = PERSON, **options: Any) -> Verdict:
    settings = FormatVerifier(kind="format", json_schema=schema, **options)
    return Format(settings).verify([Completed("", completion)])[0]


@pytest.mark.parametrize(
    "completion",
    [
        '{"name": "Ada"}',
        ' {"name": "Ada", "age": 36}\n',
        'Here it is:\n```json\n{"name": "Ada"}\n```\nDone.',
        '```\n{"name": "Ada", "boss": {"name": "Bob"}}\n```',
    ],
)
def test_json_that_fits(completion: str) -> None:
    assert verdict(completion) == Verdict(1.0)


@pytest.mark.parametrize(
    ("completion", "detail"),
    [
        ("", "no JSON"),
        ("Ada", "no JSON"),
        ('{"name": "Ada"', "no JSON"),
        ('{"name": "Ada"} and so on', "no JSON"),
        ('{"name": "Ada", "age": NaN}', "NaN is no number of JSON"),
        ('{"name": "Ada", "age": -Infinity}', "no number of JSON"),
        ('{"age": 3}', "'name' is a required property"),
        ('{"name": "Ada", "age": -1}', "at ['age']"),
        ('{"name": "Ada", "boss": {"name": 5}}', "at ['boss']['name']"),
        ('{"name": "Ada", "extra": 1}', "does not fit"),
        ("[1, 2]", "does not fit"),
        ('```json\n{"name": "Ada"}\n```\n```json\n{"name": "Bob"}\n```', "no JSON"),
        ("[" * 100_000, "nested too deeply"),
        ('{"boss":' * 50_000, "nested too deeply"),
        ("9" * 100_000, "no JSON"),
    ],
)
def test_json_that_does_not_fit(completion: str, detail: str) -> None:
    found = verdict(completion)
    assert (found.score, found.status) == (0.0, "ok")
    assert detail in found.detail
    assert len(found.detail) < 500


def test_json_beside_tags() -> None:
    both = '<think>hm</think><answer>{"name": "Ada"}</answer>'
    options: dict[str, Any] = {"tags": ["think", "answer"], "json_tag": "answer"}
    assert verdict(both, **options).score == 1.0
    assert verdict(both.replace("Ada", 'Ada", "age": "old'), **options).score == pytest.approx(2 / 3)
    assert verdict('<answer>{"name": "Ada"}</answer>', **options).score == pytest.approx(2 / 3)
    assert verdict('{"name": "Ada"}', **options).score == 0.0
    assert verdict(both, tags=["think", "answer"]).score == pytest.approx(2 / 3)
    assert verdict('<answer>\n```json\n{"name": "Ada"}\n```\n</answer>', json_tag="answer").score == 1.0


@pytest.mark.parametrize(
    ("schema", "where"),
    [
        ({"type": "strin"}, "json_schema.type"),
        ({"properties": {"a": {"minimum": "0"}}}, "json_schema.properties.a.minimum"),
        ({"required": "a"}, "json_schema.required"),
        ({"$ref": "https://example.com/schema.json"}, "json_schema"),
        ({"$ref": "#/$defs/missing"}, "json_schema"),
        ({"properties": {"a": {"$ref": "other.json"}}}, "json_schema"),
        ({"pattern": "("}, "json_schema.pattern"),
    ],
)
def test_a_schema_that_is_none_is_refused(schema: dict[str, Any], where: str) -> None:
    with pytest.raises(UserError) as caught:
        Format(FormatVerifier(kind="format", json_schema=schema), where="rewards.verifiers.2")
    assert caught.value.where == f"rewards.verifiers.2.{where}"


def test_references_within_a_schema_work() -> None:
    schema = {"$defs": {"a/b": {"type": "integer"}}, "items": {"$ref": "#/$defs/a~1b"}, "type": "array"}
    assert verdict("[1, 2]", schema).score == 1.0
    assert verdict('[1, "2"]', schema).score == 0.0
    anchored = {"$defs": {"x": {"$anchor": "whole", "type": "integer"}}, "$ref": "#whole"}
    assert verdict("1", anchored).score == 1.0


@pytest.mark.parametrize("tag", ["<a>", "", "a "])
def test_a_tag_that_is_no_name_is_refused(tag: str) -> None:
    with pytest.raises(UserError, match="json_tag"):
        Format(FormatVerifier(kind="format", json_schema={}, json_tag=tag))


def test_a_pattern_of_a_schema_that_backtracks_is_ended() -> None:
    """The regular expressions of a schema meet texts of the policy: they run in a worker, which is killed."""
    schema = {"type": "string", "pattern": "^(a|aa)+$"}
    recipe = {"verifiers": [{"kind": "format", "json_schema": schema, "timeout": 1.0}], "retries": 0, "workers": 1}
    judge = build_scorer(RewardSettings.model_validate(recipe))

    async def work() -> list[str]:
        try:
            texts = ['"aaa"', '"' + "a" * 80 + 'b"', '"aa"']
            return [reward.status for reward in await judge.score([Completed("", text) for text in texts])]
        finally:
            await judge.close()

    started = time.monotonic()
    assert asyncio.run(work()) == ["ok", "timeout", "ok"]
    assert time.monotonic() - started < 30
