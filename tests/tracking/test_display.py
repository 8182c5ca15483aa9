"""What a person sees: plain lines, the live panel at several sizes, the closing summary."""

from __future__ import annotations

import dataclasses
import io
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from strop.config.run import TrackingSettings
from strop.tracking.display import Display, Sample, SilentDisplay, StepView, Summary, make_display
from strop.tracking.display_live import LiveDisplay
from strop.tracking.display_plain import PlainDisplay
from strop.tracking.summary import print_summary, sample_line
from strop.tracking.text import BARS, one_line, show_duration, show_metric, show_number, sparkline

SIZES = [(80, 24), (120, 40), (40, 12), (20, 5)]


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def metrics(step: int) -> dict[str, float]:
    return {
        "reward/mean": step / 40,
        "reward/std": 0.2,
        "accuracy": step / 80,
        "completion/length_mean": 12.34,
        "completion/truncated_share": 0.012,
        "policy/entropy": 2 * math.exp(-step / 30),
        "policy/clip_fraction": 0.015,
        "kl/ref": 0.0012,
        "kl/sampler": 1e-7,
        "loss": -0.02,
        "grad_norm": 0.5,
        "learning_rate": 1e-4,
        "throughput/tokens_per_second": 12345.0,
        "memory/process_gib": 1.234,
        "staleness/max": 0,
        "time/step": 1.5,
        "errors/share": 0.0,
    }


SAMPLE = Sample("37+48=", "85", reward=1.0, correct=True, answer="85")


def recorded(width: int, height: int, *, terminal: bool = False) -> Console:
    return Console(file=io.StringIO(), width=width, height=height, force_terminal=terminal, _environ={})


