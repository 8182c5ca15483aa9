"""Which verifiers run in worker processes, and what a worker makes of their settings.

Workers import this file, so what it imports at its top must be small.
"""

from __future__ import annotations

from strop.config.adapted_rewards import ReasoningGymVerifier, SlimeVerifier
from strop.config.rewards import FormatVerifier, MathVerifier, PythonVerifier, RegexVerifier, VerifierSettings
from strop.rewards.protocol import Verifier


def is_isolated(settings: VerifierSettings) -> bool:
    """Whether a verifier evaluates texts in ways that may hang, crash or fill the memory."""
    match settings:
        case MathVerifier() | RegexVerifier() | ReasoningGymVerifier():
            return True
        case FormatVerifier():
            return settings.json_schema is not None
        case PythonVerifier() | SlimeVerifier():
            return settings.isolate == "process"
        case _:
            return False


def build_check(settings: VerifierSettings, *, timeout: float) -> Verifier:
    """What does the work of an isolated verifier.

    Args:
        settings: what it checks. timeout: seconds that one completion may take.
    """
    match settings:
        case MathVerifier():
            from strop.rewards.math_answer import MathAnswer

            return MathAnswer(settings)
        case RegexVerifier():
            from strop.rewards.pattern import Pattern

            return Pattern(settings, timeout=timeout)
        case FormatVerifier():
            from strop.rewards.format import Format

            return Format(settings)
        case PythonVerifier():
            from strop.rewards.python import PythonFunction

            return PythonFunction(settings)
        case SlimeVerifier():
            from strop.rewards.slime import SlimeFunction

            return SlimeFunction(settings)
        case ReasoningGymVerifier():
            from strop.rewards.reasoning_gym import ReasoningGym

            return ReasoningGym(settings)
        case _:
            raise ValueError(f"{settings.kind} does not run in a worker")
