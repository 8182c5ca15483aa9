"""A run: every part in memory, and the verbs that the loop is written in."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from strop.algorithms.batch import TokenBatch
from strop.data.prompts import PromptStream
from strop.loops import assembly, step_batch
from strop.loops.ahead import Ahead
from strop.loops.algorithm import demands_of
from strop.loops.base_run import GIB, BaseRun
from strop.loops.critic import Critic, SharedCritic
from strop.loops.curriculum import nothing_left, record_window
from strop.loops.evaluate import evaluate, evaluation_settings
from strop.loops.folder import OpenedFolder
from strop.loops.offline import take_recorded
from strop.loops.past import Past
from strop.loops.place import Place, find_place
from strop.loops.prepare import Prepared
from strop.loops.sampling_state import SamplingState
from strop.loops.speed import Speed
from strop.loops.step_record import PromptTexts, columns_beside, episode_columns, rollout_metrics, sample_of
from strop.loops.teacher import Teachers, load_teacher
from strop.loops.turns import Turns
from strop.loops.warmup import warmup_steps
from strop.loops.watch import Watch
from strop.loops.window_choices import told_of_window
from strop.rewards.composition import check_errors
from strop.rollout.collector import Collector, reward_of
from strop.rollout.episode import Episode, Group
from strop.rollout.journal import Journal
from strop.rollout.recorded import RecordedCollector
from strop.rollout.segments import Trained
from strop.tracking.display import Display, StepView
from strop.tracking.episodes import EpisodeColumns, EpisodeWriter, beside, episodes_file
from strop.tracking.system import memory_bytes
from strop.training.batching import trained_tokens
from strop.training.holdings import held_parts
from strop.training.snapshot import Held

if TYPE_CHECKING:
    from strop.loops.stored import StoredWindow


class Run(BaseRun):
    """One run of reinforcement learning. `Run.open` makes it; the loop in `loops/online.py` calls its verbs in turn.

    step: steps that are done, which is also the version of the weights. before, after: held-out scores.
    """

    def __init__(
        self,
        prepared: Prepared,
        place: Place,
        opened: OpenedFolder,
        display: Display,
        teacher: Teachers | None = None,
    ) -> None:
        super().__init__(prepared, place, opened, display)
        roles = self.roles
        self.engine = place.make_engine()
        self.publisher = place.make_publisher(self.engine)
        self.journal = Journal(self.engine)
        self._turns = Turns(
            self.engine,
            self.journal,
            place,
            engine_sleeps=roles.sizes.engine_sleeps,
            trainer_offloads=self.config.training.offload,
            ahead=self.config.rollout.max_staleness > 0,
            in_flight=self.config.rollout.in_flight_updates,
            note=self.spans.note,
        )
        self.algorithm = prepared.algorithm
        self.teacher = teacher
        self.critic: Critic | SharedCritic | None = None
        self._demands = demands_of(prepared.algorithm)
        verifiers = self.config.rewards.verifiers if self.config.rewards is not None else []
        self._environment_weight = sum(v.weight for v in verifiers if v.kind == "environment")
        self.stream: PromptStream = assembly.make_stream(prepared)
        self.player = assembly.make_player(place.world, roles, self.journal)
        self.collector: Collector | RecordedCollector | StoredWindow = assembly.make_collector(
            prepared, roles, self.player, self.stream, lambda done, total: display.progress("sampling", done, total)
        )
        self.past = Past(self.config)
        self._sampling = SamplingState(self.config, self.stream, self.collector, self.journal, self.past)
        self._texts = PromptTexts(prepared.train)
        self._watch = Watch(prepared, self._texts, display, opened.directory)
        self._files = EpisodeWriter()
        self._seen: dict[str, float] = {}
        self._trained = Trained([])
        self._left_out: list[Episode] = []
        self._recorded = False
        self._said_nothing_left = False
        self._batch_metrics: dict[str, float] = {}
        self._staleness: dict[str, float] = {}
        own_critic = self._demands.critic and not self.config.critic.shared
        self._speed = Speed(self.config, roles, own_critic=own_critic)
        self._ahead = Ahead(self.config, shares_weights=place.shares_weights)
        self._served: int | None = None
        self._begun = False
        self._evaluated_at: int | None = None

    # The verbs of the loop, in the order in which it calls them.

    async def begin(self) -> None:
        """Warm up and score the model, unless the run has gone past that."""
        if text := told_of_window(self.config):
            self.display.message(text, "warning")
        if self.place.world is not None:
            await self.place.world.factory.open()
        # What is made ahead begins with the first weights, and needs environments.
        self._begun = True
        if self._resumed:
            self._watch.go_on()
            self._say_if_done()
            if self._served is not None:
                self.collector.serve(self._served)
            if self._evaluated_at == self.step and not self.done:
                await self.evaluate()
            return
        if self.config.warmup is not None:
            await self._turns.engine_done()
            await self.place.aside(self._warm_up)
        await self.place.aside(self._make_trainer)
        await self._publish()
        await self.evaluate()
        await self.save()

    async def collect(self) -> list[Group]:
        """The next window: sampled or read, scored, in order of admission."""
        self._begin_step()
        await self._wake()
        self.display.phase(self.collector.phase)
        started = time.perf_counter()
        self.spans.begin(started)
        self.journal.take_idle()
        curriculum = self.stream.curriculum
        if curriculum is not None:
            curriculum.start_step()
        groups = await self.collector.next_window(self.step)
        self.journal.forget(group.number for group in groups)
        if curriculum is not None:
            record_window(curriculum, groups, self.collector.discarded, self.config)
        # Of a window that was there already nothing was waited for.
        sampled = max(started, self.collector.last_completion)
        self._times = {
            "time/sampling": self._note(self.collector.phase, started, sampled),
            "time/verifying": self._note("verifying", sampled),
        }
        self._times["start"] = started
        self._times |= await self._turns.engine_done()
        return groups

    async def build_batch(self, groups: Sequence[Group]) -> TokenBatch:
        """Leave out what cannot be trained, ask the roles for their log-probabilities, compute advantages.

        Raises:
            RunFailure: too many episodes could not be verified, or none was left.
        """
        return await self.place.aside(lambda: self._build_batch(groups))

    def _build_batch(self, groups: Sequence[Group]) -> TokenBatch:
        self.display.phase("scoring")
        started = time.perf_counter()
        collector = self.collector
        episodes = [e for group in [*groups, *collector.discarded] for e in group.episodes]
        judged = [*episodes, *collector.baselines.values()]
        # Of most steps none has failed, and no reward need be made of each.
        if self._judges and not all(e.status is None or e.status.trainable for e in judged):
            assert self.config.rewards is not None
            check_errors([reward_of(e) for e in judged], first_step=self.step == 0, settings=self.config.rewards)
        joined = self.past.join(groups, self.step)
        baselines = collector.baselines | self.past.baselines
        chosen = step_batch.choose(joined, self._demands, baselines)
        batch, self._trained = step_batch.lay_out(
            chosen, self._demands, baselines, environment_weight=self._environment_weight
        )
        self._left_out = chosen.left_out
        if self.config.offline is None:
            self._staleness = self.past.check(batch, self._trained, self.step)
        else:
            own = self._are_own(groups)
            self._recorded = take_recorded(batch, self.config, self._demands, self.trainer, own=own)
        self._batch_metrics = step_batch.group_metrics(
            groups, collector.discarded, collector.refills, () if chosen.silent else self.past.fresh(self._trained)
        )
        self._batch_metrics |= step_batch.fill(
            batch, self.algorithm, self._demands, self.trainer, self.teacher, self.critic
        )
        self._batch_metrics |= self.past.keep(chosen, baselines, self._trained, batch)
        self._times["time/scoring"] = self._note("scoring", started)
        return batch

    async def update(self, batch: TokenBatch) -> dict[str, float]:
        """All updates of this step; returns metrics."""
        async with self.publisher.updating(self.step + 1):
            return await self.place.aside(lambda: self._update(batch))

    def _update(self, batch: TokenBatch) -> dict[str, float]:
        self.display.phase("training")
        self._times |= self._turns.update_next(*self._trainers)
        started = time.perf_counter()
        alone = False
        stats: dict[str, float]
        if self.critic is None:
            stats = self.trainer.update(batch, self.algorithm)
        else:
            alone = self.step < self.config.critic.warmup_steps
            stats = self.critic.update_both(batch, self.trainer, alone=alone)
        # Where a correction has measured the mismatch, it did so before it took tokens out.
        stats |= step_batch.mismatch(batch, recorded=self._recorded) | self._batch_metrics
        if self.config.rollout.off_policy:
            stats |= step_batch.policies(batch)
        self._times["time/training"] = self._note("training", started)
        stats |= self._speed.figures(batch, stats, self._times, whole=not alone)
        return stats

    async def publish(self) -> dict[str, float]:
        """Make the engine serve the weights of this step, and prove it, if this step is one to publish at."""
        if self._ahead.stays(self.step, served=self._served):
            return {}
        await self._ahead.evaluated()
        return await self._publish()

    async def _publish(self) -> dict[str, float]:
        self._times |= await self._turns.trainer_done(*self._trainers)
        started = time.perf_counter()
        await self._turns.publication_next()
        found = await self.publisher.publish(self.trainer, version=self.step)
        self._times["time/publishing"] = self._note("publishing", started)
        self._times |= {name: value for name, value in found.items() if name != "publish/version"}
        await self._turns.published()
        self._served = self.step
        if self._begun:
            self.collector.serve(self.step)
        return found

    async def look(self, groups: Sequence[Group]) -> dict[str, float]:
        """Look for signs that the reward is being hacked, and ask the second opinion, if there is one."""
        started = time.perf_counter()
        sampled = [*groups, *self.collector.discarded]
        self._seen = await self._watch.look(self.step, sampled, self.evaluations)
        self._times["time/alarms"] = self._note("alarms", started)
        return self._seen

    def record(self, groups: Sequence[Group], batch: TokenBatch, stats: dict[str, float]) -> dict[str, float]:
        """Write the step's metrics and episodes, and show them; returns all metrics.

        The file of the episodes is there a moment later, and at the latest when a checkpoint is.

        Raises:
            RunFailure: an alarm was raised, and `alarms.action` is `stop`. OSError: the episodes of this step or the
                one before cannot be written.
        """
        started = time.perf_counter()
        metrics = self._figures = self.step_metrics(groups, batch, stats) | self._seen
        self._tokens["sampled"] += int(metrics.get("tokens/sampled", 0))
        self._tokens["trained"] += int(metrics["tokens/trained"])
        self.metrics.log(self.step, metrics)
        # Behind the line of this step, so that whoever goes on from the evaluated one and evaluates anew drops it.
        self._take_evaluation()
        sample = sample_of(groups, self._texts, self.step)
        self.display.step(StepView(self.step, self.config.run.steps, metrics, sample))
        self._warn_of_curriculum(metrics)
        self._write_episodes(batch)
        self._note("recording", started)
        self.spans.sampled(self.journal.take_busy(), self.collector.verifying.take())
        self.spans.write(self.step, metrics["time/step"])
        self._watch.stop_if_asked()
        return metrics

    def _write_episodes(self, batch: TokenBatch) -> None:
        """Begin to write those of this step; after all trackers, which wait for threads of their own, and these run
        slower beside the one that writes."""
        every = self.config.tracking.episodes_every
        if every and self.step % every == 0:
            path = episodes_file(self.directory.episodes_folder, self.step)
            self._files.write(path, self.step_episodes(batch))
            compared = self.collector.baselines | self.past.baselines
            others = columns_beside(compared, self.collector.discarded, self._texts)
            if others.lengths:
                self._files.write(beside(path), others)

    def step_metrics(self, groups: Sequence[Group], batch: TokenBatch, stats: dict[str, float]) -> dict[str, float]:
        """All metrics of the step that was trained last."""
        started = self._times.pop("start")
        # What was sampled and replaced counts too: the reward of the groups that are left says little of the policy.
        sampled = [*groups, *self.collector.discarded]
        metrics = rollout_metrics(sampled, max_new_tokens=self.config.rollout.max_new_tokens)
        metrics |= stats | self._times | self._take_waited()
        if self.stream.curriculum is not None:
            metrics |= self.stream.curriculum.metrics()
        tokens, seconds = metrics["tokens/sampled"], time.perf_counter() - started
        if self.config.offline is None:
            metrics |= self._overlap(tokens, seconds)
            if self.config.rollout.max_staleness:
                metrics |= self.journal.metrics()
            metrics |= self._staleness | self.collector.window_metrics
        else:
            # Nobody sampled anything, and versions count the steps of another run.
            metrics["tokens/read"] = metrics.pop("tokens/sampled")
        if self._demands.asks:
            scored = batch.input_ids.shape[0] / max(metrics["time/scoring"], 1e-9)
            metrics["throughput/scoring_tokens_per_second"] = scored
        return metrics | {
            "tokens/trained": float(trained_tokens(batch)),
            "time/step": seconds,
            "throughput/tokens_per_second": tokens / seconds,
            "throughput/completions_per_minute": 60 * sum(len(g.episodes) for g in sampled) / seconds,
            "memory/process_gib": memory_bytes()["process"] / GIB,
        }

    def _overlap(self, tokens: float, seconds: float) -> dict[str, float]:
        """How quickly it was sampled, and the share of the step in which trainer and engine had nothing to do."""
        waited, idle = self._times["time/sampling"], min(self.journal.take_idle(), seconds)
        busy = seconds - idle if self.config.rollout.max_staleness else waited
        return {
            "throughput/sampling_tokens_per_second": tokens / max(busy, 1e-9),
            "bubble/trainer": (waited + self._times["time/verifying"]) / seconds,
            "bubble/engine": idle / seconds,
        }

    def step_episodes(self, batch: TokenBatch) -> EpisodeColumns:
        """The episodes of the step that was trained last, token by token."""
        return self.past.mark(episode_columns(self._trained, batch, self._left_out, self._texts))

    async def close(self, error: BaseException | None) -> None:
        """Give back everything; the run's manifest notes how it ended."""
        self.display.close()
        await self._ahead.close()
        await self.collector.close()
        await self.engine.close()
        if self.place.world is not None:
            await self.place.world.factory.close()
        for scorer in (self.prepared.scorer, self.prepared.held_out_scorer):
            if scorer is not None:
                await scorer.close()
        await self._watch.close()
        unwritten = self._files.close()
        await super().close(error or unwritten)
        if error is None and unwritten is not None:
            raise unwritten

    # What the verbs stand on.

    def _warm_up(self) -> None:
        assert self.config.warmup is not None
        settings = self.config.warmup
        self.display.phase("warming up")
        trainer = self.place.make_trainer(settings.optimizer, total_updates=settings.steps, reinforcement=False)
        steps = warmup_steps(
            trainer, self.prepared.demonstrations, self.roles.tokenizer, settings, seed=self.config.run.seed + 1
        )
        for step, stats in steps:
            self.metrics.log(step, stats, kind="warmup")
            self.display.step(StepView(step, settings.steps, stats, kind="warmup"))
        trainer.close()
        if self.prepared.needs_reference:
            self.place.save_reference(self.folder)

    @property
    def _trainers(self) -> list[Any]:
        """What has state for its updates."""
        return [self.trainer] if self.critic is None else [self.trainer, self.critic]

    async def _wake(self) -> None:
        """Where the engine sleeps it gets the weights as they are; in the loop a publication was before."""
        if self._turns.asleep:
            await self._publish()

    def _make_trainer(self) -> None:
        training = self.config.training
        updates = self.config.run.steps * training.mini_batches * training.epochs
        self.trainer = self.place.make_trainer(training.optimizer, total_updates=updates, reinforcement=True)
        self.critic = self.place.make_critic(self.trainer)

    def _warn_of_curriculum(self, metrics: dict[str, float]) -> None:
        curriculum = self.stream.curriculum
        if curriculum is None or self._said_nothing_left:
            return
        if text := nothing_left(metrics, curriculum.rows):
            self.display.message(text, "warning")
            self._said_nothing_left = True

    @classmethod
    async def _load(cls, prepared: Prepared) -> tuple[Place, dict[str, Any]]:
        if prepared.scorer is not None:
            prepared.scorer.load()
        if prepared.held_out is not None and prepared.held_out_scorer is not None:
            prepared.held_out_scorer.load()
        if prepared.second_scorer is not None:
            prepared.second_scorer.load()
        place = await find_place(prepared)
        return place, {"teacher": load_teacher(prepared, place.roles)}

    async def _take_back(self, checkpoint: Path, state: dict[str, Any]) -> None:
        if text := self._sampling.take_back(checkpoint / "state", state):
            self.display.message(text)
        self._evaluated_at = state.get("evaluating")
        self._watch.load(state.get("alarms"))
        await self.take_back_weights(checkpoint, state)

    async def take_back_weights(self, checkpoint: Path, state: dict[str, Any]) -> None:
        """Go to the weights of a checkpoint, with all that their next update depends on."""

        def take_back() -> None:
            self.place.restore_reference(self.folder)
            self._make_trainer()
            self.trainer.load(checkpoint / "state", state["trainer"])
            if self.critic is not None:
                self.critic.load(checkpoint / "state" / "critic", state["critic"])

        await self.place.aside(take_back)
        await self._publish()

    async def save(self) -> Path:
        if self._ahead.evaluating not in (None, self.step) and not self.leaving:
            # An evaluation of the weights of this step can be begun again; those of another are gone.
            await self._ahead.evaluated()
            self._take_evaluation()
        await self._sampling.note()
        return await super().save()

    def _save(self) -> Path:
        # Whoever goes on from a checkpoint finds the episodes of all steps before it.
        self._files.wait()
        return super()._save()

    def _parts(self, trainer: Held, *, behind: bool) -> Callable[[Path], dict[str, Any]]:
        critic = None
        if self.critic is not None:
            critic = self.critic.hold() if behind else self.critic.save
        values, write_sampling = self._sampling.held()
        values |= copy.deepcopy({"evaluating": self._ahead.evaluating, "alarms": self._watch.state()})

        def write(folder: Path) -> dict[str, Any]:
            write_sampling(folder / "state")
            return {
                **values,
                "trainer": trainer.save(folder / "state"),
                "critic": None if critic is None else critic(folder / "state" / "critic"),
            }

        return write

    def _held_bytes(self) -> tuple[int, int]:
        needed, free = super()._held_bytes()
        return needed + (0 if self.critic is None else self.critic.held_bytes()[0]), free

    def _held_in_memory(self) -> dict[str, int]:
        found = super()._held_in_memory()
        if self.critic is not None and self.critic.trainer is not self.trainer:
            found["critic"] = sum(held_parts(self.critic.trainer).values())
        extra = self.engine.take_stats().extra
        for name, key in (("kv cache", "kv_cache_bytes"), ("joined weights", "joined_bytes")):
            if held := extra.get(key):
                found[name] = int(held)
        return found

    async def evaluate(self) -> dict[str, float]:
        """See `BaseRun`; where training need not wait for it, the scores come with a later step."""
        await self._ahead.evaluated()
        self._take_evaluation()
        if self.prepared.held_out is None:
            return {}
        if self._served not in (None, self.step):
            # The scores are those of this step's weights (`rollout.update_every`).
            await self._publish()
        if not self._ahead.evaluates_beside or self.step == 0 or self.done:
            return await super().evaluate()
        self._ahead.evaluate(self.step, self._score_held_out(), self.spans.note)
        return {}

    def _take_evaluation(self) -> None:
        found = self._ahead.take()
        if found is not None:
            self.log_scores(*found)

    async def _score_held_out(self) -> dict[str, float]:
        await self._wake()
        scores, episodes = await evaluate(
            self.player,
            self.prepared.held_out_scorer,
            self.prepared.held_out,
            evaluation_settings(self.config),
            prompts=self.config.evaluation.prompts,
            samples=self.config.evaluation.samples,
            progress=lambda done, total: self.display.progress("evaluating", done, total),
        )
        served = {int(version) for e in episodes for turn in e.turns for version in turn.versions}
        if len(served) > 1:
            # All engines were lost at once, and others have taken their places with newer weights.
            self.display.message("the evaluation began again: its engines were lost, and with them their weights")
            return await self._score_held_out()
        rewards = [reward_of(e) for e in episodes]
        key = "rewards.verifiers" if self.config.evaluation.verifiers is None else "evaluation.verifiers"
        assert self.config.rewards is not None
        check_errors(rewards, first_step=self.step == 0, settings=self.config.rewards, key=key)
        return scores.metrics()

    def _about(self) -> dict[str, str]:
        rollout = self.config.rollout
        if self.config.offline is not None:
            sizes = f"{rollout.groups_per_step} groups a step"
            return {"algorithm": f"{self.algorithm.name}, {sizes}", "offline": self.prepared.about}
        sizes = f"{rollout.groups_per_step} prompts x {rollout.group_size} completions a step"
        return {"algorithm": f"{self.algorithm.name}, {sizes}", "ahead": self._ahead.told(self.algorithm)}

    def _alarm_lines(self) -> list[str]:
        return self._watch.lines()

    @property
    def _judges(self) -> bool:
        """Whether this run's verifiers score what is trained."""
        return self.config.offline is None or self.config.offline.rewards == "verify"

    def _are_own(self, groups: Sequence[Group]) -> bool:
        """Whether recorded completions were sampled by the weights as they are now: those of the start, not yet
        trained."""
        untrained = self.step <= (self.config.critic.warmup_steps if self.critic is not None else 0)
        return untrained and isinstance(self.collector, RecordedCollector) and self.collector.own(groups)