def output(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def play(display: Display, clock: Clock, see: Callable[[], None] = lambda: None) -> None:
    """A whole run: warm-up, evaluation, 40 steps of 1.5 s, a warning, a summary."""
    display.start("quickstart", 40, {"model": "new, 4 layers", "device": "cpu"})
    display.phase("loading the model")
    see()
    for step in range(1, 101):
        clock.now += 0.1
        display.step(StepView(step, 100, {"loss": 3 / step}, kind="warmup"))
    see()
    display.phase("evaluating")
    clock.now += 20
    display.evaluation(0, {"accuracy": 0.41, "reward": 0.41})
    for step in range(1, 41):
        display.phase("sampling")
        clock.now += 1
        display.progress("sampling", 120, 512)
        see()
        clock.now += 0.5
        display.step(StepView(step, 40, metrics(step), SAMPLE))
        see()
        if step == 20:
            display.evaluation(20, {"accuracy": 0.7, "reward": 0.71})
            display.message("2 of 64 episodes timed out", "warning")
            see()
    display.finish(SUMMARY)


@pytest.mark.parametrize("kind", [PlainDisplay, LiveDisplay])
def test_alarms_are_shown_and_stay_in_the_panel(kind: Any) -> None:
    clock, console = Clock(), recorded(120, 40)
    display = kind(console, clock=clock, **({"auto_refresh": False} if kind is LiveDisplay else {}))
    display.start("quickstart", 40, {})
    display.message("length at step 12: rewarded completions have 15.0 tokens; usual is 4.0", "alarm")
    display.message("something else", "warning")
    assert "alarm: length at step 12: rewarded completions have 15.0 tokens; usual is 4.0" in output(console)
    if kind is LiveDisplay:
        panel = recorded(120, 40)
        panel.print(display.render(120, 40))
        assert re.search(r"alarms +1, the last: length at step 12", output(panel))
        assert re.search(r"warnings +1, the last: something else", output(panel))
    display.close()


def test_the_summary_lists_the_last_alarms() -> None:
    console = recorded(120, 40)
    print_summary(console, dataclasses.replace(SUMMARY, alarms=[f"length at step {n}: long" for n in range(1, 8)]))
    said = output(console)
    assert re.search(r"^  alarms +length at step 3: long$", said, re.MULTILINE)
    assert re.search(r"^ +length at step 7: long$", said, re.MULTILINE)
    assert "step 2:" not in said


SUMMARY = Summary(
    run=Path("runs/quickstart"),
    steps=40,
    total_steps=40,
    seconds=92.4,
    before={"accuracy": 0.41, "reward": 0.41},
    after={"accuracy": 0.955, "reward": 0.95},
    tokens_sampled=1_234_567,
    tokens_trained=1_200_000,
    model=Path("runs/quickstart/checkpoints/step-000040/model"),
    events=Path("runs/quickstart/events"),
)


def test_plain_lines() -> None:
    clock, console = Clock(), recorded(80, 24)
    play(PlainDisplay(console, clock=clock), clock)
    lines = output(console).splitlines()
    assert lines[:4] == ["quickstart: 40 steps", "  model   new, 4 layers", "  device  cpu", "loading the model …"]
    assert lines.count("evaluation at start: accuracy 41.0 %, reward 0.410") == 1
    assert "evaluation at step 20: accuracy 41.0 % → 70.0 % (+29.0), reward 0.410 → 0.710" in lines
    assert "warning: 2 of 64 episodes timed out" in lines
    header = " step   reward  accuracy      loss   length        kl  entropy   tok/s   s/step     left"
    step = " 1/40    0.025     1.2 %    -0.020     12.3    0.0012     1.93   12.3k     1.50     0:58"
    assert lines[lines.index(header) + 1] == step
    assert lines.count(header) == 2  # before steps 1 and 21
    steps = [line for line in lines if re.match(r"[ \d]\d/40 ", line)]
    assert len(steps) == 40
    assert {len(line) for line in steps} == {len(header)}
    assert len([line for line in lines if re.match(r"[ \d]+/100 ", line)]) == 10  # a tenth of the warm-up
    assert lines.count("  sample: 37+48= → 85  reward 1.00 ✓") == 2  # the first step, then every 30 s


def test_plain_shows_progress_inside_a_long_step() -> None:
    clock, console = Clock(), recorded(80, 24)
    display = PlainDisplay(console, clock=clock)
    display.start("long", 2, {})
    for done in range(0, 513, 8):
        clock.now += 1
        display.progress("sampling", done, 512)
    lines = [line for line in output(console).splitlines() if "sampling" in line]
    assert len(lines) == 6
    assert lines[0] == "  sampling 72/512"


def test_time_left_ignores_the_warmup_and_the_first_evaluation() -> None:
    clock, console = Clock(), recorded(80, 24)
    display = PlainDisplay(console, clock=clock)
    display.start("pace", 11, {})
    for step in range(1, 11):
        clock.now += 100
        display.step(StepView(step, 10, {"loss": 1.0}, kind="warmup"))
    clock.now += 1000
    display.evaluation(0, {"accuracy": 0.1})
    clock.now += 2
    display.step(StepView(1, 11, {"loss": 1.0}))
    assert output(console).splitlines()[-1].split()[-1] == "0:20"


def test_a_run_that_goes_on_says_so() -> None:
    console = recorded(80, 24)
    display = PlainDisplay(console)
    display.start("more", 9, {}, first_step=4, before={"accuracy": 0.25})
    display.evaluation(6, {"accuracy": 0.5})
    assert "more: 9 steps, going on after step 4" in output(console)
    assert "accuracy 25.0 % → 50.0 % (+25.0)" in output(console)


@pytest.mark.parametrize(("width", "height"), SIZES)
def test_live_panel_fits_and_shows_the_values(width: int, height: int) -> None:
    clock, terminal, paper = Clock(), recorded(width, height, terminal=True), recorded(width, height)
    display = LiveDisplay(terminal, clock=clock, auto_refresh=False)
    frames: list[str] = []

    def see() -> None:
        before = len(output(paper))
        paper.print(display.render(width, height))
        frames.append(output(paper)[before:])

    play(display, clock, see)
    for frame in frames:
        assert all(len(line) <= width for line in frame.splitlines())
        if height >= 12:
            assert len(frame.splitlines()) <= height
    if width < 80:
        return
    assert "loading the model" in frames[0]
    assert "new, 4 layers" in frames[0]
    assert "warm-up 100/100" in frames[1]
    assert "sampling 120/512 (23 %)" in frames[2]
    last = frames[-1]
    for value in ("step 40/40", "reward", "1.00", "50.0 %", "12.3", "0.0012", "12.3k", "1.23 GiB", "1.5 %", "0.500"):
        assert value in last
    assert "accuracy 41.0 % → 70.0 % (+29.0), reward 0.410 → 0.710" in last
    assert "37+48= → 85  reward 1.00 ✓" in last
    assert "1, the last: 2 of 64 episodes timed out" in last
    curve = re.search(rf"reward +1\.00 ([{BARS}]+)", last)
    assert curve is not None
    assert list(curve[1]) == sorted(curve[1], key=BARS.index)  # a reward that rises draws a line that rises
    assert len(set(curve[1])) > 4
    printed = output(terminal)
    assert "quickstart: finished" in printed
    assert "strop sample runs/quickstart" in printed


def test_live_names_verifiers_and_errors() -> None:
    console = recorded(80, 30)
    display = LiveDisplay(recorded(80, 30, terminal=True), auto_refresh=False)
    display.start("t", 3, {})
    display.step(
        StepView(1, 3, {"reward/mean": 0.5, "reward/exact": 0.25, "reward/format": 0.75, "errors/share": 0.05})
    )
    console.print(display.render(80, 30))
    display.close()
    assert re.search(r"exact +0\.250", output(console))
    assert re.search(r"format +0\.750", output(console))
    assert "5.0 % of the episodes could not be verified" in output(console)


def test_live_goes_on_with_the_curves_of_a_resumed_run() -> None:
    console = recorded(80, 30)
    display = LiveDisplay(recorded(80, 30, terminal=True), auto_refresh=False)
    display.start("t", 9, {}, first_step=3, history=[{"accuracy": 0.1}, {"accuracy": 0.5}, {"accuracy": 0.9}])
    console.print(display.render(80, 30))
    display.close()
    assert re.search(r"accuracy +90\.0 % ▁▅█", output(console))
    assert "step 3/9" in output(console)


def test_the_panel_is_drawn_by_its_thread_while_steps_come_in() -> None:
    console = recorded(80, 24, terminal=True)
    display = LiveDisplay(console)
    play(display, Clock())
    display.close()
    assert "quickstart: finished" in output(console)
    assert output(console).count("\x1b[?25l") == output(console).count("\x1b[?25h") == 1  # the cursor is back


def test_an_error_gives_the_terminal_back() -> None:
    console = recorded(80, 24, terminal=True)
    display = LiveDisplay(console, auto_refresh=False)
    display.start("t", 3, {})
    display.close()
    display.close()
    assert output(console).rstrip().endswith("\x1b[?25h")


ODD = {"reward/mean": math.nan, "accuracy": math.inf, "loss": 1e30, "kl/ref": -1e-30, "unknown/name": 1.0}


@pytest.mark.parametrize("make", [PlainDisplay, lambda console: LiveDisplay(console, auto_refresh=False)])
def test_nothing_that_a_run_holds_breaks_a_display(make: Callable[[Console], Display]) -> None:
    console = recorded(80, 24, terminal=True)
    display = make(console)
    nasty = "\x1b]0;owned\x07[red]x[/nothing]\n\ud800\u202e" * 50
    display.start(nasty, 2, {nasty: nasty})
    display.phase(nasty)
    display.progress(nasty, 0, 0)
    display.step(StepView(1, 2, ODD, Sample(nasty, nasty, reward=math.nan, correct=False, answer=nasty)))
    display.step(StepView(2, 2, {}))
    display.evaluation(0, {})
    display.evaluation(1, ODD)
    display.message(nasty, "error")
    display.finish(Summary(Path("r"), 1, 2, 1.0, status="failed", problem=nasty, before={}, after=ODD))
    shown = output(console)
    assert "]0;owned" in shown
    assert "\x1b]" not in shown  # the escape itself never reaches the terminal
    assert "\u202e" not in shown
    assert "[/nothing]" in shown  # and markup is text


def test_the_summary_says_what_happened_and_what_to_do_next() -> None:
    console = recorded(80, 24)
    print_summary(console, SUMMARY)
    lines = [line.strip() for line in output(console).splitlines()]
    assert "accuracy          41.0 % → 95.5 % (+54.5 points)" in lines
    assert "reward            0.410 → 0.950" in lines
    assert "time              40 steps in 1:32, 1.2M tokens sampled, 1.2M trained" in lines
    assert "model             runs/quickstart/checkpoints/step-000040/model" in lines
    assert "metrics           runs/quickstart/metrics.jsonl" in lines
    assert "curves            tensorboard --logdir runs/quickstart/events" in lines
    assert "next              strop sample runs/quickstart" in lines


def test_the_summary_of_a_failed_run_and_long_paths() -> None:
    console = recorded(80, 24)
    long = Path("/somewhere") / ("x" * 200)
    print_summary(console, Summary(long, 3, 9, 1.0, status="failed", problem="boom", next_commands=["strop train r"]))
    text = output(console)
    assert "failed after step 3 of 9" in text
    assert re.search(r"why +boom", text)
    assert f"run               {long}\n" in text  # in one piece, to be copied
    assert re.search(r"next +strop train r\n", text)
    assert "strop sample" not in text


@pytest.mark.parametrize(
    ("setting", "terminal", "environment", "expected"),
    [
        ("auto", True, {}, LiveDisplay),
        ("auto", False, {}, PlainDisplay),
        ("auto", True, {"CI": "true"}, PlainDisplay),
        ("auto", True, {"CI": "false"}, LiveDisplay),
        ("auto", True, {"TERM": "dumb"}, PlainDisplay),
        ("live", False, {}, LiveDisplay),
        ("plain", True, {}, PlainDisplay),
        ("off", True, {}, SilentDisplay),
    ],
)
def test_the_display_that_is_asked_for(
    setting: Any, terminal: bool, environment: dict[str, str], expected: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("CI", "TERM"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    console = recorded(80, 24, terminal=terminal)
    assert type(make_display(TrackingSettings(display=setting), console=console)) is expected


def test_a_terminal_without_unicode_shows_something() -> None:
    raw = io.BytesIO()
    console = Console(file=io.TextIOWrapper(raw, encoding="ascii"), width=80, height=24, force_terminal=True)
    for setting in ("plain", "live"):
        display = make_display(TrackingSettings(display=setting), console=console)  # type: ignore[arg-type]
        play(display, Clock())
        display.close()
    assert b"quickstart: finished" in raw.getvalue()


def test_silence(capsys: pytest.CaptureFixture[str]) -> None:
    play(make_display(TrackingSettings(display="off")), Clock())
    assert capsys.readouterr() == ("", "")


@given(st.floats())
def test_numbers_are_short_and_near(value: float) -> None:
    text = show_number(value)
    assert len(text) <= 9
    if math.isfinite(value) and abs(value) < 9999 and value != 0:
        assert float(text) == pytest.approx(value, rel=0.06)


def test_numbers() -> None:
    values = [0, 1.2e-5, 0.00123, 0.0123, 0.999, 1.234, 45.67, 99.97, 789.4, 9999.4, 12345, 4.56e6, 7.8e9, math.nan]
    assert [show_number(value) for value in values] == [
        "0", "1.2e-05", "0.0012", "0.012", "0.999", "1.23", "45.7", "100", "789", "9999", "12.3k", "4.6M", "7.8G", "–",
    ]  # fmt: skip
    assert show_metric("errors/share", 0.125) == "12.5 %"
    assert show_metric("memory/cuda_gib", 1.0) == "1.00 GiB"
    assert show_metric("time/step", 2.0) == "2.00 s"
    assert [show_duration(seconds) for seconds in (0.4, 8, 61, 3723, 3 * 86400 + 3 * 3600, None)] == [
        "0:00", "0:08", "1:01", "1:02:03", "3d 03:00", "–",
    ]  # fmt: skip


@given(st.lists(st.floats(allow_nan=True, allow_infinity=True), max_size=300), st.integers(0, 40))
def test_a_curve_fits_its_width(values: list[float], width: int) -> None:
    assert len(sparkline(values, width)) == min(len(values), width)


def test_curves() -> None:
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7], 8) == BARS
    assert sparkline([7, 0], 8) == "█▁"
    assert sparkline([0, math.nan, 7], 8) == "▁ █"
    assert sparkline(list(range(80)), 8) == BARS
    assert sparkline([0.1 + 0.2, 0.3, 0.3], 8) == "▄▄▄"
    assert sparkline([0, 7], 8, ascii_only=True) == "_@"
    assert sparkline([-1.7e308, 1.7e308], 8) == "▁█"
    assert sparkline([1.7e308, 1.7e308, 0, 0], 2) == "█▁"


@given(st.text(), st.integers(1, 30))
def test_one_line_is_one_line(text: str, width: int) -> None:
    shown = one_line(text, width)
    assert len(shown) <= width
    assert shown.isprintable()


@given(st.text(), st.text(), st.integers(50, 120))
def test_a_sample_fits(prompt: str, completion: str, width: int) -> None:
    assert len(sample_line(Sample(prompt, completion, 0.5, False, "12345"), width)) <= width
