"""Promise 7 for `rollout.engine.server`, and whole runs that sample with servers of both kinds.

A test says with `shows` for which keys it shows that another value changes what is done; a key that no test shows is a
failure.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
from safetensors.torch import load_file
from sampling_server import SamplingServer, serving
from tiny_runs import put, recipe

from strop.config.explain import leaves
from strop.config.loading import load_config
from strop.errors import ConfigError, RunFailure, UserError
from strop.loops import assembly
from strop.loops.evaluate import evaluate_model
from strop.loops.prepare import prepare
from strop.loops.rollout import rollout
from strop.loops.train import train

PREFIX = "rollout.engine.server."
SHOWN: list[str] = []
F = TypeVar("F", bound=Callable[..., Any])


def shows(*keys: str) -> Callable[[F], F]:
    """The test shows what these keys, below `rollout.engine.server.`, do."""
    SHOWN.extend(keys)
    return lambda function: function


def test_every_key_is_shown_and_no_other() -> None:
    assert sorted(SHOWN) == sorted(leaf.path.removeprefix(PREFIX) for leaf in leaves() if leaf.path.startswith(PREFIX))


@pytest.fixture(autouse=True)
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("os.fsync", lambda _: None)
    return tmp_path


@pytest.fixture
def server() -> SamplingServer:
    """With a model of the recipe's shape and other weights, which the first publication must replace."""
    with prepare(load_config(None, data=recipe(**{"run.seed": 99}))) as prepared:
        roles = assembly.load_roles(prepared)
    return SamplingServer(roles.model, roles.tokenizer, context=roles.loaded.context)


@pytest.fixture
def address(server: SamplingServer) -> Iterator[str]:
    with serving(server) as found:
        yield found


def sampled_by(address: str, kind: str = "sglang", server: dict[str, Any] | None = None, **changes: Any) -> Any:
    data = recipe(**{"rollout.engine.kind": kind, "run.steps": 2, **changes})
    put(data, "rollout.engine.server", {"urls": [address], "retries": 0, **(server or {})})
    return load_config(None, data=data)


def metrics_of(folder: Path) -> list[dict[str, float]]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line["metrics"] for line in lines if line["kind"] == "train"]


# Whole runs.


@pytest.mark.parametrize("kind", ["sglang", "openai"])
def test_a_run_samples_with_a_server_and_trains_what_it_sampled(
    kind: str, address: str, server: SamplingServer, capsys: pytest.CaptureFixture[str]
) -> None:
    config = sampled_by(address, kind, **{"tracking.display": "plain", "run.steps": 3})
    found = train(config)
    steps = metrics_of(found.folder)
    assert len(steps) == 3
    for step in steps:
        assert step["mismatch/abs_max"] < 1e-3
        assert step["publish/probe_gap"] < 1e-3
        assert step["staleness/max"] == 0
    said = capsys.readouterr()
    assert f"{address}: " in said.out + said.err
    # It serves what was trained last, and one version of the weights is left.
    assert [path.name for path in (found.folder / "weights").iterdir()] == ["version-000003"]
    trained = torch.cat([p.detach().flatten() for p in server.model.parameters()])
    saved = load_file(found.model / "model.safetensors")
    assert torch.equal(trained, torch.cat([saved[name].flatten() for name, _ in server.model.named_parameters()]))


def test_a_server_that_keeps_old_weights_stops_the_run(address: str, server: SamplingServer) -> None:
    server.faults.add("loads nothing")
    with pytest.raises(RunFailure, match="log-probabilit"):
        train(sampled_by(address))


def test_commands_that_sample_without_a_run_are_refused(address: str) -> None:
    config = sampled_by(address, **{"data.eval": recipe()["data"]["train"]})
    for command in (evaluate_model, lambda given: rollout(given, "out.jsonl")):
        with pytest.raises(ConfigError, match="samples with a model in its own process"):
            command(config)


def test_what_would_have_no_effect_or_is_missing_is_refused(address: str) -> None:
    for changes, says in [
        ({"rollout.engine.max_sequences": 3}, r"max_sequences` has no effect on the engine sglang"),
        ({"cluster": {"kind": "ray", "engines": {"count": 2}}}, r"cluster\.engines\.count` has no effect with servers"),
        ({"rollout.engine.kind": "local"}, r"rollout\.engine\.server` has no effect on the engine local"),
    ]:
        with pytest.raises(ConfigError, match=says), prepare(sampled_by(address, **changes)):
            pass
    with (
        pytest.raises(ConfigError, match="there is no `server` that says where"),
        prepare(load_config(None, data=recipe(**{"rollout.engine.kind": "openai"}))),
    ):
        pass


