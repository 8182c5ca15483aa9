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
from strop.data.examples import Example, ExampleDataset, ExampleRow
from strop.data.order import Cursor
from strop.data.prompts import OverlongPrompt, PromptStream
from strop.loops.assembly import Roles, load_roles
from strop.loops.base_run import GIB, BaseRun
from strop.loops.folder import OpenedFolder
from strop.loops.prepare_examples import PreparedExamples
from strop.tracking.display import Display, StepView
from strop.tracking.summary import short_path
from strop.tracking.system import memory_bytes
from strop.training.batching import token_batch
from strop.training.single import SingleDeviceTrainer

SCORES = {
    "loss": "loss",
    "perplexity": "perplexity",
    "token_accuracy": "token_accuracy",
    "preference/accuracy": "accuracy",
    "preference/margin": "margin",
}
"""What an evaluation shows of the metrics, and under which name."""


class SupervisedRun(BaseRun):
    """One run that learns from examples. `SupervisedRun.open` makes it; the loop in `loops/supervised.py` calls its
    verbs in turn. step: updates that are done.
    """

    def __init__(self, prepared: PreparedExamples, roles: Roles, opened: OpenedFolder, display: Display) -> None:
        super().__init__(prepared, roles, opened, display)
        config = self.config
        assert config.supervised is not None
        self.settings = config.supervised
        self.objective = prepared.objective
        cursor = Cursor(prepared.train.source, seed=config.run.seed, shuffle=config.data.shuffle)
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
            moving_ranks=True,
        )
        self._held_out: TokenBatch | None = None
        self._step_started = 0.0

    # The verbs of the loop, in the order in which it calls them.

    async def begin(self) -> None:
        """Score the model before its first update, unless the run has gone past that."""
        if self._resumed:
            self._say_if_done()
            return
        await self.evaluate()
        self.save()

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
        self._tokens["trained"] += trained
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

    # What the verbs stand on.

    def _fill(self, batch: TokenBatch) -> None:
        """Ask the reference for its log-probabilities, once for each batch."""
        if getattr(self.objective, "needs_reference", False) and batch.ref_logprobs is None:
            batch.ref_logprobs = self.trainer.logprobs(batch, role="reference")
        if getattr(self.objective, "needs_divergence", False):
            self.objective.kl = self._divergence(batch)

    def _divergence(self, batch: TokenBatch) -> float:
        """KL(policy || reference) of a batch, at least 0: the mean log-ratio of completions of other prompts."""
        other = mismatched(batch)
        gap = self.trainer.logprobs(other, role="policy") - self.trainer.logprobs(other, role="reference")
        return max(0.0, float(gap.double().sum()) / max(1, other.sequences))

    @classmethod
    def _load(cls, prepared: PreparedExamples) -> tuple[Roles, dict[str, Any]]:
        return load_roles(prepared, scalar=prepared.scalar), {}

    async def _take_back(self, checkpoint: Path, state: dict[str, Any]) -> None:
        self.stream.load(state["examples"])
        self.trainer.load(checkpoint / "state", state["trainer"])

    def _state(self, folder: Path) -> dict[str, Any]:
        return {"examples": self.stream.state(), "trainer": self.trainer.save(folder / "state")}

    async def _score_held_out(self) -> dict[str, float]:
        if self._held_out is None:
            self._held_out = batch_of(held_out_rows(self.prepared.held_out, self.config.evaluation.prompts))
        self._fill(self._held_out)
        found = with_perplexity(self.trainer.evaluate(self._held_out, self.objective))
        return {shown: found[name] for name, shown in SCORES.items() if name in found}

    def _about(self) -> dict[str, str]:
        return {"method": f"{self.settings.method}, {self.settings.batch_size} rows a step"}

    def _next_commands(self) -> list[str]:
        # A model that gives scores has nothing to say.
        return [f"strop runs show {short_path(self.folder)}"] if self.prepared.scalar else []


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
