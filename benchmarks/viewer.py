"""The viewer in a real browser: how long its pages take to open and to scroll, for a long run and for a short one.

`long` has 1,000 steps of 256 episodes, `short` ten steps of eight; both have the 60 metrics of a step of reinforcement
learning. Each repeat has a viewer, a browser's context and caches of its own, so what is opened first reads everything.
Frames are counted while a list is scrolled from its top to its end in 60 equal parts; a stall is a frame of more than
50 ms. `poll` is what the page asks every two seconds while nothing is new, and after one more step.

It needs Chromium (`apt-get install chromium`) and strop's extra `dev`.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import measure

PAGES = {
    "overview": "#/",
    "curves": "#/run?run=bench",
    "steps": "#/run?run=bench&tab=steps",
    "episodes": "#/episodes?run=bench&step={step}",
    "episode": "#/episode?run=bench&step={step}&row=3",
}
METRICS = 60
DISTINCT = 5
"""Files of episodes that are written; those of other steps are links to them. The viewer reads what is opened only."""
SCROLLED = """(frames) => new Promise((done) => {
  const list = document.querySelector('.vt-scroll');
  const times = [];
  let at = 0;
  let before = performance.now();
  const step = (now) => {
    times.push(now - before);
    before = now;
    at += 1;
    list.scrollTop = (at / frames) * (list.scrollHeight - list.clientHeight);
    if (at < frames) requestAnimationFrame(step);
    else requestAnimationFrame((last) => done([...times.slice(1), last - before]));
  };
  requestAnimationFrame((now) => { before = now; requestAnimationFrame(step); });
})"""


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Open and scroll; returns the numbers that were written."""
    parser = measure.arguments(__doc__, repeats=5)
    parser.add_argument("--steps", type=int, default=1000, help="steps of the long run")
    parser.add_argument("--episodes", type=int, default=256, help="episodes of each of its steps")
    parser.add_argument("--tokens", type=int, default=512, help="tokens of each of its episodes")
    options = parser.parse_args(argv)
    if options.smoke:
        options.steps, options.episodes, options.tokens, options.repeats = 30, 16, 32, 1
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    if chromium is None:
        raise SystemExit("there is no Chromium here; `apt-get install chromium`")
    from playwright.sync_api import sync_playwright

    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        make_run(Path(folder) / "long", options.steps, options.episodes, options.tokens)
        make_run(Path(folder) / "short", 10, 8, 32)
        sandbox = [] if os.getuid() else ["--no-sandbox"]
        browser = playwright.chromium.launch(executable_path=chromium, args=[*sandbox, "--disable-dev-shm-usage"])
        steps = {"long": options.steps, "short": 10}
        sides = {name: (lambda name=name: look(browser, Path(folder) / name, steps[name])) for name in steps}
        found = measure.interleaved(sides, options.repeats)
        numbers: dict[str, Any] = {"chromium": browser.version}
        browser.close()
    for side, runs in found.items():
        numbers[side] = {name: summary([run[name] for run in runs]) for name in runs[0]}
    measure.write("viewer", numbers, options)
    return numbers


