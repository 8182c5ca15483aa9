"""A local engine with a module of its own: new weights go in, and nothing of the old ones is used again."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from strop.errors import RunFailure
from strop.rollout.engine import SampleRequest, SampleSettings, WeightUpdate
from strop.rollout.engines import packed_linear
from strop.rollout.engines.local import LocalEngine

Make = Callable[..., Any]
PROBE = [[3, 4, 5, 6, 7, 8]]


@pytest.fixture(autouse=True)
def packs_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_linear, "SMALLEST", 1)


def engine_of(model: Any, *, pack: bool = True) -> LocalEngine:
    return LocalEngine(model, None, eos_ids=(), seed=0, context=256, pack_weights=pack)


def changed(model: Any) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(1)
    return {
        name: parameter.detach() + torch.randn(parameter.shape, generator=draw) * 0.05
        for name, parameter in model.named_parameters()
    }


@pytest.mark.parametrize("pack", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
async def test_new_weights_are_what_is_sampled_with(tiny_model: Make, pack: bool, dtype: torch.dtype) -> None:
    engine, fresh = engine_of(tiny_model(), pack=pack), tiny_model()
    before = (await engine.score(PROBE))[0]
    new = changed(fresh)
    fresh.load_state_dict(new, strict=False)
    assert await engine.update_weights(WeightUpdate(5, tensors=((n, t.to(dtype)) for n, t in new.items()))) == 5
    after, expected = (await engine.score(PROBE))[0], (await engine_of(fresh, pack=pack).score(PROBE))[0]
    assert np.abs(after - expected)[1:].max() < 1e-5
    assert np.abs(after - before)[1:].max() > 1e-2
    result = await engine.generate(SampleRequest((3, 4), SampleSettings(3), (0,)))
    assert result.versions == [5, 5, 5]


@pytest.mark.parametrize("name", ["model.norm.weight", "nobody"])
async def test_what_does_not_fit_is_refused_and_nothing_is_sampled_with_half_of_it(tiny_model: Make, name: str) -> None:
    engine = engine_of(tiny_model())
    with pytest.raises(RunFailure, match=name):
        await engine.update_weights(WeightUpdate(1, tensors=[(name, torch.zeros(3))]))
    with pytest.raises(RunFailure, match="parts of two versions"):
        await engine.generate(SampleRequest((3, 4), SampleSettings(3), (0,)))
    await engine.update_weights(WeightUpdate(2, tensors=changed(tiny_model()).items()))
    assert (await engine.generate(SampleRequest((3, 4), SampleSettings(1), (0,)))).versions == [2]


async def test_packed_weights_of_another_version_cannot_be_used(tiny_model: Make) -> None:
    engine = engine_of(tiny_model())
    await engine.score(PROBE)
    engine._version = 1  # announced past `update_weights`
    with pytest.raises(RunFailure, match="serves version 1 with weights packed from version 0"):
        await engine.score(PROBE)


async def test_a_sibling_of_a_later_version_computes_the_prompt_anew(tiny_model: Make) -> None:
    model = tiny_model()
    engine = engine_of(model)
    prompt = (3, 4, 5, 6)
    first = asyncio.create_task(engine.generate(SampleRequest(prompt, SampleSettings(60), (0,))))
    while engine.take_stats().prompt_tokens == 0:
        await asyncio.sleep(0)
    assert engine._running[0].first_hidden is not None
    # Announced past `update_weights`, which would have dropped what is lent.
    engine._derived.drop()
    engine._version = 1
    await engine.generate(SampleRequest(prompt, SampleSettings(1), (1,)))
    assert engine.take_stats().prompt_tokens == len(prompt)
    assert not first.done()
    await first
