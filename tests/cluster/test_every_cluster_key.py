"""Promise 7 for the section `cluster`: every key works or is refused.

`tests/promises/test_p7_every_setting_works.py` walks the rest of the schema with whole runs. Here a test says with
`shows` for which keys it shows that another value changes what is done; a key that no test shows is a failure. What
ranks compute when they are divided in one way or the other is in `tests/training/test_ranks.py`.
"""

from __future__ import annotations

import asyncio
import copy
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

import pytest
import torch
import torch.distributed as dist
from cluster_waiting import Start, until

from strop.cluster.session import Session
from strop.cluster.supervision import Restarts, WorkerLost
from strop.config.cluster import PublishingSettings, TrainerPlacement
from strop.config.explain import leaves
from strop.config.loading import load_config
from strop.errors import ConfigError, RunFailure, UserError
from strop.loops import place, processes, spread, train
from strop.loops.environment_process import EnvironmentTask
from strop.loops.environment_workers import Elsewhere, check_workers, choose_workers
from strop.loops.place import Here, find_place
from strop.loops.prepare import prepare
from strop.loops.prepare_examples import prepare_examples
from strop.loops.rank_host import EngineProcess, RankHost
from strop.loops.spread import device_of
from strop.publishing.publisher import Publisher
from strop.training.parallel.choose import check_ranks, choose_ranks
from strop.training.parallel.ranks import Ranks

SHOWN: list[str] = []
F = TypeVar("F", bound=Callable[..., Any])


def shows(*keys: str) -> Callable[[F], F]:
    """The test shows what these keys, below `cluster.`, do."""
    SHOWN.extend(keys)
    return lambda function: function


def config_of(cluster: dict[str, Any] | None = None, **changes: Any) -> Any:
    """A tiny recipe; `config_of({"kind": "ray"}, training={...})`."""
    data: dict[str, Any] = {
        "model": {"create": {"characters": "0123456789+=", "hidden_size": 32, "layers": 1, "heads": 2, "context": 32}},
        "data": {"train": {"path": "strop.data.arithmetic:problems", "arguments": {"count": 40, "digits": 1}}},
        "rewards": {"verifiers": [{"kind": "exact"}]},
        "rollout": {"groups_per_step": 2, "group_size": 2, "max_new_tokens": 2},
        "tracking": {"display": "off", "tensorboard": False},
        "run": {"steps": 1},
        "hardware": {"threads": 1, "device": "cpu"},
    }
    data |= copy.deepcopy(changes)
    return load_config(None, data={**data, "cluster": cluster or {}})


def examples_of(cluster: dict[str, Any] | None = None, **changes: Any) -> Any:
    """A recipe that learns from examples."""
    found = config_of().model_dump(mode="json", exclude_defaults=True)
    for name in ("rewards", "rollout"):
        del found[name]
    found |= {"supervised": {"method": "sft", "batch_size": 4}, **changes, "cluster": cluster or {}}
    return load_config(None, data=found)


def test_every_key_is_shown_and_no_other() -> None:
    keys = {leaf.path.removeprefix("cluster.") for leaf in leaves() if leaf.path.startswith("cluster.")}
    assert sorted(set(SHOWN)) == sorted(keys)


# --- where processes are -------------------------------------------------------------------------------------------


@pytest.fixture
def attached(ray_session: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str | None]:
    """Runs of this process go to the tests' cluster; the addresses that they asked for."""
    addresses: list[str | None] = []

    def session(address: str | None, **_: Any) -> Session:
        addresses.append(address)
        found = Session(False, ["the tests' cluster"])
        monkeypatch.setattr(found, "close", lambda: None)
        return found

    monkeypatch.setattr(processes, "open_session", session)
    monkeypatch.chdir(tmp_path)
    return addresses


@asynccontextmanager
async def started(config: Any) -> AsyncIterator[Any]:
    with prepare(config) as prepared:
        found = await find_place(prepared)
        try:
            yield found
        finally:
            await found.close()


