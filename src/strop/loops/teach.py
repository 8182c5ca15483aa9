"""`strop teach`: the teachers of a recipe say once what they think of its data, and a file keeps it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from strop.config import Config
from strop.errors import ConfigError, UserError
from strop.loops.prepare_examples import PreparedExamples, prepare_examples
from strop.paths import user_path

if TYPE_CHECKING:
    from strop.data.examples import ExampleRow
    from strop.data.targets import TargetsHeader, TargetsWriter
    from strop.loops.teacher import Teachers

BATCH_TOKENS = 16384
"""Tokens of the rows that are read together; how many go through a teacher at once is chosen from the memory."""


@dataclass(frozen=True)
class Taught:
    """A file of targets that was written. tokens: trained tokens in it. k: likeliest tokens told for each of them.
    size: bytes of the file. skipped: rows that were too long."""

    path: Path
    examples: int
    tokens: int
    k: int
    size: int
    skipped: int
    seconds: float


def teach(
    config: Config, *, out: Path | None = None, progress: Callable[[int, int], None] = lambda done, total: None
) -> Taught:
    """Ask the teachers of a recipe for all of `data.train` and `data.eval`, and write the file of targets.

    Args:
        out: where to; `supervised.targets` of the recipe when not given.
        progress: called with the rows that are done, and all there are.

    Raises:
        UserError: the recipe names no teachers or no file, the file is there already, or something does not fit;
            nothing was written.
    """
    settings = config.supervised
    if settings is None or settings.method != "distillation":
        raise UserError(
            "teachers are asked for recipes that learn from them on given texts",
            where="supervised.method",
            mend="set it to distillation",
        )
    if not settings.teachers:
        raise ConfigError(
            [
                UserError(
                    "the recipe names no teacher that could be asked",
                    where="supervised.teachers",
                    mend="name one: `teachers: [{path: runs/larger}]`",
                )
            ]
        )
    path = _place(config, out)
    prepared = prepare_examples(config, teaching=True)
    started = time.perf_counter()
    teachers, header = _load(prepared)

    from strop.data.targets import TargetsWriter
    from strop.tracking.atomic import replacing

    with replacing(path) as temporary, TargetsWriter(temporary, header) as writer:
        skipped = _write(prepared, teachers, writer, progress)
    seconds = time.perf_counter() - started
    return Taught(path, writer.examples, writer.tokens, header.k, path.stat().st_size, skipped, seconds)


def now_and_then(say: Callable[[str], None], *, seconds: float = 10.0) -> Callable[[int, int], None]:
    """A `progress` that says how many rows are done, at most so often."""
    last = time.monotonic()

    def progress(done: int, total: int) -> None:
        nonlocal last
        if time.monotonic() - last >= seconds:
            last = time.monotonic()
            say(f"{done:,} of {total:,} rows")

    return progress


def _place(config: Config, out: Path | None) -> Path:
    assert config.supervised is not None
    if out is None:
        if config.supervised.targets is None:
            raise UserError(
                "nothing says where the targets are to be written",
                where="--out",
                mend="give --out FILE, or set supervised.targets, which is also where training will look for them",
            )
        out = Path(config.supervised.targets)
    path = user_path(out)
    if path.exists():
        raise UserError("the file is there already", where=str(path), mend="delete it, or name another with --out")
    if not path.parent.is_dir():
        raise UserError("there is no such folder", where=str(path.parent), mend="make it, or name another with --out")
    return path


def _load(prepared: PreparedExamples) -> tuple[Teachers, TargetsHeader]:
    import torch

    from strop.data.targets import TargetsHeader, TeacherRecord, tokenizer_fingerprint
    from strop.loops.teacher import load_teachers
    from strop.planning.hardware import choose_sizes

    torch.set_num_threads(prepared.hardware.threads)

    def budget(model: Any) -> int:
        sizes = choose_sizes(prepared.config, prepared.hardware, model, prepared.longest)
        return sizes.tokens_per_micro_batch

    objective = prepared.objective
    teachers = load_teachers(prepared, temperature=objective.temperature, budget=budget)
    total = sum(teachers.weights)
    header = TargetsHeader(
        k=min(objective.top_k, teachers.vocabulary),
        temperature=objective.temperature,
        vocabulary=teachers.vocabulary,
        tokenizer=tokenizer_fingerprint(prepared.facts.tokenizer),
        teachers=tuple(
            TeacherRecord(name, fingerprint, weight / total)
            for name, fingerprint, weight in zip(teachers.names, teachers.fingerprints, teachers.weights, strict=True)
        ),
    )
    return teachers, header


def _write(
    prepared: PreparedExamples, teachers: Teachers, writer: TargetsWriter, progress: Callable[[int, int], None]
) -> int:
    """Ask and write, batch by batch; returns how many rows were too long. Equal examples are kept once."""
    from strop.data.targets import example_fingerprint
    from strop.loops.supervised_run import batch_of

    total = len(prepared.train) + (len(prepared.held_out) if prepared.held_out is not None else 0)
    known: set[int] = set()
    read = 0
    for rows in _batches(prepared):
        names = [example_fingerprint(e.tokens, e.loss_mask) for row in rows for e in row.examples]
        batch = batch_of(rows)
        teachers.fill_targets(batch, writer.header.k)
        inside = batch.loss_mask
        ids, logprobs = (batch.extra[name][inside].numpy() for name in ("target_ids", "target_logprobs"))
        lengths = [int(e.loss_mask.sum()) for row in rows for e in row.examples]
        start = 0
        for name, length in zip(names, lengths, strict=True):
            if name not in known:
                known.add(name)
                writer.add(name, ids[start : start + length], logprobs[start : start + length])
            start += length
        read += len(rows)
        progress(read, total)
    return total - read


def _batches(prepared: PreparedExamples) -> Iterator[list[ExampleRow]]:
    """The usable rows of the training data and then of the held-out data, some thousand tokens at a time."""
    from strop.loops.targets import usable_rows

    for dataset in (prepared.train, prepared.held_out):
        if dataset is None:
            continue
        waiting: list[ExampleRow] = []
        tokens = 0
        for row in usable_rows(dataset, range(len(dataset))):
            waiting.append(row)
            tokens += sum(len(example.tokens) for example in row.examples)
            if tokens >= BATCH_TOKENS:
                yield waiting
                waiting, tokens = [], 0
        if waiting:
            yield waiting
