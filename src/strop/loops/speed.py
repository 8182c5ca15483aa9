"""How fast a step was: tokens a second of each phase, TFLOP/s and MFU of training."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from strop.algorithms.batch import TokenBatch
from strop.config import Config
from strop.loops.assembly import Roles
from strop.planning.cards import peak_rate
from strop.planning.flops import ModelWork, causal_pairs, work_of_config
from strop.training.batching import trained_tokens

PACKED, PAIRS = "throughput/packed_tokens", "throughput/attention_pairs"
"""What trainers count: tokens of their packed rows, and pairs of tokens that see each other; all epochs of a step."""


class Speed:
    """Counts what the training of a step takes, from constants of the models and the lengths of the streams.

    Args:
        roles: the policy. own_critic: whether a critic with a backbone of its own is trained with it.
    """

    def __init__(self, config: Config, roles: Roles, *, own_critic: bool = False) -> None:
        self._cards = config.cluster.trainer.ranks if config.cluster.kind == "ray" else 1
        self._epochs = config.training.epochs if config.supervised is None else 1
        self._works: list[ModelWork | None] = [roles.work]
        if own_critic:
            self._works.append(_critic_work(config, roles.work))
        self._peak = peak_rate(roles.card, roles.dtype)

    def figures(
        self, batch: TokenBatch, stats: Mapping[str, float], times: Mapping[str, float], *, whole: bool = True
    ) -> dict[str, float]:
        """`throughput/…` of a step.

        Args:
            stats: what the trainer said. times: seconds of the phases, by `time/…`. whole: whether the policy was
                trained; of a critic alone no FLOPs are counted.
        """
        lengths = batch.lengths().numpy()
        tokens, seconds = int(lengths.sum()), times["time/training"]
        found = {"throughput/training_tokens_per_second": self._epochs * tokens / max(seconds, 1e-9)}
        works = [work for work in self._works if work is not None]
        if not whole or len(works) < len(self._works) or seconds <= 0 or not (trained := trained_tokens(batch)):
            return found
        # A trainer that does not count is taken to share nothing.
        packed = stats.get(PACKED) or self._epochs * tokens
        pairs = stats.get(PAIRS) or self._epochs * causal_pairs(lengths)
        computed = sum(w.computed(int(packed), int(pairs), self._epochs * trained, lengths) for w in works)
        each = computed / seconds / self._cards
        found["throughput/training_tflops"] = each / 1e12
        if self._peak is not None:
            full = sum(self._epochs * work.full(lengths) for work in works)
            found["throughput/mfu"] = each / self._peak
            found["throughput/mfu_full"] = full / seconds / self._cards / self._peak
        return found


def _critic_work(config: Config, policy: ModelWork | None) -> ModelWork | None:
    """What a critic with a backbone of its own costs: a copy of the policy's, or that of another model."""
    path = config.critic.path
    if path is None:
        return None if policy is None else policy.all_trained()
    from transformers import AutoConfig

    from strop.models.find import resolve_model

    loader: Any = AutoConfig
    found = work_of_config(loader.from_pretrained(resolve_model(path)))
    return None if found is None else found.all_trained()
