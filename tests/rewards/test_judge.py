"""The `judge` verifier against a real server: rubric, reading of scores, votes, cache, failures, secrets."""

from __future__ import annotations

import asyncio
import json
import math
import sqlite3
from pathlib import Path
from typing import Any

import pytest
from bad_server import BadServer, bad_server, slow

from strop.config.rewards import RUBRIC, JudgeVerifier, RewardSettings
from strop.errors import UserError
from strop.rewards import client
from strop.rewards.build import build_scorer
from strop.rewards.judge import Judge, fill_rubric, last_in_json
from strop.rewards.protocol import Completed, Verdict


def says(*replies: str) -> Any:
    """A server's answer with these replies of the model, one after the other, the last for ever."""
    left = list(replies)

    def reply(body: Any) -> Any:
        content = left.pop(0) if len(left) > 1 else left[0]
        return {"choices": [{"message": {"role": "assistant", "content": content}, "finish_reason": "stop"}]}

    return reply


def settings(server: BadServer, **options: Any) -> JudgeVerifier:
    return JudgeVerifier(kind="judge", base_url=f"{server.url}/v1/", model="judge-7b", **{"retries": 1, **options})


async def ask(server: BadServer, *texts: str, answer: Any = None, **options: Any) -> list[Verdict]:
    judge = Judge(settings(server, **options), timeout=5)
    try:
        return await judge.ask([Completed("1+1?", text, answer=answer) for text in texts])
    finally:
        await judge.close()


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "FIRST_PAUSE", 0.02)


async def test_the_request_and_the_score() -> None:
    with bad_server(says('It is right.\n{"score": 7}')) as server:
        options: dict[str, Any] = {"system": "Be strict.", "max_tokens": 99, "arguments": {"seed": 5}}
        assert await ask(server, "two", answer=2, **options) == [Verdict(0.7)]
    [(path, _, body)] = server.requests
    assert path == "/v1/chat/completions"
    question = body["messages"][1]["content"]
    assert body == {
        "model": "judge-7b",
        "temperature": 0.0,
        "max_tokens": 99,
        "seed": 5,
        "messages": [{"role": "system", "content": "Be strict."}, {"role": "user", "content": question}],
    }
    for part in ("1+1?", "two", "\n2\n", '{"score": NUMBER}'):
        assert part in question
    assert not any(place in question for place in ("{prompt}", "{completion}", "{answer}"))


