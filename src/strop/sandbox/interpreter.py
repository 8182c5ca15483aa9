"""The Python that programs run in: where it is, and what of this machine it needs to see."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from strop.errors import UserError
from strop.paths import user_text

INSIDE = Path(__file__).parent / "inside"
OLDEST = (3, 11)

_ASK = """
import json, os, py_compile, site, sys, sysconfig
for name in sorted(os.listdir(sys.argv[1])):
    if name.endswith(".py"):
        try:
            py_compile.compile(os.path.join(sys.argv[1], name), quiet=1)
        except OSError:
            pass
paths = sysconfig.get_paths()
print(json.dumps({
    "version": sys.version_info[:2],
    "executable": sys.executable,
    "prefixes": [sys.prefix, sys.base_prefix, sys.exec_prefix, sys.base_exec_prefix, paths["stdlib"],
                 paths["platstdlib"]],
    "packages": [path for path in dict.fromkeys([*site.getsitepackages(), paths["purelib"], paths["platlib"]])
                 if os.path.isdir(path)],
}))
"""


@dataclass(frozen=True)
class Interpreter:
    """executable: its path. folders: what it needs to see, none inside of another. packages: where packages are."""

    executable: str
    folders: tuple[str, ...]
    packages: tuple[str, ...]


def find_interpreter(python: str | None) -> Interpreter:
    """The interpreter of a path or a name, or the one that runs this.

    Raises:
        UserError: there is none, or it is too old.
    """
    path = sys.executable if python is None else shutil.which(user_text(python))
    where, mend = "sandbox.python", "name a Python of version 3.11 or newer, such as /usr/bin/python3"
    if not path:
        raise UserError(f"there is no interpreter {python!r}", where=where, mend=mend)
    asked = subprocess.run(
        [path, "-I", "-c", _ASK, str(INSIDE)],
        capture_output=True,
        text=True,
        check=False,
        stdin=subprocess.DEVNULL,
        cwd="/",
    )
    try:
        found = json.loads(asked.stdout)
    except ValueError:
        last = asked.stderr.strip().rpartition("\n")[2]
        raise UserError(f"{path} is no Python that answers: {last}", where=where, mend=mend) from None
    if tuple(found["version"]) < OLDEST:
        version = ".".join(str(part) for part in found["version"])
        raise UserError(f"{path} is Python {version}", where=where, mend=mend)
    executable = found["executable"]
    folders = [*found["prefixes"], *_on_the_way(executable)]
    return Interpreter(executable, _outermost(folders), tuple(found["packages"]))


def runner_arguments(interpreter: Interpreter, inside: str) -> list[str]:
    """The command line of the runner, without what it is told.

    No user folder, no `site`, no working folder to import from, no bytecode to write, UTF-8 everywhere.
    """
    code = f"import sys; sys.path.insert(0, {inside!r}); import runner; runner.main()"
    return [interpreter.executable, "-S", "-s", "-P", "-B", "-X", "utf8", "-c", code]


def environment(home: str) -> dict[str, str]:
    """What programs find in their environment: nothing of this process's, one thread for each library, fixed hashes.

    The order of a set of texts is then the same in every run, and so is a verdict that depends on it.
    """
    threads = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMEXPR_NUM_THREADS")
    return {
        "HOME": home,
        "TMPDIR": home,
        "PATH": "/usr/local/bin:/usr/bin:/bin",
        "LANG": "C.UTF-8",
        "PYTHONHASHSEED": "0",
        "PYTHONDONTWRITEBYTECODE": "1",
        **dict.fromkeys(threads, "1"),
    }


def _on_the_way(path: str) -> list[str]:
    """The folders of an executable and of what its links lead to."""
    found = []
    while True:
        found.append(os.path.dirname(path))
        if not os.path.islink(path):
            return [*found, os.path.dirname(os.path.realpath(path))]
        path = os.path.normpath(os.path.join(os.path.dirname(path), os.readlink(path)))


def _outermost(folders: list[str]) -> tuple[str, ...]:
    """Existing folders that are not inside of another one."""
    given = sorted({os.path.normpath(folder) for folder in folders if os.path.isdir(folder)}, key=len)
    kept: list[str] = []
    for folder in given:
        if not any(folder == other or folder.startswith(f"{other}/") for other in kept):
            kept.append(folder)
    return tuple(kept)
