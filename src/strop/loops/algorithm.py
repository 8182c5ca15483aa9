"""From the `algorithm:` section of a recipe to an object with the hooks of `algorithms/base.py`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from strop.config import Config
from strop.config.algorithm import AlgorithmSettings, CorrectionSettings
from strop.errors import ConfigError, UserError

if TYPE_CHECKING:
    from strop.algorithms.base import Algorithm

HOOKS = ("advantages", "loss", "denominators", "reduce")
DEFAULT_BOUND = 2.0
"""What the weights of `truncate` are bounded by where a recipe trains tokens of older weights and says nothing of
corrections."""
NOT_CHOICES = ("name", "dialect", "arguments", "teacher", "teachers")


@dataclass(frozen=True)
class Demands:
    """What an algorithm asks of the loop, beside the three hooks: each is an attribute of it, or not there at all.

    reference, old_logprobs, greedy, teacher, critic: fields of the batch to fill. targets: of how many tokens at each
    position the teacher's distribution is to be told; 0 asks for none. correct: it has the hook of the same name. The
    last three are rules of `algorithms/sampling_rules.py`.
    """

    reference: bool
    old_logprobs: bool
    greedy: bool
    teacher: bool
    targets: int
    critic: bool
    correct: bool
    overlong_filter: bool
    without_spread: str
    max_refills: int

    @property
    def asks(self) -> bool:
        """Whether a model is asked about a batch before it is trained."""
        return self.reference or self.old_logprobs or self.teacher or self.critic


def demands_of(algorithm: Algorithm) -> Demands:
    """Read an algorithm's demands; what it does not have is not asked for."""
    return Demands(
        reference=algorithm.needs_reference,
        old_logprobs=getattr(algorithm, "needs_old_logprobs", False),
        greedy=getattr(algorithm, "needs_greedy", False),
        teacher=getattr(algorithm, "needs_teacher", False),
        targets=getattr(algorithm, "top_k", 0) if getattr(algorithm, "needs_targets", False) else 0,
        critic=getattr(algorithm, "needs_critic", False),
        correct=hasattr(algorithm, "correct"),
        overlong_filter=getattr(algorithm, "overlong_filter", False),
        without_spread=getattr(algorithm, "without_spread", "keep"),
        max_refills=getattr(algorithm, "max_refills", 0),
    )


def make_algorithm(config: Config) -> Algorithm:
    """The algorithm of a recipe.

    Raises:
        ConfigError: a choice has no effect in this algorithm, something that it needs is missing, or a group of one
            has no advantage in it.
    """
    settings = config.algorithm
    kind: Any = settings.name
    if ":" in settings.name:
        kind = _own_class(settings.name)
        if not _is_policy_gradient(kind):
            return _own_object(kind, settings)
    algorithm = _built_in_form(kind, config)
    if config.critic != type(config.critic)() and not getattr(algorithm, "needs_critic", False):
        raise _problem(
            f"critic has no effect with {algorithm.name}, which has no critic",
            where="critic",
            mend="remove it, or set algorithm.name to ppo",
        )
    _check_teacher(algorithm, settings)
    return algorithm


def _check_teacher(algorithm: Any, settings: AlgorithmSettings) -> None:
    """Refuse a teacher that nobody asks, and an algorithm without the teacher that it needs."""
    needs_teacher = getattr(algorithm, "needs_teacher", False)
    key = "teachers" if settings.teachers else "teacher"
    named = settings.teacher is not None or bool(settings.teachers)
    if needs_teacher and not named:
        raise _problem(
            f"{algorithm.name} learns from a teacher, and none is named",
            where="algorithm.teacher",
            mend="set it to a model folder, a run or a name, with the tokenizer of the model that is trained",
        )
    if named and not needs_teacher:
        raise _problem(
            f"{key} has no effect with {algorithm.name}, which asks no teacher",
            where=f"algorithm.{key}",
            mend="remove it, or set algorithm.name to opd or gkd",
        )
    if len(settings.teachers) == 1 and settings.teachers[0].weight != 1:
        raise _problem(
            "the weight has no effect with a single teacher",
            where="algorithm.teachers.0.weight",
            mend="remove it, or name more teachers",
        )


