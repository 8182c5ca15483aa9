"""Promise 6 under fault injection: a verifier that crashes at 5 %, hangs at 2 % and returns NaN at 1 %, in processes.

The run goes on; statuses are counted; the baselines of the groups exclude what failed; and nothing else is another
than in a run without faults.
"""

from __future__ import annotations

import json
import math
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from tiny_faults import fault_of, worth
from tiny_runs import episodes_of, recipe, steps_of, weights_of

from strop.config.loading import load_config
from strop.loops.train import train

GROUPS, SIZE, STEPS = 6, 12, 4
STATUS = {"crash": "verifier_error", "hang": "timeout", "nan": "verifier_error"}


def trained(name: str, verifier: dict[str, Any]) -> Path:
    """A run's folder. The rows of its first step never fail, for in a first step no verifier may."""
    data = recipe(
        **{
            "data.train": {"path": "rows.jsonl"},
            "data.shuffle": False,
            "rewards": {"verifiers": [verifier], "retries": 0, "max_error_share": 0.5, "workers": 2},
            "rollout": {"groups_per_step": GROUPS, "group_size": SIZE, "max_new_tokens": 4},
            "run": {"steps": STEPS, "name": name},
        }
    )
    return train(load_config(None, data=data)).folder


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Path]]:
    folder = tmp_path_factory.mktemp("faults")
    rows = [{"prompt": f"{n}+{n}=", "answer": str(2 * n), "faulty": n >= GROUPS} for n in range(GROUPS * STEPS)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        python = {"kind": "python", "call_with": "completion"}
        before = psutil.Process().children(recursive=True)
        yield {
            "real": trained("real", {**python, "function": "tiny_faults:really", "isolate": "process", "timeout": 0.8}),
            "mild": trained("mild", {**python, "function": "tiny_faults:mildly"}),
            "clean": trained("clean", {**python, "function": "tiny_faults:never"}),
        }
        assert psutil.Process().children(recursive=True) == before


def faults(records: list[Any]) -> Counter[str]:
    return Counter(fault_of(r.prompt_text, r.completion_text, r.group >= GROUPS) for r in records)


def test_every_fault_has_its_status_and_nothing_else_has_one(runs: dict[str, Path]) -> None:
    records = episodes_of(runs["real"])
    assert len(records) == GROUPS * SIZE * STEPS
    injected = faults(records)
    assert injected["crash"] >= 3
    assert injected["hang"] >= 2
    assert injected["nan"] >= 1
    for record in records:
        fault = fault_of(record.prompt_text, record.completion_text, record.group >= GROUPS)
        if fault:
            assert record.status == STATUS[fault]
            assert math.isnan(record.reward)
            assert record.advantages is None
            assert record.detail
        else:
            assert record.status in ("stop", "length")
            assert record.reward == worth(record.prompt_text, record.completion_text)


def test_statuses_are_counted_in_the_metrics(runs: dict[str, Path]) -> None:
    records = episodes_of(runs["real"])
    for number, (_, step, metrics) in enumerate(line for line in steps_of(runs["real"]) if line[0] == "train"):
        assert step == number + 1
        of_step = [record for record in records if record.group // GROUPS == number]
        statuses = Counter(record.status for record in of_step)
        assert metrics["errors/verifier_error"] == statuses["verifier_error"]
        assert metrics["errors/timeout"] == statuses["timeout"]
        failed = statuses["verifier_error"] + statuses["timeout"]
        assert metrics["errors/share"] == pytest.approx(failed / len(of_step))
        scored = [record.reward for record in of_step if not math.isnan(record.reward)]
        assert metrics["reward/mean"] == pytest.approx(np.mean(scored))


def by_hand(rewards: np.ndarray) -> np.ndarray:
    """Advantages of a group as GRPO has them: less the mean, over the deviation of a sample."""
    if rewards.max() == rewards.min():
        return np.zeros_like(rewards)
    return (rewards - rewards.mean()) / (rewards.std(ddof=1) + 1e-6)


def test_baselines_exclude_what_failed(runs: dict[str, Path]) -> None:
    """The advantages of all others, computed here from their own rewards."""
    groups: dict[int, list[Any]] = defaultdict(list)
    for record in episodes_of(runs["real"]):
        groups[record.group].append(record)
    touched = 0
    for records in groups.values():
        whole = [record for record in records if record.advantages is not None]
        touched += len(whole) < len(records)
        expected = by_hand(np.asarray([worth(r.prompt_text, r.completion_text) for r in whole]))
        for record, advantage in zip(whole, expected, strict=True):
            np.testing.assert_allclose(record.advantages[record.loss_mask], advantage, rtol=1e-4, atol=1e-5)
    assert touched >= 3


def test_until_the_first_fault_the_runs_are_the_same_and_after_it_the_others_episodes(runs: dict[str, Path]) -> None:
    """The second step samples from the same weights: the same texts, the same rewards, but for what failed."""
    clean = {(r.group, r.sample): r for r in episodes_of(runs["clean"]) if r.group < 2 * GROUPS}
    real = {(r.group, r.sample): r for r in episodes_of(runs["real"]) if r.group < 2 * GROUPS}
    assert real.keys() == clean.keys()
    failed = 0
    for key, record in real.items():
        assert record.completion_text == clean[key].completion_text
        np.testing.assert_array_equal(record.tokens, clean[key].tokens)
        if math.isnan(record.reward):
            failed += 1
        else:
            assert record.reward == clean[key].reward
    assert failed >= 1
    affected = {key[0] for key, record in real.items() if math.isnan(record.reward)}
    for key, record in real.items():
        if key[0] not in affected:
            np.testing.assert_array_equal(record.advantages, clean[key].advantages)


def test_how_it_fails_changes_nothing(runs: dict[str, Path]) -> None:
    """Crashes and hangs in processes leave the same weights, bit for bit, as a NaN for the same completions."""
    assert weights_of(runs["real"]) == weights_of(runs["mild"])
    assert weights_of(runs["real"]) != weights_of(runs["clean"])
