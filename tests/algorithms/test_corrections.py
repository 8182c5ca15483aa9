"""Trainer/sampler mismatch: weights, bounds, what is kept, and what is reported."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from strop.algorithms.corrections import (
    effective_sample_size,
    importance_weights,
    mismatch_metrics,
    off_policy_sequence_mask,
    veto,
)

MASK = torch.tensor([False, True, True, True, False, True, True, False])
IDS = torch.tensor([0, 0, 0, 0, 0, 1, 1, 2])
LOG_RATIO = torch.tensor([0.5, 2.0, 0.25, 1.0, 3.0, 4.0, 0.5, 9.0]).log()
SAMPLER = torch.where(MASK, -torch.arange(8.0), torch.nan)
TRAINER = torch.where(MASK, SAMPLER + LOG_RATIO, 0.0)


def weights(**settings: Any) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    return importance_weights(TRAINER, SAMPLER, MASK, IDS, **settings)


def test_levels() -> None:
    torch.testing.assert_close(weights()[0], torch.tensor([0, 2.0, 0.25, 1, 0, 4, 0.5, 0]))
    torch.testing.assert_close(weights(level="sequence")[0], torch.tensor([0, 0.5, 0.5, 0.5, 0, 2, 2, 0]))
    roots = torch.tensor([0.5 ** (1 / 3), 2**0.5])
    torch.testing.assert_close(weights(level="geometric")[0], torch.where(MASK, roots[IDS.clamp(max=1)], 0.0))


def test_kinds() -> None:
    kept, expected = weights(kind="truncate", high=1.5)[1], torch.tensor([0, 1.5, 0.25, 1, 0, 1.5, 0.5, 0])
    torch.testing.assert_close(weights(kind="truncate", high=1.5)[0], expected)
    assert torch.equal(kept, MASK)
    expected = torch.tensor([0, 1.5, 0.5, 1, 0, 1.5, 0.5, 0])
    torch.testing.assert_close(weights(kind="truncate", low=0.5, high=1.5)[0], expected)
    expected = torch.tensor([0, 2.0, 0, 1, 0, 0, 0.5, 0])
    banded, kept, metrics = weights(kind="band", low=0.5, high=2.0)
    torch.testing.assert_close(banded, expected)
    assert torch.equal(kept, MASK)
    torch.testing.assert_close(metrics["mismatch/clipped_share"], torch.tensor(2 / 5))
    masked, kept, _ = weights(kind="mask", low=0.5, high=2.0)
    torch.testing.assert_close(masked, expected)
    assert torch.equal(kept, MASK & (expected > 0))
    # One bound is enough to reject; a sequence goes as a whole.
    kept = weights(kind="mask", level="sequence", high=1.0)[1]
    assert torch.equal(kept, MASK & (IDS == 0))


def test_metrics() -> None:
    metrics = weights(kind="truncate", high=1.0)[2]
    ratio = LOG_RATIO[MASK].exp()
    torch.testing.assert_close(metrics["kl/sampler"], (ratio - 1 - ratio.log()).mean())
    torch.testing.assert_close(metrics["mismatch/kl_k1"], -ratio.log().mean())
    torch.testing.assert_close(metrics["mismatch/abs_max"], ratio.log().abs().max())
    torch.testing.assert_close(metrics["mismatch/weight"], ratio.mean())
    torch.testing.assert_close(metrics["mismatch/weight_max"], torch.tensor(4.0))
    truncated = ratio.clamp(max=1.0)
    share = truncated.sum() ** 2 / truncated.square().sum() / 5
    torch.testing.assert_close(metrics["mismatch/effective_share"], share)
    same = importance_weights(SAMPLER, SAMPLER, MASK, IDS)[2]
    assert float(same["kl/sampler"]) == float(same["mismatch/abs_max"]) == float(same["mismatch/clipped_share"]) == 0
    assert float(same["mismatch/weight"]) == float(same["mismatch/effective_share"]) == 1


@given(
    tokens=st.lists(st.tuples(st.booleans(), st.floats(-600, 600, width=32), st.floats(-30, 0, width=32)), max_size=40),
    fill=st.sampled_from([torch.nan, torch.inf, -torch.inf, 0.0]),
)
def test_metrics_alone_are_those_of_the_weights(tokens: list[tuple[bool, float, float]], fill: float) -> None:
    mask = torch.tensor([inside for inside, _, _ in tokens], dtype=torch.bool)
    trainer = torch.where(mask, torch.tensor([one for _, one, _ in tokens]), fill)
    sampler = torch.where(mask, torch.tensor([one for _, _, one in tokens]), -fill)
    difference, nothing = torch.where(mask, trainer - sampler, fill).double(), torch.zeros(len(tokens)).double()
    expected = importance_weights(difference, nothing, mask, torch.zeros(len(tokens), dtype=torch.int64))[2]
    found = mismatch_metrics(trainer, sampler, mask)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name] == pytest.approx(float(value), rel=1e-9, abs=1e-9)


def test_metrics_alone_of_hopeless_policies() -> None:
    for gap in (-740.0, -600.0, -300.0, 300.0):
        found = mismatch_metrics(SAMPLER + gap, SAMPLER, MASK)
        assert found["mismatch/effective_share"] == pytest.approx(1.0)
        assert found["mismatch/abs_max"] == abs(gap)
        assert math.isfinite(found["kl/sampler"])


def test_metrics_alone_of_equal_policies_are_exact() -> None:
    found = mismatch_metrics(SAMPLER, SAMPLER, MASK)
    assert found["kl/sampler"] == found["mismatch/abs_max"] == found["mismatch/kl_k1"] == 0
    assert found["mismatch/weight"] == found["mismatch/weight_max"] == found["mismatch/effective_share"] == 1


@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
@pytest.mark.parametrize("bounds", [{}, {"kind": "truncate", "high": 2.0}, {"kind": "mask", "low": 0.5}])
@settings(max_examples=20, deadline=None)
@given(order=st.permutations(range(3)))
def test_parts_give_the_weights_of_the_whole(level: Any, bounds: dict[str, Any], order: list[int]) -> None:
    whole, kept, _ = weights(level=level, **bounds)
    for sequence in order:
        part = sequence == IDS
        got = importance_weights(TRAINER[part], SAMPLER[part], MASK[part], IDS[part], level=level, **bounds)
        assert torch.equal(got[0], whole[part])
        assert torch.equal(got[1], kept[part])


@pytest.mark.parametrize("fill", [torch.nan, torch.inf, -torch.inf, 1e30])
def test_masked_tokens_never_matter(fill: float) -> None:
    garbage = torch.where(MASK, TRAINER, fill), torch.where(MASK, SAMPLER, -fill)
    for level in ("token", "sequence", "geometric"):
        got = importance_weights(*garbage, MASK, IDS, level=level, kind="truncate", high=2.0)  # type: ignore[arg-type]
        expected = weights(level=level, kind="truncate", high=2.0)
        assert torch.equal(got[0], expected[0])
        assert got[2] == expected[2]


def test_nothing_trained_and_hopeless_mismatch_stay_finite() -> None:
    for mask, trainer in ((torch.zeros(8).bool(), TRAINER), (MASK, SAMPLER + 500), (MASK, SAMPLER - 500)):
        for level in ("token", "sequence", "geometric"):
            got, _, metrics = importance_weights(trainer, SAMPLER, mask, IDS, level=level)  # type: ignore[arg-type]
            assert bool(got.isfinite().all())
            assert all(bool(value.isfinite()) for value in metrics.values())
    nothing = torch.zeros(0)
    importance_weights(nothing, nothing, nothing.bool(), nothing.long())


def test_effective_sample_size() -> None:
    mask = torch.ones(4).bool()
    assert float(effective_sample_size(torch.ones(4), mask)) == 4
    assert float(effective_sample_size(torch.tensor([1e30, 0, 0, 0]), mask)) == 1
    assert float(effective_sample_size(torch.zeros(4), mask)) == 0


def test_veto_takes_the_whole_sequence() -> None:
    trainer = TRAINER.clone()
    assert torch.equal(veto(trainer, SAMPLER, MASK, IDS), MASK)
    trainer[5] = SAMPLER[5] - 10
    assert torch.equal(veto(trainer, SAMPLER, MASK, IDS), MASK & (IDS == 0))
    trainer[7] = -100.0
    assert torch.equal(veto(trainer, SAMPLER, MASK, IDS), MASK & (IDS == 0))


def test_off_policy_mask_needs_both_distance_and_a_negative_advantage() -> None:
    new = torch.where(IDS == 0, SAMPLER - 1.0, SAMPLER - 0.1)
    for advantage, dropped in ((-1.0, True), (1.0, False), (0.0, False)):
        got = off_policy_sequence_mask(new, SAMPLER, torch.full((8,), advantage), MASK, IDS, threshold=0.5)
        assert torch.equal(got, MASK & (IDS != 0) if dropped else MASK)


@pytest.mark.parametrize(
    "settings",
    [
        {"low": 0.5},
        {"kind": "truncate"},
        {"kind": "band", "low": 0.5},
        {"kind": "mask"},
        {"kind": "band", "low": 2.0, "high": 1.0},
        {"kind": "icepop"},
        {"level": "turn"},
    ],
)
def test_bounds_work_or_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"no effect|needs|bounds|unknown"):
        weights(**settings)