@shows("kind", "engines.placement")
async def test_kind_and_placement(attached: list[str | None]) -> None:
    async with started(config_of()) as here:
        assert isinstance(here, Here)
    assert attached == []
    async with started(config_of({"kind": "ray"})) as together:
        assert [worker.name for worker in together.trainers.workers] == ["trainer 0"]
        assert together.engines is None
        assert "the engine samples with the trainer's own weights" in together.reasons
        assert together.trainers.workers[0].pid != os.getpid()
        # Of four CPUs; `hardware.threads` holds here too.
        assert together.trainers._threads == 1
    assert attached == [None]


@shows("engines.placement", "trainer.ranks", "engines.count", "publishing.transport", "publishing.folder")
async def test_numbers_and_transports(attached: list[str | None], tmp_path: Path) -> None:
    apart = {"kind": "ray", "trainer": {"ranks": 2}, "engines": {"count": 2, "placement": "separate"}}
    async with started(config_of(apart)) as found:
        assert len(found.trainers.workers) == 2
        assert len(found.engines.workers) == 2
        assert len({worker.pid for group in (found.trainers, found.engines) for worker in group.workers}) == 4
        assert any("ddp 2" in line for line in found.reasons)
        run = tmp_path / "run"
        run.mkdir()
        found.settle_in(run)
        config = found._prepared.config
        await found.aside(lambda: found.make_trainer(config.training.optimizer, total_updates=1, reinforcement=True))
        publisher = found.make_publisher(found.make_engine())
        mine = tmp_path / "mine"
        ways = (("ipc", None), ("broadcast", None), ("delta", None), ("disk", None), ("disk", mine))
        for version, (asked, folder) in enumerate(ways):
            given = PublishingSettings(transport=asked, folder=None if folder is None else str(folder))
            found._settings = found._settings.model_copy(update={"publishing": given})
            assert found._transport() == (asked, "cluster.publishing.transport")
            await found.connect()
            publisher._version = None
            metrics = await publisher.publish(None, version=version)
            assert metrics["publish/version"] == version
            written = [path for path in (run / "weights", mine) if (path / f"version-{version:06d}").is_dir()]
            assert written == {"disk": [mine if folder else run / "weights"]}.get(asked, [])


