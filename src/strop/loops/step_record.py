"""What a step leaves behind: metrics, and episodes token by token."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import pairwise

import numpy as np

from strop.algorithms.batch import TokenBatch
from strop.data.prompts import PromptDataset
from strop.data.rollouts import RolloutDataset
from strop.data.rows import row_number
from strop.rollout.episode import Episode, Group, Status, TokenStream
from strop.tracking.display import Sample
from strop.tracking.episodes import EpisodeRecord


def rollout_metrics(groups: Sequence[Group], *, max_new_tokens: int) -> dict[str, float]:
    """Rewards, lengths and failures of a window."""
    episodes = [episode for group in groups for episode in group.episodes]
    scored = [e for e in episodes if not math.isnan(e.reward)]
    rewards = np.asarray([e.reward for e in scored])
    lengths = np.asarray([e.sampled_tokens() for e in episodes])
    statuses = Counter([e.status for e in episodes])
    judged = [e.correct for e in scored if e.correct is not None]
    components: dict[str, list[float]] = {}
    roles: dict[str, list[float]] = {}
    for episode in scored:
        for name, score in episode.components.items():
            components.setdefault(name, []).append(score)
        if episode.role:
            roles.setdefault(episode.role, []).append(episode.reward)
    metrics = {
        "reward/mean": _mean(rewards),
        "reward/std": float(rewards.std()) if len(rewards) else math.nan,
        "accuracy": _mean(judged),
        "completion/length_mean": _mean(lengths),
        "completion/length_max": float(lengths.max()) if len(lengths) else math.nan,
        "completion/truncated_share": statuses[Status.LENGTH] / len(episodes) if episodes else math.nan,
        "errors/share": 1 - len(scored) / max(1, len(episodes)),
        "errors/verifier_error": float(statuses[Status.VERIFIER_ERROR]),
        "errors/timeout": float(statuses[Status.TIMEOUT]),
        "errors/environment_error": float(statuses[Status.ENVIRONMENT_ERROR]),
        "tokens/sampled": float(_sampled(episodes, lengths)),
    }
    metrics |= {f"reward/{name}": _mean(components[name]) for name in sorted(components)}
    metrics |= {f"reward/role/{role}": _mean(roles[role]) for role in sorted(roles)}
    flat = [g for g in groups if _is_flat(g)]
    metrics["advantage/zero_share"] = len(flat) / max(1, len(groups))
    return metrics


def episode_records(
    streams: Sequence[tuple[Episode, TokenStream]],
    batch: TokenBatch | None,
    failed: Sequence[Episode],
    prompts: PromptTexts,
) -> list[EpisodeRecord]:
    """One record for each trained stream, in the order of the batch, then those of failed episodes.

    Args:
        streams: what was trained. batch: made of them, with advantages and the trainer's log-probabilities.
        failed: episodes that were left out.
    """
    records = [_record(episode, stream, prompts) for episode, stream in streams]
    if batch is not None and batch.advantages is not None:
        advantages, logprobs = batch.advantages.numpy(), batch.extra["logprobs"].numpy()
        edges = np.cumsum(batch.lengths().numpy()).tolist()
        for record, (start, end) in zip(records, pairwise([0, *edges]), strict=True):
            record.advantages, record.trainer_logprobs = advantages[start:end], logprobs[start:end]
    return records + _records(failed, prompts)


def records_beside(
    baselines: Mapping[int, Episode], discarded: Sequence[Group], prompts: PromptTexts
) -> list[EpisodeRecord]:
    """Records of what was sampled for a step beside its groups: baselines, then the groups that were replaced, in the
    order in which they were."""
    compared = [baselines[number] for number in sorted(baselines)]
    episodes = [*compared, *(episode for group in discarded for episode in group.episodes)]
    return _records(episodes, prompts)


class PromptTexts:
    """The rendered text of each prompt, for people to read."""

    def __init__(self, dataset: PromptDataset | RolloutDataset) -> None:
        self._dataset = dataset
        # The episodes of a group ask for the same text.
        self._text = lru_cache(maxsize=1024)(dataset.text)

    def text(self, prompt_id: str) -> str:
        return self._text(row_number(prompt_id))

    def answer(self, episode: Episode) -> str | None:
        answer = episode.row.get(self._dataset.source.mapping.answer)
        return None if answer is None else str(answer)


def sample_of(groups: Sequence[Group], prompts: PromptTexts, step: int) -> Sample | None:
    """A completion to show; another place in the window at each step."""
    episodes = [e for group in groups for e in group.episodes if not math.isnan(e.reward)]
    if not episodes:
        return None
    chosen = episodes[step * 7919 % len(episodes)]
    return Sample(
        prompt=prompts.text(chosen.prompt_id),
        completion=chosen.completion,
        reward=chosen.reward,
        correct=chosen.correct,
        answer=prompts.answer(chosen),
    )


def _records(episodes: Sequence[Episode], prompts: PromptTexts) -> list[EpisodeRecord]:
    return [_record(episode, stream, prompts) for episode in episodes for stream in episode.streams()]


def _record(episode: Episode, stream: TokenStream, prompts: PromptTexts) -> EpisodeRecord:
    return EpisodeRecord(
        group=episode.group,
        sample=episode.sample,
        prompt_id=episode.prompt_id,
        prompt_text=prompts.text(episode.prompt_id),
        completion_text=episode.completion,
        answer=prompts.answer(episode),
        status=str(episode.status),
        reward=episode.reward,
        correct=episode.correct,
        tokens=stream.tokens,
        loss_mask=stream.loss_mask,
        sampler_logprobs=stream.logprobs,
        versions=stream.versions,
        components=episode.components,
        detail=episode.detail,
        row=episode.row,
    )


def _is_flat(group: Group) -> bool:
    """Whether all completions have the same reward, those of each role if there are several."""
    scored = [e for e in group.episodes if not math.isnan(e.reward)]
    return len({(e.role, e.reward) for e in scored}) <= len({e.role for e in scored})


def _sampled(episodes: Sequence[Episode], lengths: np.ndarray) -> int:
    """Tokens that were sampled for some episodes; turns that several of them share are counted once. lengths: tokens of
    each episode."""
    shared = {id(turn): len(turn.tokens) for e in episodes if e.branch for turn in e.turns if turn.sampled}
    alone = (length for e, length in zip(episodes, lengths.tolist(), strict=True) if not e.branch)
    return sum(alone) + sum(shared.values())


def _mean(values: Sequence[float] | np.ndarray) -> float:
    return float(np.mean(values)) if len(values) else math.nan
