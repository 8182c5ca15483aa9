"""From a window of groups to the batch that a step trains: what is left out, what the roles say, the advantages."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from strop.algorithms.advantages import no_spread
from strop.algorithms.batch import TokenBatch
from strop.algorithms.corrections import mismatch_metrics, three_policies
from strop.algorithms.sampling_rules import overlong_filter
from strop.errors import RunFailure
from strop.loops.algorithm import Demands
from strop.loops.teacher import Teachers
from strop.rollout.episode import Episode, Group, TokenStream
from strop.rollout.segments import Trained, numbered
from strop.training.batching import token_batch

if TYPE_CHECKING:
    from strop.loops.critic import Critic, SharedCritic


@dataclass
class Chosen:
    """The episodes of a window: those that are trained and those left out, both in order. silent: no group had spread,
    so that the step trains nothing."""

    trained: list[Episode]
    left_out: list[Episode] = field(default_factory=list)
    silent: bool = False


def has_spread(group: Group) -> bool:
    """Whether the rewards of a group differ (max > min, as float32), of some role if there are several, counting
    episodes that have one."""
    found = [e for e in group.episodes if _believable(e)]
    rewards = torch.tensor([e.reward for e in found], dtype=torch.float32)
    roles = numbered(e.role for e in found)
    return len(rewards) > 1 and not bool(no_spread(rewards, torch.tensor(roles, dtype=torch.int64)).all())


def choose(groups: Sequence[Group], demands: Demands, baselines: Mapping[int, Episode]) -> Chosen:
    """Leave out episodes without a reward, groups without the baseline they need, and groups without spread if asked.

    Raises:
        RunFailure: none was left because none could be verified.
    """
    found = Chosen([])
    flat: list[Episode] = []
    for group in groups:
        judged = not demands.greedy or _believable(baselines[group.number])
        for episode in group.episodes:
            if not judged or not _believable(episode):
                found.left_out.append(episode)
            elif demands.without_spread == "drop" and not has_spread(group):
                flat.append(episode)
            else:
                found.trained.append(episode)
    if not found.trained and not flat:
        raise RunFailure("no episode of this step has a reward", mend="see the errors of the verifiers above")
    if not found.trained:
        # Nothing to learn from: the step goes by without an update.
        return Chosen(flat, found.left_out, silent=True)
    found.left_out += flat
    return found


def lay_out(
    chosen: Chosen, demands: Demands, baselines: Mapping[int, Episode], *, environment_weight: float = 0.0
) -> tuple[TokenBatch, Trained]:
    """The flat batch of the chosen episodes, and the episode and stream that each of its sequences is.

    Args:
        environment_weight: weight of the environment's rewards in the total.
    """
    trained = Trained(chosen.trained)
    batch = token_batch(
        trained.streams,
        rewards=trained.rewards,
        group_ids=numbered(trained.cohorts),
        truncated=[ends and e.status == "length" for e, ends in zip(trained.episodes, trained.ends, strict=True)],
    )
    units = numbered(trained.units)
    if len(set(units)) < len(units):
        batch.episode_ids = torch.tensor(units, dtype=torch.int64)
    # By place, not by number: past groups, which have low numbers, lie among the others.
    batch.prompt_ids = torch.tensor(numbered(e.group for e in trained.episodes), dtype=torch.int64)
    if environment_weight and any(episode.turn_rewards for episode in chosen.trained):
        batch.turn_rewards = torch.cat([_of_turns(e, s, environment_weight) for e, s in trained])
    if demands.greedy:
        batch.greedy_rewards = torch.tensor([baselines[e.group].reward for e in trained.episodes], dtype=torch.float32)
    if demands.overlong_filter:
        batch.loss_mask = overlong_filter(batch.loss_mask, batch.truncated, batch.seq_ids)
    if chosen.silent:
        batch.loss_mask = torch.zeros_like(batch.loss_mask)
    return batch, trained


def _of_turns(episode: Episode, stream: TokenStream, weight: float) -> Tensor:
    """[L] what moves the rewards of an episode's turns from the end of a stream to the ends of the turns.

    The last trained token loses the rewards of all turns up to it, and each trained turn gets its own at its end: what
    is left at the last token is the rest of the total, that of later turns included.
    """
    moved = torch.zeros(len(stream.tokens))
    end, last = 0, None
    for turn in stream.turns:
        end += len(episode.turns[turn].tokens)
        if stream.loss_mask[end - 1]:
            moved[end - 1] += weight * episode.turn_rewards.get(turn, 0.0)
            last = (turn, end - 1)
    if last is not None:
        moved[last[1]] -= weight * sum(reward for turn, reward in episode.turn_rewards.items() if turn <= last[0])
    return moved


def fill(
    batch: TokenBatch,
    algorithm: Any,
    demands: Demands,
    trainer: Any,
    teacher: Teachers | None,
    critic: Critic | SharedCritic | None,
) -> dict[str, float]:
    """Ask the roles for their log-probabilities, correct for the sampler, compute advantages; returns metrics."""
    if demands.reference:
        batch.ref_logprobs = trainer.logprobs(batch, role="reference")
    if demands.critic:
        assert critic is not None
        # First: a critic on the policy's backbone gives the policy's log-probabilities in the same pass.
        batch.values = critic.values(batch)
    if demands.old_logprobs and batch.old_logprobs is None:
        batch.old_logprobs = trainer.logprobs(batch, role="policy")
    metrics: dict[str, float] = {}
    if demands.teacher:
        assert teacher is not None, "the recipe was not checked"
        if demands.targets:
            teacher.fill_targets(batch, demands.targets)
        else:
            batch.teacher_logprobs = teacher.logprobs(batch)
        assert batch.teacher_logprobs is not None
        inside = batch.loss_mask
        gap = (batch.sampler_logprobs - batch.teacher_logprobs)[inside]
        metrics["kl/teacher"] = float(gap.mean()) if len(gap) else 0.0
    if demands.old_logprobs and demands.correct:
        metrics |= _numbers(algorithm.correct(batch))
    batch.advantages = algorithm.advantages(batch)
    return metrics


def mismatch(batch: TokenBatch, *, recorded: bool = False) -> dict[str, float]:
    """How far trainer and sampler disagree, for a batch that has been trained: no pass of its own is needed. Empty
    where nobody knows what the sampler thought.

    The policy before the first update is `old_logprobs`, or with a single update what that update saw; also where
    `old_logprobs` are the `recorded` ones, the sampler's own.
    """
    # By NumPy, which compares numbers ten times as fast as torch does on a CPU.
    if (np.isnan(batch.sampler_logprobs.numpy()) & batch.loss_mask.numpy()).any():
        return {}
    policy = batch.extra["logprobs"] if recorded or batch.old_logprobs is None else batch.old_logprobs
    return mismatch_metrics(policy, batch.sampler_logprobs, batch.loss_mask)


def policies(batch: TokenBatch) -> dict[str, float]:
    """How far sampler, policy before the step and policy after it are apart, for a batch that has been trained."""
    current = batch.extra["logprobs"]
    proximal = current if batch.old_logprobs is None else batch.old_logprobs
    return _numbers(three_policies(batch.sampler_logprobs, proximal, current, batch.loss_mask))


def group_metrics(
    groups: Sequence[Group], discarded: Sequence[Group], refills: int, trained: Collection[int]
) -> dict[str, float]:
    """An account of the groups of a step: sampled = kept + discarded, and kept = trained + left out. trained: their
    numbers."""
    return {
        "groups/sampled": float(len(groups) + len(discarded)),
        "groups/kept": float(len(groups)),
        "groups/discarded": float(len(discarded)),
        "groups/trained": float(len(trained)),
        "groups/refills": float(refills),
    }


def _believable(episode: Episode) -> bool:
    return episode.status is not None and episode.status.trainable and not math.isnan(episode.reward)


def _numbers(metrics: Mapping[str, Tensor]) -> dict[str, float]:
    return {name: float(value) for name, value in metrics.items()}
