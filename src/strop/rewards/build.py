"""From `rewards:` in a recipe to the scorer of a run."""

from __future__ import annotations

from strop.config.adapted_rewards import ReasoningGymVerifier, SlimeVerifier
from strop.config.rewards import (
    ChoiceVerifier,
    CodeVerifier,
    EnvironmentVerifier,
    ExactVerifier,
    FormatVerifier,
    HttpVerifier,
    JudgeVerifier,
    MathVerifier,
    NumericVerifier,
    PythonVerifier,
    RegexVerifier,
    RewardModelVerifier,
    RewardSettings,
    VerifierSettings,
)
from strop.rewards.checks import is_isolated
from strop.rewards.choice import Choice
from strop.rewards.code import Code
from strop.rewards.composition import CompositeScorer, timeout_of
from strop.rewards.environmental import Environmental
from strop.rewards.exact import Exact
from strop.rewards.format import Format
from strop.rewards.http import HttpService
from strop.rewards.isolated import Isolated
from strop.rewards.judge import Judge
from strop.rewards.math_answer import MathAnswer
from strop.rewards.numeric import Numeric
from strop.rewards.pattern import Pattern
from strop.rewards.pool import WorkerPool
from strop.rewards.protocol import AsyncVerifier, Verifier
from strop.rewards.python import PythonFunction
from strop.rewards.reasoning_gym import ReasoningGym
from strop.rewards.scored import RewardModel
from strop.rewards.slime import SlimeFunction
from strop.sandbox.build import SharedSandbox


def build_scorer(
    settings: RewardSettings, sandbox: SharedSandbox | None = None, *, key: str = "rewards.verifiers"
) -> CompositeScorer:
    """The scorer of a run; everything that can be wrong with a verifier before it is called is found here.

    Worker processes start when there is something for them to do.

    Args:
        settings: the verifiers.
        sandbox: where programs run; verifiers of programs need one, and do not close it.
        key: where the verifiers stand in the recipe, for messages.

    Raises:
        UserError: a function cannot be imported, a pattern does not compile, a key's variable is not set, there is no
            sandbox, and so on.
    """
    pool = WorkerPool(workers=settings.workers, memory=settings.worker_memory)
    verifiers: list[Verifier | AsyncVerifier] = []
    for index, verifier in enumerate(settings.verifiers):
        if isinstance(verifier, CodeVerifier) and sandbox is not None:
            verifiers.append(Code(verifier, sandbox.get(), sandbox.settings.limits))
            continue
        timeout = timeout_of(verifier, settings)
        built = build_verifier(verifier, timeout=timeout, where=f"{key}.{index}")
        # One that runs in workers is built here too, for the mistakes that are found by it.
        verifiers.append(Isolated(verifier, pool, timeout=timeout) if is_isolated(verifier) else built)
    return CompositeScorer(verifiers, settings)


def build_verifier(settings: VerifierSettings, *, timeout: float, where: str) -> Verifier | AsyncVerifier:
    """One verifier that needs no sandbox, as it works in the process that calls it.

    Args:
        settings: what it checks.
        timeout: seconds that it may take: a call, a completion in a worker, or a request.
        where: key path of the settings, for messages.
    """
    match settings:
        case ExactVerifier():
            return Exact(settings)
        case NumericVerifier():
            return Numeric(settings)
        case MathVerifier():
            return MathAnswer(settings)
        case ChoiceVerifier():
            return Choice(settings, where=where)
        case RegexVerifier():
            return Pattern(settings, timeout=timeout, where=where)
        case FormatVerifier():
            return Format(settings, where=where)
        case PythonVerifier():
            return PythonFunction(settings, where=where)
        case SlimeVerifier():
            return SlimeFunction(settings, where=where)
        case ReasoningGymVerifier():
            return ReasoningGym(settings, where=where)
        case EnvironmentVerifier():
            return Environmental(settings)
        case RewardModelVerifier():
            return RewardModel(settings)
        case JudgeVerifier():
            return Judge(settings, timeout=timeout, where=where)
        case HttpVerifier():
            return HttpService(settings, timeout=timeout, where=where)
        case CodeVerifier():
            raise ValueError("a verifier of programs needs a sandbox")