TINY = {"kind": "python", "factory": "tiny_environment:Tiny"}
TINY_CLASS = """
class Tiny:
    async def reset(self, row): ...
    async def step(self, turn): ...
    async def close(self): ...
"""


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A recipe's sections with an environment of the user's."""
    (tmp_path / "tiny_environment.py").write_text(TINY_CLASS)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "tiny_environment", raising=False)
    return {"environment": TINY, "rewards": {"verifiers": [{"kind": "environment"}]}}


@shows("environments.workers")
async def test_environments_are_where_they_are_asked_to_be(attached: list[str | None], tiny: dict[str, Any]) -> None:
    for workers in (0, 1, 2):
        async with started(config_of({"kind": "ray", "environments": {"workers": workers}}, **tiny)) as found:
            names = [worker.name for worker in found.environments.workers] if workers else []
            assert names == [f"environment {rank}" for rank in range(workers)]
            assert isinstance(found.world.factory, Elsewhere) is bool(workers)
            line = (
                f"{workers} process{'es' if workers > 1 else ''} of environment"
                if workers
                else "in the driver: cluster"
            )
            assert any(line in reason for reason in found.reasons), found.reasons
            if workers:
                pids = {worker.pid for worker in found.environments.workers}
                assert len(pids) == workers
                assert os.getpid() not in pids


@pytest.mark.parametrize(
    ("environment", "spare", "workers", "why"),
    [
        (TINY, 9, 4, "their code computes, and 9 CPUs are to spare"),
        (TINY, 1.5, 1, "1 CPUs are to spare"),
        (TINY, -3, 0, "no CPU to spare"),
        ({"kind": "tools", "tools": [{"kind": "calculator"}]}, 9, 0, "they only wait for tools"),
    ],
)
def test_what_auto_takes_for_environments(
    ray_session: Any, tiny: dict[str, Any], environment: dict[str, Any], spare: float, workers: int, why: str
) -> None:
    with prepare(config_of({"kind": "ray"}, **{**tiny, "environment": environment})) as prepared:
        found, reasons = choose_workers(prepared.config, prepared.world, spare)
    assert found == workers
    assert why in reasons[0]


def test_without_an_environment_there_is_nothing_to_choose(ray_session: Any) -> None:
    assert choose_workers(config_of({"kind": "ray"}), None, 9) == (0, ())


@pytest.mark.parametrize(
    ("environment", "drives", "says"),
    [
        ({"kind": "slime", "generate": "a:b"}, True, "slime drives itself: it asks the policy for tokens"),
        ({"kind": "openenv", "url": "http://x", "action": {"a": "{action}"}, "sessions": 2}, False,
         "3 workers cannot share 2 sessions"),
    ],
)  # fmt: skip
def test_environments_that_cannot_be_in_workers(environment: dict[str, Any], drives: bool, says: str) -> None:
    rewards = {"verifiers": [{"kind": "environment"}]}
    config = config_of({"kind": "ray", "environments": {"workers": 3}}, environment=environment, rewards=rewards)
    world: Any = SimpleNamespace(factory=SimpleNamespace(drives=drives), settings=config.environment)
    with pytest.raises(ConfigError) as caught:
        check_workers(config, world)
    [problem] = caught.value.problems
    assert problem.where == "cluster.environments.workers"
    assert says in problem.what
    assert problem.mend
    if drives:
        auto = config_of({"kind": "ray"}, environment=environment, rewards=rewards)
        assert choose_workers(auto, world, 9)[0] == 0


def test_the_sessions_of_a_server_are_shared_among_workers() -> None:
    settings = {"kind": "openenv", "url": "http://x", "action": {"a": "{action}"}, "sessions": 5}
    config = config_of(environment=settings, rewards={"verifiers": [{"kind": "environment"}]})
    task = EnvironmentTask(config.environment, config.sandbox, None, ".", 3)
    assert [task.share(index).sessions for index in range(3)] == [2, 2, 1]


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, True),
        ({"engines": {"placement": "separate"}}, False),
        ({"engines": {"placement": "colocated"}}, True),
        ({"engines": {"count": 2}}, False),
        ({"trainer": {"ranks": 2}}, False),
        ({"publishing": {"transport": "disk"}}, False),
        ({"publishing": {"transport": "shared"}}, True),
    ],
)
def test_an_engine_is_colocated_where_that_can_be(settings: dict[str, Any], expected: bool) -> None:
    assert spread.colocated(config_of({"kind": "ray", **settings})) is expected


def test_an_engine_on_several_gpus_has_a_process_of_its_own() -> None:
    vllm = {"engine": {"kind": "vllm", "tensor": 2}}
    assert not spread.colocated(config_of({"kind": "ray"}, rollout=vllm))
    with pytest.raises(ConfigError, match="there is an engine of several GPUs"):
        spread.colocated(config_of({"kind": "ray", "engines": {"placement": "colocated"}}, rollout=vllm))
    # Two for the engine and one for the trainer.
    ahead = config_of({"kind": "ray"}, rollout={**vllm, "max_staleness": 1})
    config, why = spread.settled(ahead, "cuda", 3)
    assert config.cluster.engines.placement == "separate"
    assert "a process of its own" in why[0]


@shows("address")
def test_an_address_is_attached_to(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    # Other tests of this process may have a cluster.
    monkeypatch.setattr("ray.is_initialized", lambda: False)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
        with pytest.raises(UserError, match="there is no Ray cluster at") as caught:
            train.train(config_of({"kind": "ray", "address": address}))
    assert address in caught.value.what
    assert caught.value.where == "cluster.address"
    assert not (tmp_path / "runs" / "run").exists()


# --- how ranks divide the work -------------------------------------------------------------------------------------


@pytest.fixture
def ranks_of() -> Iterator[Callable[..., Ranks]]:
    """`ranks_of(ranks=4, tensor=2)`: what the first of so many ranks chooses. Its peers are not there."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from strop.config.model import NewModel
    from strop.models.create import create_model

    model, _ = create_model(NewModel(characters="0123456789", hidden_size=32, layers=1, heads=4, context=32), seed=0)

    def choose(memory: int = 1 << 40, **settings: Any) -> Ranks:
        if dist.is_initialized():
            dist.destroy_process_group()
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=settings["ranks"])
        found, _ = choose_ranks(
            TrainerPlacement(**settings), model, device=torch.device("cpu"), dtype=torch.float32, memory=memory
        )
        assert isinstance(found, Ranks)
        return found

    yield choose
    if dist.is_initialized():
        dist.destroy_process_group()


