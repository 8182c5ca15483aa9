"""Everything that can be checked before anything is loaded or written, in the first seconds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self, cast

from strop.config import Config
from strop.config.rewards import RewardSettings
from strop.errors import ConfigError, DataError, UserError
from strop.loops.algorithm import Demands, demands_of, make_algorithm
from strop.loops.consistent_choices import check_consistent
from strop.loops.engine_choices import check_engine
from strop.loops.idle import check_idle, check_optimizers
from strop.loops.offline import check_offline, described, open_rollouts
from strop.loops.window_choices import check_window

if TYPE_CHECKING:
    from strop.algorithms.base import Algorithm
    from strop.data.prompts import PromptDataset
    from strop.data.rendering import Renderer
    from strop.data.rollouts import CheckedGroups, RolloutDataset
    from strop.data.sources import Source
    from strop.models.load import ModelFacts
    from strop.planning.hardware import Hardware
    from strop.rewards.protocol import Scorer
    from strop.rollout.world import World
    from strop.sandbox.build import SharedSandbox


@dataclass
class Prepared:
    """A recipe whose parts have all been found and fit together. longest: tokens of the longest sequence expected.

    train: prompts, or with `offline` groups of completions, of which `about` says what there is to say. scorer: of
    training, None where nothing is scored; held_out_scorer: of the evaluations, the same unless the recipe has
    verifiers for these. second_scorer: of the alarms' second opinion, None without one.
    """

    config: Config
    hardware: Hardware
    facts: ModelFacts
    train: PromptDataset | RolloutDataset
    demonstrations: PromptDataset | None
    held_out: PromptDataset | None
    scorer: Scorer | None
    held_out_scorer: Scorer | None
    algorithm: Algorithm
    longest: int
    sandbox: SharedSandbox
    about: str = ""
    world: World | None = None
    second_scorer: Scorer | None = None

    def close(self) -> None:
        """Give back what was started to see whether it works."""
        self.sandbox.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def needs_reference(self) -> bool:
        """Whether the weights that the run starts from are asked for log-probabilities."""
        offline = self.config.offline
        return self.algorithm.needs_reference or (offline is not None and offline.logprobs == "compute")


def prepare(config: Config) -> Prepared:
    """Check a recipe against this machine, the model's folder, the data and the rewards. Writes nothing.

    What is returned holds processes, which its end as a context manager, or `close`, gives back.

    Raises:
        UserError: something is missing or does not fit; the error says what, where and how to mend it.
    """
    if config.supervised is not None:
        raise UserError(
            "this recipe learns from examples, and nothing in it says what a sampled completion is worth",
            where="rewards",
            mend="its scores on held-out examples are in `strop runs show`; to score completions, use a recipe with "
            "`rewards` and name the run with --model",
        )
    _check_reference(config)
    check_idle(config)
    from strop.sandbox.build import SharedSandbox

    sandbox = SharedSandbox(config.sandbox)
    try:
        return _prepare(config, sandbox)
    except BaseException:
        sandbox.close()
        raise


def _prepare(config: Config, sandbox: SharedSandbox) -> Prepared:
    # What needs no torch comes first: importing it takes longer than most of these checks.
    from strop.data.gym import check_apart
    from strop.data.sources import open_source
    from strop.rewards.build import build_scorer
    from strop.tracking.trackers import check_trackers

    check_trackers(config.tracking)
    check_window(config)
    scorer = held_out_scorer = None if config.rewards is None else build_scorer(config.rewards, sandbox)
    if config.evaluation.verifiers is not None and config.rewards is not None:
        held_out_scorer = build_scorer(held_out_rewards(config), sandbox, key="evaluation.verifiers")
    second_scorer = build_second_scorer(config, sandbox)
    given = {
        "data.train": config.data.train,
        "warmup.data": config.warmup.data if config.warmup is not None else None,
        "data.eval": config.data.eval,
    }
    sources = {key: open_source(settings) for key, settings in given.items() if settings is not None}
    if config.data.eval is not None:
        check_apart(config.data.train, config.data.eval)
    _check_columns(config, config.rewards, sources["data.train"], sources.get("data.eval"))
    if second_scorer is not None:
        own = second_rewards(config)
        _check_columns(config, own, sources["data.train"], None, key="alarms.second_opinion.verifiers")

    from strop.models.load import inspect_model

    facts = inspect_model(config.model)
    room = longest_prompt(config, facts.context)
    world = _world(config, facts, sandbox)
    renderer = None if world is None else world.renderer
    train, shown, expected, seen = _training_data(config, sources, facts, room, renderer)
    held_out = None
    if "data.eval" in sources:
        held_out, _ = prompt_dataset(
            config,
            sources["data.eval"],
            facts.tokenizer,
            _longest_held_out(config, facts.context, room),
            "data.eval",
            renderer,
        )

    from strop.loops.told import warn_of_tools
    from strop.planning.hardware import choose_hardware

    algorithm = make_algorithm(config)
    if world is not None:
        _check_world(config, world, demands_of(algorithm))
        warn_of_tools(config, world, train, facts)
    if seen is not None:
        check_offline(config, algorithm, demands_of(algorithm), seen)
    hardware = choose_hardware(config)
    check_optimizers(config, hardware.device.type)
    check_engine(config, hardware.device.type)
    check_consistent(config, facts, algorithm, hardware.device.type)
    longest = _longest_sequence(config, facts.context, expected)
    _check_others(config, facts, shown, longest)
    about = "" if seen is None else described(config, cast("RolloutDataset", train), seen)
    return Prepared(
        config,
        hardware,
        facts,
        train,
        shown,
        held_out,
        scorer,
        held_out_scorer,
        algorithm,
        longest,
        sandbox,
        about,
        world,
        second_scorer,
    )


def _check_others(config: Config, facts: ModelFacts, shown: PromptDataset | None, longest: int) -> None:
    """See that the warm-up has answers to show, and that teachers and critic fit the policy."""
    if config.warmup is not None:
        from strop.loops.warmup import check_answers

        assert shown is not None
        check_answers(shown, facts.tokenizer)
    if config.algorithm.teacher is not None or config.algorithm.teachers:
        from strop.loops.teacher import check_teachers

        check_teachers(config, facts, longest)
    if config.critic.path is not None:
        from strop.loops.critic import check_critic

        check_critic(config.critic.path, facts)


def held_out_rewards(config: Config) -> RewardSettings:
    """What held-out completions are worth: the verifiers of the evaluation where it has its own, else those of training
    (which are there). Time-outs, retries and the like are the same for both."""
    assert config.rewards is not None
    if config.evaluation.verifiers is None:
        return config.rewards
    own = {"verifiers": config.evaluation.verifiers, "correct_at": config.evaluation.correct_at}
    return config.rewards.model_copy(update=own)


def second_rewards(config: Config) -> RewardSettings:
    """What the second opinion of the alarms, which is there, goes by; time-outs and the like are those of training."""
    assert config.rewards is not None
    assert config.alarms.second_opinion is not None
    second = config.alarms.second_opinion
    return config.rewards.model_copy(update={"verifiers": second.verifiers, "correct_at": second.correct_at})


def build_second_scorer(config: Config, sandbox: SharedSandbox) -> Scorer | None:
    """The scorer of the alarms' second opinion; None without one."""
    if config.alarms.second_opinion is None or config.rewards is None or config.alarms.action == "off":
        return None
    from strop.rewards.build import build_scorer

    return build_scorer(second_rewards(config), sandbox, key="alarms.second_opinion.verifiers")


