"""All verifiers of a run together: calls in threads, time-outs, retries, the weighted sum, and the error budget."""

from __future__ import annotations

import asyncio
import math
import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from strop.config.rewards import RewardSettings
from strop.errors import RunFailure, StropError
from strop.rewards.failures import describe_exception
from strop.rewards.protocol import Completed, Reward, Verdict, Verifier


class CompositeScorer:
    """Asks every verifier about every completion and adds up what they say.

    Each call of a verifier runs in a daemon thread of its own, at most `settings.workers` at a time. A call that takes
    longer than `settings.timeout` is a time-out of all its completions: its thread cannot be killed, so it is abandoned
    and its place is free for the next call. Being a daemon, it does not keep the process alive. Code that hangs while
    holding the interpreter lock can only be bounded by a verifier that uses a process of its own.

    Completions whose verdict is an error or a time-out are asked again, alone, up to `settings.retries` times. A
    `StropError` from a verifier (a wrong count of numbers, say) is never retried: `score` raises it.

    Args:
        verifiers: one for each entry of `settings.verifiers`, in the same order.
        settings: weights, time-out, retries, threads.
    """

    def __init__(self, verifiers: Sequence[Verifier], settings: RewardSettings) -> None:
        if len(verifiers) != len(settings.verifiers):
            raise ValueError(f"{len(verifiers)} verifiers for {len(settings.verifiers)} entries of rewards.verifiers")
        self.verifiers = list(verifiers)
        self.settings = settings
        self._slots: tuple[asyncio.AbstractEventLoop, asyncio.Semaphore] | None = None

    async def score(self, completed: Sequence[Completed]) -> list[Reward]:
        """One reward for each completion, in order; see `combine` for the sum.

        Raises:
            StropError: a verifier raised one, or did not return one verdict for each completion.
        """
        completed = list(completed)
        if not completed:
            return []
        questions = [asyncio.ensure_future(self._ask(verifier, completed)) for verifier in self.verifiers]
        try:
            answers = await asyncio.gather(*questions)
        except BaseException:
            for question in questions:
                question.cancel()
            raise
        names = [verifier.name for verifier in self.verifiers]
        return [
            combine(dict(zip(names, verdicts, strict=True)), self.settings) for verdicts in zip(*answers, strict=True)
        ]

    def load(self) -> None:
        """Let verifiers read what they need: in a timed call, reading a large model would count as a verifier's."""
        for verifier in self.verifiers:
            if hasattr(verifier, "load"):
                verifier.load()

    async def close(self) -> None:
        """Nothing to give back: a thread ends with its call, and an abandoned one with the process."""

    async def _ask(self, verifier: Verifier, completed: list[Completed]) -> list[Verdict]:
        """The verdicts of one verifier; those that failed are asked again."""
        verdicts = await self._call(verifier, completed)
        for _ in range(self.settings.retries):
            failed = [index for index, verdict in enumerate(verdicts) if verdict.status != "ok"]
            if not failed:
                break
            again = await self._call(verifier, [completed[index] for index in failed])
            for index, verdict in zip(failed, again, strict=True):
                verdicts[index] = verdict
        return verdicts

    async def _call(self, verifier: Verifier, completed: list[Completed]) -> list[Verdict]:
        loop = asyncio.get_running_loop()
        if self._slots is None or self._slots[0] is not loop:  # A semaphore belongs to the loop that waits for it.
            self._slots = (loop, asyncio.Semaphore(self.settings.workers))
        async with self._slots[1]:
            call = _Call(verifier, completed, loop)
            call.start()
            await asyncio.wait([call.finished], timeout=self.settings.timeout)
            # The call itself is asked, not the clock: a loop that was busy elsewhere sees both at once.
            if call.verdicts is None and call.error is None:
                detail = f"no verdict within {self.settings.timeout:g} s"
                return [Verdict(None, "timeout", detail) for _ in completed]
        if isinstance(call.error, StropError):
            raise call.error
        if call.error is not None:
            detail = describe_exception(call.error)
            return [Verdict(None, "verifier_error", detail) for _ in completed]
        return _checked(verifier, call.verdicts, len(completed))


@dataclass(eq=False)
class _Call:
    """One call of a verifier in a daemon thread; exactly one of `verdicts` and `error` is set when it has ended."""

    verifier: Verifier
    completed: list[Completed]
    loop: asyncio.AbstractEventLoop
    verdicts: list[Verdict] | None = None
    error: BaseException | None = None

    def __post_init__(self) -> None:
        self.finished: asyncio.Future[None] = self.loop.create_future()

    def start(self) -> None:
        threading.Thread(target=self._run, name=f"strop-verifier-{self.verifier.name}", daemon=True).start()

    def _run(self) -> None:
        try:
            self.verdicts = list(self.verifier.verify(self.completed))
        except BaseException as error:  # A `sys.exit()` in a reward must not pass as a hang.
            self.error = error
        try:
            self.loop.call_soon_threadsafe(self._announce)
        except RuntimeError:  # The loop is closed: nobody waits any more.
            return

    def _announce(self) -> None:
        if not self.finished.done():
            self.finished.set_result(None)


