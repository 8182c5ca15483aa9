"""The load of machines in the viewer: the numbers of the file, live, for each machine and card."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from viewer_runs import HOSTILE, client_of, get, go, make_run

from strop.serve.viewer.app import MOST_LOOKS
from strop.tracking.load import LoadSampler

Look = Callable[..., Any]
LOAD = {"cpu_percent": 40.0, "run_cpu_percent": 12.5, "memory_gib": 8.0, "run_memory_gib": 1.25}
CARDS = {"gpu_percent": [90.0, None], "gpu_memory_gib": [100.5, 2.0], "gpu_watts": [400.0, 80.0]}


def write(run: Path, *given: dict[str, Any]) -> None:
    with (run / "load.jsonl").open("a") as file:
        file.writelines(json.dumps({"step": 1, "node": "here", **LOAD, **line}) + "\n" for line in given)


def test_what_came_since_is_sent_for_each_machine(folder: Path) -> None:
    client = client_of(folder)
    assert get(client, "load", run="one")["kinds"] == {}
    write(folder / "one", {"time": 10.0}, {"time": 10.0, "node": "there", **CARDS}, {"time": 20.0, "cpu_percent": 60.0})
    first = get(client, "load", run="one")
    assert first["kinds"]["here"]["time"] == [10.0, 20.0]
    assert first["kinds"]["here"]["values"]["cpu_percent"] == [40.0, 60.0]
    there = first["kinds"]["there"]["values"]
    assert (there["gpu_percent/0"], there["gpu_percent/1"], there["gpu_watts/1"]) == ([90.0], [None], [80.0])
    write(folder / "one", {"time": 30.0, "cpu_percent": 70.0})
    news = get(client, "load", run="one", since=first["cursor"])
    assert news["reset"] is False
    assert news["kinds"]["here"]["values"]["cpu_percent"] == [70.0]
    assert news["kinds"]["there"]["time"] == []


def test_very_many_looks_are_sent_as_means(folder: Path) -> None:
    write(folder / "one", *({"time": float(at), "cpu_percent": float(at % 2)} for at in range(3 * MOST_LOOKS)))
    part = get(client_of(folder), "load", run="one")["kinds"]["here"]
    assert len(part["time"]) == len(part["step"]) == len(part["values"]["cpu_percent"]) == MOST_LOOKS
    assert part["time"][0] == 1.0
    assert part["values"]["cpu_percent"] == pytest.approx([1 / 3, 2 / 3] * (MOST_LOOKS // 2))


@pytest.mark.parametrize("text", ["[]", "{", '{"node": 3}', '{"time": "x", "step": 1, "node": "a"}', "[" * 100_000])
def test_lines_that_are_none_are_left_out(folder: Path, text: str) -> None:
    (folder / "one" / "load.jsonl").write_text(text + "\n")
    write(folder / "one", {"time": 1.0})
    assert list(get(client_of(folder), "load", run="one")["kinds"]) == ["here"]


def last(page: Any, title: str) -> Any:
    """What is written below a chart."""
    return page.locator(".load .chart", has=page.get_by_text(title, exact=True)).locator(".readout")


def test_the_page_shows_the_numbers_of_the_file_and_what_comes(folder: Path, look: Look) -> None:
    write(folder / "one", {"time": 100.0, **CARDS}, {"time": 160.0, "cpu_percent": 55.5, **CARDS})
    page = go(look(folder), "#/run?run=one&tab=system")
    assert last(page, "Processors").inner_text().split("\n") == ["last:", "machine: 55.5 %", "this run: 12.5 %"]
    assert last(page, "Memory").inner_text().split("\n") == ["last:", "machine: 8.00 GiB", "this run: 1.25 GiB"]
    assert last(page, "Cards: memory").inner_text().split("\n") == ["last:", "card 0: 100.50 GiB", "card 1: 2.00 GiB"]
    assert "card 0: 90.0 %" in last(page, "Cards: busy").inner_text()
    assert "card 1" not in last(page, "Cards: busy").inner_text()
    assert "card 1: 80 W" in last(page, "Cards: power").inner_text()
    assert page.locator(".load").get_by_text("Cards: temperature").count() == 0
    field = page.locator(".load .field").first
    field.focus()
    page.keyboard.press("Home")
    last(page, "Processors").get_by_text("machine: 40.0 %").wait_for()
    page.keyboard.press("End")
    last(page, "Processors").get_by_text("1 min:").wait_for()
    field.blur()
    write(folder / "one", {"time": 220.0, "cpu_percent": 77.7, **CARDS})
    last(page, "Processors").get_by_text("machine: 77.7 %").wait_for()
    # Another machine comes later, and each has a part of its own.
    write(folder / "one", {"time": 221.0, "node": HOSTILE, "cpu_percent": 3.25})
    page.locator(".load details").nth(1).wait_for(state="attached")
    assert page.locator(".load summary").all_inner_texts()[0] == "here"
    assert page.locator(".load details").nth(0).get_attribute("open") == ""
    page.locator(".load summary").nth(1).click()
    page.locator(".load details").nth(1).locator(".readout").first.get_by_text("machine: 3.3 %").wait_for()
    assert page.locator("main img, main script, main b").count() == 0


def test_a_sampler_at_work_is_followed(folder: Path, look: Look) -> None:
    page = go(look(folder), "#/run?run=two&tab=system")
    page.get_by_text("The run recorded no load").wait_for()
    path = folder / "two" / "load.jsonl"
    sampler = LoadSampler(path, 0.2)
    sampler.start(lambda: 5)
    try:
        page.locator(".load .chart").first.wait_for()
        assert page.get_by_text("The run recorded no load").is_hidden()
        drawn = "document.querySelector('.load .chart path.line').getAttribute('d').split('L').length"
        # What came after the page had drawn the first ones.
        page.wait_for_function(f"before => {drawn} > before + 2", arg=page.evaluate(drawn))
    finally:
        sampler.close()
    final = json.loads(path.read_text().splitlines()[-1])
    assert final["node"] == socket.gethostname()
    last(page, "Memory").get_by_text(f"machine: {final['memory_gib']:.2f} GiB").wait_for()


def test_a_run_without_load_says_so(tmp_path: Path, look: Look) -> None:
    make_run(tmp_path, "old")
    page = go(look(tmp_path), "#/run?run=old&tab=system")
    page.get_by_text("The run recorded no load").wait_for()
    assert page.locator(".load .chart").count() == 0
    assert page.locator(".chart").count() >= 1
