"""Which resources are asked for, what is refused, and what workers inherit."""

from __future__ import annotations

import builtins
import pickle
from typing import Any

import pytest

from strop.cluster.placement import Ask, asks, check_enough, choose_strategy, place
from strop.cluster.session import open_session, worker_environment
from strop.errors import ConfigError, MissingExtra, RunFailure, UserError

GPUS = [{"CPU": 16.0, "GPU": 4.0}, {"CPU": 16.0, "GPU": 4.0}]


def trainers(count: int) -> Ask:
    return Ask("trainer", count, "cuda", key="cluster.trainer.ranks")


def test_a_colocated_engine_needs_nothing_of_its_own() -> None:
    assert [(a.role, a.count) for a in asks(ranks=2, engines=1, colocated=True, device="cpu")] == [("trainer", 2)]
    both = asks(ranks=2, engines=3, colocated=False, device="cuda")
    assert [(a.role, a.count, a.bundle) for a in both] == [
        ("trainer", 2, {"GPU": 1.0, "CPU": 1.0}),
        ("engine", 3, {"GPU": 1.0, "CPU": 1.0}),
    ]
    large = asks(ranks=1, engines=2, colocated=False, device="cuda", tensor=4)
    assert [(a.role, a.count, a.bundle) for a in large] == [
        ("trainer", 1, {"GPU": 1.0, "CPU": 1.0}),
        ("engine", 2, {"GPU": 4.0, "CPU": 1.0}),
    ]


@pytest.mark.parametrize(("count", "strategy"), [(4, "STRICT_PACK"), (5, "PACK")])
def test_ranks_share_a_node_where_one_has_room(count: int, strategy: str) -> None:
    assert choose_strategy(trainers(count), GPUS)[0] == strategy


def test_what_a_cluster_can_hold_passes_and_one_more_does_not() -> None:
    engines = Ask("engine", 3, "cuda", key="cluster.engines.count", together=False)
    check_enough([trainers(5), engines], GPUS)
    with pytest.raises(UserError) as caught:
        check_enough([trainers(6), engines], GPUS)
    text = caught.value.what
    assert "no room for 1 of 3 processes of engine" in text
    assert "6 for trainer (1 GPU, 1 CPU each) and 3 for engine" in text
    assert "2 nodes with 4 GPU, 16 CPU; 4 GPU, 16 CPU" in text
    assert caught.value.where == "cluster.engines.count"
    assert caught.value.exit_code == 2


def test_gpus_on_nodes_without_cpus_are_no_room() -> None:
    with pytest.raises(UserError, match="no room for 1 of 2"):
        check_enough([trainers(2)], [{"CPU": 1.0, "GPU": 4.0}, {"GPU": 8.0}])


async def test_a_real_cluster_refuses_what_it_has_not(ray_session: Any) -> None:
    with pytest.raises(UserError, match=r"5 for trainer \(1 CPU each\); there is 1 node with 0 GPU, 4 CPU"):
        await place([Ask("trainer", 5, "cpu")], wait=5)
    with pytest.raises(UserError, match="no room for 1 of 1 processes of trainer"):
        await place([trainers(1)], wait=5)


async def test_what_others_hold_is_waited_for_and_named(ray_session: Any) -> None:
    first = await place([Ask("trainer", 3, "cpu")], wait=30)
    assert first.reasons == ["3 processes of trainer, STRICT_PACK: they fit one node, where they talk fastest"]
    try:
        with pytest.raises(RunFailure) as caught:
            await place([Ask("engine", 2, "cpu", key="cluster.engines.count", together=False)], wait=1)
        assert "no room for 2 processes of engine became free within 1 s" in caught.value.what
        assert "each needs 1 CPU, and free in the whole cluster are 1 CPU" in caught.value.what
    finally:
        first.release()
    second = await place([Ask("engine", 2, "cpu", together=False)], wait=30)
    second.release()


def test_without_ray_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(name: str, *args: Any, **kwargs: Any) -> Any:
        if name == "ray" or name.startswith("ray."):
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(MissingExtra, match=r"cluster.kind: ray needs the package 'ray'") as caught:
        open_session(None)
    assert "strop[ray]" in caught.value.mend


def test_workers_get_paths_and_settings_but_no_secrets() -> None:
    given = {"PYTHONPATH": "/mine", "NCCL_DEBUG": "INFO", "HF_HOME": "/hf", "HF_TOKEN": "hidden", "EDITOR": "ed"}
    found = worker_environment(given)
    assert found["PYTHONPATH"].split(":")[1] == "/mine"
    assert found["NCCL_DEBUG"] == "INFO"
    assert found["HF_HOME"] == "/hf"
    assert not {"HF_TOKEN", "EDITOR"} & set(found)


def test_every_error_survives_the_way_between_processes() -> None:
    errors = [
        UserError("a", where="b", mend="c"),
        MissingExtra("package", extra="extra", needed_for="a test"),
        ConfigError([UserError("one", where="x"), UserError("two", mend="y")]),
    ]
    for error in errors:
        again = pickle.loads(pickle.dumps(error))
        assert type(again) is type(error)
        assert again.block() == error.block()
        assert str(again) == str(error)
