"""Where the targets of `supervised.method: distillation` come from: teachers in memory, or a file that they wrote."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from strop.config import Config
from strop.config.supervised import SupervisedSettings
from strop.config.teachers import TeacherSettings
from strop.data.examples import CHECK_FIRST_ROWS, ExampleDataset, ExampleRow
from strop.data.fingerprints import file_fingerprint
from strop.data.prompts import OverlongPrompt
from strop.data.targets import TargetsFile, example_fingerprint, tokenizer_fingerprint
from strop.errors import DataError, UserError
from strop.models.find import resolve_model
from strop.models.folder import fingerprint_folder
from strop.models.load import ModelFacts
from strop.paths import user_path

if TYPE_CHECKING:
    from strop.algorithms.batch import TokenBatch
    from strop.loops.assembly import Roles
    from strop.loops.prepare_examples import PreparedExamples
    from strop.loops.teacher import Teachers


class TargetSource(Protocol):
    """Whoever fills `extra["target_ids"]` and `extra["target_logprobs"]` of a batch. fingerprint: names what it will
    say, so that a run that goes on learns from the same."""

    @property
    def fingerprint(self) -> str: ...

    def describe(self) -> str:
        """In a few words, for people."""
        ...

    def fill(self, batch: TokenBatch, rows: Sequence[ExampleRow]) -> None:
        """batch: that of the rows, see `supervised_run.batch_of`."""
        ...


@dataclass(frozen=True)
class AskedTargets:
    """Teachers in memory are asked for each batch. k: tokens that are told apart."""

    teachers: Teachers
    k: int

    @property
    def fingerprint(self) -> str:
        return " ".join(self.teachers.fingerprints)

    def describe(self) -> str:
        return ", ".join(self.teachers.names)

    def fill(self, batch: TokenBatch, rows: Sequence[ExampleRow]) -> None:
        self.teachers.fill_targets(batch, self.k)


@dataclass(frozen=True)
class StoredTargets:
    """Read from a file. k: tokens that are told apart, at most those of the file."""

    file: TargetsFile
    k: int

    @cached_property
    def fingerprint(self) -> str:
        return file_fingerprint(self.file.path)

    def describe(self) -> str:
        named = ", ".join(record.path for record in self.file.header.teachers)
        return f"{named}, as they are in {self.file.path}"

    def fill(self, batch: TokenBatch, rows: Sequence[ExampleRow]) -> None:
        """Raises DataError if the file lacks an example; the error names its row."""
        import torch

        found = [self._read(example, row) for row in rows for example in row.examples]
        for name, values in zip(("target_ids", "target_logprobs"), zip(*found, strict=True), strict=True):
            flat = torch.from_numpy(np.concatenate(values))
            out = torch.zeros((len(batch.input_ids), flat.shape[1]), dtype=flat.dtype)
            out[batch.loss_mask] = flat
            batch.extra[name] = out

    def _read(self, example: Any, row: ExampleRow) -> tuple[np.ndarray, np.ndarray]:
        try:
            return self.file.read(example_fingerprint(example.tokens, example.loss_mask), self.k)
        except KeyError:
            raise _absent(self.file, row) from None


def target_source(prepared: PreparedExamples, roles: Roles) -> TargetSource | None:
    """What the objective of a recipe learns from, beside the texts; None where that is nothing."""
    objective = prepared.objective
    if not getattr(objective, "needs_targets", False):
        return None
    if prepared.stored is not None:
        return StoredTargets(prepared.stored, objective.top_k)
    from strop.loops.teacher import load_teachers

    budget = roles.sizes.tokens_per_micro_batch
    teachers = load_teachers(prepared, temperature=objective.temperature, budget=lambda _: budget)
    return AskedTargets(teachers, objective.top_k)


def check_unchanged(source: TargetSource | None, fingerprint: str | None) -> None:
    """Raise UserError if a run that goes on would learn from other teachers or targets than before."""
    if source is not None and source.fingerprint != fingerprint:
        raise UserError(
            f"what the run learns from has changed since its checkpoint: {source.describe()}",
            where="supervised.targets" if isinstance(source, StoredTargets) else "supervised.teachers",
            mend="bring back what it was to go on with this run, or start a new one with --fresh",
        )


def check_stored(
    config: Config, facts: ModelFacts, datasets: Sequence[ExampleDataset]
) -> tuple[TargetsFile, SupervisedSettings]:
    """Open the file of targets and see that it belongs to the model, the teachers and the first rows of the data.

    Returns:
        The file, and the settings with `top_k` and `temperature` filled in from it.

    Raises:
        UserError: it does not; the error says what differs.
    """
    settings = config.supervised
    assert settings is not None
    assert settings.targets is not None
    file = TargetsFile(user_path(settings.targets))
    header = file.header
    if header.tokenizer != tokenizer_fingerprint(facts.tokenizer):
        raise DataError(
            "the targets were written for another tokenizer than the model's",
            where=f"supervised.targets = {settings.targets}",
            mend="write them again, with teachers of the model's family: strop teach RECIPE",
        )
    if settings.top_k is not None and settings.top_k > header.k:
        raise UserError(
            f"the targets tell {header.k} tokens apart at each position, and {settings.top_k} are asked for",
            where="supervised.top_k",
            mend=f"set it to {header.k} or less, leave it out, or write the targets again with more",
        )
    if settings.temperature is not None and settings.temperature != header.temperature:
        raise UserError(
            f"the targets are distributions at temperature {header.temperature}, not {settings.temperature}",
            where="supervised.temperature",
            mend="leave it out, or write the targets again: strop teach RECIPE",
        )
    _check_named(settings.teachers, file)
    for dataset in datasets:
        _check_rows(file, dataset)
    filled = {"top_k": settings.top_k or header.k, "temperature": header.temperature}
    return file, settings.model_copy(update=filled)


def usable_rows(dataset: ExampleDataset, numbers: Iterable[int]) -> Iterator[ExampleRow]:
    """The rows of these numbers, without those that are too long and skipped."""
    for number in numbers:
        try:
            yield dataset[number]
        except OverlongPrompt:
            if not dataset.skips_overlong:
                raise


def _check_rows(file: TargetsFile, dataset: ExampleDataset) -> None:
    for row in usable_rows(dataset, range(min(len(dataset), CHECK_FIRST_ROWS))):
        for example in row.examples:
            if example_fingerprint(example.tokens, example.loss_mask) not in file:
                raise _absent(file, row)


def _check_named(named: Sequence[TeacherSettings], file: TargetsFile) -> None:
    """The recipe may name the teachers too: then they must be those that wrote the file, as far as that can be seen."""
    if not named:
        return
    total = sum(teacher.weight for teacher in named)
    wanted = [(teacher.path, teacher.weight / total) for teacher in named]
    written = [(record.path, record.share) for record in file.header.teachers]
    if [path for path, _ in wanted] != [path for path, _ in written] or not np.allclose(
        [share for _, share in wanted], [share for _, share in written]
    ):
        raise UserError(
            f"the targets are those of {_listed(written)}, and the recipe names {_listed(wanted)}",
            where="supervised.teachers",
            mend="write the targets again (strop teach RECIPE), or leave the teachers out of the recipe",
        )
    for record in file.header.teachers:
        # The machine that trains need not have the teachers.
        if user_path(record.path).exists():
            fingerprint = fingerprint_folder(resolve_model(record.path))
            if fingerprint != record.fingerprint:
                raise UserError(
                    f"the teacher {record.path} has changed since it wrote the targets",
                    where=f"supervised.targets = {file.path}",
                    mend="write the targets again (strop teach RECIPE), or leave the teachers out of the recipe",
                )


def _listed(teachers: Sequence[tuple[str, float]]) -> str:
    return ", ".join(f"{path} ({share:.2f})" for path, share in teachers)


def _absent(file: TargetsFile, row: ExampleRow) -> DataError:
    return DataError(
        f"the file of targets {file.path} has none for this example: the row, how it is rendered or the tokenizer has "
        "changed since it was written, or the row was not there",
        where=row.where,
        mend="write the targets again: strop teach RECIPE",
    )
