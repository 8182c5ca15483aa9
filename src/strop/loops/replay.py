"""Training a stored step again, without sampling: for looking into a step, and to see that it can be reproduced."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from strop.config import Config
from strop.config.loading import load_config
from strop.config.run import TrackingSettings
from strop.errors import UserError
from strop.loops.event_loop import run_to_end
from strop.tracking.episodes import EpisodeRecord, beside, episodes_file, read_episodes, records_of
from strop.tracking.metrics import read_metrics
from strop.tracking.run_directory import RunDirectory, read_manifest
from strop.tracking.text import show_number

if TYPE_CHECKING:
    from strop.loops.run import Run

NOT_OF_THE_STEP = (
    *("time/", "throughput/", "memory/", "bubble/", "resumed/", "alarms/", "curriculum/"),
    *("window/length_bias", "window/passed_over", "window/forced", "window/past_kept"),
)
"""Metrics that depend on the clock, the machine and other steps."""
SHOWN = (
    "loss",
    "grad_norm",
    "reward/mean",
    "policy/ratio",
    "policy/clip_fraction",
    "policy/entropy",
    "kl/ref",
    "kl/sampler",
    "mismatch/abs_max",
    "mismatch/weight",
    "critic/loss",
    "critic/explained_variance",
    "tokens/trained",
)
"""What is shown of a step beside what differs."""
MOST_SHOWN = 10


@dataclass(frozen=True)
class Replay:
    """How a step came out again.

    before, now: the metrics of the step then and now, without those of the machine. differences: what is not
    bit-equal, the first thing that went another way first; empty if nothing is. weights: what the parameters were
    compared with.
    """

    folder: Path
    step: int
    sequences: int
    before: Mapping[str, float]
    now: Mapping[str, float]
    weights: str
    differences: Sequence[str] = field(default_factory=tuple)

    @property
    def equal(self) -> bool:
        return not self.differences


def replay(folder: str | Path, step: int) -> Replay:
    """Train a step of a run again on the completions that it was trained on, from the checkpoint before it.

    Nothing in the run's folder is changed, and the run may be going on in another process.

    Raises:
        UserError: there is no such run or step, or what it takes was not kept.
    """
    run = Path(folder)
    read_manifest(run)
    config = load_config(run / "config.yaml")
    # Nothing is tracked here, and what tracked the run need not be on this machine.
    config = config.model_copy(update={"tracking": TrackingSettings(display="off", tensorboard=False)})
    if config.cluster.kind != "local":
        raise UserError(
            "the run was trained by several processes, and a step of these is not the same bit for bit in one",
            where=str(run),
            mend="steps of runs with `cluster.kind: local` can be trained again",
        )
    if config.rewards is not None and any(v.kind == "environment" for v in config.rewards.verifiers):
        raise UserError(
            "the run's environment gave rewards to single turns, which its files do not keep",
            where=str(run),
            mend="steps of runs without a verifier of kind `environment` can be trained again",
        )
    if config.rollout.tree is not None or (config.environment is not None and config.environment.kind == "self_play"):
        raise UserError(
            "the run's episodes have branches or roles, which its files do not keep",
            where=str(run),
            mend="steps of runs without `rollout.tree` and self-play can be trained again",
        )
    before = _metrics_of(run, config, step)
    _check_files(run, config, step, before)
    return run_to_end(lambda: _replay(run, config, step, before))


def replayable(run: Path, config: Config) -> list[int]:
    """The steps of which everything is there that a replay takes."""
    steps = [record.step for record in read_metrics(run / "metrics.jsonl", kind="train")]
    return [step for step in dict.fromkeys(steps) if not list(_missing(run, config, step))]


async def _replay(folder: Path, config: Config, step: int, before: Mapping[str, float]) -> Replay:
    from strop.loops.prepare import prepare

    with prepare(config) as prepared:
        return await _replay_of(await _run_before(folder, prepared, step), folder, step, before)


async def _replay_of(run: Run, folder: Path, step: int, before: Mapping[str, float]) -> Replay:
    try:
        groups = await run.collect()
        batch = await run.build_batch(groups)
        stats = await run.update(batch)
        run.step += 1
        await run.publish()
        now = _comparable(run.step_metrics(groups, batch, stats))
        differences: list[str] = []
        if episodes_file(folder / "episodes", step).exists():
            stored = read_episodes(episodes_file(folder / "episodes", step))
            differences += _differing_tokens(stored, records_of(run.step_episodes(batch)))
        differences += _differing_metrics(before, now)
        weights, differing = _compare_weights(run, folder / "checkpoints" / f"step-{step:06d}")
        return Replay(folder, step, batch.sequences, before, now, weights, [*differences, *differing])
    finally:
        await run.collector.close()
        await run.engine.close()
        if run.prepared.scorer is not None:
            await run.prepared.scorer.close()


async def _run_before(folder: Path, prepared: Any, step: int) -> Run:
    """The run as it was before a step, with the step's completions in the place of whatever sampled them."""
    from strop.loops.folder import OpenedFolder
    from strop.loops.randomness import restore_random, settle
    from strop.loops.run import Run
    from strop.loops.stored import StoredWindow
    from strop.tracking.display import SilentDisplay
    from strop.training.checkpoint import read_state

    settle(prepared)
    place, others = await Run._load(prepared)
    checkpoint = folder / "checkpoints" / f"step-{step - 1:06d}"
    state = read_state(checkpoint)
    nowhere: Any = None
    opened = OpenedFolder(RunDirectory.read(folder), nowhere, checkpoint, state)
    run = Run(prepared, place, opened, SilentDisplay(), **others)
    run.step = int(state["step"])
    if prepared.config.offline is None:
        window = StoredWindow(episodes_file(folder / "episodes", step))
        if getattr(run.algorithm, "needs_greedy", False) and not window.has_baselines:
            raise UserError(
                f"step {step} cannot be replayed: its baselines were not kept",
                where=str(beside(episodes_file(folder / "episodes", step))),
                mend="train the run again with this version of strop",
            )
        run.collector = window
        run.past.give(window.past, window.baselines)
        await run.take_back_weights(checkpoint, state)
    else:
        await run._take_back(checkpoint, state)
    restore_random(state["random"])
    return run


