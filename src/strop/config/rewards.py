"""`rewards:` what a completion is worth."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from strop.config.base import (
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    ScalarModelPath,
    Share,
    StrictModel,
)


class Verifier(StrictModel):
    """What all verifiers have."""

    name: str | None = None
    """Name in metrics and episodes; the kind when not set."""
    weight: float = 1.0
    """Factor of the score in the total reward."""


class ExactVerifier(Verifier):
    """1 if the completion equals the answer, else 0."""

    kind: Literal["exact"]
    """Compare with the `answer` column."""
    ignore_case: bool = False
    """Compare without regard to case."""
    strip: bool = True
    """Drop white space around both before comparing."""


class NumericVerifier(Verifier):
    """1 if a number in the completion equals the answer, else 0."""

    kind: Literal["numeric"]
    """Compare numbers."""
    take: Literal["last", "first", "only"] = "last"
    """Which number of the completion counts; `only` gives 0 if there are several."""
    tolerance: NonNegativeFloat = 1e-6
    """Largest absolute or relative difference that still counts as equal."""


class RegexVerifier(Verifier):
    """1 if the pattern matches, else 0; with a group named `answer`, 1 if that group equals the answer."""

    kind: Literal["regex"]
    """Match a regular expression."""
    pattern: str
    """A Python regular expression, searched in the completion; the last match counts."""


class FormatVerifier(Verifier):
    """Share of the tags that occur once each, closed and in order."""

    kind: Literal["format"]
    """Check the shape of a completion."""
    tags: Annotated[list[str], Field(min_length=1)]
    """Tag names expected in this order, such as `[think, answer]`."""


class PythonVerifier(Verifier):
    """A Python function, `def reward(prompts, completions, **columns) -> list[float]`; TRL's reward functions work."""

    kind: Literal["python"]
    """Call a Python function."""
    function: str
    """`module:function`, importable from the working folder or the Python path."""
    arguments: dict[str, Any] = Field(default_factory=dict)
    """More keyword arguments for each call."""


class RewardModelVerifier(Verifier):
    """The score of a trained reward model, read off at the token that ends the completion; any number."""

    kind: Literal["reward_model"]
    """Ask a reward model."""
    path: ScalarModelPath
    """A run that trained one (`supervised.method: reward_model`), in a pipeline `stage:NAME`, or a Hugging Face folder
    of a model with one label (`...ForSequenceClassification`). It has its own tokenizer."""
    render: Literal["auto", "chat", "text"] = "auto"
    """How it reads prompts: `chat` through its chat template, `text` as they are; `auto` is `chat` for messages."""
    device: Literal["auto", "cpu", "cuda", "mps"] = "auto"
    """Where it computes; `auto` takes a GPU if there is one."""


class EnvironmentVerifier(Verifier):
    """What the environment gave for the turns of the episode, added up; it does not apply where it gave nothing."""

    kind: Literal["environment"]
    """Take the environment's own rewards."""


VerifierSettings = Annotated[
    ExactVerifier
    | NumericVerifier
    | RegexVerifier
    | FormatVerifier
    | PythonVerifier
    | RewardModelVerifier
    | EnvironmentVerifier,
    Field(discriminator="kind"),
]
Verifiers = Annotated[list[VerifierSettings], Field(min_length=1)]


def check_names(verifiers: list[VerifierSettings]) -> None:
    """Raises ValueError when two verifiers have the same name."""
    names = [verifier.name or verifier.kind for verifier in verifiers]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f"two verifiers are called {twice[0]!r}; give one of them another `name`")


class RewardSettings(StrictModel):
    """`rewards:` the weighted sum of verifiers that a completion is worth."""

    verifiers: Verifiers
    """What is scored; the first one decides what counts as correct in `accuracy`."""
    timeout: PositiveFloat = 30.0
    """Seconds that one batch of completions may take in a verifier before it counts as `timeout`."""
    retries: NonNegativeInt = 1
    """How often a verifier that failed is asked again."""
    max_error_share: Share = 0.1
    """The run stops when more than this share of a step's episodes could not be verified. In a run's first step
    none may fail: an error there is most likely a mistake in the verifier."""
    correct_at: float = 1.0
    """Score of the first verifier from which a completion counts as correct."""
    workers: PositiveInt = 4
    """Verifier calls that run at the same time."""

    @model_validator(mode="after")
    def _names_differ(self) -> Self:
        check_names(self.verifiers)
        return self
