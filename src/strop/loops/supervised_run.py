"""A supervised run: every part in memory, and the verbs that its loop is written in."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from strop.algorithms.batch import TokenBatch
from strop.algorithms.paired import Kto
from strop.config import Config
from strop.data.examples import Example, ExampleDataset, ExampleRow
from strop.data.order import Cursor
from strop.data.prompts import OverlongPrompt, PromptStream
from strop.loops.assembly import Roles, load_roles
from strop.loops.folder import OpenedFolder, close_after, open_folder
from strop.loops.prepare_examples import PreparedExamples
from strop.loops.randomness import random_state, restore_random, set_seed
from strop.loops.run import model_facts
from strop.models.save import save_model
from strop.tracking.display import Display, StepView, Summary, make_display
from strop.tracking.metrics import MetricsWriter
from strop.tracking.system import memory_bytes
from strop.training.batching import token_batch
from strop.training.checkpoint import save_checkpoint
from strop.training.single import SingleDeviceTrainer

GIB = 1 << 30
SCORES = {
    "loss": "loss",
    "loss/nll": "nll",
    "perplexity": "perplexity",
    "token_accuracy": "token_accuracy",
    "preference/accuracy": "accuracy",
    "preference/margin": "margin",
}
"""What an evaluation shows of the metrics, and under which name."""


class SupervisedRun:
    """One run that learns from examples. `SupervisedRun.open` makes it; the loop in `loops/supervised.py` calls its
    verbs in turn.

    step: updates that are done. before, after: held-out scores.
    """

    def __init__(self, prepared: PreparedExamples, roles: Roles, opened: OpenedFolder, display: Display) -> None:
        config = prepared.config
        assert config.supervised is not None
        self.config: Config = config
        self.settings = config.supervised
        self.step = 0
        self.before: dict[str, float] = {}
        self.after: dict[str, float] = {}
        self.prepared = prepared
        self.roles = roles
        self.display = display
        self.objective = prepared.objective
        self.directory = opened.directory
        self.metrics: MetricsWriter = opened.metrics
        source = prepared.train.source
        cursor = Cursor(source, seed=config.run.seed, shuffle=config.data.shuffle)
        self.stream: Any = PromptStream(prepared.train, cursor)
        self.trainer = SingleDeviceTrainer(
            roles.model,
            config.training.optimizer,
            total_updates=config.run.steps,
            budget=roles.sizes.tokens_per_micro_batch,
            chunk=config.training.logprob_chunk,
            reference=getattr(self.objective, "needs_reference", False),
            recompute=config.model.activation_checkpointing,
            head="score" if prepared.scalar else "logprobs",
        )
        self._held_out: TokenBatch | None = None
        self._tokens = 0
        self._times: dict[str, float] = {}
        self._step_started = self._started = time.perf_counter()
        self._saved_at: int | None = None
        self._evaluated_at: int | None = None

    @property
    def folder(self) -> Path:
        """The run's folder."""
        return self.directory.path

    @classmethod
    def open(cls, prepared: PreparedExamples, *, fresh: bool, recipe: str | None) -> SupervisedRun:
        """Load, and go to where the run had stopped.

        Raises:
            UserError: the run cannot be gone on with; nothing was written.
        """
        torch.set_num_threads(prepared.hardware.threads)
        torch.use_deterministic_algorithms(True, warn_only=True)
        set_seed(prepared.config.run.seed)
        display = make_display(prepared.config.tracking)
        try:
            roles = load_roles(prepared, scalar=prepared.scalar)
            opened = open_folder(prepared, roles, display, fresh=fresh, recipe=recipe)
        except BaseException:
            display.close()
            raise
        try:
            run = cls(prepared, roles, opened, display)
            run._restore(opened)
            run._show_start(opened)
            return run
        except BaseException as error:
            display.close()
            opened.close(error)
            raise

    # The verbs of the loop, in the order in which it calls them.

    def begin(self) -> None:
        """Score the model before its first update."""
        if self.step == 0 and self._saved_at is None:
            self.evaluate()
            self.save()
        elif self.step >= self.config.run.steps:
            self.display.message(
                f"all {self.step} steps of this run are done; raise run.steps to go on with it, or start a new run "
                "with --fresh"
            )

    def next_batch(self) -> TokenBatch:
        """The examples of the next step, with what the reference says of them."""
        self._step_started = time.perf_counter()
        self.display.phase("reading")
        batch = batch_of([self.stream.next()[0] for _ in range(self.settings.batch_size)])
        self._fill(batch)
        self._times = {"time/preparing": time.perf_counter() - self._step_started}
        return batch

    def update(self, batch: TokenBatch) -> dict[str, float]:
        """One optimizer update; returns metrics."""
        self.display.phase("training")
        started = time.perf_counter()
        stats = self.trainer.update(batch, self.objective)
        self._times["time/training"] = time.perf_counter() - started
        return stats

    def record(self, batch: TokenBatch, stats: dict[str, float]) -> dict[str, float]:
        """Write the step's metrics, and show them; returns all metrics."""
        seconds = time.perf_counter() - self._step_started
        tokens = int(batch.input_ids.shape[0])
        trained = int(batch.loss_mask.sum())
        self._tokens += trained
        metrics = with_perplexity(stats) | self._times
        metrics |= {
            "tokens/read": float(tokens),
            "tokens/trained": float(trained),
            "data/skipped": float(self.stream.skipped),
            "time/step": seconds,
            "throughput/tokens_per_second": tokens / seconds,
            "memory/process_gib": memory_bytes()["process"] / GIB,
        }
        self.metrics.log(self.step, metrics)
        self.display.step(StepView(self.step, self.config.run.steps, metrics))
        return metrics

    def evaluate_and_save_if_due(self) -> None:
        """Evaluate and write a checkpoint at the intervals that the recipe names, and after the last step."""
        last = self.step >= self.config.run.steps
        every = self.config.evaluation.every
        if last or (every and self.step % every == 0):
            self.evaluate()
        if last or self.step % self.config.checkpoint.every == 0:
            self.save()

    def evaluate(self) -> dict[str, float]:
        """Loss and scores on the held-out examples with the weights as they are; empty without `data.eval`."""
        if self.prepared.held_out is None:
            return {}
        self.display.phase("evaluating")
        if self._held_out is None:
            self._held_out = batch_of(held_out_rows(self.prepared.held_out, self.config.evaluation.prompts))
        self._fill(self._held_out)
        found = with_perplexity(self.trainer.evaluate(self._held_out, self.objective))
        self.after = {shown: found[name] for name, shown in SCORES.items() if name in found}
        if "nll" in self.after and len(self.after) == 4:
            del self.after["nll"]
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
        self.display.phase("saving")
        folder = save_checkpoint(
            self.directory.checkpoints_folder, self.step, self._write, keep=self.config.checkpoint.keep
        )
        self._saved_at = self.step
        return folder

    def finish(self) -> Path:
        """Save, say how it ended; returns the folder of the trained model."""
        if self._evaluated_at is None and not self.after:
            self.evaluate()
        model = self.save() / "model"
        self.display.finish(
            Summary(
                run=self.folder,
                steps=self.step,
                total_steps=self.config.run.steps,
                seconds=time.perf_counter() - self._started,
                before=self.before or None,
                after=self.after or None,
                tokens_trained=self._tokens,
                model=model,
                events=self.directory.events_folder if self.config.tracking.tensorboard else None,
                next_commands=[f"strop runs show {self.folder}"] if self.prepared.scalar else (),
            )
        )
        return model

    def close(self, error: BaseException | None) -> None:
        """Give back everything; the run's manifest notes how it ended."""
        self.display.close()
        self.metrics.close()
        if error is None:
            self.directory.close("finished" if self.step >= self.config.run.steps else "interrupted")
        else:
            close_after(self.directory, error)

    # What the verbs stand on.

    def _fill(self, batch: TokenBatch) -> None:
        """Ask the reference for its log-probabilities, once for each batch."""
        if getattr(self.objective, "needs_reference", False) and batch.ref_logprobs is None:
            batch.ref_logprobs = self.trainer.logprobs(batch, role="reference")
        if isinstance(self.objective, Kto):
            self.objective.kl = self._divergence(batch)

    def _divergence(self, batch: TokenBatch) -> float:
        """KL(policy || reference) of a batch, at least 0: the mean log-ratio of completions of other prompts."""
        other = mismatched(batch)
        gap = self.trainer.logprobs(other, role="policy") - self.trainer.logprobs(other, role="reference")
        return max(0.0, float(gap.double().sum()) / max(1, other.sequences))

    def _restore(self, opened: OpenedFolder) -> None:
        if opened.checkpoint is None:
            return
        state = opened.state
        self.step = int(state["step"])
        self._saved_at = self.step
        self.before, self.after = dict(state["before"]), dict(state["after"])
        self._tokens = int(state["tokens"])
        self.stream.load(state["examples"])
        self.trainer.load(opened.checkpoint / "state", state["trainer"])
        restore_random(state["random"])

    def _write(self, folder: Path) -> dict[str, Any]:
        save_model(self.roles.model, self.roles.tokenizer, folder / "model")
        return {
            "step": self.step,
            "before": self.before,
            "after": self.after,
            "tokens": self._tokens,
            "examples": self.stream.state(),
            "trainer": self.trainer.save(folder / "state"),
            "random": random_state(),
        }

    def _show_start(self, opened: OpenedFolder) -> None:
        method = f"{self.settings.method}, {self.settings.batch_size} rows a step"
        facts = model_facts(self.roles, self.prepared, self.folder, method=method)
        self.display.start(
            self.folder.name,
            self.config.run.steps,
            facts,
            first_step=self.step,
            before=self.before or None,
            history=opened.history,
        )