# Keys.


@shows("urls")
def test_completions_come_from_all_addresses(address: str, server: SamplingServer) -> None:
    other = SamplingServer(server.model, server.engine._tokenizer, context=64)
    with serving(other) as second:
        steps = metrics_of(train(sampled_by(address, server={"urls": [address, second]})).folder)
    assert all(step["mismatch/abs_max"] < 1e-3 for step in steps)
    for one in (server, other):
        assert sum(path == "/generate" for path, _ in one.asked) > 4
    with pytest.raises(UserError, match="does not answer"):
        train(sampled_by("http://127.0.0.1:9", **{"run.name": "nobody"}))
    assert not Path("runs/nobody").exists()


@shows("model")
def test_a_model_is_asked_for_by_its_name(address: str, server: SamplingServer) -> None:
    train(sampled_by(address, "openai", {"model": "tiny"}))
    assert {body["model"] for path, body in server.asked if path == "/v1/completions"} == {"tiny"}
    with pytest.raises(UserError, match="no model 'other'"):
        train(sampled_by(address, "openai", {"model": "other"}))
    with pytest.raises(ConfigError, match=r"server\.model` has no effect on the engine sglang"):
        train(sampled_by(address, "sglang", {"model": "tiny"}))


@shows("api_key_env")
def test_the_key_is_sent_and_written_nowhere(
    address: str, server: SamplingServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("A_KEY", "very-secret")
    found = train(sampled_by(address, server={"api_key_env": "A_KEY"}))
    assert {headers["Authorization"] for headers in server.headers} == {"Bearer very-secret"}
    for path in found.folder.rglob("*"):
        assert not path.is_file() or b"very-secret" not in path.read_bytes()
    with pytest.raises(UserError, match="NO_SUCH_KEY' is not set"):
        train(sampled_by(address, server={"api_key_env": "NO_SUCH_KEY"}))


@shows("timeout")
def test_a_server_that_is_slow_is_waited_for_so_long(address: str, server: SamplingServer) -> None:
    server.slow = 0.5
    with pytest.raises(UserError, match=r"no answer within 0\.1 s"):
        train(sampled_by(address, server={"timeout": 0.1}))


@shows("retries")
def test_failures_that_pass_are_tried_again(address: str, server: SamplingServer) -> None:
    server.faults.add("fails once")
    with pytest.raises(UserError, match="HTTP 503"):
        train(sampled_by(address))
    server._failed = False
    train(sampled_by(address, server={"retries": 1}))


@shows("concurrency")
@pytest.mark.parametrize("most", [1, 4])
def test_so_many_requests_at_a_time(most: int, address: str, server: SamplingServer) -> None:
    server.slow = 0.02
    lock, now, peaks = threading.Lock(), [0], [0]
    sampled = server._sampled

    async def counted(*given: Any) -> Any:
        with lock:
            now[0] += 1
            peaks[0] = max(peaks[0], now[0])
        try:
            return await sampled(*given)
        finally:
            with lock:
                now[0] -= 1

    server._sampled = counted  # type: ignore[method-assign]
    train(sampled_by(address, server={"concurrency": most}, **{"run.steps": 1}))
    assert peaks[0] == most


@shows("folder")
def test_weights_are_written_where_the_servers_see_them(address: str, server: SamplingServer, workplace: Path) -> None:
    found = train(sampled_by(address, server={"folder": "shared"}))
    assert [path.name for path in (workplace / "shared").iterdir()] == ["version-000002"]
    assert not (found.folder / "weights").exists()
    loaded = [body["model_path"] for path, body in server.asked if path == "/update_weights_from_disk"]
    assert loaded == [str(workplace / "shared" / f"version-{version:06d}") for version in range(3)]


@pytest.mark.slow
def test_a_run_on_ray_that_samples_with_a_server(address: str, workplace: Path) -> None:
    pytest.importorskip("ray")
    here = metrics_of(train(sampled_by(address, **{"run.name": "here"})).folder)
    config = sampled_by(address, cluster={"kind": "ray", "trainer": {"ranks": 2}}, **{"run.name": "there"})
    (workplace / "there.yaml").write_text(json.dumps(config.model_dump(mode="json", exclude_unset=True)))
    # In a process of its own: this one may be connected to the cluster of other tests.
    command = [sys.executable, "-m", "strop", "train", "there.yaml"]
    paths = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": paths}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    for one, other in zip(here, metrics_of(Path("runs/there")), strict=True):
        assert other["reward/mean"] == one["reward/mean"]
        assert other["mismatch/abs_max"] < 1e-3
