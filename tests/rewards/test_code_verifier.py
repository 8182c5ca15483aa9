"""The `code` verifier: scores, styles of tests, and whose fault a failure is."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from sandboxes import TIGHT

from strop.config.rewards import CodeVerifier, RewardSettings
from strop.config.sandbox import SandboxSettings
from strop.data.programs import problems
from strop.errors import UserError
from strop.rewards.build import build_scorer
from strop.rewards.code import Code
from strop.rewards.composition import CompositeScorer
from strop.rewards.protocol import Completed, Verdict
from strop.sandbox.build import SharedSandbox
from strop.sandbox.pool import Pool
from strop.sandbox.protocol import Job, SandboxError, SandboxResult


def ask(pool: Any, program: str, given: Any, /, *, row: dict[str, Any] | None = None, **settings: Any) -> Verdict:
    code = Code(CodeVerifier.model_validate({"kind": "code", "credit": "share", **settings}), pool, TIGHT)
    item = Completed("", program, row={"tests": given, **(row or {})})
    [verdict] = asyncio.run(code.ask([item]))
    return verdict


DOUBLES = [{"input": "2", "output": "4"}, {"input": "5", "output": "10"}, {"input": "0", "output": "0"}]
DOUBLE = "print(2 * int(input()))"


def test_a_program_is_scored_by_the_share_of_its_tests_or_by_all(pool: Pool) -> None:
    assert ask(pool, DOUBLE, DOUBLES) == Verdict(1.0)
    wrong = "x = int(input()); print(x + 2)"
    some = ask(pool, wrong, DOUBLES)
    assert (some.score, some.status) == (pytest.approx(1 / 3), "ok")
    assert some.detail == "test 2 of 3: wrong output '7\\n'"
    assert ask(pool, wrong, DOUBLES, credit="all").score == 0.0
    assert ask(pool, DOUBLE, DOUBLES, credit="all").score == 1.0
    assert ask(pool, wrong, DOUBLES, credit="all", max_tests=1).score == 1.0


def test_the_program_is_taken_from_the_completion(pool: Pool) -> None:
    answer = f"I would write\n```python\nprint('no')\n```\nor rather\n```python\n{DOUBLE}\n```\nIs that right?"
    assert ask(pool, answer, DOUBLES).score == 1.0
    assert ask(pool, answer, DOUBLES, take="whole").score == 0.0
    assert ask(pool, DOUBLE, DOUBLES, take="block") == Verdict(0.0, detail="no program in the completion")


def test_columns_say_where_everything_is(pool: Pool) -> None:
    row = {"cases": [{"args": [3], "expected": 9}], "fn": "square", "head": "def square(x):\n"}
    verdict = ask(pool, "    return x * x", None, row=row, tests="cases", entry_point="fn", before="head", take="whole")
    assert verdict == Verdict(1.0)
    checked = ask(pool, "def f(x): return x", ["assert f(ONE) == 1"], row={"first": "ONE = 1"}, setup="first")
    assert checked == Verdict(1.0)


def test_numbers_are_compared_within_the_tolerance(pool: Pool) -> None:
    tests = [{"args": [], "expected": 0.3}]
    assert ask(pool, "def f(): return 0.1 + 0.2", tests, row={"entry_point": "f"}).score == 1.0
    assert ask(pool, "def f(): return 0.1 + 0.2", tests, row={"entry_point": "f"}, tolerance=0.0).score == 0.0
    printed = [{"input": "", "output": "0.3000"}]
    assert ask(pool, "print(0.1 + 0.2)", printed).score == 1.0
    assert ask(pool, "print(0.1 + 0.2)", printed, compare="exact").score == 0.0


# --- code that tests: what ordinary tests do works although the program is somewhere else ---

PROGRAM = """
from collections import Counter, namedtuple
import math
LIMIT = 10
class TooMuch(ValueError): pass
class Vector:
    made = 0
    def __init__(self, x, y): self.x, self.y = x, y; Vector.made += 1
    def __eq__(self, other): return (self.x, self.y) == (other.x, other.y)
    def __hash__(self): return hash((self.x, self.y))
    def __add__(self, other): return Vector(self.x + other.x, self.y + other.y)
    def __mul__(self, factor): return Vector(self.x * factor, self.y * factor)
    __rmul__ = __mul__
    def __lt__(self, other): return self.x < other.x
    def __len__(self): return 2
    def __getitem__(self, i): return (self.x, self.y)[i]
    def __repr__(self): return f"Vector({self.x}, {self.y})"
    def __matmul__(self, other): return self.x * other.x + self.y * other.y
    def startswith(self, n): return self.x == n
    @property
    def length(self): return math.hypot(self.x, self.y)
    @classmethod
    def unit(cls): return cls(1, 0)
