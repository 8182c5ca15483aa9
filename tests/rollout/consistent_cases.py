"""What the tests of the consistent mode have in common: completions, sampled together in some way, and their scores
from passes of the trainer that have nothing to do with how they were sampled."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from strop.models.attention import running
from strop.models.forward import packed_inputs, packed_logprobs
from strop.models.layout import pack
from strop.rollout.engine import SampleRequest, SampleResult, SampleSettings
from strop.rollout.engines.local import LocalEngine


def requests_of(
    rng: np.random.Generator, count: int, *, vocabulary: int, longest: int, temperature: float
) -> list[SampleRequest]:
    """Ragged requests, of which some share a prompt and others the beginning of one."""
    system = rng.integers(3, vocabulary, longest).tolist()
    found: list[SampleRequest] = []
    for at in range(count):
        if at and rng.random() < 0.4:
            prompt = found[int(rng.integers(at))].tokens
        else:
            shared = system[: int(rng.integers(0, longest + 1))]
            prompt = (*shared, *rng.integers(3, vocabulary, int(rng.integers(1, longest))).tolist())
        found.append(SampleRequest(prompt, SampleSettings(int(rng.integers(1, longest)), temperature), (at,)))
    return found


async def sampled(
    engine: LocalEngine, requests: Sequence[SampleRequest], rng: np.random.Generator, *, cuts: int
) -> list[SampleResult]:
    """Requests come in over time; now and then the engine sleeps, or all is stopped and goes on in another engine's
    place with what there was of it."""

    async def later(request: SampleRequest, turns: int) -> SampleResult:
        for _ in range(turns):
            await asyncio.sleep(0)
        return (await engine.generate(request)).plain()

    tasks = [asyncio.create_task(later(request, int(rng.integers(0, 12)))) for request in requests]
    for _ in range(cuts):
        for _ in range(int(rng.integers(1, 12))):
            await asyncio.sleep(0)
        if rng.random() < 0.5:
            await engine.sleep()
        else:
            await engine.abort()
    found = list(await asyncio.gather(*tasks))
    for at, (request, result) in enumerate(zip(requests, found, strict=True)):
        if result.finish == "aborted":
            begun = result if len(result.tokens) else None
            again = SampleRequest(request.tokens, request.settings, request.stream, begun)
            found[at] = (await engine.generate(again)).plain()
    return found


def scored(
    model: Any, requests: Sequence[SampleRequest], results: Sequence[SampleResult], rng: np.random.Generator
) -> list[np.ndarray]:
    """The trainer's log-probabilities of what was sampled, from streams in any order, in any number of passes, with
    common beginnings computed once or not."""
    device = next(model.parameters()).device
    order = rng.permutation(len(requests))
    found: list[np.ndarray] = [np.zeros(0, np.float32)] * len(requests)
    for chosen in np.array_split(order, int(rng.integers(1, 5))):
        if not len(chosen):
            continue
        streams = [np.array([*requests[at].tokens, *results[at].tokens]) for at in chosen]
        starts = [len(requests[at].tokens) for at in chosen]
        # The last token of a prompt predicts, so it is the completion's own.
        shared = [start - 1 for start in starts] if rng.random() < 0.5 else None
        wanted = [np.arange(len(stream)) >= start for stream, start in zip(streams, starts, strict=True)]
        inputs = packed_inputs(pack(streams, shared), wanted, device)
        temperature = requests[chosen[0]].settings.temperature
        chunk = int(rng.integers(1, 200))
        with torch.no_grad(), running(model, inputs.attention):
            flat, _ = packed_logprobs(model, inputs, temperature=temperature, chunk=chunk)
        pieces = np.split(flat.cpu().numpy(), np.cumsum([len(results[at].tokens) for at in chosen])[:-1])
        for at, piece in zip(chosen, pieces, strict=True):
            found[at] = piece
    return found


def distances(results: Sequence[SampleResult], scores: Sequence[np.ndarray]) -> np.ndarray:
    """How far the noted log-probabilities of all tokens are from those that were scored."""
    noted = np.concatenate([np.asarray(result.logprobs, dtype=np.float32) for result in results])
    return np.abs(noted - np.concatenate(scores))
