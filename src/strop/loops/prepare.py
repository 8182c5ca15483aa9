"""Everything that can be checked before anything is loaded or written, in the first seconds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from strop.config import Config
from strop.errors import ConfigError, DataError, UserError

if TYPE_CHECKING:
    from strop.algorithms.base import Algorithm
    from strop.data.prompts import PromptDataset
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
    algorithm = make_algorithm(config)
    _check_reference(config)

    from strop.models.load import inspect_model
    from strop.planning.hardware import choose_hardware
    from strop.rewards.build import build_scorer
    from strop.tracking.trackers import check_trackers

    check_trackers(config.tracking)
    scorer = build_scorer(config.rewards)
    hardware = choose_hardware(config)
    facts = inspect_model(config.model)
    longest = _longest_prompt(config, facts.context)
    train, expected = _dataset(config, config.data.train, facts.tokenizer, longest, "data.train")
    shown = train
    if config.warmup is not None:
        from strop.loops.supervised import check_answers

        if config.warmup.data is not None:
            shown, _ = _dataset(config, config.warmup.data, facts.tokenizer, longest, "warmup.data")
        check_answers(shown, facts.tokenizer)
    held_out = None
    if config.data.eval is not None:
        held_out, _ = _dataset(config, config.data.eval, facts.tokenizer, longest, "data.eval")
    return Prepared(
        config, hardware, facts, train, shown, held_out, scorer, algorithm, expected + config.rollout.max_new_tokens
    )


def make_algorithm(config: Config) -> Algorithm:
    """The algorithm of a recipe.

    Raises:
        ConfigError: a choice has no effect in this algorithm, or a group of one has no advantage in it.
    """
    from strop.algorithms.named import build_algorithm

    choices: dict[str, Any] = config.algorithm.model_dump(exclude={"name"})
    try:
        algorithm = build_algorithm(
            config.algorithm.name,
            group_size=config.rollout.group_size,
            max_new_tokens=config.rollout.max_new_tokens,
            **choices,
        )
    except ValueError as error:
        raise ConfigError([UserError(str(error), where="algorithm")]) from None
    if algorithm.needs_group and config.rollout.group_size < 2:
        raise ConfigError(
            [
                UserError(
                    f"{config.algorithm.name} compares the completions of a group, and a group of one has nothing to "
                    "be compared with: every advantage would be 0",
                    where=f"rollout.group_size = {config.rollout.group_size}",
                    mend="set rollout.group_size to 2 or more (8 is usual), or algorithm.baseline to none",
                )
            ]
        )
    return algorithm


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


def _dataset(config: Config, settings: Any, tokenizer: Any, longest: int, key: str) -> tuple[PromptDataset, int]:
    """The prompts of a source, checked, and the tokens of the longest one that is expected."""
    from strop.data.prompts import PromptDataset
    from strop.data.sources import open_source

    dataset = PromptDataset(open_source(settings), config.data, tokenizer, longest)
    checked = dataset.check()
    if config.model.create is not None and checked.unknown:
        raise DataError(
            f"{checked.unknown} of {checked.rows} prompts hold characters that the new model's alphabet lacks",
            where=f"{key}: {checked.unknown_at}",
            mend="add them to model.create.characters",
        )
    # Of a long source only the beginning was looked at; allow the rest to be twice as long.
    return dataset, checked.longest if checked.rows == checked.of else min(2 * checked.longest, longest)
