"""Rules on the sampling side: which groups and tokens are worth training on.

Source: DAPO (arXiv 2503.14476), sections 3.2 and 3.4.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from strop.algorithms.advantages import no_spread

WithoutSpread = Literal["keep", "drop", "resample"]
"""What becomes of a group whose rewards are all equal: trained as it is (its advantages are 0, and it counts in
denominators), left out, or replaced by another prompt (dynamic sampling)."""


@dataclass(frozen=True)
class Selection:
    """What dynamic sampling made of the groups it was shown; every group is in exactly one of the three.

    kept: group ids to train on, in order of their first episode. without_spread: groups whose rewards are all equal.
    surplus: groups with a signal beyond the number wanted. refill: groups still to be sampled, 0 when done.
    """

    kept: list[int]
    without_spread: list[int]
    surplus: list[int]
    refill: int


def dynamic_sampling(
    rewards: Tensor, group_ids: Tensor, *, wanted: int, refills: int = 0, max_refills: int | None = None
) -> Selection:
    """Keep groups that carry a signal (max > min) and say how many more are needed: DAPO eq. 11.

    When `max_refills` are used up, the step is filled with groups without a signal, which train nothing, in order: a
    task that is solved, or hopeless, ends in steps of less signal and not in sampling without end.

    Args:
        rewards: [N] float, of all episodes sampled for the step so far.
        group_ids: [N] int64.
        wanted: groups in a step.
        refills: how often the step has been refilled.
        max_refills: how often it may be; None sets no bound.

    Raises:
        ValueError: wanted below 1, or a negative bound.
    """
    if wanted < 1 or refills < 0 or (max_refills is not None and max_refills < 0):
        raise ValueError("wanted must be at least 1, refills and max_refills at least 0")
    flat = dict(zip(group_ids.tolist(), no_spread(rewards, group_ids).tolist(), strict=True))
    order = list(dict.fromkeys(group_ids.tolist()))
    signal = [group for group in order if not flat[group]]
    silent = [group for group in order if flat[group]]
    missing = max(wanted - len(signal), 0)
    if missing and max_refills is not None and refills >= max_refills:
        filled = set(signal) | set(silent[:missing])
        kept = [group for group in order if group in filled]
        return Selection(kept=kept, without_spread=silent[missing:], surplus=[], refill=wanted - len(kept))
    return Selection(kept=signal[:wanted], without_spread=silent, surplus=signal[wanted:], refill=missing)


def overlong_filter(mask: Tensor, truncated: Tensor, seq_ids: Tensor) -> Tensor:
    """`mask` without the tokens of truncated sequences: DAPO, section 3.4 (overlong filtering).

    Their rewards still count in the baseline of their group. Apply it before denominators are counted.

    Args:
        mask: bool [T] or [B, T].
        truncated: bool [N].
        seq_ids: int64, the shape of the mask, 0..N-1.
    """
    return mask.bool() & ~truncated.bool()[seq_ids.clamp(min=0)]


def soft_overlong_penalty(lengths: Tensor, *, max_tokens: int, buffer: int, factor: float = 1.0) -> Tensor:
    """Added to the reward of a long completion: 0 up to max_tokens - buffer, then down a line to -factor: DAPO eq. 13.

    Bounded: it never falls below -factor, however long the completion.

    Args:
        lengths: [N] sampled tokens of each completion.
        max_tokens: length at which the penalty is whole.
        buffer: tokens over which it grows.
        factor: its size, at least 0.

    Returns:
        [N] float32 in [-factor, 0].

    Raises:
        ValueError: a buffer that does not lie in 1..max_tokens, or a negative factor.
    """
    if not 0 < buffer <= max_tokens or factor < 0:
        raise ValueError("the buffer must lie in 1..max_tokens and the factor be at least 0")
    return factor * ((max_tokens - buffer - lengths).to(torch.float32) / buffer).clamp(-1.0, 0.0)
