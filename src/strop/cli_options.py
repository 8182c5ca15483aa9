"""What several commands have: options, and reading the recipe that they are given."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand

from strop.errors import UserError

if TYPE_CHECKING:
    from strop.config import Config
    from strop.loops.profile_step import Asked

DEBUG = "strop.debug"


def remember_debug(ctx: typer.Context, value: bool) -> None:
    # `meta` is shared with the contexts of the groups around a command.
    ctx.meta[DEBUG] = value or ctx.meta.get(DEBUG, False)


Debug = Annotated[
    bool,
    typer.Option("--debug", callback=remember_debug, is_eager=True, help="Show the traceback when something fails."),
]
Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="KEY=VALUE", help="Settings that replace those of the recipe.")
]

Checkpoint = Annotated[
    str | None,
    typer.Option(metavar="WHICH", help="Of a run: `latest`, `best`, or the number of a step; the latest if not given."),
]

PROFILE = "--profile"
Profile = Annotated[
    str | None,
    typer.Option(
        PROFILE,
        metavar="[STEP]",
        help="Record one step, the third if no number is given: a trace and a page of text in the run's folder.",
    ),
]


class MaybeWithStep(TyperCommand):
    """A command whose option `--profile` may have a number behind it, or not."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        return super().parse_args(ctx, list(_with_step(args)))


def _with_step(args: Sequence[str]) -> Iterator[str]:
    """Write `--profile 5` and `--profile` as `--profile=5` and `--profile=default`. What follows is the step unless it
    is an option, an override, or a file."""
    left = iter(args)
    for arg in left:
        if arg != PROFILE:
            yield arg
            continue
        after = next(left, None)
        if after is None or (re.match(r"[-+]?\d", after) is None and re.search(r"^-|[=./]", after)):
            yield f"{PROFILE}=default"
            yield from () if after is None else (after,)
        else:
            yield f"{PROFILE}={after}"


def step_asked(given: str | None) -> Asked | None:
    """What `--profile` asks for.

    Raises:
        UserError: it is not the number of a step.
    """
    if given is None or given == "default":
        return None if given is None else "default"
    if not given.isascii() or not given.isdigit():
        raise UserError(
            f"{given!r} is not the number of a step",
            where=f"{PROFILE} {given}",
            mend="give a whole number, 1 for the first step, or none at all for the third",
        )
    return int(given)


def run_or_recipe(given: Path, otherwise: str) -> tuple[Path | None, Path]:
    """The run that was named, None if it was a recipe, and the file of the recipe.

    Args:
        otherwise: the command for a folder that is a model and not a run, with a place for its name.
    """
    if not given.is_dir():
        return None, given
    from strop.models.find import run_inside

    given = run_inside(given)
    if not (given / "config.yaml").is_file():
        raise UserError(
            f"{given} is not the folder of a run: it has no config.yaml",
            where=str(given.absolute()),
            mend=f"for a model folder, name a recipe too: {otherwise.format(given)}",
        )
    return given, given / "config.yaml"


def load(recipe: Path, overrides: list[str] | None) -> Config:
    """Read a recipe and its overrides."""
    from strop.config.loading import load_config

    return load_config(recipe, overrides or [])
