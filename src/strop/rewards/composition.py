"""All verifiers of a run together: who is asked about what, time-outs, retries, and the error budget."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import cast

from strop.config.rewards import RewardSettings, VerifierSettings
from strop.errors import RunFailure, StropError
from strop.rewards.calls import Abandoned, Crew
from strop.rewards.combination import combine_all, is_for, passes
from strop.rewards.failures import describe_exception, encodable
from strop.rewards.protocol import AsyncVerifier, Completed, Reward, Verdict, Verifier

NOT_ASKED = Verdict(None)
LARGEST = 1e15
"""Largest score that is one."""


class CompositeScorer:
    """Asks every verifier about the completions that it is for, and adds up what they say.

    A `Verifier` is called in a daemon thread, at most `settings.workers` at a time. A call that takes longer than its
    time-out is a time-out of all its completions: its thread cannot be killed, so it is abandoned and its place is free
    for the next call. Code that hangs while holding the interpreter lock can only be bounded in a process of its own;
    an `AsyncVerifier` sees to its time-outs itself, per completion.

    Verifiers that wait for others (`gate`, `requires`) are asked when those have answered, and only about what passed.
    Completions whose verdict is an error or a time-out are asked again, without the others, up to `settings.retries`
    times. A `StropError` from a verifier (a wrong count of numbers, say) is never retried: `score` raises it.

    Args:
        verifiers: one for each entry of `settings.verifiers`, in the same order.
        settings: weights, gates, time-outs, retries, threads.
    """

    def __init__(self, verifiers: Sequence[Verifier | AsyncVerifier], settings: RewardSettings) -> None:
        if len(verifiers) != len(settings.verifiers):
            raise ValueError(f"{len(verifiers)} verifiers for {len(settings.verifiers)} entries of rewards.verifiers")
        self.verifiers = list(verifiers)
        self.settings = settings
        self._needs = settings.needs()
        self._by_name = dict(zip((one.name for one in verifiers), settings.verifiers, strict=True))
        self._crew = Crew(settings.workers)
        # Looked up once: asking whether something fits a protocol takes longer than many a verifier.
        self._waited_for = {one.name: one for one in self.verifiers if isinstance(one, AsyncVerifier)}

    async def score(self, completed: Sequence[Completed]) -> list[Reward]:
        """One reward for each completion, in order; see `combine` for the sum.

        Raises:
            StropError: a verifier raised one, or did not return one verdict for each completion.
        """
        completed = list(completed)
        if not completed:
            return []
        answers = dict(zip(self._by_name, await self._answers(completed), strict=True))
        return combine_all(answers, self.settings, [item.row for item in completed])

    async def _answers(self, completed: list[Completed]) -> list[list[Verdict]]:
        """What each verifier says of each completion."""
        pairs = list(zip(self.verifiers, self.settings.verifiers, strict=True))
        if len(pairs) == 1:
            return [await self._question(*pairs[0], completed, {})]
        questions: dict[str, asyncio.Task[list[Verdict]]] = {}
        for verifier, settings in pairs:
            questions[verifier.name] = asyncio.create_task(self._question(verifier, settings, completed, questions))
        try:
            return await asyncio.gather(*questions.values())
        except BaseException:
            for question in questions.values():
                question.cancel()
            await asyncio.gather(*questions.values(), return_exceptions=True)
            raise

    def load(self) -> None:
        """Let verifiers read what they need: in a timed call, reading a large model would count as a verifier's."""
        for verifier in self.verifiers:
            if hasattr(verifier, "load"):
                verifier.load()

    async def close(self) -> None:
        """Let verifiers give back what they hold. A thread ends with its call, an abandoned one with the process."""
        for verifier in self.verifiers:
            if isinstance(verifier, AsyncVerifier):
                await verifier.close()

    async def _question(
        self,
        verifier: Verifier | AsyncVerifier,
        settings: VerifierSettings,
        completed: list[Completed],
        questions: dict[str, asyncio.Task[list[Verdict]]],
    ) -> list[Verdict]:
        """The verdicts of one verifier, after those that it waits for; `NOT_ASKED` where it has nothing to say.

        A task is in `questions` before any runs, so every verifier finds those that it needs.
        """
        needs = self._needs[verifier.name]
        if not needs and not settings.when:
            return await self._ask(verifier, settings, completed)
        chosen = [index for index, item in enumerate(completed) if is_for(settings, item.row)]
        for name in needs:
            needed, found = self._by_name[name], await questions[name]
            # What is not for a row shuts nothing there; what was shut out itself does. After a failure nobody need ask.
            chosen = [
                index
                for index in chosen
                if not is_for(needed, completed[index].row)
                or (found[index] is not NOT_ASKED and found[index].status == "ok" and passes(needed, found[index]))
            ]
        verdicts = [NOT_ASKED] * len(completed)
        answers = await self._ask(verifier, settings, [completed[index] for index in chosen])
        for index, verdict in zip(chosen, answers, strict=True):
            verdicts[index] = verdict
        return verdicts

    async def _ask(
        self, verifier: Verifier | AsyncVerifier, settings: VerifierSettings, completed: list[Completed]
    ) -> list[Verdict]:
        """The verdicts of one verifier; those that failed are asked again."""
        if not completed:
            return []
        verdicts = await self._call(verifier, settings, completed)
        for _ in range(self.settings.retries):
            failed = [index for index, verdict in enumerate(verdicts) if verdict.status != "ok"]
            if not failed:
                break
            again = await self._call(verifier, settings, [completed[index] for index in failed])
            for index, verdict in zip(failed, again, strict=True):
                verdicts[index] = verdict
        return verdicts

    async def _call(
        self, verifier: Verifier | AsyncVerifier, settings: VerifierSettings, completed: list[Completed]
    ) -> list[Verdict]:
        try:
            if (waited_for := self._waited_for.get(verifier.name)) is not None:
                return _checked(verifier, await waited_for.ask(completed), len(completed))
            verify = cast(Verifier, verifier).verify
            verdicts = await self._crew.call(
                lambda: list(verify(completed)),
                name=f"verifier-{verifier.name}",
                timeout=timeout_of(settings, self.settings),
            )
            return _checked(verifier, verdicts, len(completed))
        except Abandoned:
            detail = f"no verdict within {timeout_of(settings, self.settings):g} s"
            return [Verdict(None, "timeout", detail) for _ in completed]
        except (StropError, asyncio.CancelledError):
            raise
        except BaseException as error:
            detail = describe_exception(error)
            return [Verdict(None, "verifier_error", detail) for _ in completed]


