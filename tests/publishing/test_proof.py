"""Weights are proven delivered (promise P4): what an engine should not serve stops the run at that publication."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from strop.config.training import OptimizerSettings
from strop.errors import RunFailure
from strop.models.forward import score_streams
from strop.publishing.proof import Probe
from strop.publishing.shared import SharedPublisher
from strop.rollout.engine import WeightUpdate
from strop.rollout.engines import packed_linear
from strop.rollout.engines.local import LocalEngine
from strop.training.single import SingleDeviceTrainer

Make = Callable[..., Any]
FLOOR = 1e-4


@pytest.fixture(autouse=True)
def packs_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_linear, "SMALLEST", 1)


def parts(model: Any) -> tuple[SingleDeviceTrainer, LocalEngine, SharedPublisher]:
    trainer = SingleDeviceTrainer(model, OptimizerSettings(), total_updates=1)
    engine = LocalEngine(model, None, eos_ids=(1,), seed=0, context=512, pack_weights=True)
    probe = Probe.make(model.config.vocab_size, floor=FLOOR)
    return trainer, engine, SharedPublisher(engine, probe)


def nudge(model: Any, seed: int, size: float) -> None:
    """An update as an optimizer makes it: every weight by up to `size`."""
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_((torch.rand(parameter.shape, generator=draw) * 2 - 1) * size)


@pytest.mark.parametrize(("family", "count"), [("llama", 200), ("gemma2", 20)])
async def test_clean_publications_raise_no_alarm(tiny_model: Make, family: str, count: int) -> None:
    model = tiny_model(family)
    trainer, _, publisher = parts(model)
    gaps = []
    for version in range(count):
        found = await publisher.publish(trainer, version=version)
        gaps.append(found["publish/probe_gap"])
        assert found["publish/version"] == version
        nudge(model, version, 1e-4 if version % 2 else 3e-3)
    assert max(gaps) < FLOOR


def keep_packed(engine: LocalEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """The fault: new weights are announced, and what was derived from the old ones stays and is called new."""

    async def update(new: WeightUpdate) -> int:
        engine._version = new.version
        derived = engine._derived
        if derived.layers is not None:
            derived.layers = (new.version, derived.layers[1])
        if derived.head is not None:
            derived.head = (new.version, derived.head[1])
        return new.version

    monkeypatch.setattr(engine, "update_weights", update)


@pytest.mark.parametrize("size", [1e-3, 1e-2])
async def test_stale_packed_weights_stop_the_run_at_that_publication(
    tiny_model: Make, monkeypatch: pytest.MonkeyPatch, size: float
) -> None:
    model = tiny_model()
    trainer, engine, publisher = parts(model)
    await publisher.publish(trainer, version=0)
    nudge(model, 1, size)
    assert (await publisher.publish(trainer, version=1))["publish/probe_gap"] < FLOOR
    keep_packed(engine, monkeypatch)
    nudge(model, 2, size)
    with pytest.raises(RunFailure, match="version 2"):
        await publisher.publish(trainer, version=2)


async def test_an_engine_that_falls_behind_by_tiny_steps_is_caught_before_it_matters(
    tiny_model: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    # One step of 1e-6 moves no log-probability by more than rounding does; what is never delivered adds up.
    model = tiny_model()
    trainer, engine, publisher = parts(model)
    await publisher.publish(trainer, version=0)
    keep_packed(engine, monkeypatch)

    async def train() -> None:
        for version in range(1, 200):
            nudge(model, 7, 1e-6)
            await publisher.publish(trainer, version=version)

    with pytest.raises(RunFailure, match="does not serve the weights") as caught:
        await train()
    gap = float(caught.value.what.split("differ by ")[1].split()[0])
    assert FLOOR < gap < 2 * FLOOR


def linears(model: Any) -> list[str]:
    return [name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)]


async def test_any_one_stale_matrix_is_noticed(tiny_model: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model()
    trainer, engine, publisher = parts(model)
    await publisher.publish(trainer, version=0)
    names = linears(model)
    assert len(names) == 15
    for version, name in enumerate(names, start=1):
        module = model.get_submodule(name)
        await publisher.publish(trainer, version=version)
        before = module.weight.detach().clone()
        with monkeypatch.context() as patch:
            keep_packed(engine, patch)
            with torch.no_grad():
                module.weight.add_(torch.randn(before.shape, generator=torch.Generator().manual_seed(1)) * 3e-3)
            with pytest.raises(RunFailure):
                await publisher.publish(trainer, version=version)
        with torch.no_grad():
            module.weight.copy_(before)


async def test_one_corrupt_value_is_noticed(tiny_model: Make) -> None:
    model = tiny_model()
    trainer, engine, publisher = parts(model)
    await publisher.publish(trainer, version=0)
    names = linears(model)
    for version, name in enumerate(names, start=1):
        weight = model.get_submodule(name).weight
        with torch.no_grad():
            held, weight[3, 5] = float(weight[3, 5]), 2.0
            await engine.update_weights(WeightUpdate(version))
            # Packs the corrupt value; the trainer's own weight is then set right.
            await engine.score([[1, 2, 3]])
            weight[3, 5] = held
        with pytest.raises(RunFailure):
            await publisher._probe.prove(trainer, engine, version=version)
        await publisher.publish(trainer, version=version)


class Scripted:
    """A side of the probe that says what it is told."""

    def __init__(self, values: Sequence[float], moves: Sequence[float] = ()) -> None:
        self.values = np.asarray([np.nan, *values], dtype=np.float32)
        self.moves = np.asarray([np.nan, *(moves or [0.0] * len(values))], dtype=np.float32)
        self.asked = 0

    def score(self, _: Any) -> list[np.ndarray]:
        return [self.values]

    def rounding(self, _: Any) -> list[np.ndarray]:
        self.asked += 1
        return [self.moves]


class ScriptedEngine(Scripted):
    async def score(self, _: Any) -> list[np.ndarray]:  # type: ignore[override]
        return [self.values]


async def proves(
    probe: Probe, ours: Sequence[float], theirs: Sequence[float], moves: Sequence[float] = (), *, asks: bool = True
) -> float:
    engine: Any = ScriptedEngine(theirs)
    trainer = Scripted(ours, moves)
    try:
        return await probe.prove(trainer, engine, version=1)
    finally:
        assert trainer.asked <= asks


async def test_the_first_publication_measures_the_rounding() -> None:
    probe = Probe([[0, 1, 2]], floor=1e-4)
    assert await proves(probe, [-1.0, -2.0], [-1.0, -2.0005]) == pytest.approx(5e-4, rel=1e-3)
    assert await proves(probe, [-1.0, -2.0], [-1.0, -2.0049]) == pytest.approx(4.9e-3, rel=1e-3)
    with pytest.raises(RunFailure):
        await proves(probe, [-1.0, -2.0], [-1.0, -2.006])
    # It measured once: what failed later did not loosen it.
    with pytest.raises(RunFailure):
        await proves(probe, [-1.0, -2.0], [-1.0, -2.006])


async def test_other_weights_from_the_start_are_not_taken_for_rounding() -> None:
    with pytest.raises(RunFailure):
        await proves(Probe([[0, 1, 2]], floor=1e-4), [-1.0, -2.0], [-1.5, -2.0])


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("moves", [(), (0.0, np.nan), (0.0, np.inf), (np.inf, 0.0)])
@pytest.mark.parametrize("value", [np.nan, -np.inf, np.inf])
async def test_what_is_not_a_number_does_not_pass(first: bool, moves: Sequence[float], value: float) -> None:
    probe = Probe([[0, 1, 2]], floor=1e-4)
    if not first:
        await proves(probe, [-1.0, -2.0], [-1.0, -2.0])
    with pytest.raises(RunFailure):
        await proves(probe, [-1.0, -2.0], [-1.0, value], moves)


@pytest.mark.parametrize("moves", [np.nan, np.inf])
async def test_rounding_that_is_not_a_number_allows_nothing(moves: float) -> None:
    with pytest.raises(RunFailure):
        await proves(Probe([[0, 1, 2]], floor=1e-4, tolerance=1e-4), [-1.0, -2.0], [-1.0, -2.1], [0.0, moves])


@pytest.mark.parametrize("turned", [False, True])
def test_one_engine_that_is_not_a_number_is_seen_whoever_is_first(turned: bool) -> None:
    ours, broken = Scripted([-1.0, -2.0]), Scripted([-1.0, np.nan])
    engines = {"a": ours.score(0), "b": broken.score(0)}
    if turned:
        engines = dict(reversed(engines.items()))

    async def rounding() -> list[np.ndarray]:
        return ours.rounding(0)

    with pytest.raises(RunFailure, match="engine b"):
        asyncio.run(Probe([[0, 1, 2]], floor=1e-4).judge(ours.score(0), engines, rounding=rounding, version=1))


async def test_a_token_is_held_to_what_rounding_does_to_it() -> None:
    probe = Probe([[0, 1, 2]], floor=1e-4)
    await proves(probe, [-1.0, -2.0], [-1.0, -2.00001], asks=False)
    # Such a difference is looked into, and each token is judged by itself.
    assert await proves(probe, [-1.0, -2.0], [-1.0, -2.9], [1e-6, 0.25]) == pytest.approx(0.9, rel=1e-3)
    with pytest.raises(RunFailure, match=r"differ by 0\.01 nats, 0\.0001 is rounding"):
        await proves(probe, [-1.0, -2.0], [-1.01, -2.9], [1e-6, 0.25])
    with pytest.raises(RunFailure, match=r"differ by 1\.1 nats, 1 is rounding"):
        await proves(probe, [-1.0, -2.0], [-1.0, -3.1], [1e-6, 0.25])
    # It is what it was for the next ones.
    assert probe.tolerance == pytest.approx(1e-4, rel=0.1)


class OtherWay:
    """An engine that computes a model of bfloat16 in float32, as it was when it was made."""

    def __init__(self, model: Any) -> None:
        self.model = copy.deepcopy(model).float()

    async def score(self, lists: Sequence[Sequence[int]]) -> list[np.ndarray]:
        return score_streams(self.model, [np.asarray(tokens) for tokens in lists])


def sharpen(model: Any) -> None:
    """What training does in the end: attention turns one way or the other."""
    with torch.no_grad():
        for block in model.model.layers:
            block.self_attn.q_proj.weight.mul_(30)
            block.mlp.down_proj.weight.mul_(4)
        model.lm_head.weight.mul_(6)


async def test_other_weights_make_more_of_rounding_and_no_alarm_of_it(tiny_model: Make) -> None:
    """Attention that turns one way or the other moves a token by a nat in bfloat16, and by nothing before training."""
    model = tiny_model().to(torch.bfloat16)
    trainer = SingleDeviceTrainer(model, OptimizerSettings(), total_updates=1)
    vocabulary = model.config.vocab_size
    sequences = torch.randint(0, vocabulary, (24, 6), generator=torch.Generator().manual_seed(0)).tolist()

    async def proved(probe: Probe, engine: Any) -> float:
        return await probe.prove(trainer, engine, version=1)

    probes = [Probe([tokens], floor=1e-3) for tokens in sequences]
    before = [await proved(probe, OtherWay(model)) for probe in probes]
    stale = OtherWay(model)
    sharpen(model)
    after = [await proved(probe, OtherWay(model)) for probe in probes]
    # Most are beyond what was measured before, and would have been taken for other weights.
    assert sum(now > min(10 * then, 1) for now, then in zip(after, before, strict=True)) > 6
    for probe in probes:
        with pytest.raises(RunFailure):
            await proved(probe, stale)


async def test_other_weights_are_not_taken_for_rounding_where_it_moves_most_tokens(tiny_model: Make) -> None:
    model = tiny_model().to(torch.bfloat16)
    sharpen(model)
    trainer = SingleDeviceTrainer(model, OptimizerSettings(), total_updates=1)
    right: Any = OtherWay(model)
    wrong: Any = OtherWay(model)
    draws = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for weight in wrong.model.parameters():
            weight.add_(0.1 * weight.std() * torch.randn(weight.shape, generator=draws))
    found = 0
    for tokens in torch.randint(0, model.config.vocab_size, (60, 4), generator=draws).tolist():
        probe = Probe([tokens], floor=0.1, tolerance=0.1)
        await probe.prove(trainer, right, version=1)
        try:
            await probe.prove(trainer, wrong, version=1)
        except RunFailure:
            found += 1
    assert found > 54


@pytest.mark.parametrize("vocabulary", [3, 48, 49_152, 248_320])
def test_the_probe_walks_through_the_vocabulary(vocabulary: int) -> None:
    ((tokens),) = Probe.make(vocabulary, floor=1e-4).token_lists
    assert all(0 <= token < vocabulary for token in tokens)
    assert len(set(tokens)) == min(vocabulary, 4)
    if vocabulary > 1000:
        assert max(tokens) - min(tokens) > 0.99 * vocabulary
