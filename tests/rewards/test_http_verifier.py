"""The `http` verifier, and the client below it, against a real server that fails in every way."""

from __future__ import annotations

import asyncio
import math
import socket
import time
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from typing import Any

import pytest
from bad_server import BadServer, Behaviour, bad_server, slow

from strop.config.rewards import HttpVerifier, RewardSettings
from strop.errors import UserError
from strop.rewards import client
from strop.rewards.build import build_scorer
from strop.rewards.client import retry_after
from strop.rewards.http import HttpService, as_json
from strop.rewards.protocol import Completed, Verdict

SECRET = "sk-very-secret-1234"


def lengths(body: Any) -> Any:
    return [{"score": len(item["completion"])} for item in body["items"]]


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "FIRST_PAUSE", 0.02)


async def ask(server: BadServer, *texts: str, timeout: float = 5.0, **options: Any) -> list[Verdict]:
    settings = HttpVerifier(kind="http", url=f"{server.url}/score", **{"retries": 1, **options})
    return await HttpService(settings, timeout=timeout).ask([Completed("", text) for text in texts])


async def test_a_request_and_its_results() -> None:
    def reply(body: Any) -> Any:
        return [
            {"score": 0.5, "components": {"style": 0.25, "truth": 1}, "detail": "so so"},
            {"score": None},
            {"status": "verifier_error", "detail": "no GPU"},
            {"score": 3, "status": "timeout"},
        ]

    with bad_server(reply) as server:
        settings = HttpVerifier(kind="http", url=f"{server.url}/score?fast=1", columns=["source", "missing"])
        row = {"source": "art", "secret": "not sent", "answer": "x"}
        messages = [{"role": "user", "content": "1+1?"}]
        completed = [Completed(messages, "zwei", answer=2, row=row, finish="length"), *[Completed("p", "c")] * 3]
        found = await HttpService(settings, timeout=5).ask(completed)
    assert found == [
        Verdict(0.5, "ok", "so so", {"style": 0.25, "truth": 1.0}),
        Verdict(None),
        Verdict(None, "verifier_error", "no GPU"),
        Verdict(None, "timeout", "the service says timeout"),
    ]
    [(path, headers, body)] = server.requests
    assert path == "/score?fast=1"
    assert headers["Content-Type"] == "application/json"
    assert "Authorization" not in headers
    assert body["items"][0] == {
        "prompt": messages,
        "completion": "zwei",
        "answer": 2,
        "finish": "length",
        "row": {"source": "art", "missing": None},
    }
    assert len(body["items"]) == 4


async def test_batches_and_how_many_at_a_time() -> None:
    with bad_server(slow(0.1, lengths)) as server:
        texts = ["a" * n for n in range(17)]
        found = await ask(server, *texts, batch_size=3, concurrency=2)
    assert [verdict.score for verdict in found] == [float(n) for n in range(17)]
    # Which of two that are asked at a time comes first is chance.
    assert sorted(len(body["items"]) for _, _, body in server.requests) == [2, 3, 3, 3, 3, 3]
    assert server.most == 2


FAILURES: dict[str, str] = {
    "status 500": "HTTP 500",
    "status 503": "HTTP 503",
    "status 429 0": "HTTP 429",
    "hang": "no answer within 0.5 s",
    "trickle": "no answer within 0.5 s",
    "headers": "no answer within 0.5 s",
    "close": "",
    "half": "",
    "chunk": "",
    "garbage": "BadStatusLine",
    "huge": "more than 1 MiB",
    "raw not json": "not JSON",
    "raw [{": "not JSON",
    "raw " + "[" * 10_000: "not JSON",
    "raw ": "not JSON",
    "raw {}": "a list of 2 results is due",
    "raw null": "a list of 2 results is due",
    'raw [{"score": 1}]': "a list of 1",
    'raw [{"score": 1}, {"score": 1}, {"score": 1}]': "a list of 3",
}


