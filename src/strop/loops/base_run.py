"""What runs of every kind have: a folder, metrics, a display, evaluations, checkpoints, and going on after a stop."""

from __future__ import annotations

import asyncio
import copy
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Self

import torch

from strop.cluster.supervision import WorkerLost
from strop.config import Config
from strop.loops.best import Best
from strop.loops.event_loop import when_asked_to_leave
from strop.loops.folder import OpenedFolder, close_after, open_folder
from strop.loops.garbage import look_rarely
from strop.loops.place import Place
from strop.loops.profile import StepProfile
from strop.loops.randomness import random_state, restore_random, settle
from strop.loops.selection import evaluations_of, stop_reason
from strop.loops.shown import facts_of, why_done
from strop.loops.spans import StepSpans
from strop.tracking.display import Display, Summary, make_display
from strop.tracking.metrics import MetricsWriter
from strop.tracking.run_directory import ASKED_TO_LEAVE
from strop.tracking.summary import short_path
from strop.training.background import Background
from strop.training.checkpoint import checkpoint_of, save_checkpoint
from strop.training.holdings import held_parts
from strop.training.snapshot import Held, in_background

GIB = 1 << 30


class BaseRun(ABC):
    """One run. `open` makes it; a loop calls its verbs in turn.

    step: steps that are done. before, after: held-out scores. evaluations: the steps that were evaluated, with scores.
    """

    def __init__(self, prepared: Any, place: Place, opened: OpenedFolder, display: Display) -> None:
        self.config: Config = prepared.config
        self.step = 0
        self.before: dict[str, float] = {}
        self.after: dict[str, float] = {}
        self.evaluations: list[tuple[int, dict[str, float]]] = []
        self.prepared = prepared
        self.place = place
        self.roles = place.roles
        self.display = display
        self.directory = opened.directory
        self.metrics: MetricsWriter = opened.metrics
        self.spans = StepSpans(opened.timeline)
        self._opened = opened
        self.trainer: Any = None
        self._times: dict[str, float] = {}
        self._tokens = {"sampled": 0, "trained": 0}
        self._started = time.perf_counter()
        self._best = Best(
            prepared.config.checkpoint.best, opened.directory.checkpoints_folder, lambda: self.evaluations
        )
        self._saved_at: int | None = None
        self._saver = Background("checkpoint")
        self._saver_told = False
        self._waited = 0.0
        self._resumed = opened.checkpoint is not None
        self.look_as_before: Callable[[], None] = lambda: None
        """Undoes what `loops/garbage.py` did for the run."""
        self.leaving = False
        """Whether the run was asked to save at the end of this step and to end: its machine is about to be taken."""
        self.profile: StepProfile | None = None
        """What records one step; see `profile_step`."""
        self._profile_at: Path | None = None
        self._figures: dict[str, float] = {}

    @property
    def folder(self) -> Path:
        """The run's folder."""
        return self.directory.path

    @property
    def done(self) -> bool:
        """Whether all steps are done, the run gets no better (`evaluation.early_stop`), or it has to leave."""
        return self.step >= self.config.run.steps or bool(self.stopped) or self.leaving

    @property
    def stopped(self) -> str:
        """Why the run ends before its last step; empty while it does not."""
        if self.step >= self.config.run.steps:
            return ""
        if self.leaving:
            return ASKED_TO_LEAVE
        return stop_reason(self.evaluations, self.config.evaluation.early_stop)

    @property
    def best(self) -> Path | None:
        """The model of the best checkpoint; None without `checkpoint.best`."""
        return self._best.model()

    @classmethod
    async def open(cls, prepared: Any, *, fresh: bool, recipe: str | None) -> Self:
        """Load, and go to where the run had stopped.

        Raises:
            UserError: the run cannot be gone on with; nothing was written.
        """
        settle(prepared)
        display = make_display(prepared.config.tracking)
        try:
            place, others = await cls._load(prepared)
        except BaseException:
            display.close()
            raise
        try:
            opened = open_folder(prepared, place.roles, display, fresh=fresh, recipe=recipe)
            place.settle_in(opened.directory.path)
        except BaseException:
            display.close()
            await place.close()
            raise
        look_as_before = look_rarely()
        try:
            run = await place.aside(lambda: cls(prepared, place, opened, display, **others))
            run.look_as_before = look_as_before
            run._look_at_load()
            await run._restore(opened)
            run._show_start(opened)
            return run
        except BaseException as error:
            look_as_before()
            display.close()
            opened.close(error)
            await place.close()
            raise

    @classmethod
    @asynccontextmanager
    async def opened(cls, prepared: Any, *, fresh: bool, recipe: str | None) -> AsyncIterator[Self]:
        """The run that `open` gives, closed in the end: files, what it started, its lock."""
        run = await cls.open(prepared, fresh=fresh, recipe=recipe)
        try:
            with when_asked_to_leave(run.leave):
                yield run
        except BaseException as error:
            unwritten = await run._last_write()
            if unwritten is not None:
                run.display.message(str(unwritten), "warning")
            await run.close(error)
            if unwritten is not None and isinstance(error, WorkerLost):
                # It is why the other ranks were ended, which looks like the loss of a process.
                raise unwritten from unwritten.__cause__
            if unwritten is not None:
                error.add_note(str(unwritten))
            raise
        else:
            unwritten = await run._last_write()
            await run.close(unwritten)
            if unwritten is not None:
                raise unwritten

    def leave(self) -> None:
        """Save at the end of this step, and end; the same command goes on from there. Called from a signal handler."""
        self.leaving = True

    def profile_step(self, step: int) -> None:
        """Record a step that is still to come; its profile is in the run's folder."""
        hardware, here = self.prepared.hardware, self.config.cluster.kind == "local"
        self.profile = StepProfile(
            self.folder,
            step,
            title=f"{self.folder.name}: {self.roles.loaded.name}, {hardware.reasons[0]}",
            device=hardware.device if here else torch.device("cpu"),
            held=self._held_in_memory if here else None,
        )

    # What a kind of run has to say.

    @classmethod
    @abstractmethod
    async def _load(cls, prepared: Any) -> tuple[Place, dict[str, Any]]:
        """Where the model is, and what else `__init__` takes by name."""

    @abstractmethod
    async def _take_back(self, checkpoint: Path, state: dict[str, Any]) -> None:
        """Go to where a checkpoint was written, as far as this class does not do it itself."""

    @abstractmethod
    def _parts(self, trainer: Held, *, behind: bool) -> Callable[[Path], dict[str, Any]]:
        """What writes all that `_take_back` needs: files below the folder that it is given, and the rest as JSON-ready
        values. Nothing that later steps change may be in it, but for what is `trainer` of; behind: nor anything else.
        """

    @abstractmethod
    async def _score_held_out(self) -> dict[str, float]:
        """Scores of the model as it is, on the held-out data, which is there."""

    def _held_in_memory(self) -> dict[str, int]:
        """Bytes of what is on the device all the time, by name."""
        return held_parts(self.trainer)

    @abstractmethod
    def _about(self) -> dict[str, str]:
        """What the display says of the run beside model, data and device."""

    # Verbs that all loops call.

    async def evaluate_and_save_if_due(self) -> None:
        """Evaluate and write a checkpoint at the intervals that the recipe names, and after the last step."""
        await self._evaluate_and_save_if_due()
        if self.profile is not None and self.step == self.profile.step:
            try:
                self._profile_at = self.profile.end(self._figures)
            except OSError as error:
                self.display.message(f"the profile cannot be written: {error}", "warning")

    async def _evaluate_and_save_if_due(self) -> None:
        every = self.config.evaluation.every
        if self._saver.ended or self.config.checkpoint.best is not None:
            # A failure is told at once; and what is best is known of checkpoints that are there.
            await self.place.aside(self._settle)
        if self.leaving:
            # A machine that is taken gives half a minute or two.
            self.display.message("asked to leave (SIGUSR1): this step is saved, then the run ends", "warning")
            await self.save()
            return
        if self.step >= self.config.run.steps or (every and self.step % every == 0):
            await self.evaluate()
        if self.done or self.step % self.config.checkpoint.every == 0 or self._best.takes(self.step):
            await self.save()

    async def evaluate(self) -> dict[str, float]:
        """Scores on held-out data with the weights as they are; empty without `data.eval`."""
        if self.prepared.held_out is None:
            return {}
        self.display.phase("evaluating")
        started = time.perf_counter()
        self.log_scores(self.step, await self._score_held_out())
        self._note("evaluating", started)
        return self.after

    def log_scores(self, step: int, scores: dict[str, float]) -> None:
        """Note what an evaluation of a step found."""
        self.after = scores
        if not self.before:
            self.before = dict(scores)
        self.evaluations = [(other, found) for other, found in self.evaluations if other < step]
        self.evaluations.append((step, dict(scores)))
        self.metrics.log(step, {f"eval/{name}": value for name, value in scores.items()}, kind="eval")
        self.display.evaluation(step, scores)
        self.directory.update(scores={"before": self.before, "after": self.after})

    async def save(self) -> Path:
        """Write a checkpoint of this step."""
        return await self.place.aside(self._save)

    def _save(self) -> Path:
        if self._saved_at == self.step:
            return self._checkpoint_of(self.step)
        self.display.phase("saving")
        started = time.perf_counter()
        self._settle()
        behind = self._writes_behind()
        write = self._writer(behind=behind)
        steps, keep_best = self._best.ranking()
        folder, step, keep = self.directory.checkpoints_folder, self.step, self.config.checkpoint.keep

        def save() -> None:
            save_checkpoint(folder, step, write, keep=keep, ranking=steps, keep_best=keep_best)

        if behind:
            self._saver.start(save)
        else:
            save()
            self.directory.update(best=self._best.score())
        self._saved_at = step
        self._waited += self._note("checkpoint", started)
        return self._checkpoint_of(step)

    def _settle(self) -> None:
        """Wait for the checkpoint that is being written.

        Raises:
            RunFailure: it could not be written; the one before is intact.
        """
        if self._saver.wait():
            self.directory.update(best=self._best.score())

    async def _last_write(self) -> Exception | None:
        """Wait for the checkpoint that is being written; returns what went wrong with it."""
        try:
            await asyncio.to_thread(self._settle)
        except Exception as error:
            return error
        return None

    def _writes_behind(self) -> bool:
        """Whether the checkpoint of this step is written while the next steps are done."""
        asked = self.config.checkpoint.in_background
        if self.done or asked is False:
            return False
        behind, why = in_background(asked, *((0, 0) if asked is True else self._held_bytes()))
        if behind and not self._saver_told:
            self.display.message(f"checkpoints are written while training goes on: {why}")
            self._saver_told = True
        return behind

    def _held_bytes(self) -> tuple[int, int]:
        """(bytes of a copy of what a checkpoint holds, bytes of memory that are free where it would be)."""
        found: tuple[int, int] = self.trainer.held_bytes()
        return found

    def _note(self, phase: str, started: float, ended: float | None = None) -> float:
        """Note a phase that has ended, now or then, for the timeline and the profile; returns its seconds."""
        ended = time.perf_counter() if ended is None else ended
        self.spans.note(phase, started, ended)
        if self.profile is not None:
            self.profile.note(phase, started, ended)
        return ended - started

    def _look_at_load(self) -> None:
        """Take the load of the machines from now on, if the recipe asks for it."""
        every = self.config.tracking.load_every
        if self._opened.load is not None and every:
            self._opened.load.start(lambda: self.step + 1, self.place.elsewhere(every))

    def _begin_step(self) -> None:
        """The next step begins."""
        if self.profile is not None:
            self.profile.begin(self.step + 1)

    def _take_waited(self) -> dict[str, float]:
        """What the loop waited for checkpoints since this was last asked, for the metrics of a step."""
        waited, self._waited = self._waited, 0.0
        return {"time/checkpoint": waited} if waited else {}

    async def finish(self) -> Path:
        """Save, say how it ended; returns the folder of the trained model."""
        if not self.after and not self.leaving:
            await self.evaluate()
        model = await self.save() / "model"
        await self.place.aside(self._settle)
        self.directory.update(stopped=self.stopped, best=self._best.score())
        if self.profile is not None:
            where = "there is none" if self._profile_at is None else short_path(self._profile_at)
            self.display.message(f"profile of step {self.profile.step}: {where}")
        self.display.finish(
            Summary(
                run=self.folder,
                steps=self.step,
                total_steps=self.config.run.steps,
                seconds=time.perf_counter() - self._started,
                before=self.before or None,
                after=self.after or None,
                tokens_sampled=self._tokens["sampled"],
                tokens_trained=self._tokens["trained"],
                model=model,
                events=self.directory.events_folder if self.config.tracking.tensorboard else None,
                next_commands=self._next_commands(),
                best=self._best.line(),
                stopped=self.stopped,
                alarms=self._alarm_lines(),
            )
        )
        return model

    async def close(self, error: BaseException | None) -> None:
        """Give back everything; the run's manifest notes how it ended."""
        if self.profile is not None:
            self.profile.abandon()
        self.look_as_before()
        self.display.close()
        await asyncio.to_thread(self._opened.close_files)
        await self.place.close()
        if error is None:
            self.directory.close("finished" if self.done and not self.leaving else "interrupted")
        else:
            close_after(self.directory, error)

    # What the verbs stand on.

    def _next_commands(self) -> list[str]:
        """What the closing summary proposes; made up from the paths when empty."""
        return []

    def _alarm_lines(self) -> list[str]:
        """What the closing summary says of signs of reward hacking."""
        return []

    def _say_if_done(self) -> None:
        if text := why_done(self):
            self.display.message(text)

    def _checkpoint_of(self, step: int) -> Path:
        return checkpoint_of(self.directory.checkpoints_folder, step)

    async def _restore(self, opened: OpenedFolder) -> None:
        if opened.checkpoint is None:
            return
        state = opened.state
        self.step = int(state["step"])
        self._saved_at = self.step
        self.before, self.after = dict(state["before"]), dict(state["after"])
        self.evaluations = evaluations_of(state)
        self._tokens = dict(state["tokens"])
        await self._take_back(opened.checkpoint, state)
        restore_random(state["random"])
        # The recipe may now ask for another metric, or the process died between the two pointers.
        self._best.point()

    def _writer(self, *, behind: bool) -> Callable[[Path], dict[str, Any]]:
        """What writes a checkpoint of this step. behind: from copies, while later steps are done."""
        tokenizer, live = self.roles.tokenizer, self.trainer
        trainer = Held(lambda folder: live.export(tokenizer, folder), live.save)
        if behind:
            trainer = live.hold(tokenizer)
        parts, random = self._parts(trainer, behind=behind), random_state()
        about = copy.deepcopy(
            {
                "step": self.step,
                "before": self.before,
                "after": self.after,
                "evaluations": self.evaluations,
                "tokens": self._tokens,
            }
        )

        def write(folder: Path) -> dict[str, Any]:
            trainer.export(folder / "model")
            return {**about, **parts(folder), "random": random}

        return write

    def _show_start(self, opened: OpenedFolder) -> None:
        self.display.start(
            self.folder.name,
            self.config.run.steps,
            facts_of(self, self._about()),
            first_step=self.step,
            before=self.before or None,
            history=opened.history,
        )