def _training_data(
    config: Config, sources: dict[str, Source], facts: ModelFacts, room: int, renderer: Renderer | None
) -> tuple[PromptDataset | RolloutDataset, PromptDataset | None, int, CheckedGroups | None]:
    """What is trained on, the demonstrations of the warm-up, the tokens of the longest prompt that is expected, and
    what was seen of recorded completions, if it is these."""
    train: PromptDataset | RolloutDataset
    seen: CheckedGroups | None = None
    shown: PromptDataset | None = None
    if config.offline is None:
        train, expected = prompt_dataset(config, sources["data.train"], facts.tokenizer, room, "data.train", renderer)
        shown = train
    else:
        train, seen = _rollouts(config, sources["data.train"], facts, room)
        expected = seen.longest if seen.groups == seen.of else min(2 * seen.longest, room)
        if config.warmup is not None and config.warmup.data is None:
            shown, _ = prompt_dataset(config, sources["data.train"], facts.tokenizer, room, "data.train")
    if "warmup.data" in sources:
        shown, _ = prompt_dataset(config, sources["warmup.data"], facts.tokenizer, room, "warmup.data")
    return train, shown, expected, seen


def _world(config: Config, facts: ModelFacts, sandbox: SharedSandbox) -> World | None:
    """What answers the policy's turns; None where there is one turn only."""
    if config.environment is None:
        return None
    from strop.data.rendering import Renderer
    from strop.environments.build import build_environments
    from strop.rollout.world import World

    template = getattr(facts.tokenizer, "chat_template", None)
    factory = build_environments(config.environment, template, sandbox)
    renderer = Renderer(config.data, facts.tokenizer, tools=factory.tools, instructions=factory.instructions)
    return World(factory, config.environment, renderer, frozenset(facts.eos_ids), facts.context)


