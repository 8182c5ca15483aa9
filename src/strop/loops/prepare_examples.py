"""Everything of a supervised recipe that can be checked before anything is loaded or written."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import TYPE_CHECKING, Any

from strop.config import Config
from strop.config.supervised import ExampleColumns, SupervisedSettings
from strop.errors import ConfigError, DataError, UserError
from strop.loops.idle import check_idle, check_optimizers
from strop.loops.supervised_choices import unfit_choices

if TYPE_CHECKING:
    from strop.algorithms.base import Objective
    from strop.data.examples import CheckedRows, ExampleDataset
    from strop.data.targets import TargetsFile
    from strop.models.load import ModelFacts
    from strop.planning.hardware import Hardware

# What each method reads of `supervised.columns`; all others read the columns of pairs.
_COLUMNS = {
    "sft": {"messages"},
    "distillation": {"messages"},
    "kto": {"completion", "label"},
    "process_reward": {"steps", "labels"},
    "reward_model": {"chosen", "rejected", "margin", "ranked"},
}
_PAIRS = {"chosen", "rejected"}
_CHOICES = (
    "beta",
    "label_smoothing",
    "length_normalised",
    "margin",
    "nll_coef",
    "desirable_weight",
    "undesirable_weight",
    "centre",
    "divergence",
    "jsd_beta",
    "top_k",
    "temperature",
    "cross_entropy_weight",
)


@dataclass
class PreparedExamples:
    """A supervised recipe whose parts have all been found and fit together. longest: tokens of the longest example.
    stored: what teachers said of the data, where a file of theirs is named."""

    config: Config
    hardware: Hardware
    facts: ModelFacts
    train: ExampleDataset
    held_out: ExampleDataset | None
    objective: Any
    longest: int
    stored: TargetsFile | None = None

    @property
    def scalar(self) -> bool:
        """Whether a model with a scalar head is trained."""
        assert self.config.supervised is not None
        return self.config.supervised.method in ("reward_model", "process_reward")


def prepare_examples(config: Config, *, teaching: bool = False) -> PreparedExamples:
    """Check a recipe against this machine, the model's folder and the data. Writes nothing.

    Args:
        teaching: the teachers are to be asked, and the file of what they say need not be there yet.

    Raises:
        UserError: something is missing or does not fit; the error says what, where and how to mend it.
    """
    check_idle(config)
    settings = config.supervised
    assert settings is not None
    if problems := [*_idle_columns(settings), *_idle_choices(settings), *unfit_choices(config)]:
        raise ConfigError(problems)

    from strop.data.sources import open_source
    from strop.tracking.trackers import check_trackers

    check_trackers(config.tracking)
    sources = {"data.train": open_source(config.data.train)}
    if config.data.eval is not None:
        sources["data.eval"] = open_source(config.data.eval)

    from strop.data.examples import ExampleDataset
    from strop.models.load import inspect_model

    facts = inspect_model(config.model)
    longest = _longest(settings, facts)
    datasets = {
        key: ExampleDataset(source, config.data, settings, facts.tokenizer, facts.eos_ids, longest)
        for key, source in sources.items()
    }
    checked = {key: dataset.check() for key, dataset in datasets.items()}
    _check_alphabet(config, checked)

    from strop.planning.hardware import choose_hardware

    hardware = choose_hardware(config)
    check_optimizers(config, hardware.device.type)
    seen = checked["data.train"]
    # Of a long source only the beginning was looked at; allow the rest to be twice as long.
    expected = seen.longest if seen.rows == seen.of else min(2 * seen.longest, longest)
    stored = None
    if settings.method == "distillation":
        if settings.targets is not None and not teaching:
            from strop.loops.targets import check_stored

            stored, settings = check_stored(config, facts, list(datasets.values()))
        else:
            from strop.loops.teacher import check_teachers

            check_teachers(config, facts, max(expected, *(found.longest for found in checked.values())))
    return PreparedExamples(
        config,
        hardware,
        facts,
        datasets["data.train"],
        datasets.get("data.eval"),
        make_objective(settings),
        expected,
        stored,
    )


def _longest(settings: SupervisedSettings, facts: ModelFacts) -> int:
    """Tokens that an example may have."""
    longest = facts.context if settings.max_tokens == "auto" else settings.max_tokens
    if longest > facts.context:
        raise UserError(
            f"examples of {longest} tokens do not fit the model's context of {facts.context} tokens",
            where="supervised.max_tokens",
            mend=f"set it to {facts.context} or less, or leave it on auto",
        )
    return longest


def _check_alphabet(config: Config, checked: Mapping[str, CheckedRows]) -> None:
    """Raise DataError where a model that is made on the spot lacks a character of the data."""
    for key, found in checked.items():
        if config.model.create is not None and found.unknown_at:
            raise DataError(
                "an example holds characters that the new model's alphabet lacks",
                where=f"{key}: {found.unknown_at}",
                mend="add them to model.create.characters",
            )


def make_objective(settings: SupervisedSettings) -> Objective:
    """The objective that a `supervised:` section names, with its choices."""
    from strop.algorithms.paired import OBJECTIVES

    made: Objective = OBJECTIVES[settings.method](**_choices(settings))
    return made


def listed_objective(settings: SupervisedSettings) -> str:
    """The method of a `supervised:` section and every choice it makes, in one line."""
    objective = make_objective(settings)
    choices = sorted(_fields(type(objective)) & set(_CHOICES))
    if settings.targets is not None:
        # These are the file's unless they are set.
        choices = [name for name in choices if name not in ("top_k", "temperature") or name in _choices(settings)]
    return ", ".join([f"method: {settings.method}", *(f"{name}: {getattr(objective, name)}" for name in choices)])


def _choices(settings: SupervisedSettings) -> dict[str, Any]:
    return {name: value for name in _CHOICES if (value := getattr(settings, name)) is not None}


def _idle_choices(settings: SupervisedSettings) -> Iterator[UserError]:
    from strop.algorithms.paired import OBJECTIVES

    has = _fields(OBJECTIVES[settings.method])
    for name in _choices(settings):
        if name not in has:
            others = [other for other, kind in OBJECTIVES.items() if name in _fields(kind)]
            yield UserError(
                f"`supervised.{name}` has no effect with {settings.method}",
                where=f"supervised.{name}",
                mend=f"remove it; it belongs to {', '.join(others)}",
            )
    if settings.label_smoothing is not None and settings.label_smoothing >= 0.5:
        yield UserError(
            f"`supervised.label_smoothing` must be below 0.5, got {settings.label_smoothing}",
            where="supervised.label_smoothing",
            mend="if more than half of the labels are wrong, swap the columns",
        )
    if settings.method == "kto" and settings.batch_size < 2:
        yield UserError(
            "kto compares each completion with those of other prompts, and a batch of one has none",
            where="supervised.batch_size",
            mend="set it to 2 or more (32 is usual)",
        )


def _fields(kind: Any) -> set[str]:
    return {field.name for field in fields(kind)} if is_dataclass(kind) else set()


def _idle_columns(settings: SupervisedSettings) -> Iterator[UserError]:
    read = _COLUMNS.get(settings.method, _PAIRS)
    if "ranked" in read and settings.columns.ranked is not None:
        # A ranking has everything in it.
        read = {"ranked"}
    default = ExampleColumns()
    for name in ExampleColumns.model_fields:
        if name not in read and getattr(settings.columns, name) != getattr(default, name):
            yield UserError(
                f"`supervised.columns.{name}` has no effect with {settings.method}",
                where=f"supervised.columns.{name}",
                mend=f"remove it; {settings.method} reads {', '.join(sorted(read))}",
            )