def _checked(verifier: Verifier, verdicts: list[Verdict] | None, expected: int) -> list[Verdict]:
    """Verdicts of the right count, with scores that are numbers."""
    if verdicts is None or len(verdicts) != expected or not all(isinstance(verdict, Verdict) for verdict in verdicts):
        raise RunFailure(
            f"the verifier {verifier.name!r} returned {len(verdicts or ())} verdicts for {expected} completions",
            where=f"{type(verifier).__module__}.{type(verifier).__qualname__}.verify",
            mend="return one Verdict for each completion, in order",
        )
    return [
        Verdict(None, "verifier_error", f"the score is {verdict.score}")
        if verdict.status == "ok" and verdict.score is not None and not math.isfinite(verdict.score)
        else verdict
        for verdict in verdicts
    ]


def combine(verdicts: dict[str, Verdict], settings: RewardSettings) -> Reward:
    """The reward of one completion.

    The total is the sum of weight times score over the verifiers that apply. If any verifier failed, the reward takes
    its status (the first one's, in order) and the total is NaN: a part of a sum is not a smaller reward. The same if no
    verifier applies, for then nothing says what the completion is worth.

    Args:
        verdicts: by name, in the order of `settings.verifiers`.
        settings: weights and `correct_at`.
    """
    components = {name: v.score for name, v in verdicts.items() if v.status == "ok" and v.score is not None}
    for name, verdict in verdicts.items():
        if verdict.status != "ok":
            return Reward(math.nan, components, None, verdict.status, f"{name}: {verdict.detail}", failed=name)
    first = next(iter(verdicts))
    if not components:
        detail = f"{', '.join(verdicts)}: no verifier applies to this completion"
        return Reward(math.nan, components, None, "verifier_error", detail, failed=first)
    weights = [verifier.weight for verifier in settings.verifiers]
    total = sum(weight * components[name] for name, weight in zip(verdicts, weights, strict=True) if name in components)
    if not math.isfinite(total):
        detail = f"the weighted sum of {components} is {total}"
        return Reward(math.nan, components, None, "verifier_error", detail, failed=first)
    correct = components[first] >= settings.correct_at if first in components else None
    detail = "; ".join(f"{name}: {verdict.detail}" for name, verdict in verdicts.items() if verdict.detail)
    return Reward(total, components, correct, detail=detail)


def check_errors(
    rewards: Sequence[Reward], *, first_step: bool, settings: RewardSettings, key: str = "rewards.verifiers"
) -> None:
    """Stop a run whose verifiers fail too often: any failure in its first step, later a share above the budget.

    Args:
        rewards: of all episodes of one step.
        first_step: whether it is the first step of the run (not of a resumed part of it).
        settings: `max_error_share`.
        key: where the verifiers stand in the recipe.

    Raises:
        RunFailure: names the verifier that failed most, how often, and the first thing it said.
    """
    failures = [reward for reward in rewards if reward.status != "ok"]
    if not failures or (not first_step and len(failures) / len(rewards) <= settings.max_error_share):
        return
    name, count = Counter(reward.failed for reward in failures).most_common(1)[0]
    of_it = [reward for reward in failures if reward.failed == name]
    ways = Counter(reward.status for reward in of_it)
    told = ", ".join(f"{status} {number}" for status, number in ways.most_common())
    others = f"; {len(failures) - count} more failed in other verifiers" if len(failures) > count else ""
    rule = (
        "in the first step of a run none may fail"
        if first_step
        else f"rewards.max_error_share allows {settings.max_error_share:.0%}"
    )
    environment = name == "environment"
    slow = ways["timeout"] == count
    what = "the environment failed in" if environment else f"the verifier {name!r} could not score"
    limit = "environment.step_timeout and environment.episode_timeout" if environment else "rewards.timeout"
    raise RunFailure(
        f"{what} {count} of {len(rewards)} {'episodes' if environment else 'completions'} ({told}){others}; {rule}. "
        f"First: {of_it[0].detail}",
        where="environment" if environment else f"{key}, {name}",
        mend=f"give it more time with {limit}, or make it faster"
        if slow
        else f"mend the {'environment' if environment else 'verifier'} or the data; a failure is never counted as a "
        "reward of 0",
    )
