"""The forward pass of an objective that compares whole distributions: see `algorithms/targets.py`."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from strop.models.forward import packed_topk_logprobs
from strop.models.logprobs import Entropy
from strop.training.batching import MicroBatch


def forward_on_targets(
    model: nn.Module, micro: MicroBatch, *, temperatures: tuple[float, float], chunk: int, entropy: Entropy
) -> tuple[Tensor, Tensor]:
    """(log-probabilities, entropy) [N] of the trained tokens; call it inside `running(model, ...)`.

    What the student says of the targets' events goes into the micro-batch: `extra["student_logprobs"]` [T, K + 1] with
    a graph, and beside it `extra["hits"]` and `extra["agreement"]` [T].

    Args:
        temperatures: of the trained tokens, and of the targets.
    """
    extra = micro.batch.extra
    ids = extra["target_ids"][micro.trained].long()
    hits, agreement = (torch.zeros(len(micro.trained), device=ids.device) for _ in range(2))
    if len(micro.trained):
        logprobs, topk, spread = packed_topk_logprobs(
            model,
            micro.inputs,
            ids,
            temperature=temperatures[0],
            topk_temperature=temperatures[1],
            chunk=chunk,
            entropy=entropy,
            hits=hits,
            agreement=agreement,
        )
    else:
        logprobs = spread = torch.zeros(0, device=ids.device)
        topk = torch.zeros((0, ids.shape[1] + 1), device=ids.device)
    extra["student_logprobs"] = micro.scatter(topk)
    extra["hits"], extra["agreement"] = micro.scatter(hits), micro.scatter(agreement)
    return logprobs, spread
