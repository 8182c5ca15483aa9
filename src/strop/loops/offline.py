"""Completions that were sampled before: what is checked for them, and what the loop does otherwise.

A ratio says how much more likely a token is to the policy than it was to whoever sampled it. In the loop that samples,
the policy before the step is the sampler, up to rounding; here the recorded log-probabilities take its place.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from strop.config import Config
from strop.errors import ConfigError, DataError, UserError

if TYPE_CHECKING:
    from strop.algorithms.base import Algorithm
    from strop.algorithms.batch import TokenBatch
    from strop.data.rollouts import CheckedGroups, RolloutDataset
    from strop.data.sources import Source
    from strop.loops.algorithm import Demands
    from strop.models.load import ModelFacts


def open_rollouts(config: Config, source: Source, facts: ModelFacts, longest_prompt: int) -> RolloutDataset:
    """The groups of `data.train`.

    Raises:
        DataError: the data lacks a column.
    """
    from strop.data.rollouts import Limits, RolloutDataset
    from strop.models.load import vocabulary_size

    assert config.offline is not None
    limits = Limits(vocabulary_size(facts), longest_prompt, config.rollout.max_new_tokens, config.rollout.temperature)
    dataset = RolloutDataset(source, config.data, config.offline, facts.tokenizer, facts.eos_ids, limits)
    if problems := list(_idle_rendering(config, dataset)):
        raise ConfigError(problems)
    return dataset


def check_offline(config: Config, algorithm: Algorithm, demands: Demands, seen: CheckedGroups) -> None:
    """See that the algorithm can learn from what the data has.

    Raises:
        ConfigError: it needs log-probabilities that nobody knows.
        DataError: no group has two completions to compare, or one lacks the baseline.
    """
    assert config.offline is not None
    if config.offline.logprobs == "none" and (problems := list(_needing_logprobs(algorithm, demands))):
        raise ConfigError(problems)
    if algorithm.needs_group and seen.alone == seen.groups - seen.overlong:
        raise DataError(
            f"{algorithm.name} compares the completions of a group, and every group has one only: every advantage "
            "would be 0",
            where="data.train",
            mend="Name the column that makes groups in offline.columns.group, or set algorithm.name to reinforce.",
        )
    if demands.greedy and seen.greedy < seen.groups - seen.overlong:
        from strop.rollout.recorded import without_baseline

        raise without_baseline("data.train")


def take_recorded(batch: TokenBatch, config: Config, demands: Demands, trainer: Any, *, own: bool) -> bool:
    """Put what the policy that sampled thought of its tokens where ratios and corrections look for it.

    With `offline.logprobs: compute` that is the frozen copy of the weights of the start. `old_logprobs`, which ratios
    are measured against, are the recorded ones, unless a correction stands between (it needs the policy's own), nobody
    knows them, or the completions are the policy's own.

    Args:
        own: the weights are those that sampled every completion of the batch. The policy is then its own sampler, as in
            the loop that samples, where rounding between the two counts for nothing.

    Returns:
        Whether `old_logprobs` are the recorded ones.
    """
    import torch

    assert config.offline is not None
    if config.offline.logprobs == "compute":
        computed = trainer.logprobs(batch, role="reference")
        batch.sampler_logprobs = torch.where(batch.loss_mask, computed, torch.nan)
    if config.offline.logprobs == "none" or demands.old_logprobs or own:
        return False
    batch.old_logprobs = torch.where(batch.loss_mask, batch.sampler_logprobs, 0.0)
    return True


def described(config: Config, dataset: RolloutDataset, seen: CheckedGroups) -> str:
    """What the display says of the completions."""
    assert config.offline is not None
    settings = config.offline
    made_by = "every row alone" if dataset.groups.column is None else f"by {dataset.groups.column!r}"
    parts = [f"{seen.rows:,} completions in {seen.of:,} groups ({made_by})"]
    if seen.alone:
        parts.append(f"{seen.alone:,} groups of one")
    if seen.overlong:
        parts.append(f"{seen.overlong:,} groups with a prompt that is too long")
    if seen.remade:
        parts.append("tokens made anew from the texts")
    parts.append(
        {"recorded": "log-probabilities as recorded", "compute": "log-probabilities of the starting weights"}.get(
            settings.logprobs, "no log-probabilities: taken as the policy's own"
        )
    )
    parts.append("rewards as recorded" if settings.rewards == "recorded" else "scored now")
    return ", ".join(parts)


def _needing_logprobs(algorithm: Any, demands: Demands) -> Iterator[UserError]:
    """What is asked for that only the sampler's log-probabilities can give."""
    needs = {
        "algorithm.correction.kind": getattr(algorithm, "correction", None) is not None,
        "algorithm.correction.veto": getattr(algorithm, "correction_veto", None) is not None,
        "algorithm.correction.off_policy": getattr(algorithm, "correction_off_policy", None) is not None,
        "algorithm.kl_in": bool(getattr(algorithm, "kl_coef", 0)) and getattr(algorithm, "kl_in", "loss") == "reward",
        "algorithm.name": demands.teacher or getattr(algorithm, "needs_sampler", False),
    }
    for key, needed in needs.items():
        if needed:
            yield UserError(
                f"`{key}` needs the log-probabilities of whoever sampled, and offline.logprobs is `none`",
                where=key,
                mend="set offline.logprobs to compute, or to recorded where the data has them; or leave the key out",
            )


def _idle_rendering(config: Config, dataset: RolloutDataset) -> Iterator[UserError]:
    """Ways of rendering prompts, where all prompts come as token ids."""
    if not dataset.has_prompt_ids or config.data.eval is not None or config.warmup is not None:
        return
    names = ["system_prompt", *(["render"] if dataset.has_ids else [])]
    if config.offline is not None and config.offline.rewards == "recorded":
        names.append("prompt_template")
    default = type(config.data).model_fields
    for name in names:
        if getattr(config.data, name) != default[name].default:
            yield UserError(
                f"`data.{name}` has no effect with prompts that are token ids",
                where=f"data.{name}",
                mend="remove it, or name another column in offline.columns.prompt_ids to render them again",
            )
