"""`strop rollout`: completions of a recipe's prompts in a file, for training on them later and for reading them."""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from strop.config import Config
from strop.config.model import ModelSettings
from strop.errors import UserError
from strop.loops.engine_choices import check_engine, refuse_servers
from strop.loops.event_loop import run_to_end
from strop.loops.prepare import longest_prompt, prompt_dataset
from strop.paths import user_path
from strop.sandbox.build import SharedSandbox
from strop.tracking.rollouts import RolloutFile, check_target, rollout_row

if TYPE_CHECKING:
    from strop.data.prompts import Prompt, PromptDataset
    from strop.models.load import ModelFacts
    from strop.planning.hardware import Hardware
    from strop.rewards.protocol import Scorer
    from strop.rollout.episode import Episode, Group


@dataclass
class PreparedRollout:
    """A recipe whose prompts can be sampled from; names are those of `Prepared`. greedy: the algorithm also wants the
    most likely completion of each prompt."""

    config: Config
    hardware: Hardware
    facts: ModelFacts
    train: PromptDataset
    scorer: Scorer | None
    longest: int
    greedy: bool

    @property
    def per_group(self) -> int:
        """Rows of each prompt."""
        return self.config.rollout.group_size + self.greedy


@dataclass(frozen=True)
class RolloutSummary:
    """What was written. reward, accuracy, length: means; NaN where there is nothing to take one of. errors: completions
    that a verifier failed on. resumed: prompts that were there already."""

    path: Path
    prompts: int
    completions: int
    reward: float
    accuracy: float
    length: float
    errors: int
    resumed: int


def rollout(
    config: Config,
    out: str | Path,
    *,
    run: str | Path | None = None,
    checkpoint: int | None = None,
    prompts: int | None = None,
    samples: int | None = None,
    force: bool = False,
) -> RolloutSummary:
    """Sample completions of the training prompts, score them if the recipe can, and write them to a file.

    Prompts come in the order in which a run would take them, and draws are those of its first steps: the rollouts of a
    recipe are what its run would sample if the weights never changed.

    Args:
        config: the recipe, or that of `run`. out: a `.jsonl` or `.parquet` file.
        run: sample with the weights of a run. checkpoint: those of this step; of the latest checkpoint if None.
        prompts: how many; each of the dataset once if None. samples: of each; `rollout.group_size` if None.
        force: replace the file if it is there.

    Raises:
        UserError: something cannot work; nothing was written.
        RunFailure: something failed on the way; the same call goes on from there.
    """
    refuse_servers(config, "rollout")
    target = user_path(out)
    check_target(target, force=force)
    version = 0
    if run is not None:
        config, version = _of_run(config, Path(run), checkpoint)
    if samples is not None:
        config = config.model_copy(update={"rollout": config.rollout.model_copy(update={"group_size": samples})})
    with SharedSandbox(config.sandbox) as sandbox:
        prepared = prepare_rollout(config, sandbox)
        count = prompts or _usable(prepared.train)
        return run_to_end(lambda: _roll_out(prepared, target, count, version))


def prepare_rollout(config: Config, sandbox: SharedSandbox) -> PreparedRollout:
    """Check what sampling takes; writes nothing.

    Args:
        sandbox: where programs run; whoever made it closes it.

    Raises:
        UserError: something is missing or does not fit.
    """
    if config.offline is not None:
        raise UserError(
            "this recipe trains on completions that are there; prompts are what completions are sampled of",
            where="offline",
            mend="take the recipe that its completions came from, with model.path set to the run whose weights are to "
            "sample",
        )
    if config.environment is not None:
        raise UserError(
            "a file of completions holds single turns, and with an environment an episode has several",
            where="environment",
            mend="set environment=null to sample first turns; a run's whole episodes are in its folder episodes/",
        )
    from strop.data.sources import open_source
    from strop.rewards.build import build_scorer

    scorer = None if config.rewards is None else build_scorer(config.rewards, sandbox)
    source = open_source(config.data.train)

    from strop.models.load import inspect_model
    from strop.planning.hardware import choose_hardware

    facts = inspect_model(config.model)
    room = longest_prompt(config, facts.context)
    dataset, expected = prompt_dataset(config, source, facts.tokenizer, room, "data.train")
    hardware = choose_hardware(config)
    check_engine(config, hardware.device.type)
    return PreparedRollout(
        config,
        hardware,
        facts,
        dataset,
        scorer,
        expected + config.rollout.max_new_tokens,
        _wants_greedy(config),
    )


