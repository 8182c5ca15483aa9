"""What does not go together with `rollout.engine.consistent`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from strop.config import Config
from strop.errors import ConfigError, UserError

if TYPE_CHECKING:
    from strop.models.load import ModelFacts

KEY = "rollout.engine.consistent"


def check_consistent(config: Config, facts: ModelFacts, algorithm: Any, device: str) -> None:
    """Raise ConfigError with everything that keeps engine and trainer from computing the same bits.

    What only the loaded model shows, such as quantised layers, is refused by `consistent_mode.make_consistent`.

    Args:
        device: the kind that was chosen, "cpu", "cuda" or "mps".
    """
    if not config.rollout.engine.consistent:
        return
    problems = list(_problems(config, device))
    if getattr(algorithm, "needs_targets", False):
        problems.append(
            UserError(
                f"`{KEY}` knows the log-probabilities of sampled tokens, and this algorithm compares distributions",
                where="algorithm",
                mend=f"use another algorithm, or set {KEY} to false",
            )
        )
    if facts.folder is not None:
        from strop.models.consistent_mode import check_family
        from strop.models.folder import read_json

        problem = check_family(str(read_json(facts.folder / "config.json").get("model_type")))
        problems += [] if problem is None else [problem]
    if problems:
        raise ConfigError(problems)


def _problems(config: Config, device: str) -> Iterator[UserError]:
    engine, lora, trainer = config.rollout.engine, config.model.lora, config.cluster.trainer
    if config.offline is not None:
        yield UserError(
            f"`{KEY}` has no effect with `offline`: what is trained was sampled elsewhere",
            where=KEY,
            mend="remove the line",
        )
    refused = {
        "rollout.engine.pack_weights": (engine.pack_weights is True, "packed weights are multiplied with otherwise"),
        "rollout.engine.eager": (engine.eager is False, "compiled blocks are computed otherwise"),
        "training.compile": (config.training.compile is True, "compiled blocks are computed otherwise"),
    }
    for key, (asked, why) in refused.items():
        if asked:
            yield UserError(f"`{key}` does not go with `{KEY}`: {why}", where=key, mend="leave it on auto")
    if lora is not None:
        for name, why in {
            "dropout": "engine and trainer drop other numbers",
            "dora": "the lengths of rows are no operator of the mode",
            "adaptive": "adapters whose ranks move are no operator of the mode",
        }.items():
            if getattr(lora, name):
                key = f"model.lora.{name}"
                yield UserError(f"`{key}` does not go with `{KEY}`: {why}", where=key, mend="remove the line")
    for name in ("tensor", "context"):
        if getattr(trainer, name) > 1:
            key = f"cluster.trainer.{name}"
            what = f"`{key}` does not go with `{KEY}`: ranks that share a layer add up its parts in another order"
            yield UserError(what, where=key, mend="set it to 1; ranks may divide streams and weights")
    if device not in ("cpu", "cuda"):
        yield UserError(
            f"`{KEY}` computes on a CPU or on CUDA, and the model is on {device}",
            where=KEY,
            mend="set hardware.device to cpu, or remove the line",
        )


__all__ = ["check_consistent"]