def make_run(folder: Path, steps: int, episodes: int, tokens: int) -> None:
    """A run of so many steps, as strop's own recorder writes it."""
    import numpy as np

    from strop.tracking.episodes import EpisodeRecord, episodes_file, write_episodes
    from strop.tracking.metrics import MetricsWriter
    from strop.tracking.run_directory import RunDirectory

    run = RunDirectory.create(folder, "bench", config_yaml="algorithm: {name: grpo}\n", steps=steps)
    draw = np.random.default_rng(0)
    writer = MetricsWriter(run.metrics_path)
    for step in range(1, steps + 1):
        writer.log(step, metrics_of(step))
    writer.close()

    def one(at: int) -> EpisodeRecord:
        mask = np.arange(tokens) >= tokens // 8
        logprobs = np.where(mask, -draw.exponential(1.0, tokens), np.nan).astype(np.float32)
        return EpisodeRecord(
            group=at // 8,
            sample=at % 8,
            prompt_id=f"row-{at // 8:06d}",
            prompt_text="What is it? " * 8,
            completion_text="It is this. " * (tokens // 4),
            answer="this",
            status="stop",
            reward=float(draw.integers(0, 2)),
            correct=None,
            tokens=draw.integers(0, 50_000, tokens),
            loss_mask=mask,
            sampler_logprobs=logprobs,
            trainer_logprobs=logprobs + draw.normal(0, 0.01, tokens).astype(np.float32),
            advantages=np.where(mask, draw.normal(), 0.0),
            versions=np.where(mask, 0, -1),
            components={"exact": 1.0},
        )

    for step in range(1, steps + 1):
        path = episodes_file(run.episodes_folder, step)
        if step <= DISTINCT:
            write_episodes(path, [one(at) for at in range(episodes)])
        else:
            os.link(episodes_file(run.episodes_folder, step % DISTINCT + 1), path)
    run.close()


def metrics_of(step: int) -> dict[str, float]:
    """As many metrics as a step of reinforcement learning has."""
    known = {"reward/mean": 1 - 1 / step, "loss": 0.1 / step, "completion/length_mean": 200.0, "time/step": 2.0}
    return known | {f"metric/{number:02d}": float((step * (number + 3)) % 97) for number in range(METRICS - len(known))}


def look(browser: Any, folder: Path, steps: int) -> dict[str, Any]:
    """Open every page once, scroll the lists, and ask again."""
    found: dict[str, Any] = {}
    with viewer(folder) as address:
        context = browser.new_context(viewport={"width": 1280, "height": 900}, base_url=address)
        page = context.new_page()
        for name, where in PAGES.items():
            # Everything anew, as from a link elsewhere: what is kept is what the browser keeps.
            page.goto("about:blank")
            started = time.perf_counter()
            page.goto(f"/{where.format(step=steps)}")
            page.wait_for_function("() => document.getElementById('page').dataset.shown === location.hash")
            page.evaluate("() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
            found[f"open_{name}_seconds"] = time.perf_counter() - started
            if name in ("steps", "episodes"):
                frames = page.evaluate(SCROLLED, 60)
                found[f"scroll_{name}_frame_ms"] = measure.median(frames)
                found[f"scroll_{name}_longest_frame_ms"] = max(frames)
                found[f"scroll_{name}_stalls"] = sum(frame > 50 for frame in frames)
                found[f"{name}_rows_in_page"] = page.locator(".vt-row").count()
        found["tokens_in_page"] = page.locator(".tok").count()
        context.close()
    return found | polls(folder, steps)


def polls(folder: Path, steps: int) -> dict[str, Any]:
    """What the server does for a page that asks again: nothing new, and one step more."""
    from fastapi.testclient import TestClient

    from strop.serve.viewer.app import build
    from strop.tracking.metrics import MetricsWriter

    path = folder / "bench" / "metrics.jsonl"
    before = path.read_bytes()
    client = TestClient(build([folder]))
    asked = {"run": "bench", "names": "reward/mean,loss"}
    cursor = client.get("/api/series", params=asked).json()["cursor"]

    def timed(work: Callable[[], Any]) -> tuple[float, Any]:
        started = time.perf_counter()
        answer = work()
        return 1e3 * (time.perf_counter() - started), answer

    tag = client.get("/api/runs").headers["etag"]
    idle = timed(lambda: client.get("/api/runs", headers={"if-none-match": tag}))
    nothing = timed(lambda: client.get("/api/series", params={**asked, "since": cursor}))
    writer = MetricsWriter(path)
    writer.log(steps + 1, metrics_of(steps + 1))
    writer.close()
    more = timed(lambda: client.get("/api/series", params={**asked, "since": cursor}))
    path.write_bytes(before)
    assert idle[1].status_code == 304
    assert json.loads(more[1].content)["kinds"]["train"]["step"] == [steps + 1]
    return {
        "poll_overview_ms": idle[0],
        "poll_overview_bytes": len(idle[1].content),
        "poll_nothing_new_ms": nothing[0],
        "poll_nothing_new_bytes": len(nothing[1].content),
        "poll_one_step_ms": more[0],
        "poll_one_step_bytes": len(more[1].content),
    }


def summary(values: list[Any]) -> Any:
    """The median and every repeat; counts and sizes, which do not vary, as they are."""
    if len(set(values)) == 1:
        return values[0]
    kept = [round(float(value), 4) for value in values]
    return {"median": measure.median(kept), "of_each_repeat": kept}


@contextmanager
def viewer(folder: Path) -> Iterator[str]:
    """A viewer of a folder that listens; gives its address."""
    import uvicorn

    from strop.serve.viewer.app import build

    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(64)
        server = uvicorn.Server(uvicorn.Config(build([folder]), log_level="error", lifespan="off"))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}/"
        server.should_exit = True
        thread.join(timeout=10)


if __name__ == "__main__":
    main()
