"""From `rewards:` in a recipe to the scorer of a run."""

from __future__ import annotations

from strop.config.rewards import (
    EnvironmentVerifier,
    ExactVerifier,
    FormatVerifier,
    NumericVerifier,
    PythonVerifier,
    RegexVerifier,
    RewardModelVerifier,
    RewardSettings,
    VerifierSettings,
)
from strop.rewards.composition import CompositeScorer
from strop.rewards.environmental import Environmental
from strop.rewards.exact import Exact
from strop.rewards.format import Format
from strop.rewards.numeric import Numeric
from strop.rewards.pattern import Pattern
from strop.rewards.protocol import Verifier
from strop.rewards.python import PythonFunction
from strop.rewards.scored import RewardModel


def build_scorer(settings: RewardSettings, *, key: str = "rewards.verifiers") -> CompositeScorer:
    """The scorer of a run; everything that can be wrong with a verifier before it is called is found here.

    Args:
        key: where the verifiers stand in the recipe, for messages.

    Raises:
        UserError: a function cannot be imported, a pattern does not compile, a tag is not a name.
    """
    verifiers = [
        build_verifier(verifier, timeout=settings.timeout, where=f"{key}.{index}")
        for index, verifier in enumerate(settings.verifiers)
    ]
    return CompositeScorer(verifiers, settings)


def build_verifier(settings: VerifierSettings, *, timeout: float, where: str) -> Verifier:
    """One verifier.

    Args:
        settings: what it checks.
        timeout: seconds that a call of it may take.
        where: key path of the settings, for messages.
    """
    match settings:
        case ExactVerifier():
            return Exact(settings)
        case NumericVerifier():
            return Numeric(settings)
        case RegexVerifier():
            return Pattern(settings, timeout=timeout, where=where)
        case FormatVerifier():
            return Format(settings, where=where)
        case PythonVerifier():
            return PythonFunction(settings, where=where)
        case EnvironmentVerifier():
            return Environmental(settings)
        case RewardModelVerifier():
            return RewardModel(settings)
