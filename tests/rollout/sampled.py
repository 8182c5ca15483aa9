"""What the tests of engines that are not `local` have in common: a model, and what it says of what was sampled."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from strop.models.forward import score_streams
from strop.rollout.engine import Engine, SampleRequest, SampleResult


def model_for_vllm(vocabulary: int, context: int, *, eos: int) -> Any:
    """Heads of 32, the smallest that vLLM has a kernel for; weights so large that context and temperature matter."""
    import transformers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        intermediate_size=128,
        max_position_embeddings=context,
        vocab_size=vocabulary,
        tie_word_embeddings=False,
        eos_token_id=eos,
    )
    model = transformers.LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3.0)
    return model


async def sample(engine: Engine, requests: Sequence[SampleRequest]) -> list[SampleResult]:
    async with asyncio.timeout(120):
        return [found.plain() for found in await asyncio.gather(*(engine.generate(r) for r in requests))]


@torch.no_grad()
def logprobs_of(model: Any, asked: SampleRequest, found: SampleResult) -> np.ndarray:
    """What the plain model says of the tokens that were sampled, at the sampling temperature."""
    ids = torch.tensor([[*asked.tokens, *found.tokens]])
    logits = model(input_ids=ids).logits[0].double() / (asked.settings.temperature or 1.0)
    logp = torch.log_softmax(logits, -1)[len(asked.tokens) - 1 : -1]
    return logp.gather(1, torch.tensor(found.tokens)[:, None])[:, 0].numpy()


def went_on(asked: SampleRequest, found: SampleResult, old: Any, new: Any) -> None:
    """Each token of a completion is of the model of its version, 0 or 1, the newer ones last; and all are there."""
    assert list(found.versions) == sorted(found.versions)
    before = list(found.versions).count(0)
    logprobs = np.asarray(found.logprobs)
    assert np.abs(logprobs - logprobs_of(old, asked, found))[:before].max(initial=0.0) < 1e-4
    assert np.abs(logprobs - logprobs_of(new, asked, found))[before:].max(initial=0.0) < 1e-4
    assert found.finish == "stop" or len(found.tokens) == asked.settings.max_new_tokens


class Scores:
    """A trainer, as the proof sees it."""

    def __init__(self, model: Any) -> None:
        self.model = model

    def score(self, token_lists: Sequence[Sequence[int]]) -> list[np.ndarray]:
        return score_streams(self.model, token_lists)
