"""What the tests of engines that are not `local` have in common: a model, and what it says of what was sampled."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from strop.errors import RunFailure
from strop.models.forward import score_streams
from strop.rollout.engine import Engine, SampleRequest, SampleResult, WeightUpdate


def llama(
    vocabulary: int, context: int, *, eos: int, hidden: int = 64, heads: int = 2, key_value_heads: int = 1
) -> Any:
    """Of two layers, with random weights."""
    import transformers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=hidden,
        num_hidden_layers=2,
        num_attention_heads=heads,
        num_key_value_heads=key_value_heads,
        intermediate_size=2 * hidden,
        max_position_embeddings=context,
        vocab_size=vocabulary,
        tie_word_embeddings=False,
        eos_token_id=eos,
    )
    return transformers.LlamaForCausalLM(config).eval()


def model_for_vllm(vocabulary: int, context: int, *, eos: int) -> Any:
    """Heads of 32, the smallest that vLLM has a kernel for; weights so large that context and temperature matter."""
    model = llama(vocabulary, context, eos=eos)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3.0)
    return model


def shake(model: Any, seed: int) -> None:
    """Other weights, of which the probabilities can be told apart."""
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=draw) * 0.08
            if parameter.ndim == 1:
                noise += 1
            parameter.copy_(noise)


async def until_sampled(engine: Any, tokens: int) -> None:
    """Wait until a vLLM has sampled so many tokens."""
    async with asyncio.timeout(60):
        while engine._stats.sampled_tokens < tokens:
            await asyncio.sleep(0)


async def updated_half_way(
    engine: Any, requests: Sequence[SampleRequest], change: Callable[[], None], *, after: int
) -> list[SampleResult]:
    """Completions that were under way, so many tokens in, when version 1 of the weights was published."""
    tasks = [asyncio.create_task(engine.generate(one)) for one in requests]
    await until_sampled(engine, after)
    await engine.pause()
    change()
    await engine.update_weights(WeightUpdate(1))
    await engine.resume()
    found = [(await task).plain() for task in tasks]
    assert {0, 1} == {version for one in found for version in one.versions}
    return found


async def told_of_a_killed_rank(engine: Any, request: SampleRequest, ranks: Sequence[int], *, hangs: bool) -> None:
    """Kill the last of a vLLM's processes while it samples.

    Args:
        ranks: the numbers of its processes. hangs: the first one waits for the last for ever, as GPUs do that add up.
    """
    task = asyncio.create_task(engine.generate(request))
    await until_sampled(engine, 3)
    if hangs:
        os.kill(ranks[0], signal.SIGSTOP)
    os.kill(ranks[-1], signal.SIGKILL)
    # vLLM alone would give the others 30 seconds.
    async with asyncio.timeout(20):
        with pytest.raises(RunFailure, match="vLLM"):
            await task


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

    def rounding(self, token_lists: Sequence[Sequence[int]]) -> list[np.ndarray]:
        return [np.full(len(tokens), 1e-7, np.float32) for tokens in token_lists]