# What a replay takes.


def _metrics_of(run: Path, config: Config, step: int) -> dict[str, float]:
    if config.supervised is not None:
        raise UserError(
            "this run learns from examples: nothing was sampled, and there is nothing to replay",
            where=str(run),
            mend="to do a step again, start a new run with run.steps set to its number",
        )
    # The later line counts, if a step was done again after a crash.
    lines = {record.step: record.metrics for record in read_metrics(run / "metrics.jsonl", kind="train")}
    if step not in lines:
        known = f"it has steps {min(lines)} to {max(lines)}" if lines else "it has trained no step yet"
        raise UserError(f"the run has not trained step {step}; {known}", where=str(run / "metrics.jsonl"))
    return _comparable(lines[step])


def _missing(run: Path, config: Config, step: int) -> Iterator[str]:
    checkpoint = run / "checkpoints" / f"step-{step - 1:06d}" / "state" / "state.json"
    if not checkpoint.is_file():
        yield f"the checkpoint before it, checkpoints/step-{step - 1:06d}"
    episodes = episodes_file(run / "episodes", step)
    if config.offline is None and not episodes.is_file():
        yield f"its completions, episodes/{episodes.name}"


def _check_files(run: Path, config: Config, step: int, before: Mapping[str, float]) -> None:
    if missing := list(_missing(run, config, step)):
        there = replayable(run, config)
        listed = ", ".join(map(str, there[-20:])) or "none"
        raise UserError(
            f"step {step} cannot be replayed: {' and '.join(missing)} was not kept",
            where=str(run),
            mend=f"steps that can be: {listed}. For any step of a run, train it with checkpoint.every=1 "
            "tracking.episodes_every=1 and a checkpoint.keep as large as run.steps",
        )
    aside = beside(episodes_file(run / "episodes", step))
    if config.offline is None and before.get("groups/discarded", 0) > 0 and not aside.is_file():
        raise UserError(
            f"step {step} cannot be replayed: the groups that dynamic sampling replaced in it were not kept",
            where=str(aside),
            mend="train the run again with this version of strop",
        )


# What came out.


def _comparable(metrics: Mapping[str, float]) -> dict[str, float]:
    return {name: float(value) for name, value in metrics.items() if not name.startswith(NOT_OF_THE_STEP)}


