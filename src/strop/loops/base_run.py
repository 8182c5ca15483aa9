"""What runs of every kind have: a folder, metrics, a display, evaluations, checkpoints, and going on after a stop."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any, Self

import torch

from strop.config import Config
from strop.loops.assembly import Roles
from strop.loops.folder import OpenedFolder, close_after, open_folder
from strop.loops.randomness import random_state, restore_random, set_seed
from strop.models.save import save_model
from strop.tracking.display import Display, Summary, make_display
from strop.tracking.metrics import MetricsWriter
from strop.training.checkpoint import save_checkpoint

GIB = 1 << 30


class BaseRun(ABC):
    """One run. `open` makes it; a loop calls its verbs in turn.

    step: steps that are done. before, after: held-out scores.
    """

    def __init__(self, prepared: Any, roles: Roles, opened: OpenedFolder, display: Display) -> None:
        self.config: Config = prepared.config
        self.step = 0
        self.before: dict[str, float] = {}
        self.after: dict[str, float] = {}
        self.prepared = prepared
        self.roles = roles
        self.display = display
        self.directory = opened.directory
        self.metrics: MetricsWriter = opened.metrics
        self.trainer: Any = None
        self._times: dict[str, float] = {}
        self._tokens = {"sampled": 0, "trained": 0}
        self._started = time.perf_counter()
        self._saved_at: int | None = None
        self._resumed = opened.checkpoint is not None

    @property
    def folder(self) -> Path:
        """The run's folder."""
        return self.directory.path

    @classmethod
    async def open(cls, prepared: Any, *, fresh: bool, recipe: str | None) -> Self:
        """Load, and go to where the run had stopped.

        Raises:
            UserError: the run cannot be gone on with; nothing was written.
        """
        torch.set_num_threads(prepared.hardware.threads)
        torch.use_deterministic_algorithms(True, warn_only=True)
        # Nothing here reads memory that was not written; filling it first costs some hundredths of a step.
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
        set_seed(prepared.config.run.seed)
        display = make_display(prepared.config.tracking)
        try:
            roles, others = cls._load(prepared)
            opened = open_folder(prepared, roles, display, fresh=fresh, recipe=recipe)
        except BaseException:
            display.close()
            raise
        try:
            run = cls(prepared, roles, opened, display, **others)
            await run._restore(opened)
            run._show_start(opened)
            return run
        except BaseException as error:
            display.close()
            opened.close(error)
            raise

    # What a kind of run has to say.

    @classmethod
    @abstractmethod
    def _load(cls, prepared: Any) -> tuple[Roles, dict[str, Any]]:
        """The model, and what else `__init__` takes by name."""

    @abstractmethod
    async def _take_back(self, checkpoint: Path, state: dict[str, Any]) -> None:
        """Go to where a checkpoint was written, as far as this class does not do it itself."""

    @abstractmethod
    def _state(self, folder: Path) -> dict[str, Any]:
        """What `_take_back` needs: files below `folder`, and the rest as JSON-ready values."""

    @abstractmethod
    async def _score_held_out(self) -> dict[str, float]:
        """Scores of the model as it is, on the held-out data, which is there."""

    @abstractmethod
    def _about(self) -> dict[str, str]:
        """What the display says of the run beside model, data and device."""

    # Verbs that all loops call.

    async def evaluate_and_save_if_due(self) -> None:
        """Evaluate and write a checkpoint at the intervals that the recipe names, and after the last step."""
        last = self.step >= self.config.run.steps
        every = self.config.evaluation.every
        if last or (every and self.step % every == 0):
            await self.evaluate()
        if last or self.step % self.config.checkpoint.every == 0:
            self.save()

    async def evaluate(self) -> dict[str, float]:
        """Scores on held-out data with the weights as they are; empty without `data.eval`."""
        if self.prepared.held_out is None:
            return {}
        self.display.phase("evaluating")
        self.after = await self._score_held_out()
        if not self.before:
            self.before = dict(self.after)
        self.metrics.log(self.step, {f"eval/{name}": value for name, value in self.after.items()}, kind="eval")
        self.display.evaluation(self.step, self.after)
        self.directory.update(scores={"before": self.before, "after": self.after})
        return self.after

    def save(self) -> Path:
        """Write a checkpoint of this step."""
        if self._saved_at == self.step:
            return self.directory.checkpoints_folder / f"step-{self.step:06d}"
        self.display.phase("saving")
        started = time.perf_counter()
        folder = save_checkpoint(
            self.directory.checkpoints_folder, self.step, self._write, keep=self.config.checkpoint.keep
        )
        self._saved_at = self.step
        self._times["time/checkpoint"] = time.perf_counter() - started
        return folder

    async def finish(self) -> Path:
        """Save, say how it ended; returns the folder of the trained model."""
        if not self.after:
            await self.evaluate()
        model = self.save() / "model"
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
            )
        )
        return model

    async def close(self, error: BaseException | None) -> None:
        """Give back everything; the run's manifest notes how it ended."""
        self.display.close()
        self.metrics.close()
        if error is None:
            self.directory.close("finished" if self.step >= self.config.run.steps else "interrupted")
        else:
            close_after(self.directory, error)

    # What the verbs stand on.

    def _next_commands(self) -> list[str]:
        """What the closing summary proposes; made up from the paths when empty."""
        return []

    def _say_if_done(self) -> None:
        if self.step >= self.config.run.steps:
            self.display.message(
                f"all {self.step} steps of this run are done; raise run.steps to go on with it, or start a new run "
                "with --fresh"
            )

    async def _restore(self, opened: OpenedFolder) -> None:
        if opened.checkpoint is None:
            return
        state = opened.state
        self.step = int(state["step"])
        self._saved_at = self.step
        self.before, self.after = dict(state["before"]), dict(state["after"])
        self._tokens = dict(state["tokens"])
        await self._take_back(opened.checkpoint, state)
        restore_random(state["random"])

    def _write(self, folder: Path) -> dict[str, Any]:
        save_model(self.roles.model, self.roles.tokenizer, folder / "model")
        return {
            "step": self.step,
            "before": self.before,
            "after": self.after,
            "tokens": self._tokens,
            **self._state(folder),
            "random": random_state(),
        }

    def _show_start(self, opened: OpenedFolder) -> None:
        facts = {
            "model": f"{self.roles.loaded.name} ({_parameters(self.roles.model)})",
            "data": self.prepared.train.source.describe(),
            **self._about(),
            "device": self.prepared.hardware.reasons[0],
            "sizes": "; ".join(self.roles.sizes.reasons),
            "run": str(self.folder),
        }
        self.display.start(
            self.folder.name,
            self.config.run.steps,
            {name: value for name, value in facts.items() if value},
            first_step=self.step,
            before=self.before or None,
            history=opened.history,
        )


def _parameters(model: Any) -> str:
    total = sum(p.numel() for p in model.parameters())
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)

    def short(count: int) -> str:
        return f"{count / 1e6:.1f}M" if count >= 1e6 else f"{count / 1e3:.0f}k"

    return f"{short(total)} parameters" + ("" if trained == total else f", {short(trained)} trained")