@shows(
    "trainer.ranks", "trainer.backend", "trainer.tensor", "trainer.sequence", "trainer.context", "trainer.replicas",
    "trainer.offload", "trainer.gradient_sync",
)  # fmt: skip
def test_every_key_of_the_trainer_changes_the_ranks(ranks_of: Callable[..., Ranks]) -> None:
    def facts(**settings: Any) -> tuple[Any, ...]:
        found = ranks_of(**settings)
        d = found.mesh.dimensions
        return d.replicas, d.shards, d.context, d.tensor, found._fsdp, found._sequence, found._offload, found.multiple

    assert facts(ranks=2) == (1, 2, 1, 1, False, False, False, 1)
    assert facts(ranks=4) == (1, 4, 1, 1, False, False, False, 1)
    assert facts(ranks=4, memory=1) == (1, 4, 1, 1, True, False, False, 1)
    assert facts(ranks=4, memory=1, backend="ddp") == (1, 4, 1, 1, False, False, False, 1)
    assert facts(ranks=4, backend="fsdp") == (1, 4, 1, 1, True, False, False, 1)
    assert facts(ranks=4, tensor=2) == (1, 2, 1, 2, False, False, False, 1)
    assert facts(ranks=4, tensor=2, sequence=True) == (1, 2, 1, 2, False, True, False, 2)
    assert facts(ranks=4, context=2) == (1, 2, 2, 1, False, False, False, 2)
    assert facts(ranks=4, replicas=2) == (2, 2, 1, 1, True, False, False, 1)
    assert facts(ranks=4, offload=True) == (1, 4, 1, 1, True, False, True, 1)
    for asked in ("every_pass", "last_pass"):
        found = ranks_of(ranks=4, backend="fsdp", gradient_sync=asked)
        assert found._every_pass is (asked == "every_pass")


def test_gradients_are_summed_once_where_a_whole_one_fits(ranks_of: Callable[..., Ranks]) -> None:
    def every_pass(bytes_per_weight: float, **settings: Any) -> bool:
        return ranks_of(memory=int(3 * bytes_per_weight * weights), ranks=4, backend="fsdp", **settings)._every_pass

    from strop.config.model import NewModel
    from strop.models.create import create_model

    model, _ = create_model(NewModel(characters="0123456789", hidden_size=32, layers=1, heads=4, context=32), seed=0)
    weights = sum(p.numel() for p in model.parameters())
    # 4 bytes of the gradient, and 16 of all else over four ranks; of what is offloaded the gradient only.
    for needed, settings in (
        (4 + 16 / 4, {}),
        (4 + 16 / 2, {"replicas": 2}),
        ((4 + 16 / 2) / 2, {"tensor": 2}),
        (4.0, {"offload": True}),
    ):
        assert not every_pass(1.01 * needed, **settings)
        assert every_pass(0.99 * needed, **settings)


# --- buckets and waiting -------------------------------------------------------------------------------------------


