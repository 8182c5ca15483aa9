"""What the viewer answers about runs: of all kinds, broken ones too, and never about anything else."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path

import numpy as np
import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient
from viewer_runs import (
    HOSTILE,
    RECIPE,
    ROUTES,
    append_line,
    change_manifest,
    client_of,
    get,
    make_run,
    record,
    write_spans,
)

from strop.serve.viewer import readings
from strop.serve.viewer.app import build
from strop.tracking.episodes import beside, episodes_file, read_episodes, write_episodes
from strop.tracking.metrics import MetricsWriter


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "runs"


# --- what there is --------------------------------------------------------------------------------------------------


def test_the_overview_says_how_runs_stand(folder: Path) -> None:
    make_run(folder, "one", steps=3)
    make_run(folder, "two", steps=0, status="failed", error="no room\nmore")
    [two, one] = get(client_of(folder), "runs")["runs"]
    assert (one["run"], one["status"], one["step"], one["steps"]) == ("one", "finished", 3, 3)
    assert (one["headline"], one["value"]) == ("reward/mean", pytest.approx(1 - 0.9**3))
    assert (one["recipe"], one["method"]) == ("tiny", "grpo")
    assert len(one["spark"]) == 3
    assert (two["status"], two["step"], two["value"], two["problem"]) == ("failed", 0, None, "no room")


def test_a_run_that_says_running_and_is_not_was_interrupted(folder: Path) -> None:
    run = make_run(folder, "one")
    change_manifest(run, status="running")
    assert get(client_of(folder), "run", run="one")["status"] == "interrupted"


def test_roots_may_be_runs_pipelines_or_folders_of_them(folder: Path, tmp_path: Path) -> None:
    one = make_run(folder, "one")
    pipeline = folder / "pipe"
    stage = make_run(pipeline, "sft")
    (pipeline / "pipeline.json").write_text("{}")
    other = make_run(tmp_path / "other", "one")
    names = lambda *roots: {run["run"] for run in get(client_of(*roots), "runs")["runs"]}  # noqa: E731
    assert names(folder) == {"one", "pipe/sft"}
    assert names(one) == {"one"}
    assert names(pipeline) == {"pipe/sft"}
    assert names(stage) == {"sft"}
    assert names(folder, one) == {"one", "pipe/sft"}
    assert names(folder, tmp_path / "other") == {"one", "pipe/sft", "other/one"}
    client = client_of(folder, tmp_path / "other")
    assert get(client, "run", run="other/one")["manifest"]["id"] == json.loads((other / "run.json").read_text())["id"]
    assert names(tmp_path / "absent") == set()


def test_curves_of_runs_that_learn_from_examples(folder: Path) -> None:
    run = make_run(folder, "sft", steps=0, recipe="supervised: {method: sft}\n", tokenizer=False)
    writer = MetricsWriter(run / "metrics.jsonl")
    writer.log(1, {"loss/nll": 2.5, "loss": 2.5, "token_accuracy": 0.25, "time/step": 1.0})
    writer.log(1, {"eval/loss": 2.25}, kind="eval")
    writer.close()
    client = client_of(folder)
    found = get(client, "run", run="sft")
    assert (found["method"], found["supervised"], found["headline"], found["value"]) == ("sft", True, "loss/nll", 2.5)
    assert get(client, "steps", run="sft") == {"steps": [], "beside": []}
    get(client, "episodes", 404, run="sft", step=1)
    assert get(client, "series", run="sft", names="eval/loss")["kinds"]["eval"]["values"] == {"eval/loss": [2.25]}


# --- what is live, and cheap ----------------------------------------------------------------------------------------


def test_only_what_is_new_is_sent(folder: Path) -> None:
    run = make_run(folder, "one", steps=2)
    client = client_of(folder)
    first = get(client, "series", run="one", names="loss")
    assert (first["reset"], first["kinds"]["train"]["step"]) == (True, [1, 2])
    append_line(run, 3)
    second = get(client, "series", run="one", names="loss", since=first["cursor"])
    assert (second["reset"], second["kinds"]["train"]["step"]) == (False, [3])
    third = get(client, "series", run="one", names="loss", since=second["cursor"])
    assert (third["reset"], third["kinds"]["train"]["step"]) == (False, [])


@pytest.mark.parametrize("since", ["x", "::", "../..", "00000000:train=1", "train=1", "é"])
def test_a_cursor_of_elsewhere_brings_everything(folder: Path, since: str) -> None:
    make_run(folder, "one", steps=2)
    found = get(client_of(folder), "series", run="one", names="loss", since=since)
    assert (found["reset"], found["kinds"]["train"]["step"]) == (True, [1, 2])


def test_lines_that_a_resumed_run_drops_are_dropped(folder: Path) -> None:
    run = make_run(folder, "one", steps=5)
    client = client_of(folder)
    first = get(client, "series", run="one", names="loss")
    writer = MetricsWriter(run / "metrics.jsonl")
    writer.truncate_after(2)
    writer.log(3, {"loss": 7.0})
    writer.close()
    second = get(client, "series", run="one", names="loss", since=first["cursor"])
    assert (second["reset"], second["kinds"]["train"]["step"]) == (True, [1, 2, 3])
    assert second["kinds"]["train"]["values"]["loss"][-1] == 7.0


@pytest.mark.parametrize("route", ["runs", *(f"{r}{'&' if '?' in r else '?'}run=one" for r in ROUTES)])
def test_an_answer_that_did_not_change_is_not_sent_again(folder: Path, route: str) -> None:
    run = make_run(folder, "one", episodes=[1])
    client = client_of(folder)
    route = f"/api/{route}"
    first = client.get(route)
    again = client.get(route, headers={"if-none-match": first.headers["etag"]})
    assert (first.status_code, again.status_code, again.content) == (200, 304, b"")
    if route == "/api/runs":
        append_line(run, 4)
        assert client.get(route, headers={"if-none-match": first.headers["etag"]}).json()["runs"][0]["step"] == 4


def test_many_runs_are_read_a_moment_at_a_time(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(4):
        os.utime(make_run(folder, f"run{number}") / "metrics.jsonl", (number, number))
    monkeypatch.setattr(readings, "A_MOMENT", -1.0)
    client = client_of(folder)
    assert {(run["pending"], run["step"], run["status"]) for run in get(client, "runs")["runs"]} == {
        (True, 0, "finished")
    }
    # What was read once is followed whatever else there is, and what changed last is read first.
    get(client, "run", run="run2")
    assert {run["run"]: run["step"] for run in get(client, "runs")["runs"] if not run["pending"]} == {"run2": 3}
    monkeypatch.setattr(readings, "A_MOMENT", 30.0)
    assert {run["step"] for run in get(client, "runs")["runs"]} == {3}


def test_runs_beyond_those_that_are_kept_are_read_again(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readings, "MOST_WHOLE", 1)
    monkeypatch.setattr(readings, "MOST_RUNS", 2)
    for number in range(4):
        make_run(folder, f"run{number}", steps=number)
    client = client_of(folder)
    for _ in range(2):
        assert {run["run"]: run["step"] for run in get(client, "runs")["runs"]} == {f"run{n}": n for n in range(4)}
        for number in range(1, 4):
            name = f"run{number}"
            assert "memory/process_gib" in get(client, "run", run=name)["names"]["train"]
            found = get(client, "series", run=name, names="time/step")["kinds"]["train"]
            assert found["values"]["time/step"] == [2.0] * number


# --- episodes -------------------------------------------------------------------------------------------------------


def test_the_rows_of_a_step_say_what_the_file_holds(folder: Path) -> None:
    run = make_run(folder, "one", episodes=[3])
    rows = get(client_of(folder), "episodes", run="one", step=3)["rows"]
    records = read_episodes(episodes_file(run / "episodes", 3))
    assert len(rows["index"]) == len(records) == 4
    for at, one in enumerate(records):
        mask = one.loss_mask
        assert rows["reward"][at] == one.reward
        assert (rows["length"][at], rows["tokens"][at]) == (12, 8)
        assert rows["advantage"][at] == pytest.approx(float(one.advantages[mask].mean()))
        assert rows["mismatch"][at] == pytest.approx(
            float(np.abs(one.trainer_logprobs - one.sampler_logprobs)[mask].mean())
        )
        # Step 3 was trained from the weights of version 2, and sampled by those of version 1.
        assert rows["staleness"][at] == 1


def test_tokens_have_the_numbers_of_the_file(folder: Path) -> None:
    run = make_run(folder, "one", episodes=[1])
    records = read_episodes(episodes_file(run / "episodes", 1))
    client = client_of(folder)
    for row, one in enumerate(records):
        prompt, sampled = get(client, "episode", run="one", step=1, row=row)["nodes"]
        assert (prompt["kind"], sampled["kind"], sampled["parent"], sampled["start"]) == ("prompt", "sampled", 0, 4)
        assert prompt["tokens"] + sampled["tokens"] == one.tokens.tolist()
        assert prompt["sampler_logprobs"] is None
        for name in ("sampler_logprobs", "trainer_logprobs", "advantages", "versions"):
            kept = getattr(one, name)[4:]
            assert np.array_equal(np.array(sampled[name], dtype=kept.dtype), kept)
            assert all(len(repr(value)) <= 14 for value in sampled[name]), "float32 in the fewest digits"


def test_numbers_that_json_does_not_have(folder: Path) -> None:
    run = make_run(folder, "one")
    strange = np.array([np.nan, np.nan, -np.inf, np.nan, np.inf, -0.5], dtype=np.float32)
    mask = np.array([False, False, True, True, True, True])
    one = record(
        0, 0, 6, 2, loss_mask=mask, sampler_logprobs=strange, trainer_logprobs=None, advantages=strange, reward=math.nan
    )
    write_episodes(episodes_file(run / "episodes", 1), [one])
    client = client_of(folder)
    rows = get(client, "episodes", run="one", step=1)["rows"]
    assert (rows["reward"], rows["mismatch"], rows["advantage"]) == ([None], [None], [-0.5])
    told = get(client, "episode", run="one", step=1, row=0)
    assert told["nodes"][1]["sampler_logprobs"] == ["-inf", None, "inf", -0.5]
    assert told["nodes"][1]["trainer_logprobs"] is None
    assert told["streams"][0]["components"] == {"exact": 1.0, "format": None}


def test_hostile_text_arrives_as_it_was(folder: Path) -> None:
    run = make_run(folder, "one")
    texts = {"completion_text": HOSTILE, "prompt_text": HOSTILE, "detail": HOSTILE, "answer": HOSTILE}
    write_episodes(episodes_file(run / "episodes", 1), [record(0, 0, components={HOSTILE: 1.0}, **texts)])
    answer = client_of(folder).get("/api/episode", params={"run": "one", "step": 1, "row": 0})
    assert answer.headers["content-type"] == "application/json"
    stream = answer.json()["streams"][0]
    kept = read_episodes(episodes_file(run / "episodes", 1))[0]
    assert stream["completion_text"] == kept.completion_text
    assert list(stream["components"]) == list(kept.components)


def test_a_file_of_an_older_format_lacks_columns(folder: Path) -> None:
    import pyarrow.parquet as parquet

    run = make_run(folder, "one", episodes=[1])
    path = episodes_file(run / "episodes", 1)
    table = parquet.read_table(path)
    parquet.write_table(table.select(["group", "sample", "reward", "tokens", "completion_text"]), path)
    client = client_of(folder)
    rows = get(client, "episodes", run="one", step=1)["rows"]
    assert rows["tokens"] == [0] * 4
    assert rows["mismatch"] == rows["staleness"] == rows["status"] == [None] * 4
    told = get(client, "episode", run="one", step=1, row=2)
    assert [node["kind"] for node in told["nodes"]] == ["prompt"]
    assert told["streams"][0]["status"] == ""
    # A column of another kind counts as none.
    parquet.write_table(table.set_column(table.column_names.index("reward"), "reward", [["much"] * 4]), path)
    assert get(client, "episodes", run="one", step=1)["rows"]["reward"] == [None] * 4


def test_what_was_sampled_beside_a_step(folder: Path) -> None:
    run = make_run(folder, "one", episodes=[1])
    path = beside(episodes_file(run / "episodes", 1))
    write_episodes(path, [record(0, -1, advantages=None, trainer_logprobs=None)])
    client = client_of(folder)
    assert get(client, "steps", run="one") == {"steps": [1], "beside": [1]}
    assert get(client, "episodes", run="one", step=1, beside=True)["rows"]["sample"] == [-1]
    assert get(client, "episode", run="one", step=1, row=0, beside=True)["streams"][0]["sample"] == -1


def test_versions_of_recorded_completions_say_nothing_of_staleness(folder: Path) -> None:
    make_run(folder, "one", episodes=[3], recipe="offline: {path: x.jsonl}\n")
    assert get(client_of(folder), "episodes", run="one", step=3)["rows"]["staleness"] == [None] * 4


def test_all_samples_of_a_prompt_are_one_tree(folder: Path) -> None:
    run = make_run(folder, "one")
    same = np.arange(3, 15, dtype=np.int32)
    records = [
        record(0, 0, tokens=same),
        record(0, 1, tokens=np.where(np.arange(12) < 6, same, same[::-1])),
        record(1, 0),
    ]
    write_episodes(episodes_file(run / "episodes", 1), records)
    told = get(client_of(folder), "episode", run="one", step=1, row=1, group=True)
    assert [node["streams"] for node in told["nodes"]] == [[0, 1], [0], [1]]
    assert [node["parent"] for node in told["nodes"]] == [-1, 0, 0]
    assert told["shown"] == 1
    assert told["siblings"] == [{"index": 0, "sample": 0}, {"index": 1, "sample": 1}]


# --- steps and recipes ----------------------------------------------------------------------------------------------


def test_the_timeline_lays_the_phases_out(folder: Path) -> None:
    make_run(folder, "one")
    found = get(client_of(folder), "timeline", run="one", step=2)
    assert found["seconds"] == 2.0
    lanes = {lane["name"]: [(s["phase"], s["start"], s["seconds"]) for s in lane["spans"]] for lane in found["lanes"]}
    assert lanes == {
        "engine": [("sampling", 0.0, 0.5), ("publishing", 1.6875, 0.25)],
        "verifiers": [("verifying", 0.5, 0.125)],
        "trainer": [("scoring", 0.625, 0.0625), ("training", 0.6875, 1.0), ("publishing", 1.6875, 0.25)],
        "driver": [("alarms", 1.9375, 0.03125), ("rest", 1.96875, 0.03125)],
    }
    assert [lane["device"] for lane in found["lanes"]] == ["local, cpu", "", "cpu", ""]
    assert not found["recorded"]


def test_the_timeline_shows_when_phases_ran_where_the_run_recorded_it(folder: Path) -> None:
    run = make_run(folder, "one")
    write_spans(run, 2)
    client = client_of(folder)
    found = get(client, "timeline", run="one", step=2)
    assert (found["recorded"], found["seconds"], found["started"]) == (True, 2.0, 1e9 + 2)
    assert (found["begin"], found["end"]) == (-0.5, 2.25)
    lanes = {lane["name"]: [(s["phase"], s["start"], s["seconds"]) for s in lane["spans"]] for lane in found["lanes"]}
    assert lanes == {
        "engine 0": [("sampling", -0.25, 1.75), ("publishing", 1.75, 0.25)],
        "engine 1": [("sampling", 0.25, 0.5), ("sampling", 1.0, 1.25), ("publishing", 1.75, 0.25)],
        "verifiers": [("verifying", 0.125, 0.25)],
        "trainer": [("scoring", 0.5, 0.25), ("training", 0.75, 1.0), ("publishing", 1.75, 0.25)],
        "driver": [("checkpoint", -0.5, 0.25), ("sampling", 0.0, 0.5), ("recording", 2.0, 0.125)],
    }
    # Sampling and publishing at once is being busy once; while the driver waits it is not.
    busy = {lane["name"]: lane["busy"] for lane in found["lanes"]}
    assert busy == {"engine 0": 2.0, "engine 1": 1.75, "verifiers": 0.25, "trainer": 1.5, "driver": 0.375}
    assert [span["waits"] for span in found["lanes"][-1]["spans"]] == [False, True, False]
    assert found["other"] == {"alarms": 0.03125}
    # Of a step of an older part of the run only durations are known.
    assert not get(client, "timeline", run="one", step=1)["recorded"]


def test_recipes_are_compared_key_by_key(folder: Path) -> None:
    make_run(folder, "one", recipe=RECIPE % "1.0e-4")
    make_run(folder, "two", recipe=RECIPE % "3.0e-4" + "alarms: {action: warn}\n")
    found = get(client_of(folder), "differences", run=["one", "two"])["differences"]
    assert [one["key"] for one in found] == ["training.optimizer.learning_rate", "alarms.action"]
    assert found[0]["values"] == {"one": 1e-4, "two": 3e-4}
    assert (found[1]["values"], found[1]["absent"]) == ({"two": "warn"}, ["one"])


def test_it_can_be_a_part_of_another_application(folder: Path) -> None:
    make_run(folder, "one")
    whole = FastAPI()
    whole.mount("/view", build([folder]))
    client = TestClient(whole)
    assert str(client.get("/view").url).endswith("/view/")
    page = client.get("/view/").text
    assert 'src="static/main.js"' in page
    assert "//" not in page.replace("<!doctype", "").replace("http://www.w3.org", "")
    assert client.get("/view/static/main.js").status_code == 200
    assert client.get("/view/api/runs").json()["runs"][0]["run"] == "one"