def batch_of(rows: Sequence[ExampleRow]) -> TokenBatch:
    """The flat batch of some rows; each row is a group."""
    examples: list[Example] = [example for row in rows for example in row.examples]
    batch = token_batch(
        examples,
        rewards=[worth for row in rows for worth in row.worth],
        group_ids=[number for number, row in enumerate(rows) for _ in row.examples],
        truncated=[False] * len(examples),
    )
    if any(example.labels is not None for example in examples):
        labels = [np.zeros(len(e.tokens), np.float32) if e.labels is None else e.labels for e in examples]
        batch.extra["labels"] = torch.from_numpy(np.concatenate(labels))
    return batch


def mismatched(batch: TokenBatch) -> TokenBatch:
    """Each prompt with the completion of the next row: what a policy says of these shows how far it has moved."""
    tokens = [ids.numpy() for ids in batch.input_ids.split(batch.lengths().tolist())]
    masks = [mask.numpy() for mask in batch.loss_mask.split(batch.lengths().tolist())]
    heads = [int(np.argmax(mask)) for mask in masks]
    found = []
    for at, (ids, head) in enumerate(zip(tokens, heads, strict=True)):
        after = (at + 1) % len(tokens)
        joined = np.concatenate([ids[:head], tokens[after][heads[after] :]])
        found.append(Example(joined, np.concatenate([np.zeros(head, dtype=bool), masks[after][heads[after] :]])))
    count = len(found)
    return token_batch(found, rewards=[0.0] * count, group_ids=range(count), truncated=[False] * count)


def held_out_rows(dataset: ExampleDataset, most: int | None) -> list[ExampleRow]:
    """The held-out examples in file order, without those that are too long and skipped."""
    found = []
    for at in range(len(dataset)):
        if most is not None and len(found) >= most:
            break
        try:
            found.append(dataset[at])
        except OverlongPrompt:
            if not dataset.skips_overlong:
                raise
    return found


def with_perplexity(stats: dict[str, float]) -> dict[str, float]:
    """The metrics, and exp(mean negative log-likelihood of a token) where there is a supervised loss alone."""
    if "token_accuracy" not in stats:
        return dict(stats)
    return stats | {"perplexity": math.exp(min(stats["loss/nll"], 700.0))}