class Stack(list):
    def push(self, x): self.append(x)
class Managed:
    open = False
    def __enter__(self): self.open = True; return self
    def __exit__(self, *_): self.open = False
def fail(x): raise TooMuch(f"{x} is too much", x)
def wrong(): raise SystemExit(3)
def count(words): return Counter(words)
def naturals():
    n = 0
    while True:
        yield n
        n += 1
def adder(n): return lambda x: x + n
def apply(f, *args, **kw): return f(*args, **kw)
def total(numbers): return sum(numbers)
def reverse(items): items.reverse()
def fill(d): d["a"] = [1]
def pair(): return (1, [2.5, {"k": {3}}])
def swap(v): return Vector(v.y, v.x)
def caught(f):
    try: f()
    except ZeroDivisionError as error: return str(error)
"""

WORKS = """
assert count("aab") == {"a": 2, "b": 1} and isinstance(count("x"), dict)
assert pair() == (1, [2.5, {"k": {3}}]) and isinstance(pair(), tuple)
assert LIMIT == 10
assert list(itertools.islice(naturals(), 3)) == [0, 1, 2]
assert next(naturals()) == 0
assert adder(2)(3) == 5 and callable(adder)
assert apply(lambda x, y=0: x - y, 5, y=2) == 3
assert apply(max, [1, 4, 2]) == 4
assert sorted([3, 1, 2], key=adder(0)) == [1, 2, 3]
assert list(map(adder(1), [1, 2])) == [2, 3]
assert total(n for n in (1, 2, 3)) == 6
assert total(range(4)) == 6
assert caught(lambda: 1 / 0) == "division by zero"
assert Vector(1, 2) + Vector(3, 4) == Vector(4, 6)
assert Vector(1, 2) != Vector(2, 1) and not Vector(1, 2) == (1, 2)
assert (Vector(1, 2) * 3).x == 3 and (2 * Vector(1, 2)).y == 4
assert Vector(1, 2) * 3 == Vector(3, 6)
assert Vector(1, 2) @ Vector(3, 4) == 11
assert Vector(1, 5) < Vector(2, 0) and max(Vector(1, 5), Vector(2, 0)).x == 2
assert len(Vector(1, 2)) == 2 and Vector(1, 2)[1] == 2 and list(Vector(7, 8)) == [7, 8]
assert repr(Vector(1, 2)) == "Vector(1, 2)" and f"{Vector(0, 1)}" == "Vector(0, 1)"
assert abs(Vector(3, 4).length - 5) < 1e-9 and Vector.unit().x == 1
assert isinstance(Vector(1, 2), Vector) and not isinstance(5, Vector) and not isinstance(Stack(), Vector)
assert {Vector(1, 2)} == {Vector(1, 2)} and Vector(1, 2) in [Vector(1, 2)]
assert swap(Vector(1, 2)) == Vector(2, 1)
assert Vector(5, 0).startswith(5)
v = Vector(1, 2); v.x = 9; assert v.x == 9 and v is v
a = Vector.made; Vector(0, 0); assert Vector.made == a + 1
s = Stack(); s.push(1); s.push(2); assert s.pop() == 2 and len(s) == 1 and s[0] == 1
with Managed() as m: assert m.open is True
m = Managed(); m.__enter__(); assert m.open; m.__exit__(None, None, None); assert not m.open
items = [3, 1]; reverse(items); assert items == [1, 3]
d = {}; fill(d); assert d == {"a": [1]}
assert fail.__name__ == "fail"
assert candidate(1) == {1: 1} if False else True
""".strip().splitlines()

RAISES = [
    "try:\n    fail(3)\n    assert False\nexcept TooMuch as error:\n    assert str(error.args[0]) == '3 is too much'",
    "try:\n    fail(3)\nexcept ValueError:\n    pass\nelse:\n    assert False",
    "import unittest\nunittest.TestCase().assertRaises(ValueError, fail, 1)",
    "from solution import fail, Vector, TooMuch\nimport solution\nassert solution.LIMIT == 10",
    "from solution import *\nassert Vector(1, 1).y == 1",
    "try:\n    Vector(1, 2).z\nexcept AttributeError:\n    pass\nelse:\n    assert False",
    "try:\n    apply(None)\nexcept TypeError:\n    pass\nelse:\n    assert False",
    "x = 5\ndef helper(n):\n    return adder(n)(x)\nassert helper(2) == 7",
    "assert math.isclose(Vector(3, 4).length, 5)",
    "assert np.allclose(np.array(pair()[1][0]), 2.5)",
]


def test_what_tests_do_works(pool: Pool) -> None:
    verdict = ask(pool, PROGRAM, [*WORKS, *RAISES], row={"entry_point": "count"}, take="whole")
    assert verdict == Verdict(1.0)


FAILS = [
    "assert count('aab') == {'a': 1}",
    "assert Vector(1, 2) == (1, 2)",
    "assert missing(1) == 1",
    "from solution import missing",
    "fail(1)",
    "wrong()",
    "assert Vector(1, 2) < 5",
    "assert list(naturals()) == []",
    "import sys; sys.exit(0)",
    "import os; os._exit(0)",
    "raise KeyboardInterrupt",
]


def test_what_is_wrong_fails(pool: Pool) -> None:
    verdict = ask(pool, PROGRAM, FAILS, take="whole")
    assert (verdict.score, verdict.status) == (0.0, "ok"), verdict
    for test in FAILS:
        assert ask(pool, PROGRAM, [test, "assert True"], take="whole").score == 0.5, test


def test_whole_files_of_tests_are_split_into_tests(pool: Pool) -> None:
    functions = "from solution import f\ndef test_a():\n    assert f(1) == 1\ndef test_b():\n    assert f(2) == 3\n"
    assert ask(pool, "def f(x): return x", functions).score == 0.5
    cases = """
