"""Environments in workers of their own: asked as in the driver, and played again where a worker is lost."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import worlds_to_host
from cluster_waiting import until

from strop.cluster import environment_line
from strop.cluster.group import WorkerGroup
from strop.cluster.placement import Ask, Placed, place
from strop.cluster.remote_environments import TRIES, RemoteEnvironments
from strop.cluster.status import cluster_status
from strop.cluster.supervision import Supervisor, WorkerLost
from strop.config.cluster import SupervisionSettings
from strop.config.environment import PythonEnvironment
from strop.environments import checks
from strop.environments.protocol import Done, Observation, PolicyTurn
from strop.environments.self_play import Move
from strop.errors import RunFailure, UserError
from strop.rollout.asking import Failed, InProcess
from strop.rollout.episode import Episode

LIMIT = 20.0


@dataclass
class Hosted:
    """Workers, what stands for their environments here, and how often lost ones were started again in earnest."""

    home: RemoteEnvironments
    group: WorkerGroup
    supervisor: Supervisor
    restarted: list[int]

    @property
    def spent(self) -> int:
        return self.supervisor._restarts.spent


Host = Callable[..., Awaitable[Hosted]]


@pytest.fixture
async def host(ray_session: Any, tmp_path: Path, notices: list[str]) -> AsyncIterator[Host]:
    started: list[tuple[Hosted, Placed]] = []

    async def begin(workers: int = 1, *, restarts: int = 3, limit: float = LIMIT, **made: Any) -> Hosted:
        settings = SupervisionSettings(heartbeat=0.5, timeout=10.0, wait=60.0, restarts=restarts)
        placement = await place([Ask("environment", workers, "cpu", together=False)], wait=60)
        supervisor, placed = Supervisor(settings, notices.append), placement.roles["environment"]
        group = await WorkerGroup.start(placed, supervisor, run=tmp_path.name, logs=tmp_path / "logs", threads=0)
        restarted: list[int] = []
        made["limit"] = limit

        async def remade(index: int, loss: WorkerLost) -> Any:
            restarted.append(index)
            return await group.restart(
                index, lambda worker: worker.make("worlds_to_host:make_host", **made), counted=False
            )

        for worker in group.workers:
            await worker.make("worlds_to_host:make_host", **made)
        home = RemoteEnvironments(group.workers, supervisor, limit=limit, restart=remade)
        found = Hosted(home, group, supervisor, restarted)
        started.append((found, placed))
        return found

    yield begin
    for found, placed in started:
        await found.home.end()
        await found.group.close()
        found.supervisor.close()
        placed.release()


def turns(*texts: str, row: dict[str, Any] | None = None, seen: list[Any] | None = None) -> Any:
    """Plays an episode whose policy says these texts; answers go to `seen`, its last one into the completion."""

    async def play(home: Any, episode: Episode) -> list[Episode]:
        environment = await home.make()
        try:
            given = row if row is not None else episode.row
            begun = await home.ask(environment, "reset", given, check=checks.opening)
            if seen is not None:
                seen.append(begun)
            for number, text in enumerate(texts):
                answer = await home.ask(environment, "step", PolicyTurn(text, "stop", number), check=checks.answer)
                if seen is not None:
                    seen.append(answer)
                if isinstance(answer, Observation):
                    episode.completion = answer.messages[0]["content"]
            return [episode]
        finally:
            await home.close(environment)

    return play


async def run(home: Any, play: Any, *, group: int = 0, sample: int = 0) -> Episode:
    [episode] = await home.played((group, sample, 0), Episode(group, sample, {"name": f"{group}.{sample}"}), play)
    return episode


def pid_of(episode: Episode) -> int:
    return int(episode.completion.split()[1])


# --- asking --------------------------------------------------------------------------------------------------------


async def test_many_live_at_once_in_each_worker_and_a_prompt_in_one(host: Host) -> None:
    hosted = await host(2)
    pids = [worker.pid for worker in hosted.group.workers]
    play = turns("go on", "wait 0.2", "go on")
    episodes = await asyncio.gather(*(run(hosted.home, play, group=g, sample=s) for g in range(4) for s in range(8)))
    for episode in episodes:
        steps, _, name = episode.completion.split()
        assert (steps, name) == ("3", f"{episode.group}.{episode.sample}")
    homes = {group: {pid_of(e) for e in episodes if e.group == group} for group in range(4)}
    assert all(len(found) == 1 for found in homes.values())
    assert sorted(pid for [pid] in homes.values()) == sorted(2 * pids)
    # Five calls each of 32 episodes, of which many are made in one turn of the event loop.
    assert sum(site.line.messages for site in hosted.home.sites) < 5 * 32 / 2
    assert not hosted.home._homes
    assert not hosted.home._playing
    about = [actor for actor in cluster_status().actors if actor.role == "environment"]
    assert [(actor.rank, actor.pid) for actor in about] == list(enumerate(pids))


async def test_what_goes_wrong_is_told_as_in_the_driver(host: Host) -> None:
    hosted = await host(limit=0.5)
    here = InProcess(worlds_to_host.Worlds(worlds_to_host.Moody, None), PythonEnvironment(
        kind="python", factory="worlds_to_host:Moody", step_timeout=0.5))  # fmt: skip
    for text in ("raise it is over", "none", "wait 60"):
        told = []
        for home in (here, hosted.home):
            with pytest.raises(Failed) as caught:
                await run(home, turns(text))
            told.append((caught.value.status, caught.value.detail))
        assert told[0] == told[1]
    assert told[0] == ("timeout", "the environment took longer than 0.5 s for one answer")
    for home in (here, hosted.home):
        with pytest.raises(RunFailure, match="the server is gone"):
            await run(home, turns("fail the server is gone"))
    with pytest.raises(Failed, match=r"Moody\.step returned something that no other process can be sent"):
        await run(hosted.home, turns("strange"))
    assert hosted.restarted == []


async def test_what_an_environment_is_given_is_its_own(host: Host) -> None:
    hosted = await host()
    row = {"array": np.zeros(300_000), "name": "mine"}
    seen: list[Any] = []
    await run(hosted.home, turns("done", row=row, seen=seen))
    assert not row["array"].any()
    assert seen[1] == Done(reward=0.5)
    with pytest.raises(RunFailure, match="cannot be sent to its process") as caught:
        await run(hosted.home, turns("done", row={"lock": threading.Lock()}))
    assert caught.value.where == "cluster.environments.workers"


async def test_matches_and_forks(host: Host) -> None:
    hosted = await host(kind="Debate")

    async def match(home: Any, episode: Episode) -> list[Episode]:
        found = await home.make()
        move = partial(checks.move, roles=("pro", "con"))
        assert await home.ask(found, "reset", {}, check=move) == Move("pro", [{"role": "user", "content": "Begin."}])
        then = partial(checks.move_or_done, roles=("pro", "con"), begun=["pro"])
        answer = await home.ask(found, "step", "pro", PolicyTurn("Yes."), check=then)
        assert answer == Move("con", [{"role": "user", "content": "Yes."}], 0.5)
        rewards = partial(checks.rewards, roles=("pro", "con"))
        assert await home.ask(found, "rewards", check=rewards) == {"pro": 1.0, "con": -1.0}
        await home.close(found)
        return [episode]

    await run(hosted.home, match)
    forking = await host()

    async def fork(home: Any, episode: Episode) -> list[Episode]:
        found = await home.make()
        await home.ask(found, "reset", {"name": "tree"}, check=checks.opening)
        await home.ask(found, "step", PolicyTurn("go on"), check=checks.answer)
        other = await home.ask(found, "fork")
        said = [await home.ask(one, "step", PolicyTurn("go on"), check=checks.answer) for one in (found, other, other)]
        assert [one.messages[0]["content"].split()[0] for one in said] == ["2", "2", "3"]
        await home.close(found)
        await home.close(other)
        return [episode]

    await run(forking.home, fork)


async def test_what_drives_itself_is_refused(host: Host) -> None:
    hosted = await host(kind="Drives")
    with pytest.raises((UserError, Failed)) as caught:
        await run(hosted.home, turns("done"))
    assert "Drives" in str(caught.value)
    assert isinstance(caught.value, UserError)
    assert caught.value.where == "cluster.environments.workers"


async def test_everything_is_closed_and_what_is_given_up_too(host: Host, tmp_path: Path, notices: list[str]) -> None:
    closed, note = tmp_path / "closed", tmp_path / "note"
    hosted = await host(closed=str(closed))
    slow = asyncio.ensure_future(run(hosted.home, turns("wait 600", row={"name": "slow", "note": str(note)})))
    await until(lambda: bool(hosted.home.sites[0].lives) and not hosted.home.sites[0].line._unsent)
    await asyncio.sleep(0.5)
    slow.cancel()
    with pytest.raises(asyncio.CancelledError):
        await slow
    assert note.read_text() == "slow\n"
    # One that fails at its end does not undo what was played, and is warned of.
    await run(hosted.home, turns("done", row={"name": "bad", "note": str(note), "close": "raise"}))
    await until(lambda: any("an environment could not be closed" in line for line in notices))
    await hosted.home.end()
    assert closed.exists()
    assert note.read_text() == "slow\nbad\n"


# --- losing workers ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", [signal.SIGKILL, signal.SIGSTOP])
async def test_a_lost_worker_is_replaced_and_its_episodes_begin_again(
    host: Host, way: signal.Signals, capsys: pytest.CaptureFixture[str]
) -> None:
    hosted = await host(2)
    before = [worker.pid for worker in hosted.group.workers]
    play = turns("go on", "wait 1.5", "go on")
    playing = [asyncio.ensure_future(run(hosted.home, play, group=g, sample=s)) for g in range(2) for s in range(4)]
    await asyncio.sleep(0.7)
    os.kill(before[0], way)
    episodes = await asyncio.gather(*playing)
    assert [e.completion.split()[0] for e in episodes] == ["3"] * 8
    assert {pid_of(e) for e in episodes[4:]} == {before[1]}
    # In its place: the home of a prompt stays where it is.
    [after] = {pid_of(e) for e in episodes[:4]}
    assert after == hosted.group.workers[0].pid != before[0]
    assert hosted.restarted == [0]
    assert not psutil.pid_exists(before[0])
    # No environment did it, so it counts.
    assert hosted.spent == 1
    assert hosted.home._cases == []
    said = capsys.readouterr().err
    assert f"environment 0 is lost (process {before[0]}" in said
    assert "begun again: 4 episodes that were in it" in said


async def test_a_worker_that_is_lost_while_nobody_plays_is_noticed_before_anybody_is_blamed(host: Host) -> None:
    hosted = await host()
    await run(hosted.home, turns("go on"))
    os.kill(hosted.group.workers[0].pid, signal.SIGKILL)
    await until(lambda: hosted.group.workers[0].lost is not None)
    assert (await run(hosted.home, turns("go on"))).completion.split()[0] == "1"
    assert (hosted.restarted, hosted.spent) == ([0], 1)


async def test_an_environment_that_ends_its_worker_is_found_and_no_restart_is_counted(host: Host) -> None:
    hosted = await host(2, restarts=1)
    play = turns("wait 0.3", "wait 0.3", "go on")
    tasks = [run(hosted.home, play, group=g, sample=s) for g in range(4) for s in range(4)]
    tasks += [run(hosted.home, turns("wait 0.3", "exit"), group=1, sample=4 + s) for s in range(2)]
    found = await asyncio.gather(*tasks, return_exceptions=True)
    assert [e.completion.split()[0] for e in found[:16]] == ["3"] * 16  # type: ignore[union-attr]
    for failed in found[16:]:
        assert isinstance(failed, Episode)
        assert (failed.status, failed.failed) == ("environment_error", "environment")
        # What was said in its last try.
        assert failed.completion.split()[0] == "1"
        assert f"the environment has ended its process {TRIES} times, the last time alone in it" in failed.detail
    assert hosted.spent == 0
    assert hosted.home._cases == []
    # Together twice, then each alone.
    assert len(hosted.restarted) == 4
    assert (await run(hosted.home, play)).completion.split()[0] == "3"


async def test_losses_that_no_environment_explains_are_counted_and_end_the_run(host: Host, tmp_path: Path) -> None:
    hosted = await host(restarts=1)
    play = turns("wait 1", "go on")
    for number in range(2):
        playing = asyncio.ensure_future(run(hosted.home, play))
        await asyncio.sleep(0.4)
        os.kill(hosted.group.workers[0].pid, signal.SIGKILL)
        if number == 0:
            await playing
            assert hosted.spent == 1
    with pytest.raises(WorkerLost) as caught:
        await playing
    assert "started again 1 times already (cluster.supervision.restarts)" in caught.value.mend
    with pytest.raises(WorkerLost):
        await run(hosted.home, play)


async def test_without_restarts_the_first_loss_is_the_last(host: Host) -> None:
    hosted = await host(restarts=0)
    with pytest.raises(WorkerLost, match="environment 0 is lost"):
        await run(hosted.home, turns("exit"))
    assert hosted.restarted == []


async def test_a_worker_that_does_not_start_again_ends_the_run(host: Host, tmp_path: Path) -> None:
    refuse = tmp_path / "refuse"
    hosted = await host(refuse=str(refuse))
    refuse.touch()
    with pytest.raises(RunFailure, match="it does not start again"):
        await run(hosted.home, turns("exit"))


async def test_what_blocks_a_worker_stops_nobody_else_and_is_ended(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment_line, "POLL", 1.0)
    monkeypatch.setattr(environment_line, "STUCK", 1.0)
    hosted = await host(2, limit=1.0)
    blocked = hosted.group.workers[0].pid
    # A worker that blocks for a while gives signs of life all the same, and nothing is lost.
    [patient, other] = await asyncio.gather(
        run(hosted.home, turns("block 1.5", "go on"), group=0), run(hosted.home, turns("go on"), group=1)
    )
    assert pid_of(patient) == blocked != pid_of(other)
    assert hosted.restarted == []
    found = await asyncio.gather(
        run(hosted.home, turns("block 600"), group=2), run(hosted.home, turns("wait 0.5", "go on"), group=3),
        return_exceptions=True,
    )  # fmt: skip
    assert isinstance(found[0], Episode)
    assert found[0].status == "timeout"
    assert f"has blocked the event loop of its process {TRIES} times" in found[0].detail
    assert isinstance(found[1], Episode)
    assert hosted.spent == 0
    assert not psutil.pid_exists(blocked)