def port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@shows("publishing.bucket_mb", "supervision.wait")
@pytest.mark.parametrize("transport", ["ipc", "broadcast"])
def test_buckets_have_the_size_and_halves_the_patience_that_is_asked_for(transport: str, tmp_path: Path) -> None:
    for bucket, wait in ((1, 50.0), (3, 70.0)):
        config = config_of({"kind": "ray", "supervision": {"wait": wait}})
        task = SimpleNamespace(config=config, hardware=SimpleNamespace(device=torch.device("cpu")))
        host: Any = SimpleNamespace(task=task, rank=0, trainer=None, _side=None, _engine=None, _receiver=None)
        settings = PublishingSettings(transport=transport, bucket_mb=bucket)  # type: ignore[arg-type]
        RankHost.connect(host, settings, transport, ("127.0.0.1", port()), 1, tmp_path)
        half = host._side._transport
        assert {len(slot) for slot in half._slots} == {bucket << 20}
        if transport == "ipc":
            assert half._timeout == wait
        host._side.close()
        # An engine that meets nobody but itself; with ipc it sees the trainer's buckets.
        taker: Any = SimpleNamespace(task=task, _index=-1, _side=None, _engine=None, _receiver=None)
        EngineProcess.connect(taker, settings, transport, ("127.0.0.1", port()), 1)
        half = taker._side._transport
        if transport == "ipc":
            assert half._timeout == wait
        else:
            assert len(half._bucket) == bucket << 20
        taker._side.close()


# --- supervision ---------------------------------------------------------------------------------------------------


@shows("supervision.heartbeat")
async def test_signs_of_life_are_asked_for_as_often_as_is_said(start: Start) -> None:
    async def beats(heartbeat: float) -> int:
        """Different times of the last sign of life, of those seen in two seconds."""
        group = await start(1, heartbeat=heartbeat, timeout=600.0, make=False)
        await asyncio.sleep(0.5)
        seen = set()
        for _ in range(20):
            seen.add((await group.workers[0].health("describe", 30.0))["beat"])
            await asyncio.sleep(0.1)
        return len(seen)

    assert await beats(500.0) == 1
    assert await beats(0.3) > 1


@shows("supervision.timeout")
async def test_a_silent_process_is_lost_when_the_time_is_up_and_not_before(start: Start) -> None:
    patient = await start(1, heartbeat=0.2, timeout=600.0, make=False)
    hasty = await start(1, heartbeat=0.2, timeout=4.0, make=False)
    for group in (patient, hasty):
        os.kill(group.workers[0].pid, signal.SIGSTOP)
    await until(lambda: hasty.workers[0].lost is not None)
    assert hasty.workers[0].lost is not None
    assert "it has not given a sign of life for 4 s" in hasty.workers[0].lost.what
    assert patient.workers[0].lost is None


@shows("supervision.wait")
async def test_an_answer_is_waited_for_as_long_as_is_said(start: Start) -> None:
    group = await start(1, wait=60.0)
    assert await group.call("sleep", 2.0) == "slept"
    group._supervisor.settings = group._supervisor.settings.model_copy(update={"wait": 1.0})
    with pytest.raises(RunFailure, match=r"sleep was not answered within 1 s by trainer 0") as caught:
        await group.call("sleep", 600)
    assert "cluster.supervision.wait" in caught.value.mend


