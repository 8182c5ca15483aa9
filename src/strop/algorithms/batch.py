"""The flat batch that algorithms and trainers share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace

import torch
from torch import Tensor

PER_SEQUENCE = ("rewards", "group_ids", "truncated", "greedy_rewards", "episode_ids", "prompt_ids", "draw_keys")
"""Fields of a batch with one entry for each sequence instead of each token."""


@dataclass
class TokenBatch:
    """Token streams laid end to end: T tokens of N sequences.

    Per token, [T]: input_ids int64; position_ids int64, restarting at 0 in each sequence; seq_ids int64, 0..N-1, never
    decreasing; loss_mask bool, True where the token was sampled and is trained; sampler_logprobs float32, NaN where the
    mask is False; versions int32, -1 where the mask is False. Filled on the way, float32 [T], meaningful where the mask
    is True: advantages, old_logprobs (the policy before this step's updates), ref_logprobs (the reference), values,
    returns, teacher_logprobs (the teacher of a distillation), turn_rewards (what moves rewards from the end of a
    sequence to the ends of its turns, None where nothing does), and whatever is in extra.

    Per sequence, [N]: rewards float32; group_ids int64, the same for sequences whose rewards are compared; truncated
    bool, True where sampling ended at the token limit; greedy_rewards float32, of the most likely completion of the
    same prompt, for algorithms that ask for it; episode_ids int64, the same for sequences that are streams of one
    completion, which count once in statistics of rewards; None where each sequence is a completion of its own;
    prompt_ids int64, the same for sequences of one prompt, which stay in one mini-batch; None where these are the
    groups; draw_keys int64, what random draws that belong to a sequence are keyed by, whatever batch it is in.
    """

    input_ids: Tensor
    position_ids: Tensor
    seq_ids: Tensor
    loss_mask: Tensor
    sampler_logprobs: Tensor
    versions: Tensor
    rewards: Tensor
    group_ids: Tensor
    truncated: Tensor
    advantages: Tensor | None = None
    old_logprobs: Tensor | None = None
    ref_logprobs: Tensor | None = None
    values: Tensor | None = None
    returns: Tensor | None = None
    teacher_logprobs: Tensor | None = None
    turn_rewards: Tensor | None = None
    greedy_rewards: Tensor | None = None
    episode_ids: Tensor | None = None
    prompt_ids: Tensor | None = None
    draw_keys: Tensor | None = None
    extra: dict[str, Tensor] = field(default_factory=dict)

    @property
    def sequences(self) -> int:
        """N."""
        return self.rewards.shape[0]

    def lengths(self) -> Tensor:
        """[N] int64, tokens of each sequence."""
        # Where each one begins, which takes a twentieth of the time of counting.
        edges = torch.searchsorted(self.seq_ids, torch.arange(self.sequences + 1, device=self.seq_ids.device))
        return edges.diff()

    def episodes(self) -> tuple[Tensor, Tensor]:
        """(first [E], episode [N]), int64: the first sequence of each episode, and the episode of each sequence.

        Episodes are numbered in order of their first sequence.
        """
        own = torch.arange(self.sequences, device=self.rewards.device)
        if self.episode_ids is None or not self.sequences:
            return own, own
        _, members = torch.unique(self.episode_ids, return_inverse=True)
        earliest = own.new_full((int(members.max()) + 1,), self.sequences).scatter_reduce(0, members, own, "amin")
        first, rank = torch.sort(earliest)
        position = torch.empty_like(rank)
        position[rank] = torch.arange(len(rank), device=rank.device)
        return first, position[members]

    def select(self, sequences: Tensor) -> TokenBatch:
        """The batch of some sequences only, [n] int64 in increasing order, renumbered from 0; group ids are kept."""
        chosen = torch.full((self.sequences,), -1, dtype=torch.int64, device=self.seq_ids.device)
        chosen[sequences] = torch.arange(len(sequences), device=self.seq_ids.device)
        tokens = chosen[self.seq_ids] >= 0

        def cut(name: str, value: Tensor | None) -> Tensor | None:
            if value is None:
                return None
            return value[sequences] if name in PER_SEQUENCE else value[tokens]

        parts = {f.name: cut(f.name, getattr(self, f.name)) for f in fields(self) if f.name not in ("seq_ids", "extra")}
        parts["seq_ids"] = chosen[self.seq_ids[tokens]]
        extra = {name: value[tokens] for name, value in self.extra.items()}
        return replace(self, **parts, extra=extra)  # type: ignore[arg-type]

    def to(self, device: torch.device) -> TokenBatch:
        """The same batch on another device."""
        return self.mapped(lambda value: value.to(device))

    def mapped(self, function: Callable[[Tensor], Tensor]) -> TokenBatch:
        """The same batch with a function applied to each of its tensors."""
        parts = {f.name: function(value) for f in fields(self) if isinstance(value := getattr(self, f.name), Tensor)}
        return replace(self, **parts, extra={name: function(value) for name, value in self.extra.items()})