@pytest.mark.parametrize("failure", FAILURES)
async def test_a_failure_is_tried_again_and_then_an_error(failure: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "MOST_BYTES", 1 << 20)
    hangs = failure in ("hang", "trickle", "headers")
    # The others answer at once, unless the machine is busy.
    timeout = 0.5 if hangs else 10.0
    with bad_server(failure, lengths) as server:
        found = await ask(server, "ab", "c", timeout=timeout)
        assert [verdict.score for verdict in found] == [2.0, 1.0]
        assert len(server.requests) == 2
    with bad_server(failure) as server:
        started = time.monotonic()
        found = await ask(server, "ab", "c", timeout=timeout, retries=2)
        assert time.monotonic() - started < 10
    assert len(server.requests) == 3
    status = "timeout" if hangs else "verifier_error"
    assert [(verdict.score, verdict.status) for verdict in found] == [(None, status)] * 2
    assert FAILURES[failure] in found[0].detail
    assert found[0].detail.endswith("(3 tries)")
    assert len(found[0].detail) < 400


@pytest.mark.parametrize(
    "failure", ["status 400", "status 401", "status 404", "status 422", "redirect http://127.0.0.1:1/"]
)
async def test_what_would_fail_again_is_not_tried_again(failure: str) -> None:
    with bad_server(failure) as server:
        [verdict] = await ask(server, "ab", retries=5)
    assert len(server.requests) == 1
    assert verdict.status == "verifier_error"
    assert ("redirect" if "redirect" in failure else f"HTTP {failure[7:]}") in verdict.detail


async def test_nobody_there() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        server = BadServer(url=f"http://127.0.0.1:{unused.getsockname()[1]}")
        [verdict] = await ask(server, "ab")
    assert verdict.status == "verifier_error"
    assert "refused" in verdict.detail


WRONG: list[tuple[Any, str]] = [
    ({"score": math.nan}, "is not a number"),
    ({"score": math.inf}, "is not a number"),
    ({"score": "1"}, "is not a number"),
    ({"score": True}, "is not a number"),
    ({"score": [1]}, "is not a number"),
    ({"score": 10**400}, "is not a number"),
    ({}, "with a score"),
    (1.0, "with a score"),
    (None, "with a score"),
    ({"score": 1, "status": "fine"}, "none of ok"),
    ({"score": 1, "components": {"a": "b"}}, "components"),
    ({"score": 1, "components": {"a": math.nan}}, "components"),
    ({"score": 1, "components": [1]}, "components"),
]


@pytest.mark.parametrize(("result", "detail"), WRONG)
async def test_a_wrong_result_is_an_error_of_its_completion_alone(result: Any, detail: str) -> None:
    with bad_server(lambda body: [{"score": 1}, result, {"score": 0}]) as server:
        found = await ask(server, "a", "b", "c")
    assert len(server.requests) == 1
    assert [verdict.score for verdict in found] == [1.0, None, 0.0]
    assert found[1].status == "verifier_error"
    assert detail in found[1].detail


async def test_one_batch_that_fails_leaves_the_others() -> None:
    def reply(body: Any) -> Any:
        return "no" if body["items"][0]["completion"] == "bb" else lengths(body)

    with bad_server(reply) as server:
        found = await ask(server, "a", "bb", "ccc", batch_size=1, retries=0)
    assert [verdict.score for verdict in found] == [1.0, None, 3.0]


class Clock:
    """Notes what is waited for, and does not wait."""

    def __init__(self) -> None:
        self.waits: list[float] = []

    async def __call__(self, seconds: float) -> None:
        self.waits.append(seconds)


async def waits(*then: Behaviour, retries: int) -> list[float]:
    clock = Clock()
    with bad_server(*then) as server:
        settings = HttpVerifier(kind="http", url=server.url, retries=retries)
        service = HttpService(settings, timeout=5)
        service._client._sleep = clock
        await service.ask([Completed("", "a")])
    return clock.waits


async def test_pauses_double_and_a_server_that_says_how_long_is_obeyed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "FIRST_PAUSE", 1.0)
    found = await waits("status 500", retries=9)
    assert len(found) == 9
    for number, seconds in enumerate(found):
        assert 0.75 * min(2**number, 60) <= seconds <= 1.25 * min(2**number, 60)
    assert len({round(seconds / 2**number, 6) for number, seconds in enumerate(found[:6])}) > 1
    assert await waits("status 429 7", lengths, retries=3) == [7.0]
    assert await waits("status 503 99999", lengths, retries=3) == [300.0]
    [soon] = await waits(f"status 429 {format_datetime(datetime.now(UTC) + timedelta(seconds=30))}", lengths, retries=1)
    assert 25 < soon < 31
    [usual] = await waits("status 429 whenever", lengths, retries=1)
    assert 0.75 <= usual <= 1.25


