"""Evaluation: completions of held-out prompts, scored by the run's verifiers."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING

from strop.config import Config
from strop.config.alarms import AlarmSettings
from strop.config.model import ModelSettings
from strop.config.training import CriticSettings
from strop.data.prompts import Prompt, PromptDataset
from strop.errors import UserError
from strop.loops.engine_choices import refuse_servers
from strop.loops.event_loop import run_to_end
from strop.rewards.composition import check_errors
from strop.rewards.protocol import Scorer
from strop.rollout.collector import reward_of, score_episodes
from strop.rollout.engine import SampleSettings
from strop.rollout.episode import Episode
from strop.rollout.player import Part, Player
from strop.rollout.together import all_or_none

if TYPE_CHECKING:
    from strop.loops.prepare import Prepared

# Random streams of evaluation never meet those of training, whose first number is a group's.
STREAM = -1


@dataclass(frozen=True)
class Scores:
    """Means over evaluated episodes; those that could not be verified are counted in `errors` and left out.

    accuracy: share that the first verifier calls correct. reward: weighted total. length: tokens of a completion.
    components: the score of each verifier by name, where there are several.
    """

    accuracy: float
    reward: float
    length: float
    episodes: int
    errors: int
    components: Mapping[str, float] = field(default_factory=dict)

    def metrics(self) -> dict[str, float]:
        found = {"accuracy": self.accuracy, "reward": self.reward, "completion_length": self.length}
        return found | {f"reward/{name}": score for name, score in self.components.items()}


async def evaluate(
    player: Player,
    scorer: Scorer,
    dataset: PromptDataset,
    settings: SampleSettings,
    *,
    prompts: int | None = None,
    samples: int = 1,
    progress: Callable[[int, int], None] | None = None,
) -> tuple[Scores, list[Episode]]:
    """Sample and score held-out prompts, in file order.

    Args:
        prompts: use only the first, so many. samples: completions for each.
    """
    chosen = list(islice(dataset, prompts))
    total, done = len(chosen) * samples, 0

    async def one(number: int, prompt: Prompt) -> list[Episode]:
        def ended(part: Part) -> None:
            nonlocal done
            done += 1
            if progress is not None:
                progress(done, total)

        begun = [
            Part(
                Episode(number, sample * player.most(), dict(prompt.row), prompt.prompt_id),
                settings,
                (STREAM, number, sample),
            )
            for sample in range(samples)
        ]
        played = await player.play_all(begun, prompt, ended)
        episodes = [episode for parts in played for episode in parts]
        await score_episodes(episodes, prompt, scorer)
        return episodes

    groups = await all_or_none([one(number, prompt) for number, prompt in enumerate(chosen)])
    episodes = [episode for group in groups for episode in group]
    return summarise(episodes), episodes


def summarise(episodes: list[Episode]) -> Scores:
    """Means over episodes."""
    scored = [e for e in episodes if e.status is not None and e.status.trainable and not math.isnan(e.reward)]
    judged = [e for e in scored if e.correct is not None]

    def mean(values: list[float]) -> float:
        return sum(values) / len(values) if values else math.nan

    # One verifier alone is the reward itself.
    names = list(dict.fromkeys(name for e in scored for name in e.components))
    names = names if len(names) > 1 else []
    return Scores(
        accuracy=mean([float(bool(e.correct)) for e in judged]),
        reward=mean([e.reward for e in scored]),
        length=mean([float(e.sampled_tokens()) for e in scored]),
        episodes=len(scored),
        errors=len(episodes) - len(scored),
        components={name: mean([e.components[name] for e in scored if name in e.components]) for name in names},
    )


def evaluation_settings(config: Config) -> SampleSettings:
    """How held-out prompts are sampled."""
    return SampleSettings(
        max_new_tokens=config.evaluation.max_new_tokens or config.rollout.max_new_tokens,
        temperature=config.evaluation.temperature,
        stop=tuple(config.rollout.stop),
    )


def evaluate_model(config: Config, *, model: str | None = None, prompts: int | None = None) -> Scores:
    """Score a model on a recipe's held-out prompts, with the recipe's evaluation settings and the verifiers of those.

    Args:
        config: the recipe. model: a model to score instead of the recipe's: a folder, a run, or a name.
        prompts: use only the first, so many; the recipe's choice when not given.

    Raises:
        UserError: the recipe has no held-out prompts, or something in it cannot work.
    """
    from strop.loops.prepare import held_out_rewards, prepare

    refuse_servers(config, "eval")

    if config.data.eval is None:
        raise UserError("the recipe has no held-out prompts", where="data.eval", mend="add a dataset there")
    if model is not None:
        # The run's own model: its adapters are merged, and its warm-up is behind it.
        settings = ModelSettings(path=model, dtype=config.model.dtype, trust_remote_code=config.model.trust_remote_code)
        config = config.model_copy(update={"model": settings, "warmup": None})
    if config.rewards is not None:
        # A reward model, a critic or a second opinion that only training asks need not be there.
        evaluation = config.evaluation.model_copy(update={"verifiers": None, "correct_at": 1.0})
        parts = {"rewards": held_out_rewards(config), "evaluation": evaluation, "critic": CriticSettings()}
        config = config.model_copy(update={**parts, "alarms": AlarmSettings()})
    with prepare(config) as prepared:
        return _evaluate(prepared, prompts)


def _evaluate(prepared: Prepared, prompts: int | None) -> Scores:
    from strop.loops import assembly

    config, held_out, scorer = prepared.config, prepared.held_out, prepared.scorer
    assert held_out is not None
    assert scorer is not None
    assert config.rewards is not None
    rewards = config.rewards
    scorer.load()
    roles = assembly.load_roles(prepared)
    engine = assembly.make_engine(prepared, roles)

    async def work() -> Scores:
        try:
            if prepared.world is not None:
                await prepared.world.factory.open()
            scores, episodes = await evaluate(
                assembly.make_player(prepared.world, roles, engine),
                scorer,
                held_out,
                evaluation_settings(config),
                prompts=prompts or config.evaluation.prompts,
                samples=config.evaluation.samples,
            )
            check_errors([reward_of(e) for e in episodes], first_step=True, settings=rewards)
        finally:
            await engine.close()
            if prepared.world is not None:
                await prepared.world.factory.close()
            await scorer.close()
        return scores

    return run_to_end(work)
