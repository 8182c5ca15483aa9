"""What a step leaves behind: metrics, and episodes token by token."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from strop.algorithms.batch import TokenBatch
from strop.data.prompts import PromptDataset
from strop.data.rollouts import RolloutDataset
from strop.data.rows import row_number
from strop.rollout.episode import Episode, Group, Status, TokenStream
from strop.rollout.segments import Trained
from strop.tracking.display import Sample
from strop.tracking.episodes import EpisodeColumns


def rollout_metrics(groups: Sequence[Group], *, max_new_tokens: int) -> dict[str, float]:
    """Rewards, lengths and failures of a window."""
    episodes = [episode for group in groups for episode in group.episodes]
    scored = [e for e in episodes if not math.isnan(e.reward)]
    rewards = np.asarray([e.reward for e in scored])
    lengths = np.asarray([e.sampled_tokens() for e in episodes])
    statuses = Counter([e.status for e in episodes])
    judged = [e.correct for e in scored if e.correct is not None]
    components: defaultdict[str, list[float]] = defaultdict(list)
    roles: defaultdict[str, list[float]] = defaultdict(list)
    for episode in scored:
        for name, score in episode.components.items():
            components[name].append(score)
        if episode.role:
            roles[episode.role].append(episode.reward)
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


def episode_columns(
    trained: Sequence[tuple[Episode, TokenStream]],
    batch: TokenBatch | None,
    failed: Sequence[Episode],
    prompts: PromptTexts,
) -> EpisodeColumns:
    """Each trained stream, in the order of the batch, then those of failed episodes.

    Args:
        trained: each with its episode. batch: made of them, with advantages and the trainer's log-probabilities.
        failed: episodes that were left out.

    Raises:
        ValueError: the batch is made of something else.
    """
    columns = _columns(trained, _streams(failed), prompts)
    if batch is not None and batch.advantages is not None:
        if batch.lengths().tolist() != columns.lengths[: len(trained)]:
            raise ValueError("the batch has entries for other streams than these")
        for name, numbers in (("advantages", batch.advantages), ("trainer_logprobs", batch.extra["logprobs"])):
            columns.arrays[name] = numbers.numpy()
            columns.without[name][: len(trained)] = False
    return columns


def columns_beside(
    baselines: Mapping[int, Episode], discarded: Sequence[Group], prompts: PromptTexts
) -> EpisodeColumns:
    """The same of what was sampled for a step beside its groups: baselines, then the groups that were replaced, in the
    order in which they were."""
    compared = [baselines[number] for number in sorted(baselines)]
    episodes = [*compared, *(episode for group in discarded for episode in group.episodes)]
    return _columns((), _streams(episodes), prompts)


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


def _streams(episodes: Sequence[Episode]) -> list[tuple[Episode, TokenStream]]:
    return [(episode, stream) for episode in episodes for stream in episode.streams()]


def _columns(
    trained: Sequence[tuple[Episode, TokenStream]], others: Sequence[tuple[Episode, TokenStream]], prompts: PromptTexts
) -> EpisodeColumns:
    episodes, streams = [episode for episode, _ in others], [stream for _, stream in others]
    lengths = [len(stream.tokens) for stream in streams]
    if isinstance(trained, Trained) and trained.laid is not None:
        # What lies end to end need not be cut apart to lie so.
        owners, parts, sizes = trained.episodes, [trained.laid.flat], trained.laid.lengths
    else:
        owners, parts = [episode for episode, _ in trained], [stream for _, stream in trained]
        sizes = [len(stream.tokens) for stream in parts]
    episodes, streams, lengths = [*owners, *episodes], [*parts, *streams], [*sizes, *lengths]
    names = [episode.prompt_id for episode in episodes]
    texts = {name: prompts.text(name) for name in set(names)}
    values: dict[str, Sequence[Any]] = {
        "group": [episode.group for episode in episodes],
        "sample": [episode.sample for episode in episodes],
        "prompt_id": names,
        "prompt_text": [texts[name] for name in names],
        "completion_text": [episode.completion for episode in episodes],
        "answer": [prompts.answer(episode) for episode in episodes],
        "status": [str(episode.status) for episode in episodes],
        "reward": [episode.reward for episode in episodes],
        "correct": [episode.correct for episode in episodes],
        "components": [episode.components for episode in episodes],
        "detail": [episode.detail for episode in episodes],
        "row": [episode.row for episode in episodes],
        "stream": _places(episodes),
        "past": [False] * len(episodes),
    }
    arrays = {
        "tokens": _end_to_end([stream.tokens for stream in streams], np.int32),
        "loss_mask": _end_to_end([stream.loss_mask for stream in streams], np.bool_),
        "sampler_logprobs": _end_to_end([stream.logprobs for stream in streams], np.float32),
        "versions": _end_to_end([stream.versions for stream in streams], np.int32),
        "advantages": np.zeros(0, dtype=np.float32),
        "trainer_logprobs": np.zeros(0, dtype=np.float32),
    }
    without = {name: np.ones(len(lengths), dtype=np.bool_) for name in ("advantages", "trainer_logprobs")}
    return EpisodeColumns(lengths, values, arrays, without)


def _places(episodes: Sequence[Episode]) -> list[int]:
    """For each stream, whose episode it is, how many of this episode came before it."""
    seen: dict[int, int] = {}
    found = []
    for episode in episodes:
        place = seen.get(id(episode), 0)
        seen[id(episode)] = place + 1
        found.append(place)
    return found


def _end_to_end(parts: Sequence[np.ndarray], dtype: type) -> np.ndarray:
    """All parts in one array, not to be written to: a single one is given as it is."""
    if len(parts) == 1 and parts[0].dtype == dtype:
        return parts[0]
    return np.concatenate([np.zeros(0, dtype=dtype), *parts], dtype=dtype, casting="unsafe")


def _is_flat(group: Group) -> bool:
    """Whether all completions have the same reward, those of each role if there are several."""
    found = {(e.role, e.reward) for e in group.episodes if not math.isnan(e.reward)}
    return len(found) <= len({role for role, _ in found})


def _sampled(episodes: Sequence[Episode], lengths: np.ndarray) -> int:
    """Tokens that were sampled for some episodes; turns that several of them share are counted once. lengths: tokens of
    each episode."""
    branched = [e for e in episodes if e.branch]
    if not branched:
        return int(lengths.sum())
    shared = {id(turn): len(turn.tokens) for e in branched for turn in e.turns if turn.sampled}
    alone = (length for e, length in zip(episodes, lengths.tolist(), strict=True) if not e.branch)
    return sum(alone) + sum(shared.values())


def _mean(values: Sequence[float] | np.ndarray) -> float:
    return float(np.mean(values)) if len(values) else math.nan
