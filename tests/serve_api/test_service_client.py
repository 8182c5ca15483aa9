"""The client of the service, against a real one: the example, streams that break, downloads that go on."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from serve_at_hand import ROOT, SMALL, AtHand, put_run

from strop.errors import UserError
from strop.serve.api.access import Role
from strop.serve.client import Client, ServiceError

EXAMPLE = ROOT / "examples" / "client.py"


@pytest.fixture
def listening(at_hand: Callable[..., AtHand]) -> Iterator[tuple[AtHand, str]]:
    """A whole service, that looks after its jobs, and its address."""
    there = at_hand()
    server = uvicorn.Server(uvicorn.Config(there.service.app, port=0, log_level="critical", http="h11"))
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        assert thread.is_alive()
    port = server.servers[0].sockets[0].getsockname()[1]
    yield there, f"http://127.0.0.1:{port}"
    server.should_exit = True
    thread.join()
    # What was started outlives a service, but not this test; a runner that only just begins cannot be found yet.
    backend = there.service.jobs.backends["local"]
    give_up = time.monotonic() + 30
    for job in there.service.jobs.store.running():
        while backend.look(job).how == "alive" and time.monotonic() < give_up:
            backend.kill(job)
            time.sleep(0.1)


def test_the_example_fits_in_twenty_lines() -> None:
    assert len(EXAMPLE.read_text().splitlines()) <= 20


@pytest.mark.slow
def test_the_example_submits_follows_and_fetches_the_model(listening: tuple[AtHand, str], tmp_path: Path) -> None:
    there, url = listening
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    environment |= {"STROP_URL": url, "STROP_TOKEN": there.tokens[Role.operator]}
    done = subprocess.run(
        [sys.executable, str(EXAMPLE), *SMALL, "run.name=mine"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert [line.split(":")[0] for line in lines] == ["step 1", "step 2", "mine", "model"]
    assert lines[2] == "mine: finished"
    model = there.root / "mine" / "checkpoints" / "step-000002" / "model"
    fetched = tmp_path / "quickstart-model"
    assert {path.name for path in fetched.iterdir()} == {path.name for path in model.iterdir()}
    assert (fetched / "model.safetensors").read_bytes() == (model / "model.safetensors").read_bytes()
    # And it is a model.
    import transformers

    transformers.AutoModelForCausalLM.from_pretrained(fetched)
    # The token of the caller is not passed on to what runs.
    assert there.tokens[Role.operator] not in (there.root / "mine" / "run.json").read_text()


def test_jobs_are_steered_and_problems_are_told(listening: tuple[AtHand, str], quickstart: str) -> None:
    there, url = listening
    client = Client(url, there.tokens[Role.operator])
    with pytest.raises(ServiceError, match=r"unknown key `run.stpes`") as caught:
        client.submit(quickstart, "run.stpes=3")
    assert caught.value.status == 422
    assert "did you mean `run.steps`?" in caught.value.mend
    with pytest.raises(ServiceError) as caught:
        client.job("nothing")
    assert caught.value.status == 404
    with pytest.raises(ServiceError) as caught:
        Client(url, "strop-000000000000-" + "A" * 43).runs()
    assert caught.value.status == 401
    with pytest.raises(UserError, match="not the address"):
        Client("ftp://there", "t")
    with pytest.raises(ServiceError, match="no service answers"):
        Client("http://127.0.0.1:1", "t").runs()
    job = client.submit(quickstart, name="mine")
    assert client.stop(job["id"])["state"] in ("stopped", "running")
    assert client.wait(job["id"])["state"] == "stopped"
    assert [one["id"] for one in client.jobs(state="stopped")] == [job["id"]]
    assert isinstance(client.log(job["id"]), str)


def test_a_recipe_is_sent_with_what_it_extends(listening: tuple[AtHand, str], tmp_path: Path, quickstart: str) -> None:
    there, url = listening
    (tmp_path / "base.yaml").write_text(quickstart)
    (tmp_path / "mine.yaml").write_text("extends: base.yaml\nrun: {steps: 7}\n")
    client = Client(url, there.tokens[Role.operator])
    job = client.submit(tmp_path / "mine.yaml", name="extended")
    client.stop(job["id"])
    assert "steps: 7" in there.service.jobs.recipe(job["id"])
    assert "hidden_size: 128" in there.service.jobs.recipe(job["id"])


def test_a_stream_that_breaks_goes_on_behind_what_was_seen(
    listening: tuple[AtHand, str], quickstart: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    there, url = listening
    put_run(there.root, "mine", steps=50)
    store = there.service.jobs.store
    store.add("abc", "mine", owner="me", backend="ray", overrides=[])
    store.take_out("abc", "stopped")  # type: ignore[arg-type]
    client = Client(url, there.tokens[Role.viewer])
    whole, broken = client._events, 0

    def breaking(job: str, at: str) -> Iterator[Any]:
        nonlocal broken
        for seen, (event, behind) in enumerate(whole(job, at)):
            if broken < 3 and seen == 9:
                broken += 1
                raise ConnectionResetError
            yield event, behind

    monkeypatch.setattr(client, "_events", breaking)
    monkeypatch.setattr("strop.serve.client.time.sleep", lambda _: None)
    events = list(client.follow("abc"))
    assert broken == 3
    assert [event.data["step"] for event in events if event.name == "metrics"] == list(range(1, 51))
    assert events[-1].name == "end"
    assert [record["step"] for record in client.metrics("mine")] == list(range(1, 51))


def test_a_download_that_breaks_goes_on(
    listening: tuple[AtHand, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there, url = listening
    run = put_run(there.root)
    file = run / "checkpoints" / "step-000003" / "model" / "model.safetensors"
    file.write_bytes(os.urandom(300_000))
    client = Client(url, there.tokens[Role.viewer])
    opened, asked = client._open, []

    def breaking(method: str, path: str, *rest: Any, **more: Any) -> Any:
        answer = opened(method, path, *rest, **more)
        asked.append((more.get("headers") or {}).get("Range"))
        read = answer.read
        parts = iter([100_000, None] if len(asked) < 3 else [])

        def some(size: int) -> bytes:
            left = next(parts, size)
            if left is None:
                raise ConnectionResetError
            return read(left)

        answer.read = some
        return answer

    monkeypatch.setattr(client, "_open", breaking)
    fetched = client.download("done", "checkpoints/step-000003/model/model.safetensors", tmp_path / "m")
    assert hashlib.sha256(fetched.read_bytes()).digest() == hashlib.sha256(file.read_bytes()).digest()
    assert asked == [None, "bytes=100000-", "bytes=200000-"]
    assert [path.name for path in tmp_path.glob("*.part")] == []


@pytest.mark.parametrize(
    ("asked", "status", "part"),
    [
        ("bytes=0-9", 206, slice(0, 10)),
        ("bytes=4000-", 206, slice(4000, 4096)),
        ("bytes=-10", 206, slice(-10, None)),
        ("bytes=-9999", 206, slice(0, None)),
        ("bytes=4090-9999", 206, slice(4090, None)),
        ("bytes=0-0", 206, slice(0, 1)),
        ("bytes=4096-", 416, None),
        ("bytes=5-2", 416, None),
        ("bytes=-0", 416, None),
        ("bytes=-", 416, None),
        ("bytes=0-1,3-4", 200, slice(None)),
        ("lines=0-1", 200, slice(None)),
    ],
)
def test_parts_of_files(there: AtHand, asked: str, status: int, part: slice | None) -> None:
    put_run(there.root)
    whole = bytes(range(256)) * 16
    path = "/api/v1/runs/done/files/checkpoints/step-000003/model/model.safetensors"
    answer = there.viewer("GET", path, headers={"Range": asked})
    assert answer.status_code == status
    if part is None:
        assert answer.headers["content-range"] == "bytes */4096"
        return
    assert answer.content == whole[part]
    other = there.viewer("GET", path, headers={"Range": asked, "If-Range": '"another"'})
    assert (other.status_code, other.content) == (200, whole)
    assert there.audit()[-1]["action"] == "file.fetch"


def test_the_load_of_machines_is_read_on(there: AtHand) -> None:
    run = put_run(there.root)
    where = "/api/v1/runs/done/load"
    assert there.viewer("GET", where).json() == {"records": [], "next": "", "restarted": False}
    line = {"time": 5.0, "step": 1, "node": "here", "cpu_percent": 12.5, "gpu_percent": [1.0, None]}
    with (run / "load.jsonl").open("a") as file:
        file.write(json.dumps(line) + '\n{"step": 1, "metrics": {}}\n[]\n{"step": 2, "no')
    first = there.viewer("GET", where).json()
    assert (first["records"], first["restarted"]) == ([line], False)
    assert there.viewer("GET", where, params={"after": first["next"]}).json()["records"] == []
    # What is no line of the metrics is none for them either.
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 9, "kind": "train", "node": "here"}) + "\n")
    assert there.viewer("GET", "/api/v1/runs/done").json()["step"] == 3
    assert there.viewer("GET", where, params={"after": "x"}).status_code == 422
    assert there.viewer("GET", "/api/v1/runs/done/files/load.jsonl").status_code == 200


def test_metrics_are_read_on_and_from_the_beginning_after_a_resume(there: AtHand) -> None:
    from strop.tracking.metrics import MetricsWriter

    run = put_run(there.root)

    def ask(after: str = "") -> Any:
        answer = there.viewer("GET", "/api/v1/runs/done/metrics", params={"after": after})
        assert answer.status_code == 200, answer.text
        return answer.json()

    first = ask()
    assert [record["step"] for record in first["records"]] == [1, 2, 3]
    assert first["records"][0]["metrics"]["loss"] is None
    assert ask(first["next"])["records"] == []
    writer = MetricsWriter(run / "metrics.jsonl")
    writer.log(4, {"reward/mean": 0.4})
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 5, "ti')
    second = ask(first["next"])
    assert [record["step"] for record in second["records"]] == [4]
    assert there.viewer("GET", "/api/v1/runs/done").json()["step"] == 4
    writer.truncate_after(2)
    third = ask(second["next"])
    assert (third["restarted"], [record["step"] for record in third["records"]]) == (True, [1, 2])
    assert there.viewer("GET", "/api/v1/runs/done").json()["step"] == 2
    writer.close()
    assert there.viewer("GET", "/api/v1/runs/done/metrics", params={"after": "x"}).status_code == 422
    assert json.loads(json.dumps(third)) == third