async def _roll_out(prepared: PreparedRollout, target: Path, count: int, version: int) -> RolloutSummary:
    from strop.loops.randomness import settle
    from strop.rollout.engine import WeightUpdate
    from strop.tracking.display import make_display

    settle(prepared)
    sampler = _Sampler(prepared, version, make_display(prepared.config.tracking))
    file = RolloutFile(target, key=sampler.key(count), per_group=prepared.per_group)
    resumed = file.groups
    try:
        await sampler.engine.update_weights(WeightUpdate(version))
        sampler.show_start(target, count, resumed)
        while file.groups < count:
            file.append(await sampler.next_rows(file.groups, count))
        summary = _summary(file, count, resumed)
        file.finish()
        return summary
    finally:
        file.close()
        await sampler.close()


class _Sampler:
    """The model in memory, and the rows that it gives."""

    def __init__(self, prepared: PreparedRollout, version: int, display: Any) -> None:
        from strop.loops import assembly
        from strop.loops.step_record import PromptTexts
        from strop.rollout.admission import Admission
        from strop.rollout.collector import Collector
        from strop.rollout.engine import SampleSettings
        from strop.rollout.player import Player

        rollout = prepared.config.rollout
        self.prepared = prepared
        self.display = display
        self.version = version
        if prepared.scorer is not None:
            prepared.scorer.load()
        self.roles = assembly.load_roles(prepared)
        self.engine = assembly.make_engine(prepared, self.roles)
        self.stream = assembly.make_stream(prepared)
        self.collector = Collector(
            Player(self.engine, self.roles.tokenizer),
            prepared.scorer,
            self.stream.take,
            settings=SampleSettings(rollout.max_new_tokens, rollout.temperature, tuple(rollout.stop)),
            group_size=rollout.group_size,
            admission=Admission(rollout.groups_per_step),
            progress=self._progress,
            greedy=prepared.greedy,
        )
        self._texts = PromptTexts(prepared.train)
        self._done = self._expected = self._windows = 0

    def key(self, count: int) -> str:
        """What the rows depend on, as one hash."""
        config = self.prepared.config.model_dump()
        config["data"].pop("eval")
        parts = [
            {name: config[name] for name in ("data", "rewards", "rollout", "hardware")},
            self.prepared.train.source.fingerprint,
            self.roles.loaded.fingerprint,
            [str(self.prepared.hardware.dtype), config["model"]["lora"]],
            [config["run"]["seed"], count, self.version, self.prepared.greedy],
        ]
        return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()

    def show_start(self, target: Path, count: int, resumed: int) -> None:
        """Say what will be done, and pass by the prompts that are done."""
        rollout, scorer = self.prepared.config.rollout, self.prepared.scorer
        size = rollout.groups_per_step
        self._windows = -(-count // size)
        facts = {
            "model": self.roles.loaded.name,
            "data": self.prepared.train.source.describe(),
            "samples": f"{rollout.group_size} of each of {count:,} prompts at temperature {rollout.temperature:g}"
            + (", and the most likely one" if self.prepared.greedy else "")
            + ("" if scorer is not None else ", not scored: the recipe has no verifiers"),
            "device": self.prepared.hardware.reasons[0],
            "file": str(target),
        }
        self.display.start(f"rollout {target.name}", self._windows, facts, first_step=resumed // size)
        for _ in range(resumed):
            self.stream.next()

    async def next_rows(self, first: int, count: int) -> list[dict[str, Any]]:
        """The rows of the next prompts, at most as many as a step has.

        Raises:
            RunFailure: too many completions could not be verified.
        """
        from strop.loops.step_record import rollout_metrics, sample_of
        from strop.rewards.composition import check_errors
        from strop.rollout.collector import reward_of
        from strop.rollout.together import all_or_none
        from strop.tracking.display import StepView

        config, started = self.prepared.config, time.perf_counter()
        size = min(config.rollout.groups_per_step, count - first)
        self._done, self._expected = 0, size * self.prepared.per_group
        made = list(enumerate(self.stream.take(size), start=first))
        groups = await all_or_none([self.collector.make_group(number, prompt) for number, prompt in made])
        episodes = [_with_baseline(group) for group in groups]
        if config.rewards is not None:
            judged = [reward_of(episode) for group in episodes for episode in group]
            check_errors(judged, first_step=first == 0, settings=config.rewards)
        metrics = rollout_metrics(groups, max_new_tokens=config.rollout.max_new_tokens)
        seconds = time.perf_counter() - started
        metrics |= {"time/step": seconds, "throughput/tokens_per_second": metrics["tokens/sampled"] / seconds}
        step = -(-(first + size) // config.rollout.groups_per_step)
        self.display.step(StepView(step, self._windows, metrics, sample_of(groups, self._texts, step)))
        pairs = zip(made, episodes, strict=True)
        return [self._row(episode, prompt) for (_, prompt), group in pairs for episode in group]

    async def close(self) -> None:
        self.display.close()
        await self.collector.close()
        await self.engine.close()
        if self.prepared.scorer is not None:
            await self.prepared.scorer.close()

    def _progress(self, *_: int) -> None:
        self._done += 1
        self.display.progress("sampling", self._done, self._expected)

    def _row(self, episode: Episode, prompt: Prompt) -> dict[str, Any]:
        asked, said = episode.turns
        found = {
            "prompt": prompt.prompt,
            "prompt_id": episode.prompt_id,
            "group": episode.group,
            "sample": episode.sample,
            "prompt_ids": asked.tokens.tolist(),
            "completion": episode.completion,
            "completion_ids": said.tokens.tolist(),
            "logprobs": said.logprobs.tolist(),
            # The most likely token is taken at temperature 0, and has its log-probability at 1.
            "temperature": self.prepared.config.rollout.temperature if episode.sample >= 0 else 0.0,
            "reward": None if math.isnan(episode.reward) else episode.reward,
            "correct": episode.correct,
            "components": dict(episode.components),
            "status": str(episode.status),
            "detail": episode.detail,
            "answer": prompt.answer,
            "model": self.roles.loaded.name,
            "model_fingerprint": self.roles.loaded.fingerprint,
            "weight_version": self.version,
        }
        return rollout_row(found, episode.row)


def _with_baseline(group: Group) -> Sequence[Episode]:
    return group.episodes if group.baseline is None else [*group.episodes, group.baseline]


def _of_run(config: Config, run: Path, checkpoint: int | None) -> tuple[Config, int]:
    """A run's recipe with the model of one of its checkpoints, and the number of steps behind that."""
    from strop.training.checkpoint import latest_checkpoint, read_state

    folder = run / "checkpoints"
    if checkpoint is None:
        found = latest_checkpoint(folder) if folder.is_dir() else None
        if found is None:
            raise UserError("the run has no checkpoint yet", where=str(run), mend="train until its first checkpoint")
    else:
        found = folder / f"step-{checkpoint:06d}"
        if not (found / "state" / "state.json").is_file():
            there = sorted(int(path.name[5:]) for path in folder.glob("step-*") if path.name[5:].isdigit())
            raise UserError(
                f"the run has no checkpoint of step {checkpoint}",
                where=str(folder),
                mend=f"it has those of steps {', '.join(map(str, there))}" if there else "train until its first one",
            )
    # Its adapters are merged, and its warm-up is behind it.
    model = ModelSettings(path=str(found), dtype=config.model.dtype, trust_remote_code=config.model.trust_remote_code)
    return config.model_copy(update={"model": model, "warmup": None}), int(read_state(found)["step"])


def _usable(dataset: PromptDataset) -> int:
    """Prompts that are not skipped."""
    return sum(1 for _ in dataset) if dataset.skips_overlong else len(dataset)


def _wants_greedy(config: Config) -> bool:
    """Whether the algorithm compares with the most likely completion."""
    from strop.loops.algorithm import demands_of, make_algorithm

    if config.supervised is not None:
        return False
    # As many samples as any algorithm is content with: here they need not be enough to train on.
    rollout = config.rollout.model_copy(update={"group_size": max(2, config.rollout.group_size)})
    return demands_of(make_algorithm(config.model_copy(update={"rollout": rollout}))).greedy


def _summary(file: RolloutFile, count: int, resumed: int) -> RolloutSummary:
    rewards, correct, lengths, errors = [], [], [], 0
    for row in file.rows():
        if row["sample"] < 0:
            continue
        lengths.append(len(row["completion_ids"]))
        errors += row["status"] not in ("stop", "length")
        if row["reward"] is not None:
            rewards.append(row["reward"])
        if row["correct"] is not None:
            correct.append(float(row["correct"]))

    def mean(values: list[float]) -> float:
        return sum(values) / len(values) if values else math.nan

    return RolloutSummary(
        file.path, count, len(lengths), mean(rewards), mean(correct), mean([*map(float, lengths)]), errors, resumed
    )
