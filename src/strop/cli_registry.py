"""`strop registry …` and `strop seal …`: models by name and version, and encryption at rest."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from strop.cli_options import Debug
from strop.cli_serve import Root, note_in_audit, whoever
from strop.errors import UserError
from strop.paths import user_path

if TYPE_CHECKING:
    from strop.serve.registry.store import Registry

registry = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Models by name and version, signed.")
seal = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Encryption of checkpoints and episodes at rest.")

Name = Annotated[str, typer.Argument(metavar="NAME", help="The model's name.")]
Number = Annotated[int, typer.Argument(metavar="VERSION", min=1, help="Its version.")]


class _Stage(StrEnum):
    approved = "approved"
    retired = "retired"


@registry.command("add")
def registry_add(
    run: Annotated[str, typer.Argument(metavar="RUN", help="The name of a run in the folder, or PIPELINE/STAGE.")],
    name: Annotated[str, typer.Option(help="The model's name.")],
    checkpoint: Annotated[str, typer.Option(metavar="WHICH", help="latest, best, or the number of a step.")] = "latest",
    root: Root = Path("runs"),
    debug: Debug = False,
) -> None:
    """Keep the model of a checkpoint as the next version of a name, a candidate.

    Its files are copied and signed, and what it was made of and how it scored is noted.

    \b
    Example:
      strop registry add quickstart --name sums --checkpoint best
    """
    from strop.serve.registry.store import checkpoint_named

    root = user_path(root).resolve()
    folder = root / run
    found = _registry(root).add(folder, name, checkpoint=checkpoint_named(folder, checkpoint), by=whoever())
    note_in_audit(root, "registry.add", f"{found.name} {found.version}", run=run, checkpoint=found.checkpoint)
    typer.echo(f"{found.name} {found.version}")


@registry.command("list")
def registry_list(root: Root = Path("runs"), debug: Debug = False) -> None:
    """All versions."""
    for found in _registry(root).list():
        scores = ", ".join(f"{name} {value:.4g}" for name, value in found.scores.items())
        typer.echo(f"{found.name} {found.version}  {found.stage:<9}  {found.run} {found.checkpoint}  {scores}".rstrip())


@registry.command("move")
def registry_move(
    name: Name,
    version: Number,
    stage: Annotated[_Stage, typer.Argument(help="Where to; a candidate is approved, anything is retired.")],
    root: Root = Path("runs"),
    debug: Debug = False,
) -> None:
    """Approve a candidate, whose files are checked first, or retire a version.

    Example: strop registry move sums 3 approved
    """
    from strop.serve.registry.store import Stage

    found = _registry(root).move(name, version, Stage(stage.value), by=whoever())
    note_in_audit(root, "registry.move", f"{name} {version}", stage=found.stage.value)
    typer.echo(f"{name} {version} is {found.stage}")


@registry.command("verify")
def registry_verify(
    name: Name,
    version: Number,
    key: Annotated[
        str | None, typer.Option(help="The public key that must have signed; the registry's if none.")
    ] = None,
    root: Root = Path("runs"),
    debug: Debug = False,
) -> None:
    """Check that the files of a version are those that were registered.

    Prints the public key. A key that was noted elsewhere is checked with --key.
    """
    found = _registry(root).verify(name, version, public=key)
    typer.echo(f"{name} {version} is as it was signed by {found.public_key}")


@registry.command("card")
def registry_card(name: Name, version: Number, root: Root = Path("runs"), debug: Debug = False) -> None:
    """Print the model card of a version: scores, data, configuration, models before it."""
    typer.echo(_registry(root).card(name, version), nl=False)


@registry.command("export")
def registry_export(
    name: Name,
    out: Annotated[Path, typer.Option(metavar="FOLDER", help="Where to write it; must not exist, or be empty.")],
    version: Annotated[int | None, typer.Option(min=1, help="The newest approved one if not given.")] = None,
    root: Root = Path("runs"),
    debug: Debug = False,
) -> None:
    """Write a version's files to a folder, checked, with card, manifest and signature."""
    store = _registry(root)
    typer.echo(str(store.export(name, store.get(name, version).version, user_path(out))))


@seal.command("key")
def seal_key(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Where to write the private key.")], debug: Debug = False
) -> None:
    """Make a key: the private half goes to a file, the public half is printed.

    Keep the file away from the machine that trains; sealing needs the public half only.
    """
    from strop.serve.sealing import make_key

    typer.echo(make_key(user_path(file)))


@seal.command("run")
def seal_run(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run that nobody trains.")],
    key: Annotated[str, typer.Option(help="The public key, as `strop seal key` printed it.")],
    debug: Debug = False,
) -> None:
    """Encrypt the checkpoints and episodes of a run in place.

    The run cannot be resumed or sampled until it is opened.
    """
    from strop.serve.sealing import seal_run as seal_now

    typer.echo(f"{seal_now(_run(run), key)} files sealed")


@seal.command("open")
def seal_open(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run that was sealed.")],
    key: Annotated[Path, typer.Option(metavar="FILE", help="The private key's file.")],
    debug: Debug = False,
) -> None:
    """Decrypt what `strop seal run` has encrypted, in place."""
    from strop.serve.sealing import unseal_run

    typer.echo(f"{unseal_run(_run(run), user_path(key))} files opened")


def _run(run: Path) -> Path:
    found = user_path(run)
    if not found.is_dir():
        raise UserError("there is no such folder", where=str(found), mend="name the folder of a run")
    return found


def _registry(root: Path) -> Registry:
    from strop.serve.api.settings import made_state
    from strop.serve.registry.store import Registry

    root = user_path(root).resolve()
    return Registry(root, made_state(root))
