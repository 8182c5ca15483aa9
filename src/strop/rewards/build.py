"""From `rewards:` in a recipe to the scorer of a run."""

from __future__ import annotations

from strop.config.rewards import (
    CodeVerifier,
    ExactVerifier,
    FormatVerifier,
    NumericVerifier,
    PythonVerifier,
    RegexVerifier,
    RewardModelVerifier,
    RewardSettings,
    VerifierSettings,
)
from strop.config.sandbox import SandboxSettings
from strop.rewards.code import Code
from strop.rewards.composition import CompositeScorer
from strop.rewards.exact import Exact
from strop.rewards.format import Format
from strop.rewards.numeric import Numeric
from strop.rewards.pattern import Pattern
from strop.rewards.protocol import Verifier
from strop.rewards.python import PythonFunction
from strop.rewards.scored import RewardModel
from strop.sandbox.build import make_sandbox


def build_scorer(settings: RewardSettings, sandbox: SandboxSettings | None = None) -> CompositeScorer:
    """The scorer of a run; everything that can be wrong with a verifier before it is called is found here.

    Args:
        settings: the verifiers.
        sandbox: where programs run; the default settings if not given. All verifiers share one sandbox, which is made
            only if one of them needs it.

    Raises:
        UserError: a function cannot be imported, a pattern does not compile, a tag is not a name, there is no sandbox.
    """
    places = sandbox or SandboxSettings()
    needed = any(isinstance(verifier, CodeVerifier) for verifier in settings.verifiers)
    made = make_sandbox(places) if needed else None
    verifiers = [
        Code(verifier, made, places.limits)
        if isinstance(verifier, CodeVerifier) and made is not None
        else build_verifier(verifier, timeout=settings.timeout, where=f"rewards.verifiers.{index}")
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
        case RewardModelVerifier():
            return RewardModel(settings)
