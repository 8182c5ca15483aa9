"""A run: every part in memory, and the verbs that the loop is written in."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from strop.algorithms.batch import TokenBatch
from strop.config import Config
from strop.data.prompts import PromptStream
from strop.errors import RunFailure
from strop.loops import assembly, step_batch
from strop.loops.algorithm import demands_of
from strop.loops.critic import Critic, make_critic
from strop.loops.evaluate import evaluate, evaluation_settings
from strop.loops.folder import OpenedFolder, close_after, open_folder
from strop.loops.prepare import Prepared
from strop.loops.randomness import random_state, restore_random, set_seed
from strop.loops.step_record import PromptTexts, episode_records, rollout_metrics, sample_of
from strop.loops.teacher import Teacher, load_teacher
from strop.loops.warmup import warmup_steps
from strop.models.save import save_model
from strop.rewards.composition import check_errors
from strop.rollout.collector import reward_of
from strop.rollout.episode import Episode, Group, TokenStream
from strop.tracking.display import Display, StepView, Summary, make_display
from strop.tracking.episodes import write_episodes
from strop.tracking.metrics import MetricsWriter
from strop.tracking.system import memory_bytes
from strop.training.checkpoint import save_checkpoint

GIB = 1 << 30


class Run:
    """One run of reinforcement learning. `Run.open` makes it; the loop in `loops/online.py` calls its verbs in turn.

    step: steps that are done, which is also the version of the weights. before, after: held-out scores.
    """

    def __init__(
        self,
        prepared: Prepared,
        roles: assembly.Roles,
        opened: OpenedFolder,
        display: Display,
        teacher: Teacher | None = None,
    ) -> None:
        self.config: Config = prepared.config
        self.step = 0
        self.before: dict[str, float] = {}
        self.after: dict[str, float] = {}
        self.prepared = prepared
        self.roles = roles
        self.display = display
        self.directory = opened.directory
        self.metrics: MetricsWriter = opened.metrics
        self.engine = assembly.make_engine(prepared, roles)
        self.publisher = assembly.make_publisher(roles, self.engine)
        self.algorithm = prepared.algorithm
        self.teacher = teacher
        self._demands = demands_of(prepared.algorithm)
        self.stream: PromptStream = assembly.make_stream(prepared)
        self.collector = assembly.make_collector(
            prepared, roles, self.engine, self.stream, lambda done, total: display.progress("sampling", done, total)
        )
        self.trainer: Any = None
        self.critic: Critic | None = None
        self._texts = PromptTexts(prepared.train)
        self._trained: list[tuple[Episode, TokenStream]] = []
        self._left_out: list[Episode] = []
        self._batch_metrics: dict[str, float] = {}
        self._times: dict[str, float] = {}
        self._tokens = {"sampled": 0, "trained": 0}
        self._started = time.perf_counter()
        self._saved_at: int | None = None
        self._evaluated_at: int | None = None
        self._resumed = opened.checkpoint is not None

    @property
    def folder(self) -> Path:
        """The run's folder."""
        return self.directory.path

    @classmethod
    async def open(cls, prepared: Prepared, *, fresh: bool, recipe: str | None) -> Run:
        """Load, and go to where the run had stopped.

        Raises:
            UserError: the run cannot be gone on with; nothing was written.
        """
        config = prepared.config
        torch.set_num_threads(prepared.hardware.threads)
        torch.use_deterministic_algorithms(True, warn_only=True)
        set_seed(config.run.seed)
        display = make_display(config.tracking)
        try:
            roles = assembly.load_roles(prepared)
            teacher = load_teacher(prepared, roles)
            opened = open_folder(prepared, roles, display, fresh=fresh, recipe=recipe)
        except BaseException:
            display.close()
            raise
        try:
            run = cls(prepared, roles, opened, display, teacher)
            await run._restore(opened)
            run._show_start(opened)
            return run
        except BaseException as error:
            display.close()
            opened.close(error)
            raise

    # The verbs of the loop, in the order in which it calls them.

    async def begin(self) -> None:
        """Warm up and score the model, unless the run has gone past that."""
        if self._resumed:
            if self.step >= self.config.run.steps:
                self.display.message(
                    f"all {self.step} steps of this run are done; raise run.steps to go on with it, or start a new run "
                    "with --fresh"
                )
            return
        if self.config.warmup is not None:
            self._warm_up()
            if self.algorithm.needs_reference:
                assembly.save_reference(self.folder, self.roles)
        self._make_trainer()
        await self.publish()
        await self.evaluate()
        self.save()

    async def collect(self) -> list[Group]:
        """The next window: sampled, scored, in order of admission."""
        self._phase("sampling")
        started = time.perf_counter()
        groups = await self.collector.next_window(self.step)
        ended = time.perf_counter()
        self._times = {
            "time/sampling": self.collector.last_completion - started,
            "time/verifying": ended - self.collector.last_completion,
        }
        self._times["start"] = started
        return groups

    def build_batch(self, groups: Sequence[Group]) -> TokenBatch:
        """Leave out what cannot be trained, ask the roles for their log-probabilities, compute advantages.

        Raises:
            RunFailure: too many episodes could not be verified, or none was left.
        """
        self._phase("scoring")
        started = time.perf_counter()
        collector = self.collector
        episodes = [e for group in [*groups, *collector.discarded] for e in group.episodes]
        judged = [*episodes, *collector.baselines.values()]
        check_errors([reward_of(e) for e in judged], first_step=self.step == 0, settings=self.config.rewards)
        chosen = step_batch.choose(groups, self._demands, collector.baselines)
        batch, self._trained = step_batch.lay_out(chosen, self._demands, collector.baselines)
        self._left_out = chosen.left_out
        self._check_staleness(batch)
        self._batch_metrics = step_batch.group_metrics(
            groups, collector.discarded, collector.refills, [] if chosen.silent else self._trained
        )
        self._batch_metrics |= step_batch.fill(
            batch, self.algorithm, self._demands, self.trainer, self.teacher, self.critic
        )
        self._times["time/scoring"] = time.perf_counter() - started
        return batch

    def update(self, batch: TokenBatch) -> dict[str, float]:
        """All updates of this step; returns metrics."""
        self._phase("training")
        started = time.perf_counter()
        stats: dict[str, float] = {}
        if self.critic is None or self.step >= self.config.critic.warmup_steps:
            stats = self.trainer.update(batch, self.algorithm)
        else:
            batch.extra["logprobs"] = self.trainer.logprobs(batch)
        if self.critic is not None:
            stats |= self.critic.update(batch)
        # Where a correction has measured the mismatch, it did so before it took tokens out.
        stats |= step_batch.mismatch(batch) | self._batch_metrics
        self._times["time/training"] = time.perf_counter() - started
        return stats

    async def publish(self) -> dict[str, float]:
        """Make the engine serve the weights of this step, and prove it."""
        started = time.perf_counter()
        found = await self.publisher.publish(self.trainer, version=self.step)
        self._times["time/publishing"] = time.perf_counter() - started
        self._times["publish/probe_gap"] = found["publish/probe_gap"]
        return found

    def record(self, groups: Sequence[Group], batch: TokenBatch, stats: dict[str, float]) -> dict[str, float]:
        """Write the step's metrics and episodes, and show them; returns all metrics."""
        started = self._times.pop("start")
        # What was sampled and replaced counts too: the reward of the groups that are left says little of the policy.
        sampled = [*groups, *self.collector.discarded]
        metrics = rollout_metrics(sampled, max_new_tokens=self.config.rollout.max_new_tokens)
        metrics |= stats | self._times
        trained = float(batch.loss_mask.sum())
        seconds = time.perf_counter() - started
        metrics |= {
            "tokens/trained": trained,
            "staleness/max": float(self.step - 1 - batch.versions[batch.versions >= 0].min()),
            "time/step": seconds,
            "throughput/tokens_per_second": metrics["tokens/sampled"] / seconds,
            "throughput/completions_per_minute": 60 * sum(len(g.episodes) for g in sampled) / seconds,
            "memory/process_gib": memory_bytes()["process"] / GIB,
        }
        self._tokens["sampled"] += int(metrics["tokens/sampled"])
        self._tokens["trained"] += int(trained)
        every = self.config.tracking.episodes_every
        if every and self.step % every == 0:
            records = episode_records(self._trained, batch, self._left_out, self._texts)
            write_episodes(self.directory.episodes_folder / f"step-{self.step:06d}.parquet", records)
        self.metrics.log(self.step, metrics)
        sample = sample_of(groups, self._texts, self.step)
        self.display.step(StepView(self.step, self.config.run.steps, metrics, sample))
        return metrics

    async def evaluate_and_save_if_due(self) -> None:
        """Evaluate and write a checkpoint at the intervals that the recipe names, and after the last step."""
        last = self.step >= self.config.run.steps
        every = self.config.evaluation.every
        if last or (every and self.step % every == 0):
            await self.evaluate()
        if last or self.step % self.config.checkpoint.every == 0:
            self.save()

    async def evaluate(self) -> dict[str, float]:
        """Score held-out prompts with the weights as they are; empty without `data.eval`."""
        if self.prepared.held_out is None:
            return {}
        self._phase("evaluating")
        scores, episodes = await evaluate(
            self.engine,
            self.prepared.scorer,
            self.roles.tokenizer,
            self.prepared.held_out,
            evaluation_settings(self.config),
            prompts=self.config.evaluation.prompts,
            samples=self.config.evaluation.samples,
            progress=lambda done, total: self.display.progress("evaluating", done, total),
        )
        rewards = [reward_of(e) for e in episodes]
        check_errors(rewards, first_step=self.step == 0, settings=self.config.rewards)
        self.after = scores.metrics()
        if not self.before:
            self.before = dict(self.after)
        self._evaluated_at = self.step
        self.metrics.log(self.step, {f"eval/{name}": value for name, value in self.after.items()}, kind="eval")
        self.display.evaluation(self.step, self.after)
        self.directory.update(scores={"before": self.before, "after": self.after})
        return self.after

    def save(self) -> Path:
        """Write a checkpoint of this step."""
        if self._saved_at == self.step:
            return self.directory.checkpoints_folder / f"step-{self.step:06d}"
        self._phase("saving")
        started = time.perf_counter()
        folder = save_checkpoint(
            self.directory.checkpoints_folder, self.step, self._write, keep=self.config.checkpoint.keep
        )
        self._saved_at = self.step
        self._times["time/checkpoint"] = time.perf_counter() - started
        return folder

    async def finish(self) -> Path:
        """Save, say how it ended; returns the folder of the trained model."""
        if self._evaluated_at is None and self.prepared.held_out is not None and not self.after:
            await self.evaluate()
        model = self.save() / "model"
        self.display.finish(self._summary(model))
        return model

    async def close(self, error: BaseException | None) -> None:
        """Give back everything; the run's manifest notes how it ended."""
        self.display.close()
        await self.collector.close()
        await self.engine.close()
        await self.prepared.scorer.close()
        self.metrics.close()
        if error is None:
            self.directory.close("finished" if self.step >= self.config.run.steps else "interrupted")
        else:
            close_after(self.directory, error)

    # What the verbs stand on.

    def _warm_up(self) -> None:
        assert self.config.warmup is not None
        settings = self.config.warmup
        self._phase("warming up")
        trainer = assembly.make_trainer(
            self.prepared, self.roles, settings.optimizer, total_updates=settings.steps, reinforcement=False
        )
        steps = warmup_steps(
            trainer, self.prepared.demonstrations, self.roles.tokenizer, settings, seed=self.config.run.seed + 1
        )
        for step, stats in steps:
            self.metrics.log(step, stats, kind="warmup")
            self.display.step(StepView(step, settings.steps, stats, kind="warmup"))
        trainer.close()

    def _make_trainer(self) -> None:
        training = self.config.training
        updates = self.config.run.steps * training.mini_batches * training.epochs
        self.trainer = assembly.make_trainer(
            self.prepared, self.roles, training.optimizer, total_updates=updates, reinforcement=True
        )
        self.critic = make_critic(self.prepared, self.roles)

    async def _restore(self, opened: OpenedFolder) -> None:
        if opened.checkpoint is None:
            return
        state = opened.state
        self.step = int(state["step"])
        self._saved_at = self.step
        self.before, self.after = dict(state["before"]), dict(state["after"])
        self._tokens = dict(state["tokens"])
        self.stream.load(state["prompts"])
        self.collector.admission.started = int(state["started_groups"])
        assembly.restore_reference(self.folder, self.roles)
        self._make_trainer()
        self.trainer.load(opened.checkpoint / "state", state["trainer"])
        if self.critic is not None:
            self.critic.load(opened.checkpoint / "state" / "critic", state["critic"])
        restore_random(state["random"])
        await self.publish()

    def _write(self, folder: Path) -> dict[str, Any]:
        save_model(self.roles.model, self.roles.tokenizer, folder / "model")
        return {
            "step": self.step,
            "before": self.before,
            "after": self.after,
            "tokens": self._tokens,
            "prompts": self.stream.state(),
            "started_groups": self.collector.admission.started,
            "trainer": self.trainer.save(folder / "state"),
            "critic": None if self.critic is None else self.critic.save(folder / "state" / "critic"),
            "random": random_state(),
        }

    def _check_staleness(self, batch: TokenBatch) -> None:
        age = self.step - batch.versions[batch.versions >= 0]
        oldest, youngest = int(age.max()), int(age.min())
        if oldest > self.config.rollout.max_staleness or youngest < 0:
            raise RunFailure(
                f"a token of this step is {oldest} versions old, and at most {self.config.rollout.max_staleness} is "
                "allowed",
                mend="this is a fault of strop; please report it",
            )

    def _phase(self, name: str) -> None:
        self.display.phase(name)

    def _show_start(self, opened: OpenedFolder) -> None:
        config = self.config
        facts = model_facts(
            self.roles,
            self.prepared,
            self.folder,
            algorithm=f"{self.algorithm.name}, {config.rollout.groups_per_step} prompts x "
            f"{config.rollout.group_size} completions a step",
        )
        self.display.start(
            self.folder.name,
            config.run.steps,
            facts,
            first_step=self.step,
            before=self.before or None,
            history=opened.history,
        )

    def _summary(self, model: Path) -> Summary:
        return Summary(
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
        )


def model_facts(roles: assembly.Roles, prepared: Any, folder: Path, **more: str) -> dict[str, Any]:
    """What a display says of a run when it begins."""
    facts = {
        "model": f"{roles.loaded.name} ({_parameters(roles.model)})",
        "data": prepared.train.source.describe(),
        **more,
        "device": prepared.hardware.reasons[0],
        "sizes": "; ".join(roles.sizes.reasons),
        "run": str(folder),
    }
    return {name: value for name, value in facts.items() if value}


def _parameters(model: Any) -> str:
    total = sum(p.numel() for p in model.parameters())
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)

    def short(count: int) -> str:
        return f"{count / 1e6:.1f}M" if count >= 1e6 else f"{count / 1e3:.0f}k"

    return f"{short(total)} parameters" + ("" if trained == total else f", {short(trained)} trained")