@shows("supervision.restarts")
@pytest.mark.parametrize("restarts", [0, 2])
async def test_a_run_goes_on_as_often_as_is_allowed(
    restarts: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from strop.cluster.supervision import Supervisor

    monkeypatch.chdir(tmp_path)
    config = config_of({"kind": "ray", "supervision": {"restarts": restarts}})
    loss = WorkerLost("trainer", 1, "it was killed", node="n", host="h", pid=7, log=None, last=[])
    tries = 0

    async def lost(*_: Any, **__: Any) -> None:
        nonlocal tries
        tries += 1
        if tries % 2:
            raise loss
        raise RunFailure("the checkpoint could not be written") from loss

    with pytest.raises(WorkerLost) as caught:
        await train._whatever_is_lost(lost, config, fresh=False, recipe=None)
    assert tries == 1 + restarts
    assert f"started again {restarts} times already (cluster.supervision.restarts)" in caught.value.mend
    assert capsys.readouterr().err.count("going on from the last checkpoint") == restarts

    tries = 0

    async def engines_lost(*_: Any, **__: Any) -> None:
        """An engine is started again as often as may be, in each of the goes at the run."""
        nonlocal tries
        supervisor = Supervisor(config.cluster.supervision)
        try:
            while True:
                supervisor.spend_restart(loss)
                tries += 1
        finally:
            supervisor.close()

    with pytest.raises(WorkerLost):
        await train._whatever_is_lost(engines_lost, config, fresh=False, recipe=None)
    assert tries == restarts


async def test_a_loss_in_a_publication_is_told_as_a_loss(
    attached: list[str | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that the run goes on from its checkpoint, and does not end with a failed publication. Before anything has
    moved another process takes the place."""
    async with started(config_of({"kind": "ray", "engines": {"count": 2}})) as found:
        config = found._prepared.config
        await found.aside(lambda: found.make_trainer(config.training.optimizer, total_updates=1, reinforcement=True))
        publisher = found.make_publisher(found.make_engine())
        await publisher.publish(None, version=0)
        before = found.engines.workers[1]
        os.kill(before.pid, signal.SIGKILL)
        await publisher.publish(None, version=1)
        lost = found.engines.workers[1]
        assert lost.pid != before.pid
        move = Publisher._move

        async def moving(self: Publisher, *given: Any) -> Any:
            os.kill(lost.pid, signal.SIGKILL)
            return await move(self, *given)

        monkeypatch.setattr(Publisher, "_move", moving)
        with pytest.raises(WorkerLost) as caught:
            await publisher.publish(None, version=2)
        assert (caught.value.role, caught.value.rank, caught.value.pid) == ("engine", 1, lost.pid)


def test_a_loss_counts_once_whoever_hears_of_it() -> None:
    restarts = Restarts(config_of({"kind": "ray", "supervision": {"restarts": 2}}).cluster.supervision)
    losses = [WorkerLost("engine", at, "it was killed", node="n", host="h", pid=7, log=None, last=[]) for at in (0, 1)]
    assert restarts.spend(losses[0]) == 1
    # Its publication failed too, and the run is set back.
    assert restarts.set_back(losses[0]) == 1
    # But a run that is set back by the same again and again comes to an end.
    assert restarts.set_back(losses[0]) == 0
    for again in (restarts.set_back, restarts.spend):
        with pytest.raises(WorkerLost):
            again(losses[1])


async def test_a_fresh_run_that_is_lost_before_it_has_a_folder_is_not_the_one_before(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from strop.tracking.run_directory import RunDirectory

    monkeypatch.chdir(tmp_path)
    config = config_of({"kind": "ray"}, run={"name": "named", "steps": 1})
    RunDirectory.create("runs", "named", config_yaml="").close("finished")
    loss = WorkerLost("trainer", 1, "it was killed", node="n", host="h", pid=7, log=None, last=[])
    seen: list[bool] = []

    async def loop(*_: Any, fresh: bool, **__: Any) -> str:
        seen.append(fresh)
        if len(seen) == 2:
            RunDirectory.create("runs", "named", config_yaml="").close("failed")
        if len(seen) < 3:
            raise loss
        return "done"

    assert await train._whatever_is_lost(loop, config, fresh=True, recipe=None) == "done"
    assert seen == [True, True, False]


# --- what is refused -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cluster", "says"),
    [
        ({"trainer": {"ranks": 2}}, "several processes need cluster.kind: ray"),
        ({"engines": {"count": 2}}, "several processes need cluster.kind: ray"),
        ({"engines": {"placement": "separate"}}, "several processes need cluster.kind: ray"),
        ({"publishing": {"transport": "disk"}}, "transport disk has no effect in one process"),
        ({"address": "auto"}, "address has no effect with kind: local"),
        ({"environments": {"workers": 0}}, "environments has no effect with kind: local"),
        ({"publishing": {"bucket_mb": 3}}, "publishing has no effect with kind: local"),
        ({"supervision": {"restarts": 1}}, "supervision has no effect with kind: local"),
        ({"kind": "ray", "trainer": {"ranks": 3, "tensor": 2}}, "ranks (3) cannot be divided by tensor x context"),
        ({"kind": "ray", "trainer": {"ranks": 2, "sequence": True}}, "sequence has no effect while tensor is 1"),
        ({"kind": "ray", "trainer": {"ranks": 2, "backend": "ddp", "replicas": 2}}, "of the backend fsdp"),
        ({"kind": "ray", "trainer": {"ranks": 2, "backend": "ddp", "offload": True}}, "of the backend fsdp"),
        ({"kind": "ray", "trainer": {"backend": "fsdp"}}, "backend and offload have no effect while ranks is 1"),
        ({"kind": "ray", "trainer": {"offload": True}}, "backend and offload have no effect while ranks is 1"),
        ({"kind": "ray", "trainer": {"gradient_sync": "last_pass"}}, "gradient_sync is of several ranks with"),
        ({"kind": "ray", "trainer": {"ranks": 2, "gradient_sync": "every_pass"}}, "gradient_sync is of several ranks"),
        ({"kind": "ray", "publishing": {"folder": "w"}}, "folder has no effect with transport auto"),
        ({"kind": "ray", "publishing": {"transport": "disk", "bucket_mb": 3}}, "bucket_mb has no effect with"),
        ({"kind": "ray", "publishing": {"transport": "delta", "bucket_mb": 3}}, "bucket_mb has no effect with"),
        ({"kind": "ray", "supervision": {"heartbeat": 9.0}}, "timeout (8) must be more than heartbeat (9)"),
    ],
)
def test_what_the_schema_refuses(cluster: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        config_of(cluster)
    assert says in str(caught.value)
    assert "cluster" in str(caught.value)


@pytest.mark.parametrize(
    ("cluster", "where", "says"),
    [
        ({"engines": {"placement": "colocated", "count": 2}}, "cluster.engines.placement", "several trainer ranks or"),
        ({"engines": {"placement": "colocated"}, "trainer": {"ranks": 2}}, "cluster.engines.placement", "several"),
        (
            {"engines": {"placement": "colocated"}, "publishing": {"transport": "ipc"}},
            "cluster.engines.placement",
            "there is a transport",
        ),
        (
            {"engines": {"count": 2}, "publishing": {"transport": "shared"}},
            "cluster.publishing.transport",
            "weights cannot be shared between processes",
        ),
        (
            {"engines": {"placement": "separate"}, "publishing": {"transport": "shared"}},
            "cluster.publishing.transport",
            "weights cannot be shared between processes",
        ),
    ],
)
def test_a_placement_that_does_not_go_with_the_rest(cluster: dict[str, Any], where: str, says: str) -> None:
    config = config_of({"kind": "ray", **cluster})
    with pytest.raises(ConfigError) as caught:
        spread.colocated(config)
    [problem] = caught.value.problems
    assert problem.where == where
    assert says in problem.what


@pytest.mark.parametrize(
    ("config", "key"),
    [
        (lambda: config_of({"kind": "ray", "publishing": {"bucket_mb": 3}}), "cluster.publishing.bucket_mb"),
        (lambda: config_of({"kind": "ray", "environments": {"workers": 2}}), "cluster.environments.workers"),
        (lambda: examples_of({"kind": "ray", "environments": {"workers": 2}}), "cluster.environments.workers"),
        (lambda: examples_of({"kind": "ray", "engines": {"count": 2}}), "cluster.engines.count"),
        (lambda: examples_of({"kind": "ray", "engines": {"placement": "separate"}}), "cluster.engines.placement"),
        (lambda: examples_of({"kind": "ray", "publishing": {"transport": "ipc"}}), "cluster.publishing.transport"),
        (lambda: examples_of({"kind": "ray", "publishing": {"bucket_mb": 3}}), "cluster.publishing.bucket_mb"),
    ],
)
def test_what_would_have_no_effect_beside_the_rest(config: Callable[[], Any], key: str) -> None:
    asked = config()
    with pytest.raises(ConfigError) as caught:
        (prepare if asked.supervised is None else prepare_examples)(asked)
    assert f"`{key}` has no effect" in str(caught.value)


FSDP = {"kind": "ray", "trainer": {"ranks": 2, "backend": "fsdp"}}
TENSOR = {"kind": "ray", "trainer": {"ranks": 2, "tensor": 2}}
CONTEXT = {"kind": "ray", "trainer": {"ranks": 2, "context": 2}}
DDP = {"kind": "ray", "trainer": {"ranks": 2, "backend": "ddp"}}
MUON = {"optimizer": {"name": "muon"}}
ADAPTIVE = {"create": config_of().model.create.model_dump(), "lora": {"rank": 2, "adaptive": {}}}
NOISY = {"method": "sft", "batch_size": 4, "neftune_alpha": 5.0}


@pytest.mark.parametrize(
    ("config", "where"),
    [
        (lambda: config_of(FSDP, training=MUON), "training.optimizer.name"),
        (lambda: config_of({**FSDP, "trainer": {"ranks": 2}}, training=MUON), "training.optimizer.name"),
        (lambda: config_of({**DDP, "trainer": {"ranks": 2, "backend": "ddp", "tensor": 2}}, training=MUON),
         "training.optimizer.name"),
        (lambda: config_of(FSDP, algorithm={"name": "ppo"}, critic=MUON), "critic.optimizer.name"),
        (lambda: config_of(DDP, training={"optimizer": {"offload": True}}), "training.optimizer.offload"),
        (lambda: config_of(DDP, model=ADAPTIVE), "model.lora.adaptive"),
        (lambda: examples_of(TENSOR, supervised=NOISY), "supervised.neftune_alpha"),
        (lambda: examples_of(CONTEXT, supervised=NOISY), "supervised.neftune_alpha"),
        (lambda: config_of(CONTEXT, algorithm={"name": "gkd"}), "cluster.trainer"),
        (lambda: config_of(TENSOR, training={"compile": True}), "training.compile"),
    ],
)  # fmt: skip
def test_what_ranks_cannot_do_together(config: Callable[[], Any], where: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_ranks(config())
    assert [problem.where for problem in caught.value.problems] == [where]


@pytest.mark.parametrize(
    "config",
    [
        lambda: config_of({"kind": "ray"}, training=MUON),
        lambda: config_of(DDP, training=MUON),
        lambda: config_of(FSDP),
        lambda: examples_of(FSDP, supervised=NOISY),
    ],
)
def test_what_they_can(config: Callable[[], Any]) -> None:
    check_ranks(config())


async def test_a_run_asks_before_it_starts_anything(attached: list[str | None]) -> None:
    for config in (
        config_of(FSDP, training=MUON),
        config_of({"kind": "ray", "engines": {"placement": "colocated", "count": 2}}),
    ):
        with pytest.raises(ConfigError), prepare(config) as prepared:
            await place.find_place(prepared)
    assert attached == []


@pytest.mark.parametrize(
    ("asked", "here", "gpus", "device", "told"),
    [
        ("auto", "cpu", 0, "cpu", 0),
        ("auto", "cuda", 4, "cuda", 0),
        # The driver of a cluster is often on a node without a GPU.
        ("auto", "cpu", 4, "cuda", 1),
        ("cpu", "cpu", 4, "cpu", 0),
    ],
)
def test_processes_compute_on_what_the_cluster_has(asked: str, here: str, gpus: int, device: str, told: int) -> None:
    config = config_of({"kind": "ray"})
    config = config.model_copy(update={"hardware": config.hardware.model_copy(update={"device": asked})})
    found, why = device_of(config, here, gpus)
    assert found == device
    assert len(why) == told