async def test_a_conversation_and_no_answer() -> None:
    with bad_server(says('{"score": 10}')) as server:
        judge = Judge(settings(server), timeout=5)
        await judge.ask([Completed([{"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "?"}], "2")])
    [(_, _, body)] = server.requests
    assert "user: 1+1?\n\nassistant: ?" in body["messages"][0]["content"]
    assert "(none)" in body["messages"][0]["content"]


def test_what_is_filled_in_is_not_filled_in_again() -> None:
    """Or a completion could bring the reference answer into its own place, or quote the rubric."""
    filled = fill_rubric(
        r"{completion} \frac{a}{b} {{prompt}} {answer}", {"prompt": "p", "completion": "{answer}", "answer": "secret"}
    )
    assert filled == r"{answer} \frac{a}{b} {p} secret"


@pytest.mark.parametrize(
    ("reply", "options", "score"),
    [
        ('{"score": 5}', {}, 0.5),
        ('{"score": "5"}', {}, 0.5),
        ('{"score": 0}', {}, 0.0),
        ('```json\n{"reason": {"a": 1}, "score": 2.5}\n```', {}, 0.25),
        ('They wrote {"score": 10}, but {"score": 1} is right', {}, 0.1),
        ('{"score": 3} {"other": 9}', {}, 0.3),
        ('{"grade": 4, "score": 1}', {"score_key": "grade"}, 0.4),
        ('{"score": 1}', {"scale": [1, 5]}, 0.0),
        ('{"score": 4}', {"scale": [1, 5]}, 0.75),
        ('{"score": -1}', {"scale": [-1, 1]}, 0.0),
        ("First 3, then I think 8", {"read": "number"}, 0.8),
        ("I give 7.5/10", {"read": "pattern", "pattern": r"give (?P<score>[\d.]+)/10"}, 0.75),
        ("[[3]] no, [[6]]", {"read": "pattern", "pattern": r"\[\[(?P<score>\d+)\]\]"}, 0.6),
    ],
)
async def test_where_the_score_stands(reply: str, options: dict[str, Any], score: float) -> None:
    with bad_server(says(reply)) as server:
        [verdict] = await ask(server, "two", **options)
    assert verdict.score == pytest.approx(score)


NO_SCORE = [
    "", "   ", "no idea", '{"score": null}', '{"score": NaN}', '{"score": true}', '{"score": "high"}', '{"score": [5]}',
    '{"score": 11}', '{"score": -1}', '{"score": 5', "{" * 5000, '{"score": 1e999}',
]  # fmt: skip


@pytest.mark.parametrize("reply", NO_SCORE)
async def test_a_reply_without_a_score_is_asked_for_again_and_then_an_error(reply: str) -> None:
    with bad_server(says(reply, '{"score": 5}')) as server:
        assert [verdict.score for verdict in await ask(server, "two")] == [0.5]
        assert len(server.requests) == 2
    with bad_server(says(reply)) as server:
        [verdict] = await ask(server, "two", retries=2)
        assert len(server.requests) == 3
    assert (verdict.score, verdict.status) == (None, "verifier_error")
    assert "(3 tries)" in verdict.detail


@pytest.mark.parametrize(
    "broken",
    [{}, {"choices": []}, {"choices": [{"message": {"content": None}}]}, [], "text", {"error": {"message": "busy"}}],
)  # fmt: skip
async def test_an_answer_of_another_form_is_an_error(broken: Any) -> None:
    with bad_server(lambda body: broken) as server:
        [verdict] = await ask(server, "two", retries=0)
    assert verdict.status == "verifier_error"
    assert "no text in the answer" in verdict.detail


@pytest.mark.parametrize(("combine", "expected"), [("mean", 0.52), ("median", 0.4), ("majority", 0.2)])
async def test_votes(combine: str, expected: float) -> None:
    """Two votes for 2 and two for 9: of equal majorities the lower counts."""
    with bad_server(says(*(f'{{"score": {score}}}' for score in (2, 9, 2, 9, 4)))) as server:
        options: dict[str, Any] = {"votes": 5, "temperature": 1.0, "concurrency": 1, "combine": combine}
        [verdict] = await ask(server, "two", **options)
        assert len(server.requests) == 5
    assert verdict.components == {"spread": pytest.approx(0.7)}
    assert verdict.score == pytest.approx(expected)
    assert {body["temperature"] for _, _, body in server.requests} == {1.0}


async def test_a_vote_that_fails_fails_the_verdict() -> None:
    with bad_server(says('{"score": 5}'), "status 400", says('{"score": 5}')) as server:
        [verdict] = await ask(server, "two", votes=3, temperature=1.0, concurrency=1)
    assert (verdict.score, verdict.status) == (None, "verifier_error")


@pytest.mark.parametrize(("failure", "status"), [("status 500", "verifier_error"), ("hang", "timeout")])
async def test_a_server_that_fails(failure: str, status: str) -> None:
    with bad_server(failure) as server:
        judge = Judge(settings(server, retries=0), timeout=0.4 if failure == "hang" else 10.0)
        [verdict] = await judge.ask([Completed("", "two")])
    assert (verdict.score, verdict.status) == (None, status)


async def test_one_that_fails_leaves_the_others() -> None:
    def reply(body: Any) -> Any:
        return {} if "bad" in body["messages"][0]["content"] else says('{"score": 5}')(body)

    with bad_server(reply) as server:
        found = await ask(server, "good", "bad!", "good too", retries=0)
    assert [verdict.score for verdict in found] == [0.5, None, 0.5]


async def test_so_many_requests_at_a_time() -> None:
    with bad_server(slow(0.05, says('{"score": 5}'))) as server:
        await ask(server, *"abcdefghijkl", concurrency=3)
    assert server.most == 3
    assert len(server.requests) == 12


async def test_the_cache_answers_the_same_question_and_no_other(tmp_path: Path) -> None:
    cache = str(tmp_path / "deep" / "judge.sqlite")
    options: dict[str, Any] = {"cache": cache, "temperature": 0.5, "votes": 2}
    with bad_server(says(*(f'{{"score": {score}}}' for score in range(11)))) as server:
        first = await ask(server, "two", **options)
        assert len(server.requests) == 2
        assert await ask(server, "two", **options) == first  # another process would find it too
        assert len(server.requests) == 2
        # What the score is read from, or becomes, is asked of the kept reply.
        await ask(server, "two", **{**options, "combine": "median", "scale": [0, 20], "weight": 3.0})
        await ask(server, "two", **{**options, "read": "number", "retries": 5})
        assert len(server.requests) == 2
        others: list[dict[str, Any]] = [
            {"temperature": 0.6}, {"max_tokens": 5}, {"arguments": {"seed": 1}}, {"system": "x"},
            {"rubric": "{completion}"},
        ]  # fmt: skip
        for number, other in enumerate(others, start=2):
            await ask(server, "two", **{**options, **other})
            assert len(server.requests) == 2 * number, other
        await ask(server, "zwei", **options)
        await ask(server, "two", answer=2, **options)
        assert len(server.requests) == 16
        await ask(server, "two", **{**options, "votes": 3})
        assert len(server.requests) == 17
    with bad_server(says('{"score": 1}')) as elsewhere:
        await ask(elsewhere, "two", **options)
        assert len(elsewhere.requests) == 2


async def test_failures_are_not_kept(tmp_path: Path) -> None:
    options: dict[str, Any] = {"cache": str(tmp_path / "judge.sqlite"), "retries": 0}
    with bad_server(says("no score", '{"score": 3}')) as server:
        assert [verdict.status for verdict in await ask(server, "two", **options)] == ["verifier_error"]
        assert [verdict.score for verdict in await ask(server, "two", **options)] == [0.3]


async def test_a_kept_reply_that_is_read_in_another_way_is_asked_for_again(tmp_path: Path) -> None:
    options: dict[str, Any] = {"cache": str(tmp_path / "judge.sqlite")}
    with bad_server(says('{"score": 3}', '{"grade": 4}')) as server:
        assert [verdict.score for verdict in await ask(server, "two", **options)] == [0.3]
        assert [verdict.score for verdict in await ask(server, "two", score_key="grade", **options)] == [0.4]


async def test_a_cache_that_fails_later_is_an_error_of_the_verdict(tmp_path: Path) -> None:
    path = tmp_path / "judge.sqlite"
    with bad_server(says('{"score": 3}')) as server:
        judge = Judge(settings(server, cache=str(path)), timeout=5)
        judge.load()
        with sqlite3.connect(path) as database:
            database.execute("DROP TABLE replies")
        [verdict] = await judge.ask([Completed("", "two")])
        await judge.close()
    assert verdict.status == "verifier_error"
    assert "the cache failed" in verdict.detail


@pytest.mark.parametrize(
    ("options", "where", "says_"),
    [
        ({"rubric": "Is {completions} good?"}, "rubric", "{completion}?"),
        ({"rubric": "Is {prompt} good?"}, "rubric", "does not show the completion"),
        ({"base_url": "localhost:8000/v1"}, "base_url", "http"),
        ({"api_key_env": "NOT_SET_AT_ALL"}, "api_key_env", "not set"),
        ({"read": "pattern", "pattern": "("}, "pattern", "does not compile"),
        ({"read": "pattern", "pattern": r"(\d)"}, "pattern", "no group named `score`"),
        ({"arguments": {"temperature": 1}}, "arguments.temperature", "set `temperature`"),
        ({"arguments": {"messages": []}}, "arguments.messages", "remove it"),
        ({"cache": "."}, "cache", "cannot be used"),
        ({"cache": "notes.txt"}, "cache", "not a database"),
    ],
)
def test_what_cannot_work_is_refused(
    options: dict[str, Any], where: str, says_: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("notes.txt").write_text("dear diary " * 100)
    verifier = {"kind": "judge", "base_url": "http://localhost/v1", "model": "m", **options}
    with pytest.raises(UserError) as caught:
        build_scorer(RewardSettings.model_validate({"verifiers": [verifier]}))
    assert caught.value.where == f"rewards.verifiers.0.{where}"
    assert says_ in str(caught.value)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["notes.txt"]


def test_a_recipe_that_is_only_looked_at_makes_no_cache(tmp_path: Path) -> None:
    verifier = {"kind": "judge", "base_url": "http://localhost/v1", "model": "m", "cache": str(tmp_path / "c.sqlite")}
    scorer = build_scorer(RewardSettings.model_validate({"verifiers": [verifier]}))
    assert list(tmp_path.iterdir()) == []
    scorer.load()
    assert [path.name for path in tmp_path.iterdir()] == ["c.sqlite"]
    asyncio.run(scorer.close())


def test_the_rubric_that_is_there_by_default_asks_for_what_is_read() -> None:
    text = fill_rubric(RUBRIC, {"prompt": "", "completion": "", "answer": ""})
    assert last_in_json(text.replace("NUMBER", "7"), "score") == 7.0
    assert JudgeVerifier(kind="judge", base_url="http://x", model="m").scale == [0.0, 10.0]


def test_the_last_json_object_is_found_quickly() -> None:
    assert last_in_json("{" * 1_000_000, "score") is None
    assert last_in_json('{"a": ' * 20_000 + "1" + "}" * 20_000, "score") is None
    assert last_in_json(json.dumps({"score": 5, "why": [{"x": math.pi}] * 30}), "score") == 5.0
