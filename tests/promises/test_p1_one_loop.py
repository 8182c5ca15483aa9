"""Promise 1: there is one loop. With staleness 0 it gives the parameters of generate-then-train, bit for bit."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tiny_runs import recipe

from strop.config import Config
from strop.config.loading import load_config
from strop.loops import assembly
from strop.loops.prepare import prepare
from strop.loops.train import train
from strop.rewards.protocol import Completed
from strop.rollout.engine import SampleRequest, SampleSettings, WeightUpdate
from strop.rollout.episode import Episode
from strop.training.batching import token_batch


async def generate_then_train(config: Config) -> dict[str, torch.Tensor]:
    """The plain loop, without collector, admission, publisher or run: all prompts, all completions, one update."""
    prepared = prepare(config)
    roles = assembly.load_roles(prepared)
    engine = assembly.make_engine(prepared, roles)
    stream = assembly.make_stream(prepared)
    parts = config.training.mini_batches * config.training.epochs
    trainer = assembly.make_trainer(
        prepared, roles, config.training.optimizer, total_updates=config.run.steps * parts, reinforcement=True
    )
    settings = SampleSettings(config.rollout.max_new_tokens, config.rollout.temperature)
    group = 0
    for step in range(config.run.steps):
        await engine.update_weights(WeightUpdate(step))
        episodes, requests, texts = [], [], []
        for _ in range(config.rollout.groups_per_step):
            prompt, _ = stream.next()
            for sample in range(config.rollout.group_size):
                episodes.append(Episode(group, sample))
                requests.append(SampleRequest(tuple(prompt.tokens), settings, (group, sample, 0)))
                texts.append(prompt)
            group += 1
        results = await asyncio.gather(*(engine.generate(request) for request in requests))
        completed = []
        for episode, request, result, prompt in zip(episodes, requests, results, texts, strict=True):
            turn = episode.append_prompt(request.tokens)
            episode.append_sampled(result.tokens, result.logprobs, result.versions, parent=turn, finish=result.finish)
            text = roles.tokenizer.decode(result.tokens, skip_special_tokens=True)
            completed.append(Completed(prompt.prompt, text, prompt.answer, prompt.row, finish=result.finish))
        rewards = await prepared.scorer.score(completed)
        batch = token_batch(
            [episode.streams()[0] for episode in episodes],
            rewards=[reward.total for reward in rewards],
            group_ids=[episode.group for episode in episodes],
            truncated=[result.finish == "length" for result in results],
        )
        if prepared.algorithm.needs_reference:
            batch.ref_logprobs = trainer.logprobs(batch, role="reference")
        batch.advantages = prepared.algorithm.advantages(batch)
        trainer.update(batch, prepared.algorithm)
    await engine.close()
    return {name: parameter.detach() for name, parameter in roles.model.named_parameters()}


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({}, id="one update a step"),
        pytest.param(
            {"training.mini_batches": 2, "training.epochs": 2, "algorithm.kl_coef": 0.1, "rollout.temperature": 0.7},
            id="four updates a step and a reference",
        ),
    ],
)
def test_staleness_0_is_generate_then_train(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any]
) -> None:
    monkeypatch.chdir(tmp_path)
    config = load_config(None, data=recipe(**{"run.steps": 5, **changes}))
    model = train(config).model
    mine = asyncio.run(generate_then_train(config))
    theirs = load_file(model / "model.safetensors")
    assert theirs.keys() == mine.keys()
    for name, tensor in theirs.items():
        assert torch.equal(tensor, mine[name]), name
    start = assembly.load_roles(prepare(config)).model.state_dict()
    assert any(not torch.equal(start[name], tensor) for name, tensor in theirs.items()), "nothing was trained"
