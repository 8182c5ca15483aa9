"""`code`: the program in the completion passes its tests, in the sandbox."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from strop.config.rewards import CodeVerifier
from strop.config.sandbox import LimitSettings
from strop.rewards.code_answers import prints_the_same, returns_the_same
from strop.rewards.code_block import find_program
from strop.rewards.code_tests import Suite, read_tests
from strop.rewards.failures import shorten
from strop.rewards.protocol import Completed, Verdict
from strop.sandbox.calls import Checked, checked, value_of
from strop.sandbox.inside.plain import NotPlain
from strop.sandbox.protocol import Job, RunResult, Sandbox, SandboxError, SandboxResult


class Code:
    """Runs the tests of each completion's program.

    The verdict is made here, of what the program printed or returned; see `docs/sandbox.md` for what it could do about
    that. Whatever a program does wrong scores 0, its own time-outs, crashes and endless output included. A sandbox that
    fails, and tests that cannot be run, are a `verifier_error`.

    Args:
        settings: where the tests are and how they are compared.
        sandbox: where programs run. It may be shared; whoever made it closes it.
        limits: of each program.
    """

    def __init__(self, settings: CodeVerifier, sandbox: Sandbox, limits: LimitSettings) -> None:
        self.name = settings.name or settings.kind
        self.settings = settings
        self.sandbox = sandbox
        self.limits = limits

    async def ask(self, completed: Sequence[Completed]) -> list[Verdict]:
        """One verdict for each completion, in order. Equal completions of a prompt are run once, for one verdict."""
        runs: dict[tuple[Any, ...], asyncio.Task[Verdict]] = {}
        keys = [self._key(item) for item in completed]
        try:
            for key, item in zip(keys, completed, strict=True):
                if key not in runs:
                    runs[key] = asyncio.ensure_future(self._verdict(item))
            await asyncio.gather(*runs.values())
        finally:
            for run in runs.values():
                run.cancel()
        return [runs[key].result() for key in keys]

    def _key(self, item: Completed) -> tuple[Any, ...]:
        """What a verdict depends on. The completions of a group share the values of their row, which may be of kinds
        that cannot be compared."""
        settings = self.settings
        columns = (settings.tests, settings.entry_point, settings.setup, settings.before)
        return item.completion, *(None if column is None else id(item.row.get(column)) for column in columns)

    async def close(self) -> None:
        """Nothing is held: the sandbox belongs to whoever made it."""

    async def _verdict(self, item: Completed) -> Verdict:
        try:
            tests = self._tests(item)
            before = self._column(item, self.settings.before)
        except ValueError as error:
            return Verdict(None, "verifier_error", str(error))
        program = find_program(item.completion, self.settings.take)
        if program is None:
            return Verdict(0.0, detail="no program in the completion")
        try:
            result = await self.sandbox.run(self._job(f"{before}\n{program}" if before else program, tests))
            # What was returned may be made to take long to read.
            reasons = await asyncio.to_thread(self._reasons, tests, result)
        except SandboxError as error:
            return Verdict(None, "verifier_error", f"the sandbox failed: {shorten(str(error))}")
        except _TestsAtFault as error:
            return Verdict(None, "verifier_error", shorten(str(error)))
        return self._score(reasons)

    def _tests(self, item: Completed) -> Suite:
        row, settings = item.row, self.settings
        if settings.tests not in row:
            raise ValueError(f"the row has no column {settings.tests!r}; it has {', '.join(row) or 'none'}")
        entry = row.get(settings.entry_point)
        tests = read_tests(row[settings.tests], settings.style, str(entry or ""), self._column(item, settings.setup))
        return tests.first(settings.max_tests)

    @staticmethod
    def _column(item: Completed, name: str | None) -> str:
        if name is None:
            return ""
        if name not in item.row:
            raise ValueError(f"the row has no column {name!r}; it has {', '.join(item.row) or 'none'}")
        value: Any = item.row[name]
        if value is not None and not isinstance(value, str):
            raise ValueError(f"the column {name!r} holds a {type(value).__name__}; code is needed")
        return value or ""

    def _job(self, program: str, tests: Suite) -> Job:
        # Where one failure decides, the runs after it are of no use.
        early = self.settings.credit == "all"
        if tests.style == "assert":
            partner = Job("serve", program, inputs=("",) * len(tests.inputs), limits=self.limits)
            return Job(
                "check", tests.source, inputs=tests.inputs, limits=self.limits, stop_at_failure=early, partner=partner
            )
        return Job(
            "script" if tests.style == "stdin" else "call",
            program,
            inputs=tests.inputs,
            limits=self.limits,
            stop_at_failure=early,
        )

    def _reasons(self, tests: Suite, result: SandboxResult) -> list[str]:
        """For each test what is wrong with it, or nothing."""
        return [self._why_not(tests, index, result) for index in range(len(tests.inputs))]

    def _why_not(self, tests: Suite, index: int, result: SandboxResult) -> str:
        """What is wrong with one test; empty if it passed."""
        run = result.runs[index]
        if tests.style == "assert":
            return _failed_check(run, result.partner[index])
        if run.ended != "ok":
            return how_it_ended(run)
        if tests.style == "stdin":
            same = any(
                prints_the_same(run.stdout, answer, compare=self.settings.compare, tolerance=self.settings.tolerance)
                for answer in tests.expected[index]
            )
            return "" if same else f"wrong output {_shown(run.stdout)}"
        try:
            value = value_of(run.value)
        except NotPlain:
            # An exit before the function returned, or a value that only means something where it was made.
            return "it returned no plain data"
        same = any(returns_the_same(value, answer, self.settings.tolerance) for answer in tests.expected[index])
        return "" if same else f"wrong value {_shown(value)}"

    def _score(self, reasons: list[str]) -> Verdict:
        failed = [index for index, reason in enumerate(reasons) if reason]
        passed = len(reasons) - len(failed)
        score = passed / len(reasons) if self.settings.credit == "share" else float(not failed)
        if not failed:
            return Verdict(score)
        first = failed[0]
        return Verdict(score, detail=f"test {first + 1} of {len(reasons)}: {shorten(reasons[first], 300)}")


class _TestsAtFault(Exception):
    """The tests cannot be run, whatever the program."""


def _failed_check(run: RunResult, program: RunResult) -> str:
    """What is wrong with a test that is code; empty if it passed."""
    verdict = checked(run.value) if run.ended in ("ok", "error") else Checked(passed=False)
    if verdict.fault:
        raise _TestsAtFault(verdict.fault)
    if verdict.passed and run.ended == "ok":
        return ""
    if program.ended not in ("ok", "not_run"):
        return how_it_ended(program)
    return verdict.detail or how_it_ended(run)


def how_it_ended(run: RunResult) -> str:
    """An unhappy end, in a few words, with the last line of what was printed about it."""
    last = run.stderr.strip().rpartition("\n")[2]
    told = {
        "timeout": f"it took too long ({run.seconds:.1f} s)",
        "memory": "it took too much memory",
        "output_limit": "it printed too much",
        "killed": "it was killed",
        "not_run": "it was not run, for an earlier failure or the time that all had taken",
    }.get(run.ended, f"signal {run.signal}" if run.signal else f"exit code {run.code}")
    return f"{told}: {last}" if last else told


def _shown(value: Any) -> str:
    try:
        return shorten(repr(value), 80)
    except (ValueError, RecursionError):  # A number that is too long to be written in decimals.
        return f"of type {type(value).__name__}"