def _check_world(config: Config, world: World, demands: Demands) -> None:
    """Raise UserError unless the environment can do what the recipe asks of it."""
    if config.rollout.tree is not None and not world.factory.forks:
        raise UserError(
            "the environment cannot branch: it has no `async def fork`",
            where="rollout.tree",
            mend="add one that returns another environment in the same state, or remove rollout.tree",
        )
    if world.factory.roles and demands.greedy:
        raise UserError(
            f"{config.algorithm.name} compares with the most likely completion, and a match has none: what one role "
            "says depends on the other",
            where="algorithm.name",
            mend="take an algorithm that compares within groups, such as grpo",
        )


def _longest_sequence(config: Config, context: int, prompt: int) -> int:
    """Tokens of the longest sequence that is expected: with an environment, what it says is not known before."""
    if config.environment is None:
        return prompt + config.rollout.max_new_tokens
    limit = config.environment.max_tokens
    return context if limit == "auto" else min(context, prompt + limit)


def _check_columns(
    config: Config,
    rewards: RewardSettings | None,
    train: Source,
    held_out: Source | None,
    *,
    key: str = "rewards.verifiers",
) -> None:
    """Raise DataError unless the columns that verifiers choose rows by, read or send along are in the data.

    Args:
        rewards: the verifiers. key: where they stand in the recipe.
    """
    from strop.config.rewards import CodeVerifier
    from strop.data.columns import listed, nearest
    from strop.environments.self_play import ROLE

    added = [ROLE] if config.environment is not None and config.environment.kind == "self_play" else []
    for name in added:
        if name in train.columns:
            raise DataError(
                f"a match puts the role into the column {name!r}, and the data has one already",
                where="data.train",
                mend="rename the column",
            )
    for index, verifier in enumerate(rewards.verifiers if rewards is not None else []):
        named = {"when": list(verifier.when), "columns": getattr(verifier, "columns", [])}
        if isinstance(verifier, CodeVerifier):
            code = {name: getattr(verifier, name) for name in ("tests", "setup", "before")}
            named |= {name: [column] for name, column in code.items() if column is not None}
        if verifier.kind == "reasoning_gym":
            named["kind"] = ["task", "metadata"]
        for name, columns in named.items():
            for column in columns:
                # Held-out prompts may be of one kind only, and the column then says so in none of them.
                if column not in [*added, *train.columns] and (held_out is None or column not in held_out.columns):
                    raise DataError(
                        f"there is no column {column!r} in the data; the columns are {listed(train.columns)}",
                        where=f"{key}.{index}.{name}",
                        mend=nearest(column, train.columns) or "name one of them",
                    )


def _check_reference(config: Config) -> None:
    computed = config.offline is not None and config.offline.logprobs == "compute"
    if (config.algorithm.kl_coef or computed) and config.warmup is not None and config.model.lora is not None:
        asks = "offline.logprobs: compute" if computed else "the KL penalty"
        raise ConfigError(
            [
                UserError(
                    "with adapters the reference is the model without them, which the warm-up has not trained",
                    where=f"{'offline.logprobs' if computed else 'algorithm.kl_coef'}, warmup and model.lora",
                    mend=f"leave out the warm-up or {asks}, or train all weights (model.lora: null)",
                )
            ]
        )


def longest_prompt(config: Config, context: int) -> int:
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


def prompt_dataset(
    config: Config, source: Source, tokenizer: Any, longest: int, key: str, renderer: Renderer | None = None
) -> tuple[PromptDataset, int]:
    """The prompts of a source, checked, and the tokens of the longest one that is expected."""
    from strop.data.prompts import PromptDataset

    dataset = PromptDataset(source, config.data, tokenizer, longest, renderer=renderer)
    checked = dataset.check()
    if config.model.create is not None and checked.unknown:
        raise DataError(
            f"{checked.unknown} of {checked.rows} prompts hold characters that the new model's alphabet lacks",
            where=f"{key}: {checked.unknown_at}",
            mend="add them to model.create.characters",
        )
    # Of a long source only the beginning was looked at; allow the rest to be twice as long.
    return dataset, checked.longest if checked.rows == checked.of else min(2 * checked.longest, longest)


def _rollouts(config: Config, source: Source, facts: ModelFacts, longest: int) -> tuple[RolloutDataset, CheckedGroups]:
    """The groups of a source of completions, checked."""
    dataset = open_rollouts(config, source, facts, longest)
    seen = dataset.check()
    if config.model.create is not None and seen.unknown:
        raise DataError(
            f"{seen.unknown} of {seen.groups} groups hold characters that the new model's alphabet lacks",
            where=f"data.train: {seen.unknown_at}",
            mend="add them to model.create.characters",
        )
    return dataset, seen
