"""The math verifier: how many of 10,000 answers worker processes judge in a second, with poison in every hundred.

Every answer is right or wrong by construction (`answers.py`). Every hundredth completion is poison: it is of
astronomic size, nested without end, a megabyte long, or a program that would make a file. The verifier must call every
clean answer what it is, no poisoned one right, and no item may take longer than the time-out. `poisoned` and `clean`
are run in turn, through the pool of workers that a training run uses.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import measure
from answers import items


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Verify; returns the numbers that were written."""
    parser = measure.arguments(__doc__, repeats=3)
    parser.add_argument("--answers", type=int, default=10_000, help="completions of each side")
    parser.add_argument("--every", type=int, default=100, help="one in so many is poison")
    parser.add_argument("--timeout", type=float, default=5.0, help="seconds that one may take")
    options = parser.parse_args(argv)
    if options.smoke:
        options.answers, options.every, options.timeout, options.repeats = 300, 10, 1.5, 1
    with tempfile.TemporaryDirectory() as folder:
        canary = Path(folder) / "canary"
        sides = {"poisoned": lambda: verify(options, canary), "clean": lambda: verify(options, None)}
        runs = measure.interleaved(sides, options.repeats)
        executed = canary.exists()
    numbers: dict[str, Any] = {"workers": options.threads, "timeout": options.timeout, "executed": executed}
    for side, found in runs.items():
        rates = [one["answers_per_second"] for one in found]
        numbers[side] = {**found[-1], "answers_per_second": measure.median(rates), "of_each_repeat": rates}
    measure.write("math_answers", numbers, options)
    return numbers


def verify(options: argparse.Namespace, canary: Path | None) -> dict[str, Any]:
    """Score all completions at once, as workers take them."""
    from strop.config.rewards import RewardSettings
    from strop.rewards.build import build_scorer
    from strop.rewards.process import Worker
    from strop.rewards.protocol import Completed, Reward

    settings = {"verifiers": [{"kind": "math", "timeout": options.timeout}], "workers": options.threads, "retries": 0}
    scorer = build_scorer(RewardSettings.model_validate(settings))
    given = list(items(options.answers, options.every, canary))
    watch = Watch(Worker, options.timeout)

    async def work() -> tuple[list[Reward], float]:
        try:
            # Workers that are there and have imported what they need, as after a run's first step.
            await scorer.score([Completed("", r"\boxed{x+1}", answer="1+x")] * 16 * options.threads)
            watch.begin()
            started = time.perf_counter()
            rewards = await scorer.score([Completed("", item.completion, answer=item.gold) for item in given])
            return rewards, time.perf_counter() - started
        finally:
            await scorer.close()

    with watch:
        rewards, seconds = asyncio.run(work())
    poisoned = [reward for item, reward in zip(given, rewards, strict=True) if item.right is None]
    wrong = [
        (item, reward)
        for item, reward in zip(given, rewards, strict=True)
        if item.right is not None and (reward.status != "ok" or reward.total != float(item.right))
    ]
    return {
        "answers": len(given),
        "of_kinds": dict(Counter(item.kind for item in given)),
        "right_by_construction": sum(item.right is True for item in given),
        "misjudged": len(wrong),
        "first_misjudged": [[item.gold, item.completion, item.right, str(reward.total)] for item, reward in wrong[:5]],
        "poisoned": len(poisoned),
        "poisoned_called_right": sum(reward.status == "ok" and reward.total > 0 for reward in poisoned),
        "poisoned_statuses": dict(Counter("wrong" if one.status == "ok" else one.status for one in poisoned)),
        "seconds": seconds,
        "answers_per_second": len(given) / seconds,
        "longest_item_seconds": max(watch.seconds),
        "workers_replaced": watch.started - options.threads,
    }


class Watch:
    """Times each item while it is entered: how long the run waits for a worker's answer to it.

    started: workers that were started.
    """

    def __init__(self, worker: Any, timeout: float) -> None:
        self._worker = worker
        self._timeout = timeout
        self._answer, self._init = worker.answer, worker.__init__
        self.seconds: list[float] = []
        self.started = 0

    def begin(self) -> None:
        """Forget what was timed."""
        self.seconds = []

    def __enter__(self) -> None:
        def answer(worker: Any, timeout: float) -> Any:
            started = time.perf_counter()
            try:
                return self._answer(worker, timeout)
            finally:
                if timeout == self._timeout:  # Others are for starting a worker.
                    self.seconds.append(time.perf_counter() - started)

        def init(worker: Any, **arguments: Any) -> None:
            self.started += 1
            self._init(worker, **arguments)

        self._worker.answer, self._worker.__init__ = answer, init

    def __exit__(self, *_: object) -> None:
        self._worker.answer, self._worker.__init__ = self._answer, self._init


if __name__ == "__main__":
    main()
