"""The viewer's pages in a real browser: live, with the numbers of the files, with hostile text, and with very much."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from viewer_runs import ALARM, HOSTILE, SHOWN, append_line, change_manifest, go, make_run, record, write_spans

import strop
from strop.tracking.episodes import episodes_file, read_episodes, write_episodes
from strop.tracking.run_directory import RunDirectory

Look = Callable[..., Any]
QUICK = {
    "model.create": {"characters": "0123456789+=", "hidden_size": 32, "layers": 1, "heads": 2, "context": 32},
    "warmup.steps": 4,
    "rollout.groups_per_step": 4,
    "evaluation.every": 1000,
    "checkpoint.every": 1000,
    "run.steps": 100_000,
    "hardware.threads": 1,
    "tracking.display": "off",
    "tracking.tensorboard": False,
}


@pytest.fixture(scope="module")
def training(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder of a run of the quickstart, made smaller, that trains while it is looked at."""
    folder = tmp_path_factory.mktemp("live")
    root = Path(strop.__file__).parents[2]
    overrides = [f"{key}={json.dumps(value)}" for key, value in QUICK.items()]
    command = [sys.executable, "-m", "strop", "train", str(root / "recipes" / "quickstart.yaml"), *overrides]
    log = folder / "log.txt"
    with log.open("w") as out:
        process = subprocess.Popen(
            [*command, f"run.folder={folder / 'runs'}", "run.name=live"],
            stdout=out, stderr=out, env={**os.environ, "PYTHONPATH": str(root / "src"), "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        try:
            until = time.monotonic() + 120
            while not (folder / "runs" / "live" / "episodes" / "step-000003.parquet").exists():
                assert process.poll() is None, log.read_text()
                assert time.monotonic() < until, log.read_text()
                time.sleep(0.1)
            yield folder / "runs"
        finally:
            process.kill()
            process.wait()


# --- live -----------------------------------------------------------------------------------------------------------


def test_a_run_is_watched_while_it_trains_and_a_token_has_the_number_of_the_file(training: Path, look: Look) -> None:
    page = go(look(training), "#/")
    page.evaluate("window.notReloaded = true")
    row = page.locator(".vt-row[data-key=live]")
    assert row.locator("[data-column=status]").inner_text() == "running"
    before = int(row.locator("[data-column=step]").inner_text().split("/")[0])
    page.wait_for_function(
        "before => parseInt(document.querySelector('.vt-row[data-key=live] [data-column=step]').textContent) > before",
        arg=before,
    )
    row.locator("a").first.click()
    page.locator(".chart[data-name='reward/mean'] path").first.wait_for(state="attached")
    page.locator("[data-tab=steps]").click()
    # The newest step is the first row; another one comes without a reload.
    page.locator(".vt-row[data-at='0']").wait_for()
    newest = int(page.locator(".vt-row[data-at='0']").get_attribute("data-key"))
    page.wait_for_function(
        "newest => parseInt(document.querySelector(\".vt-row[data-at='0']\").dataset.key) > newest", arg=newest
    )
    assert page.evaluate("window.notReloaded") is True
    # The file of step 3 is whole; the run writes others meanwhile.
    go(page, "#/episodes?run=live&step=3")
    records = read_episodes(episodes_file(training / "live" / "episodes", 3))
    assert page.locator("[role=grid]").get_attribute("aria-rowcount") == str(len(records) + 1)
    page.locator(".vt-row[data-key='5'] a").click()
    page.locator(".tok.own").first.wait_for()
    one = records[5]
    sampled = np.flatnonzero(one.loss_mask)
    assert page.locator(".tok.own").count() == len(sampled)
    for at, position in enumerate(sampled):
        page.locator(".tok.own").nth(at).hover()
        said = lambda name: page.locator(f"#token-numbers [data-name={name}]").inner_text()  # noqa: E731
        assert said("position") == str(position)
        assert said("id") == str(one.tokens[position])
        for name in ("sampler_logprobs", "trainer_logprobs", "advantages"):
            assert np.float32(said(name)) == getattr(one, name)[position]
        assert said("versions") == str(one.versions[position]) == "2"
        assert said("staleness") == "0"
        assert said("mask") == "trained"
        difference = float(one.trainer_logprobs[position]) - float(one.sampler_logprobs[position])
        assert float(said("difference")) == pytest.approx(difference, abs=1e-7)
        assert float(said("ratio")) == pytest.approx(np.exp(difference), abs=1e-6)
    # Characters of the run's own tokenizer.
    text = "".join(page.locator(".conversation .tok").all_inner_texts())
    assert text.startswith(one.prompt_text)
    assert one.completion_text in text


def test_a_curve_grows_by_what_a_writer_appends(folder: Path, look: Look) -> None:
    page = look(folder)
    asked: list[str] = []
    page.on("response", lambda answer: asked.append(answer.url) if "api/series" in answer.url else None)
    go(page, "#/run?run=one")
    read = page.locator(".chart[data-name='completion/length_mean'] .readout")
    read.get_by_text("8", exact=True).wait_for()
    append_line(folder / "one", 7, **{"completion/length_mean": 99.0})
    read.get_by_text("99", exact=True).wait_for()
    assert page.locator("[data-fact=step] .value").inner_text().startswith("7/")
    # Later questions are for what came since.
    assert all("since=" in url and "since=&" not in url and not url.endswith("since=") for url in asked[2:])


def test_a_run_that_goes_away_while_it_is_looked_at(folder: Path, look: Look) -> None:
    page = look(folder)
    page.expected = ("404 (Not Found)",)
    go(page, "#/run?run=two")
    shutil.rmtree(folder / "two")
    page.locator("#live", has_text="there is no run of this name").wait_for()
    page.locator(".brand").click()
    page.locator(".vt-row[data-key=one]").wait_for()
    assert page.locator(".vt-row").count() == 1
    go(page, "#/run?run=two")
    assert "there is no run of this name" in page.locator("[role=alert]").inner_text()


def test_an_interrupted_run_that_goes_on_is_running_again(folder: Path, look: Look) -> None:
    change_manifest(folder / "two", status="running")
    page = go(look(folder), "#/")
    status = page.locator(".vt-row[data-key=two] .status")
    assert status.inner_text() == "interrupted"
    directory = RunDirectory.open(folder / "two")
    try:
        page.locator(".vt-row[data-key=two] .status.running").wait_for()
    finally:
        directory.close("finished")
    page.locator(".vt-row[data-key=two] .status.finished").wait_for()


# --- what is shown --------------------------------------------------------------------------------------------------


def test_two_runs_are_compared_by_keyboard(folder: Path, look: Look) -> None:
    page = go(look(folder), "#/")
    press = page.keyboard.press
    page.locator("#filter").focus()
    press("Tab")  # There is nothing to compare yet, so the table is next: its headings, then its rows.
    for _ in range(20):
        if page.evaluate("document.activeElement.classList.contains('vt-row')"):
            break
        press("Tab")
    press("Space")
    press("ArrowDown")
    press("Space")
    assert page.locator("input:checked").count() == 2
    page.locator(".button", has_text="Compare 2").focus()
    press("Enter")
    page.wait_for_function(SHOWN)
    changed = page.locator("tr[data-key='training.optimizer.learning_rate']")
    assert sorted(changed.locator("td").all_inner_texts()) == ["0.0001", "0.0003"]
    assert page.locator("tr[data-key]").count() == 1
    chart = page.locator(".chart[data-name='reward/mean']")
    assert chart.locator("path.line").count() == 2
    chart.locator(".field").focus()
    press("Home")
    said = chart.locator(".readout").inner_text()
    assert "step 1:" in said
    assert "one: 0.1" in said
    assert "two: 0.1" in said
    page.locator("#smooth").focus()
    press("End")
    assert chart.locator("path.faint").count() == 2


def test_an_alarm_leads_to_the_completion_that_shows_it(folder: Path, look: Look) -> None:
    page = go(look(folder), "#/")
    assert page.locator(".vt-row[data-key=one] .alarm").inner_text() == "1"
    page.locator(".vt-row[data-key=one] .alarm").click()
    item = page.locator("[data-alarm=length]")
    assert ALARM["what"] in item.inner_text()
    assert "14 against 12" in item.inner_text()
    curves = page.locator(".chart[data-name='alarms/length'] path.line")
    curves.nth(1).wait_for(state="attached")
    assert curves.count() == 2
    item.locator("a").click()
    page.locator("h1", has_text="Episode 1.1 of step 3").wait_for()
    # One that is raised while the page is open comes by itself.
    go(page, "#/run?run=one&tab=alarms")
    change_manifest(folder / "one", alarms=[ALARM, ALARM | {"name": "jump", "group": None, "sample": None}])
    page.locator("[data-alarm=jump]").wait_for()


def test_the_timeline_of_a_step(folder: Path, look: Look) -> None:
    page = go(look(folder), "#/run?run=one&tab=timeline&step=2")
    assert page.locator(".lane").count() == 4
    box = lambda lane, at: page.locator(f"[data-lane={lane}] .span").nth(at).bounding_box()  # noqa: E731
    track = page.locator("[data-lane=engine] .track").bounding_box()
    sampling, training = box("engine", 0), box("trainer", 1)
    assert sampling["width"] / track["width"] == pytest.approx(0.25, abs=0.01)
    assert (training["x"] - track["x"]) / track["width"] == pytest.approx(0.34375, abs=0.01)
    waiting = page.locator("tr[data-phase=waiting]").first
    assert waiting.inner_text().split("\t")[2:] == ["1.25 s", "62.5 %"]
    page.get_by_role("button", name="Later").click()
    page.get_by_text("Step 3: 2.00 s").wait_for()


def test_the_timeline_shows_who_worked_at_the_same_time(folder: Path, look: Look) -> None:
    write_spans(folder / "one", 2, 3)
    page = go(look(folder), "#/run?run=one&tab=timeline&step=2")
    assert page.locator(".lane strong").all_inner_texts() == ["engine 0", "engine 1", "verifiers", "trainer", "driver"]

    def place(lane: str, phase: str, at: int = 0) -> tuple[float, float]:
        """From where to where a span is drawn, in seconds of the step."""
        track = page.locator(f"[data-lane='{lane}'] .track").bounding_box()
        box = page.locator(f"[data-lane='{lane}'] .span[data-phase={phase}]").nth(at).bounding_box()
        start = (box["x"] - track["x"]) / track["width"] * 2.75 - 0.5
        return start, start + box["width"] / track["width"] * 2.75

    about = lambda *seconds: pytest.approx(seconds, abs=0.02)  # noqa: E731
    assert place("trainer", "training") == about(0.75, 1.75)
    assert place("engine 0", "sampling") == about(-0.25, 1.5)
    assert place("engine 1", "sampling", 0) == about(0.25, 0.75)
    # It waited, and then sampled while the trainer trained.
    assert place("engine 1", "sampling", 1) == about(1.0, 2.25)
    mark = page.locator("[data-lane=driver] .mark").bounding_box()
    track = page.locator("[data-lane=driver] .track").bounding_box()
    assert (mark["x"] - track["x"]) / track["width"] == pytest.approx(0.5 / 2.75, abs=0.01)
    waiting = page.locator("tr[data-phase=waiting]")
    assert [text.split("\t")[::2] for text in waiting.all_inner_texts()][:2] == [
        ["engine 0", "750.0 ms"],
        ["engine 1", "1.00 s"],
    ]
    assert "between it and the step before" in page.locator(".timeline p").first.inner_text()
    page.get_by_role("button", name="Earlier").click()
    page.get_by_text("This run recorded how long each phase took").wait_for()


def test_tokens_are_read_by_keyboard_and_coloured_by_what_is_chosen(folder: Path, look: Look) -> None:
    page = go(look(folder), "#/episode?run=one&step=1&row=0")
    one = read_episodes(episodes_file(folder / "one" / "episodes", 1))[0]
    said = lambda name: page.locator(f"#token-numbers [data-name={name}]").inner_text()  # noqa: E731
    page.locator(".tok[tabindex='0']").focus()
    for position in range(4, 12):
        assert np.float32(said("sampler_logprobs")) == one.sampler_logprobs[position]
        page.keyboard.press("ArrowRight")
    page.keyboard.press("Home")
    assert (said("position"), said("mask"), said("sampler_logprobs")) == ("0", "context", "–")
    assert page.locator(".tok:focus").count() == 1
    seen = set()
    for name in page.locator("#quantity option").evaluate_all("all => all.map(one => one.value)"):
        page.locator("#quantity").select_option(name)
        seen.add(tuple(page.locator(".conversation .tok").evaluate_all("all => all.map(one => one.className)")))
        assert page.locator(".legend li").count() >= 1
    # Difference and ratio are the same in colours, and so may be the sampler's and the trainer's log-probabilities.
    assert len(seen) >= 5
    assert page.locator("[data-component=exact]").inner_text() == "1"
    assert page.locator("[data-component=format]").inner_text() == "–"
    assert page.locator(".detail").inner_text() == "compared with 42"


def test_an_episode_that_forked_is_a_tree(folder: Path, look: Look) -> None:
    same = np.arange(3, 15, dtype=np.int32)
    other = np.where(np.arange(12) < 6, same, same[::-1])
    mask = np.arange(12) >= 4
    forked = [record(0, 0, tokens=same), record(0, 0, tokens=other, loss_mask=mask & (np.arange(12) >= 6))]
    write_episodes(episodes_file(folder / "one" / "episodes", 1), [*forked, record(0, 1, tokens=same)])
    page = go(look(folder), "#/episode?run=one&step=1&row=0")
    assert page.locator(".turn").evaluate_all("all => all.map(one => one.className)") == [
        "turn prompt", "turn sampled", "turn sampled", "turn sampled",
    ]  # fmt: skip
    assert page.locator(".branch").count() == 2
    assert page.locator(".branch .turn").count() == 2
    page.get_by_role("link", name="All samples of the prompt").click()
    page.get_by_role("link", name="This episode only").wait_for()
    assert page.locator(".branch").count() == 4
    assert "sample 1" in page.locator(".branches").first.inner_text()
    fold = page.get_by_role("button", name="Prompt")
    fold.click()
    assert fold.get_attribute("aria-expanded") == "false"
    assert not page.locator(".turn.prompt .tokens").first.is_visible()


def test_episodes_are_sorted_by_any_number(folder: Path, look: Look) -> None:
    page = go(look(folder), "#/episodes?run=one&step=2")
    for name in ("reward", "tokens", "advantage", "staleness", "mismatch"):
        heading = page.get_by_role("columnheader", name=name)
        for order in ("descending", "ascending"):
            heading.get_by_role("button").click()
            assert heading.get_attribute("aria-sort") == order
            shown = page.locator(f".vt-row [data-column={name}]").all_inner_texts()
            values = [float(text) for text in shown]
            assert values == sorted(values, reverse=order == "descending")
            assert len(values) == 4


def test_runs_without_episodes_and_broken_ones(folder: Path, look: Look) -> None:
    make_run(folder, "sft", steps=2, recipe="supervised: {method: sft}\n", tokenizer=False)
    make_run(folder, "broken", steps=1, episodes=[1])
    (folder / "broken" / "episodes" / "step-000001.parquet").write_bytes(b"PAR1")
    make_run(folder, "worse")
    (folder / "worse" / "run.json").write_text("{")
    page = look(folder)
    page.expected = ("422 (Unprocessable",)
    go(page, "#/")
    assert page.locator(".vt-row[data-key=worse] .status").inner_text() == "unreadable"
    assert "worse: the run's manifest cannot be read" in page.locator(".problems").inner_text()
    go(page, "#/run?run=sft&tab=steps")
    page.get_by_text("a run that learns from examples has none").wait_for()
    go(page, "#/episodes?run=broken&step=1")
    assert "the file of episodes cannot be read" in page.locator("[role=alert]").inner_text()
    go(page, "#/nonsense?x=%00")
    assert "there is no such page" in page.locator("[role=alert]").inner_text()


# --- hostile text ---------------------------------------------------------------------------------------------------


def test_what_a_model_wrote_is_only_ever_text(folder: Path, look: Look) -> None:
    texts = dict.fromkeys(("completion_text", "prompt_text", "detail", "answer", "prompt_id"), HOSTILE)
    write_episodes(
        episodes_file(folder / "one" / "episodes", 1),
        [record(0, 0, components={HOSTILE: 1.0}, row={"x": HOSTILE}, **texts)],
    )
    tokenizer = folder / "one" / "checkpoints" / "step-000001" / "model" / "tokenizer.json"
    tokenizer.write_text(tokenizer.read_text().replace('"a":', '"<script>window.pwned=3</script>":'))
    change_manifest(
        folder / "one", alarms=[ALARM | {"name": HOSTILE, "what": HOSTILE}], error=HOSTILE, model={HOSTILE: HOSTILE}
    )
    page = look(folder)
    for where in (
        "#/",
        "#/run?run=one",
        "#/run?run=one&tab=alarms",
        "#/run?run=one&tab=system",
        "#/episodes?run=one&step=1",
        "#/episode?run=one&step=1&row=0",
        f"#/run?run={HOSTILE[:20]}",
    ):
        page.expected = ("404 (Not Found)",)
        go(page, where)
        assert page.locator("main img, main script, main b, main iframe").count() == 0
        assert page.evaluate("window.pwned") is None
    go(page, "#/episode?run=one&step=1&row=0")
    answer = page.locator("[data-fact=answer]").inner_text()
    assert answer.startswith("<img src=x onerror=")
    assert "\\u202e\\u001b[31m" in answer


def test_the_policy_of_the_page_holds(folder: Path, look: Look) -> None:
    page = go(look(folder), "#/")
    page.expected = ("Content Security Policy", "TrustedHTML")
    assert "TrustedHTML" in page.evaluate(
        "() => { try { document.body.innerHTML = '<b>x</b>'; } catch (e) { return String(e); } }"
    )
    page.evaluate("document.body.append(document.createElement('div'))")
    page.evaluate("document.body.lastChild.setAttribute('style', 'color: red')")
    assert page.evaluate("() => getComputedStyle(document.body.lastChild).color") != "rgb(255, 0, 0)"
    assert page.evaluate("() => fetch('https://example.org/').then(() => 'sent', () => 'refused')") == "refused"
    page.asked = [url for url in page.asked if "example.org" not in url]


# --- much of it -----------------------------------------------------------------------------------------------------


def test_of_long_lists_only_what_is_seen_is_in_the_page(tmp_path: Path, look: Look) -> None:
    run = make_run(tmp_path / "runs", "long", steps=1000, episodes=[1000], groups=32, size=8)
    for step in range(1, 1000):
        # A name and no more: only the step that is opened is read.
        (run / "episodes" / f"step-{step:06d}.parquet").touch()
    page = go(look(tmp_path / "runs"), "#/run?run=long&tab=steps")
    grid = page.locator("[role=grid]")
    assert grid.get_attribute("aria-rowcount") == "1001"
    rows = lambda: page.locator(".vt-row").count()  # noqa: E731
    assert 10 < rows() < 60
    page.locator(".vt-row").first.focus()
    page.keyboard.press("End")
    page.locator(".vt-row[data-key='1']:focus").wait_for()
    assert 10 < rows() < 60
    page.keyboard.press("Home")
    page.locator(".vt-row[data-key='1000']:focus").wait_for()
    page.keyboard.press("Enter")
    page.wait_for_function(SHOWN)
    page.locator("h1", has_text="Episodes of step 1000").wait_for()
    assert page.locator("[role=grid]").get_attribute("aria-rowcount") == "257"
    assert 10 < rows() < 60
    page.locator(".vt-scroll").evaluate("one => { one.scrollTop = one.scrollHeight; }")
    page.locator(".vt-row[data-key='255']").wait_for()
    assert 10 < rows() < 60


def test_of_a_long_episode_only_tokens_near_what_is_seen_are_in_the_page(folder: Path, look: Look) -> None:
    one = record(0, 0, length=30_000, prompt=100)
    write_episodes(episodes_file(folder / "one" / "episodes", 1), [one])
    page = go(look(folder), "#/episode?run=one&step=1&row=0")
    many = page.locator(".tok").count()
    assert 400 <= many < 8000
    page.locator(".tok[tabindex='0']").focus()
    page.keyboard.press("End")
    page.locator("#token-numbers [data-name=position]", has_text="29999").wait_for()
    assert np.float32(page.locator("[data-name=sampler_logprobs]").inner_text()) == one.sampler_logprobs[-1]
    page.wait_for_function("() => document.querySelectorAll('.tok').length < 8000")
    # Those that came into the page later have their colours too.
    assert page.locator(".tok:focus").evaluate("one => /tok own s[0-6]/.test(one.className)")
