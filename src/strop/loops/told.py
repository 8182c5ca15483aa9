"""Whether the policy can know of its tools, and write calls of them: looked at before a run begins, and warned of."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import TYPE_CHECKING

from strop.config import Config
from strop.data.prompts import PromptDataset
from strop.environments.build import ToolFactory

if TYPE_CHECKING:
    from strop.data.rollouts import RolloutDataset
    from strop.models.load import ModelFacts
    from strop.rollout.world import World

ROWS = 20
"""Prompts that are looked at."""


def warn_of_tools(config: Config, world: World, prompts: PromptDataset | RolloutDataset, facts: ModelFacts) -> None:
    """Warn where nothing tells the policy of its tools, or a created model lacks characters of their calls.

    Neither is refused: an earlier training may have taught the calls, and not every tool need be reached.
    """
    factory = world.factory
    if isinstance(factory, ToolFactory) and isinstance(prompts, PromptDataset):
        for problem in (*_never_told(config, factory, world, prompts, facts), *_unspelled(config, factory)):
            warnings.warn(problem, stacklevel=4)


def _never_told(
    config: Config, factory: ToolFactory, world: World, prompts: PromptDataset, facts: ModelFacts
) -> Iterator[str]:
    if config.warmup is not None:
        # Demonstrations show how calls are written.
        return
    names = [*factory.names, *(begin for begin, _ in factory.marks)]
    for number in range(min(len(prompts), ROWS)):
        where = prompts.source.location(number)
        prompt = prompts.given(prompts.source[number], where)
        if not isinstance(prompt, str) or world.renderer.renders_chat(prompt) or any(n in prompt for n in names):
            continue
        chat = getattr(facts.tokenizer, "chat_template", None) is not None
        mend = "set data.render=chat, or say in the prompts" if chat else "say in the prompts (data.prompt_template)"
        yield (
            "the policy is not told of its tools: prompts are texts that no chat template renders, and have no system "
            f"message ({where}); {mend} how a call is written, such as {'...'.join(factory.marks[0])}, unless the "
            "model has learned that before"
        )
        return


def _unspelled(config: Config, factory: ToolFactory) -> Iterator[str]:
    if config.model.create is None:
        return
    for name, marks in zip(factory.names, factory.marks, strict=True):
        lacking = "".join(dict.fromkeys(one for one in "".join(marks) if one not in config.model.create.characters))
        if lacking:
            yield (
                f"the policy can never call the tool {name}: model.create.characters lacks {lacking!r} of "
                f"{'...'.join(marks)}; add what is missing, or set environment.opening and closing (style: tag)"
            )
