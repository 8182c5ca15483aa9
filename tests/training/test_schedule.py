"""Learning rates: where they begin, peak and end."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strop.config.training import OptimizerSettings
from strop.training.schedule import learning_rate


def rates(total: int, **settings: object) -> list[float]:
    made = OptimizerSettings.model_validate({"learning_rate": 2.0, **settings})
    return [learning_rate(made, update, total) for update in range(total)]


def test_constant() -> None:
    assert rates(4) == [2.0] * 4


def test_warm_up_rises_in_equal_parts_and_never_from_zero() -> None:
    assert rates(6, warmup_steps=3) == pytest.approx([0.5, 1.0, 1.5, 2.0, 2.0, 2.0])


def test_linear_falls_to_the_final_share_at_the_last_update() -> None:
    assert rates(5, schedule="linear") == pytest.approx([2.0, 1.5, 1.0, 0.5, 0.0])
    assert rates(5, schedule="linear", final_share=0.5) == pytest.approx([2.0, 1.75, 1.5, 1.25, 1.0])
    assert rates(7, schedule="linear", warmup_steps=2) == pytest.approx([2 / 3, 4 / 3, 2.0, 1.5, 1.0, 0.5, 0.0])


def test_cosine_is_half_way_in_the_middle() -> None:
    found = rates(5, schedule="cosine", final_share=0.1)
    assert found == pytest.approx(
        [2.0, 0.2 + 1.8 * (1 + math.sqrt(0.5)) / 2, 1.1, 0.2 + 1.8 * (1 - math.sqrt(0.5)) / 2, 0.2]
    )


@given(
    st.sampled_from(["constant", "linear", "cosine"]),
    st.integers(0, 20),
    st.integers(1, 30),
    st.floats(0, 1),
)
def test_rates_stay_between_the_bounds_and_fall_after_the_warm_up(
    schedule: str, warmup: int, total: int, share: float
) -> None:
    found = rates(total, schedule=schedule, warmup_steps=warmup, final_share=share)
    assert all(0 <= rate <= 2.0 + 1e-12 for rate in found)
    rising, falling = found[: warmup + 1], found[warmup:]
    assert rising == sorted(rising)
    assert falling == sorted(falling, reverse=True)
    if len(falling) > 1:
        assert falling[-1] == pytest.approx(2.0 if schedule == "constant" else 2.0 * share, abs=1e-9)


def test_a_run_that_goes_on_beyond_its_length_stays_at_the_end() -> None:
    settings = OptimizerSettings(learning_rate=2.0, schedule="cosine", final_share=0.25)
    assert learning_rate(settings, 50, 10) == 0.5
