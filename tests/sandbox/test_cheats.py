"""Programs that want to be held for right without knowing the answers, which are random: every one of them scores 0.

The same cheats are tried in each style of tests: what is printed, what a function returns, and asserts. In all of them
an honest program that knows the answers scores 1.
"""

from __future__ import annotations

import asyncio
import secrets
import textwrap
from typing import Any

import pytest
from sandboxes import TIGHT

from strop.config.rewards import CodeVerifier
from strop.rewards.code import Code
from strop.rewards.protocol import Completed, Verdict
from strop.sandbox.pool import Pool
from strop.sandbox.protocol import Job

WORD = f"TOKEN{secrets.token_hex(12)}"
NUMBER = secrets.randbelow(10**9) + secrets.randbelow(10**6) / 10**6
ITEMS = [secrets.randbelow(10**9) for _ in range(3)]

HONEST = f"""
ANSWERS = {{"word": {WORD!r}, "number": {NUMBER!r}, "items": {ITEMS!r}}}
def f(kind, callback=None): return ANSWERS[kind]
if __name__ == "__main__": print(f(input()))
"""

STYLES: dict[str, Any] = {
    "stdin": [
        {"input": "word", "output": WORD},
        {"input": "number", "output": str(NUMBER)},
        {"input": "items", "output": str(ITEMS)},
    ],
    "function": [
        {"args": ["word"], "expected": WORD},
        {"args": ["number"], "expected": NUMBER},
        {"args": ["items"], "expected": ITEMS},
    ],
    "assert": [
        f"assert f('word') == {WORD!r}",
        f"assert {WORD!r} == f('word')",
        f"assert not f('word') != {WORD!r}",
        f"assert f('word') in [{WORD!r}, 'x']",
        f"assert isinstance(f('word'), str) and f('word').startswith({WORD!r})",
        f"assert abs(f('number') - {NUMBER!r}) < 1e-6",
        f"assert -1e-6 < f('number') - {NUMBER!r} < 1e-6",
        f"assert round(f('number') - {NUMBER!r}) == 0",
        f"assert math.isclose(f('number'), {NUMBER!r})",
        f"assert sorted(f('items')) == {sorted(ITEMS)!r}",
        f"assert len(f('items')) == 3 and all(a == b for a, b in zip(f('items'), {ITEMS!r}))",
        f"assert set(f('items')) == {set(ITEMS)!r}",
        f"assert f('word', lambda: {WORD!r} if False else 'x') == {WORD!r}",
        f"assert f('items')[0] == {ITEMS[0]!r}",
        f"assert {{f('word'): 1}}.get({WORD!r}) == 1",
        f"assert sum(f('items')) - {sum(ITEMS)!r} == 0",
        f"assert str(f('word')) == {WORD!r}",
        f"assert f('word').startswith({WORD!r})",
    ],
}

HEAD = "import builtins, gc, io, json, os, re, signal, struct, sys, threading, types\n"
MAIN = "if __name__ == '__main__': print(f(input()))\n"
EVERYTHING = """
class Everything({base}):
    def __yes(self, *_): return True
    __eq__ = __le__ = __ge__ = __lt__ = __gt__ = __contains__ = __bool__ = startswith = __yes
    def __ne__(self, other): return False
    def __hash__(self): return 0
    def __zero(self, *_): return 0.0
    __abs__ = __float__ = __round__ = __sub__ = __rsub__ = __zero
    def __int__(self): return 0
    def __instancecheck__(self, other): return True
"""