def test_retry_after() -> None:
    assert retry_after(None) is None
    assert retry_after("2.5") == 2.5
    assert retry_after("-3") == 0.0
    assert retry_after("nan") is None
    assert retry_after("inf") is None
    assert retry_after("Wed, 21 Oct 2015 07:28:00 GMT") == 0.0


async def test_a_key_is_sent_and_never_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SERVICE_KEY", SECRET)
    with bad_server("status 401") as server:
        settings = HttpVerifier(kind="http", url=server.url, api_key_env="SERVICE_KEY")
        service = HttpService(settings, timeout=5)
        [verdict] = await service.ask([Completed("", "a")])
    assert server.requests[0][1]["Authorization"] == f"Bearer {SECRET}"
    assert "Bearer ***" in verdict.detail  # the server quoted it
    for shown in (verdict.detail, repr(service._client.server), settings.model_dump_json(), repr(settings)):
        assert SECRET not in shown


@pytest.mark.parametrize(
    ("options", "where"),
    [
        ({"url": "localhost:80"}, "url"),
        ({"url": "ftp://localhost"}, "url"),
        ({"url": "http://"}, "url"),
        ({"url": "http://host:port/"}, "url"),
        ({"url": "http://[::1/"}, "url"),
        ({"url": "https://me:pass@host/"}, "url"),
        ({"api_key_env": "NOT_SET_AT_ALL"}, "api_key_env"),
        ({"api_key_env": SECRET}, "api_key_env"),
        ({"api_key_env": "TWO_LINES"}, "api_key_env"),
    ],
)
def test_what_cannot_work_is_refused(options: dict[str, Any], where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TWO_LINES", "a\nb")
    verifier = {"kind": "http", "url": "http://localhost", **options}
    with pytest.raises(UserError) as caught:
        build_scorer(RewardSettings.model_validate({"verifiers": [verifier]}))
    assert caught.value.where == f"rewards.verifiers.0.{where}"
    assert SECRET not in str(caught.value)
    assert "pass" not in caught.value.what.replace("password", "")


async def test_a_proxy_is_used_but_not_for_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("no_proxy", "NO_PROXY", "HTTP_PROXY"):
        monkeypatch.delenv(name, raising=False)
    with bad_server(lengths) as proxy, bad_server(lengths) as server:
        monkeypatch.setenv("http_proxy", proxy.url)
        assert [verdict.score for verdict in await ask(server, "ab")] == [2.0]
        assert len(proxy.requests) == 0
        far = BadServer(url="http://rewards.invalid:8000")
        assert [verdict.score for verdict in await ask(far, "ab")] == [2.0]
        assert [path for path, _, _ in proxy.requests] == ["http://rewards.invalid:8000/score"]


async def test_a_request_that_hangs_does_not_hold_up_the_loop() -> None:
    with bad_server("hang") as server:
        question = asyncio.create_task(ask(server, "a", timeout=1.0, retries=0))
        started = time.monotonic()
        for _ in range(10):
            await asyncio.sleep(0.01)
        assert time.monotonic() - started < 0.8
        assert [verdict.status for verdict in await question] == ["timeout"]


def test_values_of_rows_become_json() -> None:
    assert as_json({"a": [1, math.nan, (2.5, None)], 3: datetime(2020, 1, 1)}) == {
        "a": [1, None, [2.5, None]],
        "3": "2020-01-01 00:00:00",
    }


async def test_in_a_recipe_with_another_verifier() -> None:
    with bad_server("status 500", lengths) as server:
        verifiers = [{"kind": "exact"}, {"kind": "http", "url": server.url, "weight": 0.5, "retries": 0}]
        judge = build_scorer(RewardSettings.model_validate({"verifiers": verifiers, "retries": 1}))
        [reward] = await judge.score([Completed("", "ab", answer="ab")])
        await judge.close()
    assert (reward.total, reward.components, reward.correct) == (2.0, {"exact": 1.0, "http": 2.0}, True)
