"""A supervised run: every part in memory, and the verbs that its loop is written in."""

from __future__ import annotations

import copy
import json
import math
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch

from strop.algorithms.batch import TokenBatch
from strop.data.examples import Example, ExampleDataset, ExampleRow
from strop.data.order import Cursor, stream_key
from strop.data.prompts import PromptStream
from strop.loops.base_run import GIB, BaseRun
from strop.loops.folder import OpenedFolder
from strop.loops.place import Place, find_place
from strop.loops.prepare_examples import PreparedExamples
from strop.loops.reference import FILE, AskedReference, row_names
from strop.loops.speed import Speed
from strop.loops.targets import TargetSource, check_unchanged, target_source, usable_rows
from strop.tracking.display import Display, StepView
from strop.tracking.summary import short_path
from strop.tracking.system import memory_bytes
from strop.training.batching import token_batch, trained_tokens
from strop.training.snapshot import Held

SCORES = {
    "loss": "loss",
    "perplexity": "perplexity",
    "token_accuracy": "token_accuracy",
    "preference/accuracy": "accuracy",
    "preference/margin": "margin",
    "distillation/divergence": "divergence",
    "distillation/agreement": "agreement",
}
"""What an evaluation shows of the metrics, and under which name."""


class SupervisedRun(BaseRun):
    """One run that learns from examples. `SupervisedRun.open` makes it; the loop in `loops/supervised.py` calls its
    verbs in turn. step: updates that are done.
    """

    def __init__(
        self,
        prepared: PreparedExamples,
        place: Place,
        opened: OpenedFolder,
        display: Display,
        targets: TargetSource | None = None,
    ) -> None:
        super().__init__(prepared, place, opened, display)
        config = self.config
        assert config.supervised is not None
        self.settings = config.supervised
        self.objective = prepared.objective
        self.stream: Any = self._new_stream()
        self._targets = targets
        self._asked: AskedReference | None = None
        if self.settings.reference == "precomputed":
            self._asked = AskedReference(self.folder / FILE, self._reference_key())
        self.trainer = place.make_supervised_trainer(
            scalar=prepared.scalar,
            reference=getattr(self.objective, "needs_reference", False) and self._asked is None,
        )
        self._speed = Speed(config, self.roles)
        self._held_out: tuple[list[ExampleRow], TokenBatch] | None = None
        self._step_started = 0.0

    # The verbs of the loop, in the order in which it calls them.

    async def begin(self) -> None:
        """Score the model before its first update, unless the run has gone past that."""
        if self._resumed:
            self._say_if_done()
            return
        await self._ask_reference()
        await self.evaluate()
        await self.save()

    async def next_batch(self) -> TokenBatch:
        """The examples of the next step, with what the reference says of them."""
        self._begin_step()
        return await self.place.aside(self._next_batch)

    def _next_batch(self) -> TokenBatch:
        self._step_started = time.perf_counter()
        self.spans.begin(self._step_started)
        self.display.phase("reading")
        rows = self._next_rows(self.stream)
        batch = batch_of(rows)
        self._fill(batch, "train", rows, f"step-{self.step}")
        if self.settings.neftune_alpha is not None:
            batch.draw_keys = draw_keys(rows, self.config.run.seed)
        self._times = {"time/preparing": self._note("preparing", self._step_started)}
        return batch

    async def update(self, batch: TokenBatch) -> dict[str, float]:
        """One optimizer update; returns metrics."""
        return await self.place.aside(lambda: self._update(batch))

    def _update(self, batch: TokenBatch) -> dict[str, float]:
        self.display.phase("training")
        started = time.perf_counter()
        stats: dict[str, float] = self.trainer.update(batch, self.objective)
        self._times["time/training"] = self._note("training", started)
        return stats | self._speed.figures(batch, stats, self._times)

    def record(self, batch: TokenBatch, stats: dict[str, float]) -> dict[str, float]:
        """Write the step's metrics, and show them; returns all metrics."""
        started = time.perf_counter()
        seconds = started - self._step_started
        tokens = int(batch.input_ids.shape[0])
        trained = trained_tokens(batch)
        self._tokens["trained"] += trained
        metrics = with_perplexity(stats) | self._times | self._take_waited()
        metrics |= {
            "tokens/read": float(tokens),
            "tokens/trained": float(trained),
            "data/skipped": float(self.stream.skipped),
            "time/step": seconds,
            "throughput/tokens_per_second": tokens / seconds,
            "memory/process_gib": memory_bytes()["process"] / GIB,
        }
        self._figures = metrics
        self.metrics.log(self.step, metrics)
        self.display.step(StepView(self.step, self.config.run.steps, metrics))
        self._note("recording", started)
        self.spans.write(self.step, seconds)
        return metrics

    # What the verbs stand on.

    def _fill(self, batch: TokenBatch, split: str, rows: Sequence[ExampleRow], name: str) -> None:
        """Ask the reference and the teachers what they say of a batch, once for each.

        Args:
            split: "train" or "eval". rows: what the batch is made of. name: of the batch among those of its split.
        """
        if getattr(self.objective, "needs_reference", False) and batch.ref_logprobs is None:
            if self._asked is None:
                batch.ref_logprobs = self.trainer.logprobs(batch, role="reference")
            else:
                batch.ref_logprobs = self._asked.fill(batch, row_names(split, rows))
        if getattr(self.objective, "needs_divergence", False):
            self.objective.kl = self._divergence(batch, f"{split}/{name}")
        if self._targets is not None and "target_ids" not in batch.extra:
            self._targets.fill(batch, rows)

    def _divergence(self, batch: TokenBatch, name: str) -> float:
        """KL(policy || reference) of a batch, at least 0: the mean log-ratio of completions of other prompts."""
        other = mismatched(batch)
        if self._asked is None:
            reference = self.trainer.logprobs(other, role="reference")
        else:
            reference = self._asked.fill(other, [name])
        gap = self.trainer.logprobs(other, role="policy") - reference
        return max(0.0, float(gap.double().sum()) / max(1, other.sequences))

    async def _ask_reference(self) -> None:
        """Ask the reference for all that this run will want of it, before the first update makes the policy another."""
        if self._asked is None:
            return
        self.display.phase("asking the reference")
        role = "reference" if self.config.model.lora is not None else "policy"
        await self._asked.ask(
            self._reference_work(),
            lambda batch: self.place.aside(lambda: self.trainer.logprobs(batch, role=role)),
            lambda done: self.display.progress("asking the reference", done, self.config.run.steps),
        )

    def _reference_work(self) -> Iterator[tuple[list[str], Callable[[], TokenBatch]]]:
        """What the reference is asked for: the batches of the run, in order, until all rows have been seen."""
        mixes = getattr(self.objective, "needs_divergence", False)
        stream = self._new_stream()
        for step in range(self.config.run.steps):
            if stream.epoch > 0 and not mixes:
                break
            rows = self._next_rows(stream)
            yield row_names("train", rows), partial(batch_of, rows)
            if mixes:
                yield [f"train/step-{step}"], partial(_mismatched_of, rows)
        if self.prepared.held_out is not None:
            rows = self._held_out_rows()
            yield row_names("eval", rows), partial(batch_of, rows)
            if mixes:
                yield [f"eval/first-{len(rows)}"], partial(_mismatched_of, rows)

    def _reference_key(self) -> str:
        """What the reference's log-probabilities depend on."""
        prepared, config = self.prepared, self.config
        sources = [prepared.train.source, *([prepared.held_out.source] if prepared.held_out is not None else [])]
        return json.dumps(
            {
                "model": self.roles.loaded.fingerprint,
                "dtype": f"torch.{self.roles.dtype}",
                "sources": [source.fingerprint for source in sources],
                "data": config.data.model_dump(mode="json"),
                "supervised": self.settings.model_dump(mode="json"),
                "seed": config.run.seed,
            }
        )

    def _new_stream(self) -> PromptStream:
        """The training rows from the beginning, in the order of the run's seed."""
        train, config = self.prepared.train, self.config
        return PromptStream(train, Cursor(train.source, seed=config.run.seed, shuffle=config.data.shuffle))

    def _next_rows(self, stream: Any) -> list[ExampleRow]:
        return [stream.next()[0] for _ in range(self.settings.batch_size)]

    def _held_out_rows(self) -> list[ExampleRow]:
        return held_out_rows(self.prepared.held_out, self.config.evaluation.prompts)

    @classmethod
    async def _load(cls, prepared: PreparedExamples) -> tuple[Place, dict[str, Any]]:
        place = await find_place(prepared, scalar=prepared.scalar)
        return place, {"targets": target_source(prepared, place.roles)}

    async def _take_back(self, checkpoint: Path, state: dict[str, Any]) -> None:
        self.stream.load(state["examples"])
        check_unchanged(self._targets, state.get("targets"))
        # While the weights are still those of the reference.
        await self._ask_reference()
        await self.place.aside(lambda: self.trainer.load(checkpoint / "state", state["trainer"]))

    def _parts(self, trainer: Held, *, behind: bool) -> Callable[[Path], dict[str, Any]]:
        examples = copy.deepcopy(self.stream.state())
        targets = None if self._targets is None else self._targets.fingerprint
        return lambda folder: {"examples": examples, "trainer": trainer.save(folder / "state"), "targets": targets}

    async def _score_held_out(self) -> dict[str, float]:
        return await self.place.aside(self._scores)

    def _scores(self) -> dict[str, float]:
        if self._held_out is None:
            rows = self._held_out_rows()
            self._held_out = rows, batch_of(rows)
        rows, batch = self._held_out
        if self._targets is None:
            self._fill(batch, "eval", rows, f"first-{len(rows)}")
            found = with_perplexity(self.trainer.evaluate(batch, self.objective))
        else:
            found = with_perplexity(self._evaluate_in_parts(rows))
        return {shown: found[name] for name, shown in SCORES.items() if name in found}

    def _evaluate_in_parts(self, rows: Sequence[ExampleRow]) -> dict[str, float]:
        """Means over the trained tokens of all rows, a batch at a time: targets of all would take much memory."""
        sums: dict[str, float] = {}
        total = 0
        for start in range(0, len(rows), self.settings.batch_size):
            part = rows[start : start + self.settings.batch_size]
            batch = batch_of(part)
            self._fill(batch, "eval", part, f"from-{start}")
            trained = trained_tokens(batch)
            total += trained
            for name, value in self.trainer.evaluate(batch, self.objective).items():
                sums[name] = sums.get(name, 0.0) + value * trained
        return {name: value / max(1, total) for name, value in sums.items()}

    def _about(self) -> dict[str, str]:
        facts = {"method": f"{self.settings.method}, {self.settings.batch_size} rows a step"}
        if self._targets is not None:
            facts["teachers"] = self._targets.describe()
        return facts

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


def _mismatched_of(rows: Sequence[ExampleRow]) -> TokenBatch:
    return mismatched(batch_of(rows))


def draw_keys(rows: Sequence[ExampleRow], seed: int) -> torch.Tensor:
    """[N] int64: what random draws for each example of some rows are keyed by, whatever batch it comes in."""
    keys = [stream_key(seed, row.index, number) for row in rows for number in range(len(row.examples))]
    return torch.from_numpy(np.asarray(keys, dtype=np.uint64).view(np.int64))


def held_out_rows(dataset: ExampleDataset, most: int | None) -> list[ExampleRow]:
    """The held-out examples in file order, without those that are too long and skipped; at most so many."""
    return list(islice(usable_rows(dataset, range(len(dataset))), most))


def with_perplexity(stats: dict[str, float]) -> dict[str, float]:
    """The metrics, and exp(mean negative log-likelihood of a token) where texts are learned."""
    if "token_accuracy" not in stats:
        return dict(stats)
    return stats | {"perplexity": math.exp(min(stats.get("nll", stats.get("loss/nll", 0.0)), 700.0))}
