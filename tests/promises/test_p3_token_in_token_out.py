"""Promise 3: token in, token out. What the engine sampled is what the trainer is handed, with the mask on exactly that.

The property tests of the single writer are in tests/rollout/test_episode.py; here a whole run is watched at both ends.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_runs import episodes_of, recipe

from strop.algorithms.batch import TokenBatch
from strop.config.loading import load_config
from strop.config.model import NewModel
from strop.loops.online import open_run
from strop.models.create import create_model
from strop.models.save import save_model
from strop.rollout.engine import SampleRequest, SampleResult

STEPS = 3
GROUPS = 4


@dataclass
class Watched:
    """What left the engine, by (group, sample), and what reached the trainer, by step."""

    eos: int = -1
    sampled: dict[tuple[int, int], tuple[SampleRequest, SampleResult]] = field(default_factory=dict)
    trained: list[TokenBatch] = field(default_factory=list)


async def watch(data: dict[str, Any]) -> tuple[Watched, Path]:
    seen = Watched()
    async with open_run(load_config(None, data=data)) as run:
        await run.begin()
        seen.eos = run.roles.tokenizer.eos_token_id
        generate, update = run.engine.generate, run.trainer.update

        async def spied_generate(request: SampleRequest) -> SampleResult:
            result = await generate(request)
            group, sample, _ = request.stream
            copy = SampleResult(list(result.tokens), list(result.logprobs), list(result.versions), result.finish)
            seen.sampled[group, sample] = (request, copy)
            return result

        def spied_update(batch: TokenBatch, objective: Any) -> dict[str, float]:
            seen.trained.append(batch)
            return update(batch, objective)

        run.engine.generate, run.trainer.update = spied_generate, spied_update
        while run.step < STEPS:
            groups = await run.collect()
            batch = await run.build_batch(groups)
            stats = await run.update(batch)
            run.step += 1
            await run.publish()
            run.record(groups, batch, stats)
        return seen, run.folder


def pad_is_eos(folder: Path) -> dict[str, Any]:
    """A model whose padding token is its end-of-text token, as many have."""
    settings = NewModel(characters="0123456789+=", hidden_size=32, layers=1, heads=2, context=32)
    model, tokenizer = create_model(settings, seed=0)
    tokenizer.pad_token = tokenizer.eos_token
    model.config.pad_token_id = model.generation_config.pad_token_id = tokenizer.eos_token_id
    save_model(model, tokenizer, folder)
    return {"path": str(folder)}


@pytest.mark.parametrize("shared_pad", [False, True])
def test_the_trainer_gets_what_the_engine_sampled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shared_pad: bool
) -> None:
    monkeypatch.chdir(tmp_path)
    model = {"model": pad_is_eos(tmp_path / "model")} if shared_pad else {}
    seen, run = asyncio.run(watch(recipe(**model, **{"run.steps": STEPS, "rollout.temperature": 0.8})))

    assert len(seen.trained) == STEPS
    ended = 0
    for step, batch in enumerate(seen.trained):
        handed = []
        for sequence in range(batch.sequences):
            here = batch.seq_ids == sequence
            ids, mask = batch.input_ids[here], batch.loss_mask[here]
            # Prompts are numbered by their place in the step.
            group = step * GROUPS + int(batch.prompt_ids[sequence])
            sample = sum(1 for other, _ in handed if other == group)
            handed.append((group, sample))
            request, result = seen.sampled[group, sample]
            # The whole stream is the prompt as it was given and the tokens as they were drawn; nothing is re-tokenised.
            assert ids.tolist() == [*request.tokens, *result.tokens]
            assert mask.tolist() == [False] * len(request.tokens) + [True] * len(result.tokens)
            logprobs = batch.sampler_logprobs[here]
            assert torch.isfinite(logprobs[mask]).all()
            assert torch.isnan(logprobs[~mask]).all()
            assert torch.equal(logprobs[mask], torch.tensor(result.logprobs))
            assert batch.versions[here][mask].tolist() == result.versions == [step] * len(result.tokens)
            if result.finish == "stop":
                # The end-of-text token was sampled, so it is trained.
                assert ids[-1] == seen.eos
                assert mask[-1]
                ended += 1
        # Every completion of the step, each once.
        assert handed == [(group, sample) for group in range(4 * step, 4 * step + 4) for sample in range(4)]
    assert ended > 0

    # The trainer's own log-probabilities of these tokens are the sampler's, at the same temperature.
    for batch in seen.trained:
        gap = (batch.extra["logprobs"] - batch.sampler_logprobs)[batch.loss_mask]
        assert gap.abs().max() < 1e-5
    # And the run's files hold the same tokens.
    for record in episodes_of(run):
        request, result = seen.sampled[record.group, record.sample]
        assert record.tokens.tolist() == [*request.tokens, *result.tokens]
        assert record.tokens[record.loss_mask].tolist() == result.tokens
