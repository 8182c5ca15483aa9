"""Writing what was made into a file, and handing the file on."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

from strop.errors import RunFailure, UserError


def check_writable(path: Path, recipe: Path, *, force: bool) -> None:
    """Raise UserError if a file cannot or may not be written."""
    if path.resolve() == recipe.resolve():
        raise UserError("this would replace the recipe", where=str(path), mend="give another name with --output")
    if path.is_dir():
        raise UserError(f"{path} is a folder", where=str(path), mend="name a file with --output")
    if not path.parent.is_dir():
        mend = "make the folder, or name another one with --output"
        raise UserError(f"there is no folder {path.parent}", where=str(path), mend=mend)
    if path.exists() and not force:
        mend = "give another name with --output, or --force to replace it"
        raise UserError(f"{path} is there already", where=str(path), mend=mend)


def write(path: Path, text: str, *, executable: bool, force: bool) -> None:
    """Write a file whole or not at all; one that is there is replaced only with `force`.

    Raises:
        UserError: it cannot be written.
    """
    beside = path.with_name(f".{path.name[:100]}.{os.getpid()}")
    try:
        try:
            # Names of files need not be UTF-8; scripts carry them as they are.
            beside.write_text(text, encoding="utf-8", errors="surrogateescape", newline="\n")
            beside.chmod(0o755 if executable else 0o644)
            if force:
                beside.replace(path)
            else:
                os.link(beside, path)
        finally:
            beside.unlink(missing_ok=True)
    except OSError as error:
        raise UserError(f"the file cannot be written: {error}", where=str(path), mend="see --output") from None


def program(name: str) -> str:
    """Where a program is. Raises UserError if it is nowhere."""
    found = shutil.which(name)
    if found is None:
        raise UserError(
            f"--submit needs the program {name!r}, which is not on this machine",
            where="PATH",
            mend="leave --submit away, and hand in the file that is written where the program is",
        )
    return found


def submit(command: list[str], folder: Path) -> None:
    """Run the program that takes the file; what it says is on the terminal. Raises RunFailure if it refuses."""
    code = subprocess.run(command, cwd=folder, check=False).returncode
    if code:
        what = f"{Path(command[0]).name} ended with {code}"
        raise RunFailure(what, where=command[-1], mend="its own message is above; the file is written")