def _differing_tokens(then: Sequence[EpisodeRecord], now: Sequence[EpisodeRecord]) -> Iterator[str]:
    """The first place at which the batch came out otherwise."""
    if len(then) != len(now):
        yield f"batch: {len(then)} token streams then, {len(now)} now"
        return
    for name in ("tokens", "loss_mask", "sampler_logprobs", "trainer_logprobs", "advantages"):
        for old, new in zip(then, now, strict=True):
            a, b = getattr(old, name), getattr(new, name)
            if a is None or b is None:
                if (a is None) != (b is None):
                    yield f"{name}: of group {old.group}, sample {old.sample} there then or now only"
                    return
                continue
            # Log-probabilities at masked places are not in the file.
            inside = old.loss_mask if name.endswith("logprobs") else np.ones(len(a), dtype=bool)
            if len(a) != len(b):
                yield f"{name}: group {old.group}, sample {old.sample} has {len(a)} tokens then, {len(b)} now"
                return
            wrong = np.flatnonzero(inside & ~((a == b) | (_nan(a) & _nan(b))))
            if len(wrong):
                at = int(wrong[0])
                yield f"{name}: group {old.group}, sample {old.sample}, token {at}: {a[at]!s} then, {b[at]!s} now"
                return


def _nan(values: np.ndarray) -> np.ndarray:
    return np.isnan(values) if values.dtype.kind == "f" else np.zeros(len(values), dtype=bool)


def _differing_metrics(then: Mapping[str, float], now: Mapping[str, float]) -> Iterator[str]:
    for name in dict.fromkeys([*(n for n in SHOWN if n in then or n in now), *then, *now]):
        old, new = then.get(name), now.get(name)
        if old is None or new is None:
            yield f"metric {name}: {'now only' if old is None else 'then only'}"
        elif not _same(old, new):
            yield f"metric {name}: {old!r} then, {new!r} now"


def _same(a: float, b: float) -> bool:
    # The file has null for whatever is not finite.
    return a == b or (not math.isfinite(a) and not math.isfinite(b))


def _compare_weights(run: Run, checkpoint: Path) -> tuple[str, list[str]]:
    """What the weights and the state of the optimizers were compared with, and the first tensor that differs."""
    import torch
    from safetensors.torch import load_file

    if not (checkpoint / "state" / "state.json").is_file():
        return f"not compared: there is no {checkpoint.name}", []
    compared = 0
    with tempfile.TemporaryDirectory() as name:
        made = Path(name)
        run.trainer.save(made)
        if run.critic is not None:
            run.critic.save(made / "critic")
        for file in sorted(made.rglob("*.safetensors"), key=lambda path: ("optimizer" in path.name, str(path))):
            mine, theirs = load_file(file), load_file(checkpoint / "state" / file.relative_to(made))
            for tensor in dict.fromkeys([*theirs, *mine]):
                compared += 1
                if tensor not in mine or tensor not in theirs or not torch.equal(mine[tensor], theirs[tensor]):
                    gap = _gap(mine.get(tensor), theirs.get(tensor))
                    return f"{checkpoint.name}", [f"{file.relative_to(made)}: {tensor} differs{gap}"]
    return f"{checkpoint.name}, {compared} tensors", []


def _gap(a: Any, b: Any) -> str:
    if a is None or b is None or a.shape != b.shape:
        return ""
    return f", by up to {float((a.double() - b.double()).abs().max()):.3g}"


def shown(found: Replay) -> str:
    """A replay as text: a table of its numbers, and whether they are those of the run."""
    lines = [f"step {found.step} of {found.folder}, trained again on {found.sequences} sequences", ""]
    names = [name for name in SHOWN if name in found.before or name in found.now]
    width = max((len(name) for name in names), default=0)
    lines.append(f"  {'':<{width}}  {'then':>12}  {'now':>12}")
    for name in names:
        old, new = found.before.get(name), found.now.get(name)
        mark = "" if old is not None and new is not None and _same(old, new) else "  differs"
        lines.append(f"  {name:<{width}}  {show_number(old):>12}  {show_number(new):>12}{mark}")
    equal = sum(_same(value, found.now[name]) for name, value in found.before.items() if name in found.now)
    lines += ["", f"metrics     {equal} of {len(found.before)} bit-equal", f"parameters  {found.weights}"]
    if found.equal:
        return "\n".join([*lines, "bit-equal"])
    lines += [
        f"differs first in {found.differences[0]}",
        *(f"  also {text}" for text in found.differences[1:MOST_SHOWN]),
    ]
    if len(found.differences) > MOST_SHOWN:
        lines.append(f"  and {len(found.differences) - MOST_SHOWN} more")
    return "\n".join(lines)
