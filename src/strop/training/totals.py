"""What a step of training is told as: sums over its micro-batches and ranks."""

from __future__ import annotations

import torch
from torch import Tensor

from strop.algorithms.base import LossTerms
from strop.training.batching import MicroBatch
from strop.training.parallel.ranks import Alone


class Totals:
    """Metrics of a step, kept as tensors on the device and read once at the end."""

    def __init__(self) -> None:
        self.sums: dict[str, Tensor] = {}
        self.maxima: dict[str, Tensor] = {}
        self.once: dict[str, Tensor] = {}
        self.rates: list[float] = []
        self.norms: list[Tensor] = []
        self.counted = {"throughput/packed_tokens": 0, "throughput/attention_pairs": 0}

    def add(
        self,
        terms: dict[str, Tensor],
        found: LossTerms,
        micro: MicroBatch,
        entropy: Tensor | None,
        trained: int,
        counted: float,
    ) -> None:
        self.counted["throughput/packed_tokens"] += micro.tokens
        self.counted["throughput/attention_pairs"] += micro.pairs
        loss = torch.zeros((), device=micro.trained.device)
        for name, term in terms.items():
            loss = loss + term.detach()
            self._sum(f"loss/{name}", term.detach())
        self._sum("loss", loss)
        if not len(micro.trained):
            return
        if entropy is not None:
            self._sum("policy/entropy", entropy.detach()[micro.trained].sum() / trained)
        for name, value in found.units.items():
            self._sum(name, value.detach().sum() / counted)
        for name, value in found.metrics.items():
            picked = value.detach()[micro.trained]
            if name.endswith("_max"):
                top = picked.max()
                self.maxima[name] = torch.maximum(self.maxima[name], top) if name in self.maxima else top
            else:
                self._sum(name, picked.sum() / trained)

    def add_term(self, name: str, term: Tensor) -> None:
        """A term that is no sum over micro-batches."""
        self._sum(f"loss/{name}", term)
        self._sum("loss", term)

    def mismatch(self, logprobs: Tensor, micro: MicroBatch, trained: int) -> None:
        """How far the sampler's log-probabilities are from the trainer's, for the same weights."""
        if not len(micro.trained):
            return
        difference = (logprobs - micro.batch.sampler_logprobs)[micro.trained]
        known = ~torch.isnan(difference)
        gap = torch.where(known, difference, torch.zeros_like(difference))
        for name, value in (("kl/sampler", (torch.exp(gap) - 1 - gap).sum()), ("mismatch/mean", gap.abs().sum())):
            self.once[name] = self.once.get(name, torch.zeros_like(value)) + value / trained
        self.once["mismatch/max"] = torch.maximum(self.once.get("mismatch/max", gap.new_zeros(())), gap.abs().max())

    def updated(self, step: dict[str, Tensor | float]) -> None:
        self.norms.append(torch.as_tensor(step["grad_norm"]))
        self.rates.append(float(step["learning_rate"]))

    def means(self, ranks: Alone) -> dict[str, float]:
        updates = max(1, len(self.norms))
        found_here = (self.sums, self.maxima, self.once, self.counted)
        parts = [({k: float(v) for k, v in each.items()}) for each in found_here]
        sums: dict[str, float] = {}
        maxima: dict[str, float] = {}
        once: dict[str, float] = {}
        counted = dict.fromkeys(self.counted, 0.0)
        for of_rank in ranks.all_of(parts):
            for name, value in of_rank[0].items():
                sums[name] = sums.get(name, 0.0) + value
            for name, value in of_rank[1].items():
                maxima[name] = max(maxima.get(name, value), value)
            for name, value in of_rank[2].items():
                once[name] = (
                    max(once.get(name, 0.0), value)
                    if name.endswith("_max") or name.endswith("/max")
                    else (once.get(name, 0.0) + value)
                )
            for name, value in of_rank[3].items():
                counted[name] += value
        found = {name: value / updates for name, value in sums.items()} | maxima | once | counted
        if self.norms:
            found["grad_norm"] = float(torch.stack(self.norms).mean())
            found["learning_rate"] = self.rates[-1]
        return found

    def _sum(self, name: str, value: Tensor) -> None:
        self.sums[name] = self.sums[name] + value if name in self.sums else value
