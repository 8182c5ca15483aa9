"""Paths as a user writes them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from strop.paths import user_path, user_text


def test_home_is_found_where_there_is_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert user_path("~") == tmp_path
    assert user_path("~/runs") == tmp_path / "runs"
    assert user_path(f"~{os.environ.get('USER', 'root')}/runs").is_absolute()
    assert user_path("a/~/b") == Path("a/~/b")
    # Where a program is looked for, `./python` is another than `python`.
    assert user_text("./python") == "./python"


@pytest.mark.parametrize("name", ["~.yaml", "~nobody-of-that-name/x", "./~0"])
def test_a_tilde_without_a_home_is_a_letter(name: str) -> None:
    assert user_path(name) == Path(name)
    assert user_path(Path(name)) == Path(name)