def timeout_of(verifier: VerifierSettings, settings: RewardSettings) -> float:
    """Seconds that a verifier may take."""
    return settings.timeout if verifier.timeout is None else verifier.timeout


def _checked(verifier: Verifier | AsyncVerifier, verdicts: list[Verdict], expected: int) -> list[Verdict]:
    """Verdicts of the right count, with scores that are numbers."""
    if len(verdicts) != expected or not all(issubclass(kind, Verdict) for kind in set(map(type, verdicts))):
        raise RunFailure(
            f"the verifier {verifier.name!r} returned {len(verdicts)} verdicts for {expected} completions",
            where=f"{type(verifier).__module__}.{type(verifier).__qualname__}.verify",
            mend="return one Verdict for each completion, in order",
        )
    return [verdict if _is_plain(verdict) else _sound(verdict) for verdict in verdicts]


def _is_plain(verdict: Verdict) -> bool:
    """Whether a verdict is nothing but a number."""
    if verdict.status != "ok" or verdict.detail or verdict.components:
        return False
    return verdict.score is not None and abs(verdict.score) <= LARGEST


def _sound(verdict: Verdict) -> Verdict:
    """A verdict that can be computed with and written down; an error where it cannot."""
    components = {encodable(name): value for name, value in verdict.components.items()}
    if components or verdict.detail:
        verdict = replace(verdict, detail=encodable(verdict.detail), components=components)
    if verdict.status != "ok":
        return verdict
    numbers = {"the score": verdict.score, **{f"component {name!r}": value for name, value in components.items()}}
    for name, value in numbers.items():
        # NaN too; and what is larger has no square in float32, and no standard deviation.
        if value is not None and not abs(value) <= LARGEST:
            return replace(verdict, score=None, status="verifier_error", detail=f"{name} is {value}", components={})
    return verdict


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
    (name, environment), count = Counter(map(_culprit, failures)).most_common(1)[0]
    of_it = [reward for reward in failures if _culprit(reward) == (name, environment)]
    ways = Counter(reward.status for reward in of_it)
    told = ", ".join(f"{status} {number}" for status, number in ways.most_common())
    others = f"; {len(failures) - count} more failed in another way" if len(failures) > count else ""
    rule = (
        "in the first step of a run none may fail"
        if first_step
        else f"rewards.max_error_share allows {settings.max_error_share:.0%}"
    )
    if environment:
        what, where = f"the environment failed in {count} of {len(rewards)} episodes", "environment"
        mend = "mend the environment or the data; a failure is never counted as a reward of 0"
    elif name:
        what, where = f"the verifier {name!r} could not score {count} of {len(rewards)} completions", f"{key}, {name}"
        mend = "mend the verifier or the data; a failure is never counted as a reward of 0"
    else:
        what, where = f"no verifier applies to {count} of {len(rewards)} completions", key
        mend = (
            "give every row and every role a verifier that is for it (`when`) and does not say None, or return 0 for "
            "what is worth nothing"
        )
    if ways["timeout"] == count:
        limit = "environment.step_timeout and environment.episode_timeout" if environment else "rewards.timeout"
        mend = f"give it more time with {limit}, or make it faster"
    raise RunFailure(f"{what} ({told}){others}; {rule}. First: {of_it[0].detail}", where=where, mend=mend)


def _culprit(reward: Reward) -> tuple[str, bool]:
    """What failed: a verifier's name, empty where none applies, and whether it was the environment itself.

    A verifier may be called `environment` too, but a completion that it cannot score is a `verifier_error`.
    """
    return reward.failed, reward.failed == "environment" and reward.status != "verifier_error"
