"""`strop report`: one page with what there is, that loads nothing, runs nothing, and shows text as text."""

from __future__ import annotations

import json
import math
import re
import xml.etree.ElementTree as ET
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from serve_at_hand import AtHand, put_run
from typer.testing import CliRunner

from strop.cli import app
from strop.serve.curves import MAX_POINTS, curve
from strop.serve.report import report
from strop.tracking.episodes import EpisodeRecord, write_episodes
from strop.tracking.run_directory import RunDirectory
from strop.tracking.text import show_metric

EVIL = '"><script src="https://evil.example/x.js">alert(1)</script><img src=x onerror=alert(1)>\u202e\x1b[31m&amp;'


class Page(HTMLParser):
    """The tags, attributes and text of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.attributes: list[tuple[str, str | None]] = []
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes += attrs

    def handle_data(self, data: str) -> None:
        self.text += data


def episode(group: int, reward: float, prompt: str, completion: str) -> EpisodeRecord:
    return EpisodeRecord(
        group=group,
        sample=0,
        prompt_id=str(group),
        prompt_text=prompt,
        completion_text=completion,
        answer=EVIL,
        status="stop",
        reward=reward,
        correct=reward > 0.5,
        tokens=np.array([1, 2]),
        loss_mask=np.array([False, True]),
    )


def test_the_load_of_machines_is_drawn_for_each(tmp_path: Path) -> None:
    with RunDirectory.create(tmp_path, "run", config_yaml="a: 1") as run:
        lines = [
            {"time": 60.0 * at, "step": at, "node": node, "cpu_percent": 10.0 * at, "run_cpu_percent": 1.0, **cards}
            for at in range(3)
            for node, cards in (("here", {}), (EVIL, {"gpu_percent": [20.0 * at, 40.0 * at]}))
        ]
        run.load_path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    text = report(run.path)
    page = Page(text)
    assert "Load of the machines" in page.text
    assert page.text.count("processors, percent (here)") == 2
    assert page.text.count("cards, percent (") == 2
    assert "minute 2" in page.text
    # The mean of both cards at the end.
    assert f">{show_metric('cards, percent', 60.0)}</text>" in text
    assert "img" not in page.tags


@pytest.fixture
def run(tmp_path: Path) -> Path:
    path = put_run(tmp_path, steps=5)
    (path / "episodes" / "step-000001.parquet").unlink()
    many = [episode(g, g / 20, f"ask {g}", f"say {g} {EVIL}") for g in range(20)]
    write_episodes(path / "episodes" / "step-000005.parquet", [*many, episode(21, math.nan, "broken", "broken")])
    (path / "config.yaml").write_text(f"base_url: https://user:hunter2@host/v1\nnote: '{EVIL}'\n")
    alarm = {"name": EVIL, "step": 2, "what": EVIL}
    with RunDirectory.open(path) as directory:
        directory.update(alarms=[alarm], model={"name": EVIL}, scores={"before": {EVIL: 0.5}, "after": {EVIL: 0.75}})
    return path


def test_everything_is_on_the_page_and_nothing_of_it_runs(run: Path) -> None:
    text = report(run)
    page = Page(text)
    assert not page.tags & {"script", "img", "link", "iframe", "object", "embed", "form", "a", "base"}
    assert not [name for name, _ in page.attributes if name.startswith("on") or name in ("src", "href", "action")]
    assert "default-src 'none'" in text
    assert not re.search(r"url\(|@import", text)
    # What was hostile is there to read, as text, without what only a terminal or the direction of writing would obey.
    assert page.text.count("<script src=") >= 9
    assert "\u202e" not in text
    assert "\x1b" not in text
    assert "hunter2" not in text
    assert "://…@host/v1" in page.text
    for said in ("5 of 5", "reward/mean", "step 5", "c0ffee", "Alarms", "Samples of step-000005"):
        assert said in page.text, said
    shown = re.findall(r"say (\d+)", page.text)
    assert shown == ["19", "18", "17", "16", "0", "1", "2", "3"]
    assert "broken" not in page.text


def test_curves_are_where_the_numbers_are() -> None:
    svg = ET.fromstring(curve("<a&b>", [(1, 0.0), (2, 1.0), (3, math.nan), (4, 0.5)]))
    lines = svg.findall("polyline")
    assert [len(line.attrib["points"].split()) for line in lines] == [2]
    assert len(svg.findall("circle")) == 1
    (x1, y1), (x2, y2) = (tuple(map(float, point.split(","))) for point in lines[0].attrib["points"].split())
    assert x1 < x2
    assert y1 > y2, "more is higher"
    assert svg.attrib["aria-label"] == "<a&b>"
    many = ET.fromstring(curve("m", [(step, step) for step in range(100_000)]))
    assert len(many.findall("polyline")[0].attrib["points"].split()) == MAX_POINTS
    assert ET.fromstring(curve("constant", [(1, 2.0), (2, 2.0)])).findall("polyline")
    assert curve("nothing", [(1, math.nan)]) == ""


def test_the_command_writes_one_file(run: Path, tmp_path: Path) -> None:
    found = CliRunner().invoke(app, ["report", str(run), "--out", str(tmp_path / "r.html")])
    assert found.exit_code == 0, found.output
    assert found.stdout.strip() == str(tmp_path / "r.html")
    assert (tmp_path / "r.html").read_text() == report(run)
    assert CliRunner().invoke(app, ["report", str(run)]).exit_code == 0
    assert (run / "report.html").is_file()
    nothing = CliRunner().invoke(app, ["report", str(tmp_path / "no")])
    assert nothing.exit_code == 2
    assert "there is no run in this folder" in nothing.stderr


def test_a_run_without_anything_has_a_page(tmp_path: Path) -> None:
    RunDirectory.create(tmp_path, "new", config_yaml="").close("failed", error="it broke")
    assert "failed: it broke" in Page(report(tmp_path / "new")).text


def test_the_service_shows_no_page_of_linked_files(at_hand: Callable[..., AtHand], tmp_path: Path) -> None:
    there = at_hand()
    run = put_run(there.root)
    answer = there.viewer("GET", "/api/v1/runs/done/report")
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith("text/html")
    assert "sandbox" in answer.headers["content-security-policy"]
    (tmp_path / "secret").write_text("the-canary-sings")
    (run / "config.yaml").unlink()
    (run / "config.yaml").symlink_to(tmp_path / "secret")
    answer = there.viewer("GET", "/api/v1/runs/done/report")
    assert answer.status_code == 404
    assert "canary" not in answer.text
