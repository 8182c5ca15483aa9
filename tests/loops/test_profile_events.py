"""How what torch recorded is divided: by phase, by part of training, and when a GPU was busy. The first tests make
torch record something; those of a GPU's kernels give their times, so that they are the same on every machine.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from threading import Thread
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._C._autograd import DeviceType

from strop.loops.profile import StepProfile
from strop.loops.profile_events import OTHER, operators
from strop.loops.profile_page import Memory, Page, Span, page
from strop.training.ranges import named, named_plan

MARK = "begin"


def recorded(folder: Path, work: Callable[[StepProfile], None]) -> str:
    """The page of a step in which some work is done."""
    held = {"weights": 1 << 20}
    profile = StepProfile(folder, 1, title="work", device=torch.device("cpu"), held=lambda: held)
    profile.begin(2)
    profile.begin(1)
    work(profile)
    found = profile.end({})
    assert found is not None
    assert profile.end({}) is None
    return found.read_text(encoding="utf-8")


def test_ranges_are_there_only_while_a_profile_is_made(tmp_path: Path) -> None:
    plan: Any = object()

    def opened() -> bool:
        return isinstance(named("blocks"), torch.profiler.record_function)

    seen: list[bool] = []
    assert not opened()
    recorded(tmp_path, lambda _: seen.extend([opened(), named_plan(plan) is not plan]))
    assert seen == [True, True]
    assert not opened()
    assert named_plan(plan) is plan
    profile = StepProfile(tmp_path, 1, title="", device=torch.device("cpu"), held=None)
    profile.begin(1)
    assert opened()
    profile.abandon()
    assert not opened()


def test_a_backward_pass_counts_where_its_forward_pass_does(tmp_path: Path) -> None:
    """Each part has an operator of its own, whose gradient has one too."""

    def train(profile: StepProfile) -> None:
        started = time.perf_counter()
        x = torch.randn(300, 300, requires_grad=True)
        with named("loss"):
            with named("blocks"):
                for _ in range(3):
                    x = x @ torch.randn(300, 300)
            with named("output head"):
                x = torch.cumsum(x, 0)
            x.sum().backward()
        profile.note("training", started, time.perf_counter())

    text = recorded(tmp_path, train)
    events = parts_of(text)
    # Three products and their gradients in the one, two sums in the other.
    assert events["blocks"] > events["output head"] > 0
    assert events["blocks"] > events.get("loss", 0.0)
    assert set(events) <= {"blocks", "output head", "loss", "gradients", OTHER}


def parts_of(text: str) -> dict[str, float]:
    rows = text.split("parts of training")[1].split("\n\n")[0].splitlines()[1:]
    return {row[2:18].strip(): float(row[18:28]) for row in rows}


def test_what_another_thread_computes_is_in_the_phase(tmp_path: Path) -> None:
    """Some engines sample in a thread, which is there before the profile begins."""
    waiting: list[bool] = []

    def work() -> None:
        while not waiting:
            time.sleep(0.001)
        torch.linalg.det(torch.randn(50, 50))

    thread = Thread(target=work)
    thread.start()

    def sample(profile: StepProfile) -> None:
        started = time.perf_counter()
        waiting.append(True)
        thread.join()
        profile.note("sampling", started, time.perf_counter())

    text = recorded(tmp_path, sample)
    assert "linalg" in text.split("operators  ")[1].split("\n\n")[0].split("sampling ")[1]


class Event(SimpleNamespace):
    """A `FunctionEvent` with the times that it is given, in seconds since the mark."""

    def __init__(self, name: str, start: float, end: float, *, gpu: float | None = None, kernel: bool = False) -> None:
        super().__init__(
            id=id(self),
            name=name,
            time_range=SimpleNamespace(start=1e6 * (start + 100), end=1e6 * (end + 100)),
            device_type=DeviceType.CUDA if kernel else DeviceType.CPU,
            is_user_annotation=False,
            is_async=False,
            cpu_parent=None,
            sequence_nr=-1,
            thread=1,
            fwd_thread=0,
            self_cpu_time_total=1e6 * (end - start),
            self_device_time_total=0.0 if gpu is None else 1e6 * gpu,
        )


def test_on_a_gpu_kernels_count_and_its_idle_time_is_told() -> None:
    began = 5000.0
    spans = [Span("sampling", began, began + 4), Span("training", began + 4, began + 10)]
    events = [
        Event(MARK, 0.0, 0.0),
        Event("aten::mm", 1.0, 1.5, gpu=2.0),
        Event("kernel of mm", 1.5, 3.5, kernel=True),
        # Started in one phase, and running into the next beside another one.
        Event("aten::add", 3.6, 3.7, gpu=1.5),
        Event("kernel of add", 3.75, 5.25, kernel=True),
        Event("aten::mul", 4.5, 4.6, gpu=1.0),
        Event("kernel of mul", 5.0, 6.0, kernel=True),
    ]
    found = operators(events, MARK, began, spans)
    assert found.unit == "GPU time"
    assert found.by_phase["sampling"] == pytest.approx({"mm": 2.0, "add": 1.5})
    assert found.by_phase["training"] == pytest.approx({"mul": 1.0})
    assert found.busy == pytest.approx({"": 4.25, "sampling": 2.25, "training": 2.0})
    text = page(Page(3, "a run", began, began + 10, spans, {}, found, Memory("GPU", 8 << 20, {"weights": 3 << 20})))
    rows = {line[:18].strip(): line.split() for line in reversed(text.splitlines())}
    assert rows["phase"][-2:] == ["GPU", "idle"]
    assert rows["sampling"][-2:] == ["43.8", "%"]
    assert rows["training"][-2:] == ["66.7", "%"]
    assert rows["whole step"][-2:] == ["57.5", "%"]
    assert "The GPU has nothing to do in 57.5 % of the step." in text
    assert "60.0 % of the step is training, and 40.0 % sampling." in text
    assert rows["rest"][1] == "5.0"
    assert "activations and the rest" in text


def test_where_the_model_is_elsewhere_the_page_says_so() -> None:
    spans = [Span("sampling", 0.0, 1.0), Span("training", 1.0, 3.0)]
    text = page(Page(1, "a run", 0.0, 3.0, spans, {}, None, Memory("process", 1 << 20, None)))
    assert "operators and memory of the other processes are not in it" in text
    assert "66.7 % of the step is training, and 33.3 % sampling." in text
    assert "operators  " not in text


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_a_run_on_a_gpu_has_kernels_and_mfu_of_a_known_card(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import json

    from tiny_runs import recipe

    from strop.config.loading import load_config
    from strop.loops.train import train
    from strop.planning.cards import peak_rate

    monkeypatch.chdir(tmp_path)
    summary = train(load_config(None, data=recipe(**{"hardware.device": "cuda"})), profile=2)
    text = (summary.folder / "profile" / "step-000002" / "profile.txt").read_text(encoding="utf-8")
    assert "GPU idle" in text
    assert "(allocated on the GPU, in this step)" in text
    assert parts_of(text)["blocks"] > 0
    metrics = json.loads((summary.folder / "metrics.jsonl").read_text().splitlines()[-1])["metrics"]
    if (peak := peak_rate(torch.cuda.get_device_name(0), "bfloat16")) is not None:
        assert metrics["throughput/mfu"] == pytest.approx(metrics["throughput/training_tflops"] * 1e12 / peak)
        assert metrics["throughput/mfu_full"] > metrics["throughput/mfu"]
    else:
        assert "throughput/mfu" not in metrics
