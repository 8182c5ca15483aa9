"""The optimizer's state goes away between updates and comes back, and no bit of any number changes.

Here the CPU's memory is its home too; `test_gpu_parked.py` moves it off a GPU.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from rank_cases import Case, make_trainer, objective_of, parked_of_rank, ragged_batch, run_ranks
from test_optimizer import NAMES, backward, parameters

from strop.config.training import OptimizerSettings
from strop.training.optimizer import MasterOptimizer


def optimizer_of(name: str, dtype: torch.dtype) -> tuple[list[Any], MasterOptimizer]:
    named = parameters(dtype)
    settings = OptimizerSettings(name=name, learning_rate=1e-2, weight_decay=0.1)
    return named, MasterOptimizer(named, settings, total=20, outer={"embedding"})


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_updates_with_a_move_between_them_are_the_same(name: str, dtype: torch.dtype) -> None:
    (here, plain), (away, parked) = optimizer_of(name, dtype), optimizer_of(name, dtype)
    for seed in range(6):
        parked.parked.reload()
        for named in (here, away):
            backward(named, seed)
        if seed == 3:
            # Between two micro-batches: gradients of masters go too.
            parked.parked.offload()
            parked.parked.reload()
        for named, optimizer in ((here, plain), (away, parked)):
            backward(named, seed + 100)
            optimizer.step()
        moved = parked.parked.offload()
        assert parked.parked.offload() == 0
        state, expected = parked.state(), plain.state()
        assert state.keys() == expected.keys()
        assert all(torch.equal(state[key], expected[key]) for key in expected)
        if dtype == torch.bfloat16:
            masters = sum(m.numel() * 4 for m in parked.masters.values() if m.numel() >= 16)
            assert moved >= masters
    for (key, a), (_, b) in zip(here, away, strict=True):
        assert torch.equal(a, b), key


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_away_is_in_the_same_buffers_each_time(dtype: torch.dtype) -> None:
    named, optimizer = optimizer_of("adamw", dtype)
    places = []
    for seed in range(20):
        optimizer.parked.reload()
        backward(named, seed)
        optimizer.step()
        inside = {key: value.data_ptr() for key, value in optimizer.state().items() if value.numel() >= 16}
        optimizer.parked.offload()
        there = {key: value.data_ptr() for key, value in optimizer.state().items() if value.numel() >= 16}
        assert all(inside[key] != there[key] for key in inside), "nothing may stay where it was"
        places.append(there)
    assert len(places[0]) >= 6
    assert all(one == places[0] for one in places)


def test_gradients_of_masters_that_are_away_are_a_mistake() -> None:
    named, optimizer = optimizer_of("adamw", torch.bfloat16)
    optimizer.parked.offload()
    backward(named, 0)
    with pytest.raises(AssertionError, match="were away"):
        optimizer.step()


@pytest.mark.parametrize("bfloat16", [False, True])
def test_a_state_that_is_away_is_saved_held_and_gone_on_from(tmp_path: Path, bfloat16: bool) -> None:
    case = Case(bfloat16=bfloat16)

    def trained(folder: Path | None) -> dict[str, torch.Tensor]:
        """Weights after four updates; with a folder through two checkpoints, and the state away between updates."""
        trainer = make_trainer(case, None)
        for seed in range(4):
            trainer.update(ragged_batch(9, seed=seed), objective_of(case))
            if folder is None:
                continue
            trainer.offload()
            if seed == 1:
                (folder / "now").mkdir()
                state = trainer.save(folder / "now")
                trainer.close()
                trainer = make_trainer(case, None)
                # A trainer may be told before its state is there.
                trainer.offload()
                trainer.load(folder / "now", state)
            if seed == 2:
                write = trainer.hold_state()
                # The buffers are written anew before the copies are.
                trainer.update(ragged_batch(9, seed=77), objective_of(case))
                trainer.offload()
                (folder / "later").mkdir()
                state = write(folder / "later")
                trainer.close()
                trainer = make_trainer(case, None)
                trainer.load(folder / "later", state)
        trainer.reload()
        return {name: p.detach().clone() for name, p in trainer.optimizer.parameters.items()}

    plain, moved = trained(None), trained(tmp_path)
    assert all(torch.equal(plain[name], moved[name]) for name in plain)


@pytest.mark.slow
def test_each_rank_moves_its_own_part(tmp_path: Path) -> None:
    cases = [Case(shards=2, fsdp=True), Case(shards=2, fsdp=True, bfloat16=True), Case(replicas=2, bfloat16=True)]
    for case, found in zip(cases, run_ranks(2, parked_of_rank, cases, tmp_path), strict=True):
        assert found["moved"] > 0, case.name
        for name, weight in found["plain"].items():
            assert torch.equal(found["parked"][name], weight), (case.name, name)