import unittest
class Cases(unittest.TestCase):
    def setUp(self): self.value = f(3)
    def test_a(self): self.assertEqual(self.value, 3)
    def test_b(self): self.assertAlmostEqual(self.value, 4)
    def test_c(self): self.assertIn(self.value, [3])
"""
    assert ask(pool, "def f(x): return x", cases).score == pytest.approx(2 / 3)
    check = "def check(candidate):\n    assert candidate(1) == 1\n    assert candidate(2) == 2\n"
    assert ask(pool, "def f(x): return x", check, row={"entry_point": "f"}) == Verdict(1.0)
    assert ask(pool, "class Solution:\n    def f(self, x): return x", check, row={"entry_point": "f"}) == Verdict(1.0)


# --- whose fault it is ---


@pytest.mark.parametrize("style", ["stdin", "function", "assert"])
@pytest.mark.parametrize(
    ("program", "says"),
    [
        ("while True: pass", "it took too long"),
        ("import time; time.sleep(60)", "it took too long"),
        ("blocks = []\nwhile True: blocks.append(bytes(1 << 22))", "it took too much memory"),
        ("def f(", "SyntaxError"),
        ("raise RuntimeError('mine')", "RuntimeError: mine"),
    ],
)
def test_what_a_program_does_is_its_own_fault(pool: Pool, program: str, says: str, style: str) -> None:
    tests = {
        "stdin": [{"input": "", "output": "1"}],
        "function": [{"args": [], "expected": 1}],
        "assert": ["assert f() == 1"],
    }[style]
    row = {"entry_point": "f"} if style == "function" else {}
    verdict = ask(pool, program, tests, row=row, take="whole")
    assert (verdict.score, verdict.status) == (0.0, "ok")
    assert says in verdict.detail


@pytest.mark.parametrize(
    ("tests", "row", "says"),
    [
        ([], {}, "no tests"),
        ([{"args": [1], "expected": 1}], {}, "which function"),
        (["assert f(1) ==", "assert f(1) == 1"], {}, "do not compile"),
        (["import no_such_package\nassert f(1) == 1"], {}, "No module named 'no_such_package'"),
        ("def test_a(fixture): pass", {}, "fixtures"),
    ],
)
def test_tests_that_cannot_be_run_are_the_verifiers_fault(
    pool: Pool, tests: Any, row: dict[str, Any], says: str
) -> None:
    verdict = ask(pool, "def f(x): return x", tests, row=row)
    assert (verdict.score, verdict.status) == (None, "verifier_error")
    assert says in verdict.detail


def test_a_program_cannot_blame_the_tests(pool: Pool) -> None:
    program = "def f(x): raise ModuleNotFoundError('No module named tests', name='tests')"
    assert ask(pool, program, ["assert f(1) == 1"]).score == 0.0
    assert ask(pool, "import no_such_package\ndef f(x): return x", ["assert f(1) == 1"]).score == 0.0


def test_a_missing_column_is_the_verifiers_fault(pool: Pool) -> None:
    verdict = ask(pool, "x = 1", DOUBLES, tests="cases")
    assert (verdict.status, verdict.detail) == ("verifier_error", "the row has no column 'cases'; it has tests")
    assert ask(pool, "x = 1", DOUBLES, before="head").status == "verifier_error"


class Failing:
    """A sandbox that fails for programs that say so."""

    name = "failing"
    workers = 1

    def __init__(self, pool: Pool) -> None:
        self.pool = pool
        self.asked = 0

    def start(self) -> None: ...

    def close(self) -> None: ...

    async def run(self, job: Job) -> SandboxResult:
        self.asked += 1
        if "unlucky" in job.source:
            raise SandboxError("no memory left on this machine")
        return await self.pool.run(job)


def test_a_sandbox_that_fails_is_no_wrong_answer(pool: Pool) -> None:
    failing = Failing(pool)
    code = Code(CodeVerifier(kind="code", take="whole"), failing, TIGHT)
    items = [Completed("", program, row={"tests": DOUBLES}) for program in (DOUBLE, f"{DOUBLE}  # unlucky", "print(0)")]
    verdicts = asyncio.run(code.ask(items))
    assert [(verdict.score, verdict.status) for verdict in verdicts] == [
        (1.0, "ok"),
        (None, "verifier_error"),
        (0.0, "ok"),
    ]
    assert verdicts[1].detail == "the sandbox failed: no memory left on this machine"


def test_equal_completions_of_a_prompt_are_run_once(pool: Pool) -> None:
    counting = Failing(pool)
    code = Code(CodeVerifier(kind="code", take="whole"), counting, TIGHT)
    rows = [{"tests": DOUBLES}, {"tests": [{"input": "2", "output": "2"}]}]
    programs = (DOUBLE, "print(0)", DOUBLE, f"{DOUBLE}  # unlucky", DOUBLE, f"{DOUBLE}  # unlucky")
    # Each episode has a row of its own, with the same values.
    items = [Completed("", program, row=dict(row)) for row in rows for program in programs]
    verdicts = asyncio.run(code.ask(items))
    assert [verdict.score for verdict in verdicts] == [1.0, 0.0, 1.0, None, 1.0, None, 0.0, 0.0, 0.0, None, 0.0, None]
    assert counting.asked == 6


async def test_a_scorer_runs_programs_and_leaves_the_sandbox_to_its_maker() -> None:
    settings = RewardSettings.model_validate({"verifiers": [{"kind": "code", "weight": 2.0}], "timeout": 0.5})
    limits = {"cpu_seconds": 2, "wall_seconds": 1.5, "memory_mib": 256}
    with SharedSandbox(SandboxSettings.model_validate({"workers": 2, "limits": limits})) as sandbox:
        scorer = build_scorer(settings, sandbox)
        await _check_scorer(scorer)
        assert (await scorer.score([Completed("", DOUBLE, row={"tests": DOUBLES})]))[0].correct


async def _check_scorer(scorer: CompositeScorer) -> None:
    sleepy = [f"import time; time.sleep({seconds})" for seconds in (60, 61, 62)]
    items = [Completed("", program, row={"tests": DOUBLES}) for program in (DOUBLE, "print(1)", *sleepy)]
    rewards = await scorer.score(items)
    # The time-out of verifiers does not end a program, and programs that wait for a place are not late.
    assert [(reward.total, reward.status, reward.correct) for reward in rewards] == [
        (2.0, "ok", True),
        *[(0.0, "ok", False)] * 4,
    ]
    await scorer.close()


@pytest.mark.parametrize("style", ["function", "stdin", "assert"])
def test_made_up_tasks_are_solved_by_their_answers_and_by_no_others(pool: Pool, style: Any) -> None:
    rows = problems(12, style=style)
    code = Code(CodeVerifier(kind="code"), pool, TIGHT)
    answers = [row["answer"] for row in rows]
    right = [Completed(row["prompt"], f"```python\n{row['answer']}```", row=row) for row in rows]
    wrong = [
        Completed(row["prompt"], answer, row=row) for row, answer in zip(rows, answers[1:] + answers[:1], strict=True)
    ]
    assert asyncio.run(code.ask(right)) == [Verdict(1.0)] * len(rows)
    assert {(verdict.score, verdict.status) for verdict in asyncio.run(code.ask(wrong))} == {(0.0, "ok")}


def test_the_time_of_programs_is_not_that_of_verifiers() -> None:
    with pytest.raises(ValueError, match=r"sandbox\.limits"):
        CodeVerifier.model_validate({"kind": "code", "timeout": 3.0})


def test_a_scorer_without_a_sandbox_is_refused_before_anything_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    settings = RewardSettings.model_validate({"verifiers": [{"kind": "code"}]})
    with pytest.raises(UserError, match="bubblewrap is not installed"):
        build_scorer(settings, SharedSandbox())
    # Without a verifier that needs one, none is looked for.
    build_scorer(RewardSettings.model_validate({"verifiers": [{"kind": "exact"}]}), SharedSandbox())