def _built_in_form(kind: Any, config: Config) -> Any:
    from strop.algorithms.named import build_algorithm

    settings = config.algorithm
    choices = choices_of(settings)
    if twice := sorted(settings.arguments.keys() & {*choices, "group_size", "max_new_tokens", "dialect"}):
        raise _problem(
            f"{', '.join(twice)} among the arguments: a recipe has a key for that",
            where="algorithm.arguments",
            mend="`strop config explain algorithm` lists the keys",
        )
    unsaid = settings.correction == CorrectionSettings()
    choices["correction"] = None if choices["correction"] == "none" else choices["correction"]

    def build(**changed: Any) -> Any:
        # With two completions, so that a group of one is answered below, with the key that mends it.
        return build_algorithm(
            kind,
            group_size=max(2, config.rollout.group_size),
            max_new_tokens=config.rollout.max_new_tokens,
            dialect=settings.dialect,
            **settings.arguments,
            **(choices | changed),
        )

    try:
        algorithm = build()
        # One that makes no sense without the sampler's log-probabilities weighs tokens by them itself.
        if config.rollout.off_policy and unsaid and algorithm.correction is None and not algorithm.needs_sampler:
            algorithm = build(correction="truncate", correction_high=DEFAULT_BOUND)
    except (ValueError, TypeError) as error:
        raise _problem(str(error), where="algorithm") from None
    if algorithm.needs_group and config.rollout.group_size < 2:
        raise _problem(
            f"{algorithm.name} compares the completions of a group, and a group of one has nothing to be compared "
            "with: every advantage would be 0",
            where=f"rollout.group_size = {config.rollout.group_size}",
            mend="set rollout.group_size to 2 or more (8 is usual), or algorithm.name to reinforce",
        )
    return algorithm


def choices_of(settings: AlgorithmSettings) -> dict[str, Any]:
    """The section as keywords of `build_algorithm`; None is the algorithm's own choice."""
    choices = settings.model_dump(exclude=set(NOT_CHOICES))
    correction, overlong = choices.pop("correction"), choices.pop("overlong")
    choices["correction"] = correction.pop("kind")
    choices |= {f"correction_{name}": value for name, value in correction.items()}
    choices |= {f"overlong_{name}": value for name, value in overlong.items()}
    if not choices["overlong_filter"]:
        choices["overlong_filter"] = None
    return choices


def _own_class(path: str) -> Any:
    from strop.rewards.python import load_function

    found = load_function(path, where="algorithm.name")
    if not isinstance(found, type):
        raise _problem(
            f"{path!r} is a function, and an algorithm is a class",
            where="algorithm.name",
            mend="docs/algorithms.md shows one in 15 lines",
        )
    return found


def _is_policy_gradient(kind: type) -> bool:
    from strop.algorithms.policy_gradient import PolicyGradient

    return issubclass(kind, PolicyGradient)


def _own_object(kind: type, settings: AlgorithmSettings) -> Any:
    """An object of a class that builds on nothing of strop's: it has only the arguments of its own."""
    set_here = sorted(settings.model_fields_set - {"name", "arguments", "teacher", "teachers"})
    if set_here:
        raise _problem(
            f"{', '.join(set_here)} would have no effect: {settings.name} is not built on PolicyGradient and takes its "
            "settings from `arguments` alone",
            where="algorithm",
            mend="put them under algorithm.arguments, or derive the class from "
            "strop.algorithms.policy_gradient.PolicyGradient",
        )
    try:
        algorithm: Any = kind(**settings.arguments)
    except (ValueError, TypeError) as error:
        raise _problem(f"{settings.name} cannot be made: {error}", where="algorithm.arguments") from None
    lacking = _lacking(algorithm, (*HOOKS, "name", "needs_entropy", "needs_reference", "needs_group"))
    if lacking:
        raise _problem(
            f"{settings.name} lacks {', '.join(lacking)}",
            where="algorithm.name",
            mend="strop.algorithms.base.Algorithm says what an algorithm has; a class derived from PolicyGradient has "
            "all of it",
        )
    return algorithm


def _lacking(algorithm: Any, names: Sequence[str]) -> list[str]:
    return [name for name in names if not hasattr(algorithm, name)]


def _problem(what: str, *, where: str, mend: str = "") -> ConfigError:
    return ConfigError([UserError(what, where=where, mend=mend)])