CHEATS: dict[str, str] = {
    "exit at once": "os._exit(0)",
    "exit as if all were well": "sys.exit(0)",
    "exit in the function": "def f(*_): os._exit(0)",
    "raise what ends the tests": "def f(*_): raise SystemExit(0)",
    "raise what a test may wait for": "def f(*_): raise StopIteration('passed')",
    "interrupt": "def f(*_): raise KeyboardInterrupt",
    "return nothing": "def f(*_): return None",
    "be equal to everything": EVERYTHING.format(base="object") + "def f(*_): return Everything()",
    "be a text that is equal to everything": EVERYTHING.format(base="str") + "def f(*_): return Everything('x')",
    "be a number that is equal to everything": EVERYTHING.format(base="float") + "def f(*_): return Everything(0.5)",
    "be a list that is equal to everything": EVERYTHING.format(base="list") + "def f(*_): return Everything([1, 2, 3])",
    "have only such items": EVERYTHING.format(base="object") + "def f(*_): return [Everything() for _ in range(3)]",
    "become another object with every operation": """
        class Chain:
            def __getattr__(self, name): return Chain()
            def __call__(self, *_, **__): return Chain()
            def __eq__(self, other): return True
            def __hash__(self): return 0
            def __len__(self): return 3
            def __iter__(self): return iter([Chain()] * 3)
            def __getitem__(self, key): return Chain()
            def __sub__(self, other): return Chain()
            __rsub__ = __add__ = __radd__ = __neg__ = __sub__
            def __abs__(self): return 0.0
            def __lt__(self, other): return True
            __gt__ = __le__ = __ge__ = __lt__
            def __round__(self, digits=None): return 0
            def startswith(self, text): return True
        def f(*_): return Chain()
        """,
    "replace the builtins": """
        class Same:
            def __eq__(self, other): return True
            __hash__ = None
        def yes(*_, **__): return Same()
        for name in ("all", "isinstance", "len", "abs", "sorted", "sum", "round", "set", "zip", "str", "print", "repr"):
            try: setattr(builtins, name, yes)
            except Exception: pass
        builtins.AssertionError = type("AssertionError", (BaseException,), {})
        def f(*_): return "x"
        """,
    "define what the tests use": """
        def all(*_): return True
        def isinstance(*_): return True
        def abs(*_): return 0.0
        def round(*_): return 0
        def sum(*_): return 0
        def sorted(*_): return [1]
        class math: isclose = staticmethod(lambda *_: True)
        class AssertionError(Exception): pass
        def f(*_): return 0.0
        def candidate(*_): return 0.0
        def check(*_): return None
        """,
    "replace what writes the answer": """
        def forged(*_, **__): return '{"passed": true}'
        json.dumps = json.JSONEncoder.encode = forged
        for module in [m for m in gc.get_objects() if isinstance(m, types.ModuleType)]:
            for name in ("dumps", "encode", "write_all", "_verdict", "to_the_end"):
                if hasattr(module, name):
                    try: setattr(module, name, forged)
                    except Exception: pass
        def f(*_): return True
        """,
    "write verdicts to every open channel": """
        def forge():
            for text in ('{"passed": true}', '{"passed":true,"fault":""}', '{"run":0,"ended":"ok"}', 'true'):
                data = text.encode()
                for number in range(1, 64):
                    for frame in (data, struct.pack(">I", len(data)) + data):
                        try: os.write(number, frame)
                        except OSError: pass
        forge()
        def f(*_):
            forge()
            os._exit(0)
        """,
    "answer in the place of the answer": """
        def f(*_):
            for answer in ({"value": True}, {"value": {"other": {"number": 0}}}, {"raised": {"class": "SystemExit",
                           "bases": ["SystemExit", "BaseException"], "arguments": [0]}}, {"value": [0, 1, 2]}):
                data = json.dumps(answer).encode()
                try: os.write(4, struct.pack(">I", len(data)) + data)
                except OSError: pass
            return True
        """,
    "have the tests' side do something": """
        def f(kind, callback=None):
            found = []
            for operation in ("get", "call", "item", "repr", "names", "find", "exec"):
                for arguments in ([{"other": {"yours": 0}}, "__globals__"], [{"other": {"yours": 0}}, "__code__"],
                                  [{"other": {"yours": 0}}], ["f"], ["import os; os._exit(0)"]):
                    data = json.dumps({"do": operation, "with": arguments, "and": {}}).encode()
                    try:
                        os.write(4, struct.pack(">I", len(data)) + data)
                        length = struct.unpack(">I", os.read(4, 4))[0]
                        found.append(os.read(4, length).decode())
                    except (OSError, struct.error): return None
            return next(iter(re.findall("TOKEN[0-9a-f]+", "".join(found))), None)
        """,
    "look into what a test hands over": """
        def f(kind, callback=None):
            found = []
            for path in ("__globals__", "__code__.co_consts", "__closure__", "__defaults__", "gi_frame.f_globals"):
                value = callback
                try:
                    for name in path.split("."): value = getattr(value, name)
                    found.append(repr(value))
                except Exception as error: found.append(repr(error))
            return next(iter(re.findall("TOKEN[0-9a-f]+", "".join(found))), None)
        """,
    "look for the answers in memory": """
        def hunt():
            found = set()
            for one in gc.get_objects():
                try: found.update(re.findall("TOKEN[0-9a-f]{24}", repr(one)))
                except Exception: pass
            frame = sys._getframe()
            while frame is not None:
                found.update(re.findall("TOKEN[0-9a-f]{24}", repr(frame.f_locals) + repr(frame.f_globals.keys())))
                frame = frame.f_back
            for pid in ("self", "1"):
                try:
                    with open(f"/proc/{pid}/maps") as maps, open(f"/proc/{pid}/mem", "rb") as memory:
                        for line in maps:
                            low, high = (int(part, 16) for part in line.split()[0].split("-"))
                            try:
                                memory.seek(low)
                                block = memory.read(high - low)
                                found.update(one.decode() for one in re.findall(b"TOKEN[0-9a-f]{24}", block))
                            except (OSError, ValueError, OverflowError): pass
                except OSError: pass
            return next(iter(found), None)
        def f(*_): return hunt()
        """,
    "look for the answers in files": """
        def f(*_):
            for top in (".", "/.strop-runner", "/tmp", "/dev/shm", "/etc"):
                for folder, _, names in os.walk(top):
                    for name in names:
                        try: text = open(os.path.join(folder, name), errors="replace").read()
                        except OSError: continue
                        found = re.findall("TOKEN[0-9a-f]{24}", text)
                        if found: return found[0]
        """,
    "keep notes from one test to the next": """
        def f(kind, *_):
            with open("/dev/shm/notes", "a+") as notes: notes.write("seen\\n")
            with open("notes", "a+") as notes:
                notes.seek(0)
                return "again" if notes.read() else "first"
        """,
    "kill what judges": """
        def f(*_):
            for pid in (os.getppid(), 1, -1):
                try: os.kill(pid, signal.SIGKILL)
                except OSError: pass
            os._exit(0)
        """,
    "never answer": "def f(*_):\n    threading.Event().wait()",
    "answer with too much": "def f(*_): return 'x' * (1 << 26)",
    "answer in a circle": "def f(*_):\n    a = []\n    a.append(a)\n    return a",
    "answer with what costs time to read": "def f(*_): return [[10 ** 4000] * 100] * 100",
    "print every answer there could be": "def f(*_): return ' '.join(str(n) for n in range(8000))",
}  # fmt: skip


