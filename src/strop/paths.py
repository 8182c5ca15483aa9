"""Paths as a user writes them."""

from __future__ import annotations

import os
from pathlib import Path


def user_text(path: str | os.PathLike[str]) -> str:
    """A path whose `~` or `~name` at its start is the home folder, where there is such a home.

    Otherwise `~` is a letter like any other, as in a shell: a file may be called `~.yaml`. `Path.expanduser` raises
    RuntimeError there.
    """
    return os.path.expanduser(os.fspath(path))


def user_path(path: str | os.PathLike[str]) -> Path:
    """The same as a `Path`, which does not remember that a name began with `./`."""
    return Path(user_text(path))
