"""The viewer's answers to names that are no runs, and about runs that are broken."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient
from viewer_runs import ROUTES, change_manifest, client_of, get, make_run, write_spans

from strop.serve.viewer.app import build


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "runs"


# --- names from outside ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    [
        "..",
        "../secret",
        "/etc",
        "one/..",
        "one/../../secret",
        "one/",
        "",
        ".",
        "%2e%2e",
        "ONE",
        "one\x00",
        "one\n",
        "\udcff".encode("utf-8", "surrogatepass").decode("latin-1"),
        "a" * 400,
    ],
)
@pytest.mark.parametrize("route", ROUTES)
def test_a_name_that_is_no_run_is_not_found(folder: Path, route: str, name: str) -> None:
    make_run(folder, "one", episodes=[1])
    make_run(folder.parent, "secret", episodes=[1])
    path, _, query = route.partition("?")
    asked = dict(part.split("=") for part in query.split("&") if part)
    told = get(client_of(folder), path, 404, run=name, **asked)["problem"]
    assert told["what"]
    assert "secret" not in json.dumps(get(client_of(folder), "runs"))


@pytest.mark.parametrize(
    ("route", "query"),
    [
        ("run", {}),
        ("run", {"run": "a" * 501}),
        ("episodes", {"run": "one", "step": "../1"}),
        ("episodes", {"run": "one", "step": -1}),
        ("episodes", {"run": "one", "step": 10**30}),
        ("episode", {"run": "one", "step": 1, "row": "x"}),
        ("differences", {"run": ["one"] * 13}),
    ],
)
def test_a_question_that_makes_no_sense_is_refused(folder: Path, route: str, query: dict[str, Any]) -> None:
    make_run(folder, "one", episodes=[1])
    assert get(client_of(folder), route, 422, **query)["problem"]["where"]


@pytest.mark.parametrize("row", [-1, 4, 10**12])
def test_a_row_that_is_not_there_is_not_found(folder: Path, row: int) -> None:
    make_run(folder, "one", episodes=[1])
    get(client_of(folder), "episode", 404, run="one", step=1, row=row)


@pytest.mark.parametrize(
    "path",
    [
        "static/..%2fapp.py",
        "static/%2e%2e/app.py",
        "static/../app.py",
        "static//etc/passwd",
        "static/app.py",
        "static/",
    ],
)
def test_only_files_of_the_page_are_sent(folder: Path, path: str) -> None:
    assert client_of(folder).get(f"/{path}").status_code == 404


def test_links_that_lead_out_are_not_followed(folder: Path, tmp_path: Path) -> None:
    secret = make_run(tmp_path / "elsewhere", "secret", episodes=[1])
    run = make_run(folder, "one", episodes=[1])
    (folder / "link").symlink_to(secret)
    (run / "episodes" / "step-000002.parquet").symlink_to(secret / "episodes" / "step-000001.parquet")
    write_spans(secret, 1)
    (secret / "load.jsonl").write_text('{"time": 1.0, "step": 1, "node": "there", "cpu_percent": 1.0}\n')
    for name in ("metrics.jsonl", "config.yaml", "timeline.jsonl", "load.jsonl"):
        (run / name).unlink(missing_ok=True)
        (run / name).symlink_to(secret / name)
    client = client_of(folder)
    [one] = get(client, "runs")["runs"]
    assert one == {"run": "one", "status": "unreadable", "problem": "this file lies outside of the run's folder"}
    for route, query in (
        ("series", {"names": "loss"}),
        ("load", {}),
        ("config", {}),
        ("episodes", {"step": 2}),
        ("timeline", {"step": 1}),
    ):
        get(client, route, 404, run="one", **query)
    assert get(client, "episodes", run="one", step=1)["step"] == 1


def test_a_link_to_a_run_beside_it_is_that_run(folder: Path) -> None:
    run = make_run(folder, "one")
    (folder / "again").symlink_to(run)
    assert [run["run"] for run in get(client_of(folder), "runs")["runs"]] == ["one"]


def test_other_names_of_this_machine_are_refused(folder: Path) -> None:
    application = build([folder], hosts=["127.0.0.1", "localhost", "[::1]"])
    for host, status in (
        ("127.0.0.1:7860", 200),
        ("LOCALHOST", 200),
        ("[::1]:80", 200),
        ("evil.example", 421),
        ("", 421),
    ):
        answer = TestClient(application).get("/api/runs", headers={"host": host})
        assert answer.status_code == status, host


@pytest.mark.parametrize("path", ["", "api/runs", "api/run?run=x", "static/main.js", "absent"])
def test_every_answer_has_the_headers_that_protect_the_page(folder: Path, path: str) -> None:
    headers = client_of(folder).get(f"/{path}").headers
    policy = headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert "require-trusted-types-for 'script'" in policy
    assert headers["x-content-type-options"] == "nosniff"


def test_nothing_can_be_written(folder: Path) -> None:
    client = client_of(folder)
    assert {client.request(method, "/api/runs").status_code for method in ("POST", "PUT", "DELETE", "PATCH")} == {405}


# --- what is broken -------------------------------------------------------------------------------------------------


def test_lines_that_cannot_be_read_are_left_out(folder: Path) -> None:
    run = make_run(folder, "one", steps=2)
    with (run / "metrics.jsonl").open("ab") as file:
        file.write(b'\xff\xfe\n[1]\n{}\nnull\n{"step": "x", "time": 1, "kind": "train", "metrics": {}}\n')
        file.write(b'{"step": 3, "time": 1, "kind": "../x", "metrics": {"loss": 1}}\n')
        file.write(b'{"step": 3, "time": 1, "kind": "train", "metrics": {"loss": "<b>"}}\n')
        file.write(b"[" * 100_000 + b"\n")
        file.write(
            b'{"step": 4, "time": 5.0, "kind": "train", "metrics": {"loss": NaN, "grad_norm": Infinity, "x": 1e999}}\n'
        )
        file.write(b'{"step": 5, "time": 6.0, "kind": "train", "metrics": {"loss": 0.5')
    client = client_of(folder)
    found = get(client, "series", run="one", names="loss,grad_norm,x")["kinds"]
    assert list(found) == ["train"]
    assert found["train"]["step"] == [1, 2, 4]
    assert found["train"]["values"]["loss"] == [0.01, 0.005, None]
    assert found["train"]["values"]["grad_norm"] == [None, None, "inf"]
    assert get(client, "run", run="one")["step"] == 4
    with (run / "metrics.jsonl").open("ab") as file:
        file.write(b"}}\n")
    assert get(client, "run", run="one")["step"] == 5


@pytest.mark.parametrize("damage", ["cut", "empty", "other", "folder"])
def test_a_broken_file_of_episodes_says_so(folder: Path, damage: str) -> None:
    run = make_run(folder, "one", episodes=[1, 2])
    path = run / "episodes" / "step-000002.parquet"
    whole = path.read_bytes()
    path.unlink()
    if damage == "folder":
        path.mkdir()
    else:
        path.write_bytes(
            {"cut": whole[: len(whole) // 2], "empty": b"", "other": b"PAR1" + bytes(200) + b"PAR1"}[damage]
        )
    client = client_of(folder)
    status = 404 if damage == "folder" else 422
    for route, query in (("episodes", {}), ("episode", {"row": 0})):
        assert get(client, route, status, run="one", step=2, **query)["problem"]["where"]
    assert len(get(client, "episodes", run="one", step=1)["rows"]["index"]) == 4


def test_damaged_pages_inside_a_file_are_an_error_with_words(folder: Path) -> None:
    run = make_run(folder, "one", episodes=[1], length=4000)
    path = run / "episodes" / "step-000001.parquet"
    whole = bytearray(path.read_bytes())
    whole[200 : len(whole) // 2] = os.urandom(len(whole) // 2 - 200)
    path.write_bytes(whole)
    assert get(client_of(folder), "episodes", 422, run="one", step=1)["problem"]["what"].startswith(
        "the file of episodes"
    )


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"id": 1}', "null", "\x00"])
def test_a_manifest_that_cannot_be_read_says_why(folder: Path, text: str) -> None:
    run = make_run(folder, "one")
    make_run(folder, "two")
    (run / "run.json").write_text(text)
    found = {one["run"]: one for one in get(client_of(folder), "runs")["runs"]}
    assert found["one"]["status"] == "unreadable"
    assert found["one"]["problem"]
    assert found["two"]["status"] == "finished"
    get(client_of(folder), "run", 422, run="one")


def test_a_manifest_of_odd_values_is_shown(folder: Path) -> None:
    run = make_run(folder, "one")
    change_manifest(
        run, alarms=7, resumed=None, command="x", created="long ago", status=3, steps="many", error=None, best=[1]
    )
    client = client_of(folder)
    [one] = get(client, "runs")["runs"]
    assert (one["status"], one["seconds"], one["steps"], one["alarms"]) == ("3", None, 0, 0)
    assert get(client, "run", run="one")["alarms"] == []


def test_a_manifest_of_an_older_version_is_shown(folder: Path) -> None:
    run = make_run(folder, "one")
    values = json.loads((run / "run.json").read_text())
    kept = {key: values[key] for key in ("id", "series", "number", "created", "status", "steps")}
    (run / "run.json").write_text(json.dumps(kept | {"unknown_key": 1}))
    found = get(client_of(folder), "run", run="one")
    assert (found["status"], found["step"], found["alarms"]) == ("finished", 3, [])


@pytest.mark.parametrize(
    "text", ["", "[", "- 1", "a: {b: c}", "\t", "supervised: 3\nalgorithm: []\nrollout: x\ncluster: {trainer: 4}"]
)
def test_a_recipe_that_is_none_is_shown_without_a_method(folder: Path, text: str) -> None:
    run = make_run(folder, "one", episodes=[1], recipe=text)
    client = client_of(folder)
    assert get(client, "run", run="one")["method"] == ""
    assert get(client, "config", run="one") == {"text": text}
    assert get(client, "timeline", run="one", step=1)["seconds"] == 2.0
    assert get(client, "differences", run=["one"]) == {"differences": []}
    (run / "config.yaml").unlink()
    get(client, "config", 404, run="one")
    assert get(client, "run", run="one")["method"] == ""


def test_missing_files_are_nothing_to_show(folder: Path) -> None:
    run = make_run(folder, "one", episodes=[1], tokenizer=False)
    client = client_of(folder)
    assert get(client, "episode", run="one", step=1, row=0)["has_texts"] is False
    for name in ("metrics.jsonl", "config.yaml", "run.lock"):
        (run / name).unlink()
    assert get(client, "run", run="one")["step"] == 0
    assert get(client, "series", run="one", names="loss")["kinds"] == {}
    get(client, "timeline", 404, run="one", step=1)
    shutil.rmtree(run / "episodes")
    assert get(client, "steps", run="one") == {"steps": [], "beside": []}


def test_a_run_that_is_deleted_is_gone(folder: Path) -> None:
    run = make_run(folder, "one", episodes=[1])
    client = client_of(folder)
    get(client, "run", run="one")
    shutil.rmtree(run)
    assert get(client, "runs") == {"runs": []}
    for route in ("run", "series", "steps", "config"):
        get(client, route, 404, run="one")
    make_run(folder, "one", steps=1)
    assert get(client, "run", run="one")["step"] == 1
