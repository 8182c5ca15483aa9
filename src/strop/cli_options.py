"""What several commands have: options, and reading the recipe that they are given."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from strop.errors import UserError

if TYPE_CHECKING:
    from strop.config import Config

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
