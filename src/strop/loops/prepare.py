"""Everything that can be checked before anything is loaded or written, in the first seconds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from strop.config import Config
from strop.errors import ConfigError, DataError, UserError
from strop.loops.algorithm import make_algorithm
from strop.loops.idle import check_idle, check_optimizers

if TYPE_CHECKING:
    from strop.algorithms.base import Algorithm
    from strop.config.rewards import RewardSettings
    from strop.data.prompts import PromptDataset
    from strop.data.sources import Source
    from strop.models.load import ModelFacts
    from strop.planning.hardware import Hardware
    from strop.rewards.protocol import Scorer


@dataclass
class Prepared:
    """A recipe whose parts have all been found and fit together. longest: tokens of the longest sequence expected."""

    config: Config
    hardware: Hardware
    facts: ModelFacts
    train: PromptDataset
    demonstrations: PromptDataset
    held_out: PromptDataset | None
    scorer: Scorer
    algorithm: Algorithm
    longest: int


def prepare(config: Config) -> Prepared:
    """Check a recipe against this machine, the model's folder, the data and the rewards. Writes nothing.

    Raises:
        UserError: something is missing or does not fit; the error says what, where and how to mend it.
    """
    if config.rewards is None:
        raise UserError(
            "this recipe learns from examples, and nothing in it says what a sampled completion is worth",
            where="rewards",
            mend="its scores on held-out examples are in `strop runs show`; to score completions, use a recipe with "
            "`rewards` and name the run with --model",
        )
    _check_reference(config)
    check_idle(config)

    # What needs no torch comes first: importing it takes longer than most of these checks.
    from strop.data.sources import open_source
    from strop.rewards.build import build_scorer
    from strop.tracking.trackers import check_trackers

    check_trackers(config.tracking)
    scorer = build_scorer(config.rewards, config.sandbox)
    given = {
        "data.train": config.data.train,
        "warmup.data": config.warmup.data if config.warmup is not None else None,
        "data.eval": config.data.eval,
    }
    sources = {key: open_source(settings) for key, settings in given.items() if settings is not None}
    _check_columns(config.rewards, sources["data.train"], sources.get("data.eval"))

    from strop.models.load import inspect_model

    facts = inspect_model(config.model)
    room = _longest_prompt(config, facts.context)
    train, expected = _dataset(config, sources["data.train"], facts.tokenizer, room, "data.train")
    shown = train
    if "warmup.data" in sources:
        shown, _ = _dataset(config, sources["warmup.data"], facts.tokenizer, room, "warmup.data")
    held_out = None
    if "data.eval" in sources:
        held_out, _ = _dataset(
            config, sources["data.eval"], facts.tokenizer, _longest_held_out(config, facts.context, room), "data.eval"
        )

    from strop.planning.hardware import choose_hardware

    algorithm = make_algorithm(config)
    hardware = choose_hardware(config)
    check_optimizers(config, hardware.device.type)
    if config.warmup is not None:
        from strop.loops.warmup import check_answers

        check_answers(shown, facts.tokenizer)
    if config.algorithm.teacher is not None:
        from strop.loops.teacher import check_teacher

        check_teacher(config, facts, expected + config.rollout.max_new_tokens)
    return Prepared(
        config, hardware, facts, train, shown, held_out, scorer, algorithm, expected + config.rollout.max_new_tokens
    )


def _check_columns(rewards: RewardSettings, train: Source, held_out: Source | None) -> None:
    """Raise DataError unless the columns that verifiers choose rows by, read or send along are in the data."""
    from strop.config.rewards import CodeVerifier
    from strop.data.columns import listed, nearest

    for index, verifier in enumerate(rewards.verifiers):
        named = {"when": list(verifier.when), "columns": getattr(verifier, "columns", [])}
        if isinstance(verifier, CodeVerifier):
            code = {key: getattr(verifier, key) for key in ("tests", "setup", "before")}
            named |= {key: [column] for key, column in code.items() if column is not None}
        for key, columns in named.items():
            for column in columns:
                # Held-out prompts may be of one kind only, and the column then says so in none of them.
                if column not in train.columns and (held_out is None or column not in held_out.columns):
                    raise DataError(
                        f"there is no column {column!r} in the data; the columns are {listed(train.columns)}",
                        where=f"rewards.verifiers.{index}.{key}",
                        mend=nearest(column, train.columns) or "name one of them",
                    )


def _check_reference(config: Config) -> None:
    if config.algorithm.kl_coef and config.warmup is not None and config.model.lora is not None:
        raise ConfigError(
            [
                UserError(
                    "with adapters the reference is the model without them, which the warm-up has not trained",
                    where="algorithm.kl_coef, warmup and model.lora",
                    mend="leave out the warm-up or the KL penalty, or train all weights (model.lora: null)",
                )
            ]
        )


def _longest_prompt(config: Config, context: int) -> int:
    """Most prompt tokens that leave room for a completion."""
    room = context - config.rollout.max_new_tokens
    if room < 1:
        raise UserError(
            f"{config.rollout.max_new_tokens} new tokens leave no room for a prompt in a context of {context} tokens",
            where="rollout.max_new_tokens",
            mend=f"set it below {context}",
        )
    asked = config.data.max_prompt_tokens
    if asked == "auto":
        return room
    if asked > room:
        raise UserError(
            f"prompts of {asked} tokens and completions of {config.rollout.max_new_tokens} do not fit the model's "
            f"context of {context} tokens",
            where="data.max_prompt_tokens",
            mend=f"set it to {room} or less, or leave it on auto",
        )
    return asked


def _longest_held_out(config: Config, context: int, room: int) -> int:
    """Most tokens of a held-out prompt: no more than in training, and room for an evaluated completion."""
    new_tokens = config.evaluation.max_new_tokens
    if new_tokens is None:
        return room
    if new_tokens >= context:
        raise UserError(
            f"{new_tokens} new tokens leave no room for a prompt in a context of {context} tokens",
            where="evaluation.max_new_tokens",
            mend=f"set it below {context}",
        )
    return min(room, context - new_tokens)


def _dataset(config: Config, source: Source, tokenizer: Any, longest: int, key: str) -> tuple[PromptDataset, int]:
    """The prompts of a source, checked, and the tokens of the longest one that is expected."""
    from strop.data.prompts import PromptDataset

    dataset = PromptDataset(source, config.data, tokenizer, longest)
    checked = dataset.check()
    if config.model.create is not None and checked.unknown:
        raise DataError(
            f"{checked.unknown} of {checked.rows} prompts hold characters that the new model's alphabet lacks",
            where=f"{key}: {checked.unknown_at}",
            mend="add them to model.create.characters",
        )
    # Of a long source only the beginning was looked at; allow the rest to be twice as long.
    return dataset, checked.longest if checked.rows == checked.of else min(2 * checked.longest, longest)
