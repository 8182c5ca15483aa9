"""Which room may import which. This table is the source; `docs/architecture.md` shows it."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "strop"
INSIDE = PACKAGE / "sandbox" / "inside"

MAY_IMPORT = {
    "config": set(),
    "models": {"config"},
    "data": {"config"},
    "sandbox": {"config"},
    "rewards": {"config", "models", "sandbox"},
    "environments": {"config", "data", "rewards", "sandbox"},
    "rollout": {"config", "environments", "models", "rewards"},
    "algorithms": set(),
    "training": {"algorithms", "config", "models"},
    "publishing": {"models", "rollout", "training"},
    "tracking": {"config"},
    "planning": {"config"},
    "cluster": {"config", "rollout"},
    "serve": {"config", "tracking"},
}
LOOPS = {"loops": set(MAY_IMPORT)}
COMMANDS = (
    *("cli", "cli_algorithms", "cli_cluster", "cli_launch", "cli_options", "cli_registry", "cli_rollouts"),
    *("cli_serve", "cli_view"),
)
ENTRANCES = {name: {*MAY_IMPORT, "loops", *COMMANDS} for name in ("__init__", "__main__", *COMMANDS)}
TABLE: dict[str, set[str]] = {**MAY_IMPORT, **LOOPS, **ENTRANCES, "errors": set(), "paths": set()}
KNOW_NOTHING = {"algorithms", "errors", "paths"}
"""Rooms that may not even import `strop.errors` and `strop.paths`, which every other room may."""
WITHOUT_TORCH = {"config", "data", "rewards", "environments", "errors", "paths", "sandbox", "serve"}


def room_of(path: Path) -> str:
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return parts[0]


def imported(path: Path) -> Iterator[str]:
    """Full names of all modules that a file imports anywhere, inside functions too."""
    package = ("strop", *path.relative_to(PACKAGE).parent.parts)
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            home = ".".join(package[: len(package) + 1 - node.level]) if node.level else ""
            module = ".".join(part for part in (home, node.module) if part)
            # `from strop import cli` imports a room by another way.
            yield from (f"{module}.{alias.name}" if module == "strop" else module for alias in node.names)


FILES = sorted(PACKAGE.rglob("*.py"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_a_file_imports_what_its_room_may(path: Path) -> None:
    room = room_of(path)
    assert room in TABLE, f"the room {room} is not in the table"
    allowed = TABLE[room] | {room, "__version__"} | ({"errors", "paths"} if room not in KNOW_NOTHING else set())
    for name in imported(path):
        parts = name.split(".")
        if parts[0] == "strop":
            assert not path.is_relative_to(INSIDE), f"there is no strop inside of a sandbox: {name}"
            assert len(parts) == 1 or parts[1] in allowed, f"{room} may not import {name}"
        elif path.is_relative_to(INSIDE):
            # These files are mounted into sandboxes, where nothing else is.
            assert parts[0] in sys.stdlib_module_names or (INSIDE / f"{parts[0]}.py").exists(), name
        elif room == "algorithms":
            assert parts[0] == "torch" or parts[0] in sys.stdlib_module_names, name
        elif room in WITHOUT_TORCH:
            assert parts[0] not in ("torch", "transformers"), f"{room} may not import {name}"


def test_the_table_has_no_circle() -> None:
    below: set[str] = set()
    while len(below) < len(MAY_IMPORT):
        free = {room for room, others in MAY_IMPORT.items() if room not in below and others <= below}
        assert free, f"these rooms import each other: {set(MAY_IMPORT) - below}"
        below |= free


def test_importing_the_configuration_and_the_command_line_loads_no_torch() -> None:
    code = "import strop, strop.cli, strop.config.explain, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("room", [*MAY_IMPORT, "loops"])
def test_the_architecture_page_shows_this_table(room: str) -> None:
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    rows = [line.split("|") for line in page.splitlines() if line.startswith(f"| `{room}/`")]
    assert len(rows) == 1, f"the page has {len(rows)} rows for {room}"
    shown = rows[0][3].strip()
    expected = "all above" if room == "loops" else ", ".join(sorted(MAY_IMPORT[room])) or "–"
    assert shown == expected


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_paths_of_users_are_read_in_one_way(path: Path) -> None:
    called = {node.attr for node in ast.walk(ast.parse(path.read_text("utf-8"))) if isinstance(node, ast.Attribute)}
    assert room_of(path) == "paths" or "expanduser" not in called, "use `strop.paths.user_path`"