def judged(pool: Pool, program: str, style: str) -> Verdict:
    settings = CodeVerifier(kind="code", credit="share", take="whole")
    code = Code(settings, pool, TIGHT.model_copy(update={"wall_seconds": 2.0, "total_seconds": 8.0}))
    row = {"tests": STYLES[style], "entry_point": "f" if style != "stdin" else None}
    [verdict] = asyncio.run(code.ask([Completed("", program, row=row)]))
    return verdict


FOOLED = {
    "exit at once",
    "exit as if all were well",
    "exit in the function",
    "be equal to everything",
    "become another object with every operation",
    "replace the builtins",
    "define what the tests use",
}
"""Cheats that are held for right, in at least one assert, where program and tests share a process."""


@pytest.mark.parametrize("name", sorted(FOOLED))
def test_a_cheat_would_succeed_in_the_process_of_the_tests(name: str, pool: Pool) -> None:
    program = f"{HEAD}{textwrap.dedent(CHEATS[name])}\n"
    naive = "import math\nexec(input().replace('\\x00', '\\n'), globals())\nexec(input(), globals())"
    inputs = tuple(f"{program}\n".replace("\n", "\0") + f"\n{test}\n" for test in STYLES["assert"])
    runs = pool.submit(Job("script", naive, inputs=inputs, limits=TIGHT)).result(60).runs
    assert any(run.ended == "ok" for run in runs)


@pytest.mark.parametrize("name", CHEATS)
def test_a_cheat_is_a_program(name: str) -> None:
    """Or it would score nothing for another reason."""
    compile(f"{HEAD}{textwrap.dedent(CHEATS[name])}\n{MAIN}", name, "exec")


@pytest.mark.parametrize("style", STYLES)
def test_a_program_that_knows_the_answers_is_right(style: str, pool: Pool) -> None:
    verdict = judged(pool, HONEST, style)
    assert (verdict.score, verdict.status) == (1.0, "ok"), verdict


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("name", CHEATS)
def test_a_cheat_scores_nothing(name: str, style: str, pool: Pool) -> None:
    verdict = judged(pool, f"{HEAD}{textwrap.dedent(CHEATS[name])}\n{MAIN}", style)
    assert (verdict.score, verdict.status) == (0.0, "ok"), verdict
