"""`strop serve …`: the service, its tokens and its audit log."""

from __future__ import annotations

from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from strop.cli_options import Debug
from strop.paths import user_path

if TYPE_CHECKING:
    from strop.serve.api.access import Tokens

serve = typer.Typer(rich_markup_mode=None, help="A service over HTTP: submit recipes, follow runs, sample.")
token = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Who may use the service.")
audit = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="What was done and refused.")
serve.add_typer(token, name="token")
serve.add_typer(audit, name="audit")

Root = Annotated[Path, typer.Option("--root", metavar="FOLDER", help="Where the runs are kept.")]


class _Role(StrEnum):
    viewer = "viewer"
    operator = "operator"
    admin = "admin"


@serve.callback(invoke_without_command=True)
def start(
    ctx: typer.Context,
    root: Root = Path("runs"),
    host: Annotated[str, typer.Option(help="Address to listen on; beyond this machine only with TLS.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port to listen on.")] = 8420,
    certificate: Annotated[Path | None, typer.Option(metavar="FILE", help="Certificate for TLS, PEM.")] = None,
    key: Annotated[Path | None, typer.Option(metavar="FILE", help="Its private key, PEM.")] = None,
    allow_plain: Annotated[bool, typer.Option("--allow-plain", help="Listen beyond this machine without TLS.")] = False,
    name: Annotated[list[str] | None, typer.Option(help="A name that the service is called by; repeatable.")] = None,
    jobs: Annotated[int, typer.Option(min=1, help="Runs that train at the same time.")] = 1,
    models: Annotated[int, typer.Option(min=1, help="Models that are kept loaded for sampling.")] = 1,
    allow_hub: Annotated[
        bool, typer.Option("--allow-hub", help="Let operators name models and data on the Hub.")
    ] = False,
    allow: Annotated[
        list[Path] | None, typer.Option(metavar="FOLDER", help="A folder that operators' recipes may read; repeatable.")
    ] = None,
    ray: Annotated[
        str | None, typer.Option(metavar="ADDRESS", help="Ray's dashboard, to run jobs there: http://HOST:8265.")
    ] = None,
    nice: Annotated[int, typer.Option(min=0, max=19, help="How far the service gives way to training.")] = 15,
    debug: Debug = False,
) -> None:
    """Serve a folder of runs, or administrate its tokens and audit log.

    \b
    Examples:
      strop serve token add alice --role operator      prints a token, once
      strop serve                                      on 127.0.0.1:8420, the runs in runs/
      strop serve --host 0.0.0.0 --certificate cert.pem --key key.pem --name strop.example.org
      strop serve audit verify
    """
    if ctx.invoked_subcommand is not None:
        return
    from strop.serve.api.server import serve as serve_now
    from strop.serve.api.settings import ServiceSettings

    serve_now(
        ServiceSettings(
            root=user_path(root).resolve(),
            host=host,
            port=port,
            certificate=None if certificate is None else user_path(certificate),
            key=None if key is None else user_path(key),
            allow_plain=allow_plain,
            names=tuple(name or ()),
            jobs=jobs,
            models=models,
            allow_hub=allow_hub,
            allowed=tuple(user_path(folder).resolve() for folder in allow or ()),
            ray=ray,
            nice=nice,
        )
    )


@token.command("add")
def token_add(
    name: Annotated[str, typer.Argument(help="Whose it is; runs belong to the name.")],
    role: Annotated[_Role, typer.Option(help="viewer reads, operator submits and samples, admin does everything.")],
    days: Annotated[float | None, typer.Option(help="Refuse it after so many days.")] = None,
    root: Root = Path("runs"),
    debug: Debug = False,
) -> None:
    """Make a token and print it. It is shown this once.

    Example: strop serve token add alice --role operator --days 90
    """
    from strop.serve.api.access import Role

    tokens = _tokens(root)
    made = tokens.add(name, Role(role.value), days=days)
    note_in_audit(root, "token.add", made.split("-")[1], name=name, given=role.value)
    typer.echo(made)


@token.command("list")
def token_list(root: Root = Path("runs"), debug: Debug = False) -> None:
    """All tokens, without their secrets."""
    for info in _tokens(root).list():
        state = "accepted" if info.works else "revoked" if info.revoked else "expired"
        made = datetime.fromtimestamp(info.created, UTC).strftime("%Y-%m-%d")
        until = "" if info.expires is None else f" until {datetime.fromtimestamp(info.expires, UTC):%Y-%m-%d}"
        typer.echo(f"{info.id}  {info.role.value:<8}  {state:<8}  {info.name}, made {made}{until}")


@token.command("revoke")
def token_revoke(
    id: Annotated[str, typer.Argument(metavar="ID", help="As `strop serve token list` shows it.")],
    root: Root = Path("runs"),
    debug: Debug = False,
) -> None:
    """Refuse a token from now on."""
    info = _tokens(root).revoke(id)
    note_in_audit(root, "token.revoke", id, name=info.name)
    typer.echo(f"{info.name}'s token {info.id} is refused from now on")


@audit.command("verify")
def audit_verify(root: Root = Path("runs"), debug: Debug = False) -> None:
    """Check that no line of the audit log was changed, removed or put elsewhere.

    Prints the number and hash of the last line. Keep them elsewhere to notice a log that was replaced as a whole.
    """
    from strop.serve.api.audit import open_audit
    from strop.serve.api.settings import STATE

    head = open_audit(user_path(root) / STATE).verify()
    typer.echo(f"{head.number} lines, the last one {head.hash}")


def _tokens(root: Path) -> Tokens:
    from strop.serve.api.access import Tokens
    from strop.serve.api.settings import made_state

    return Tokens(made_state(user_path(root)))


def note_in_audit(root: Path, action: str, target: str, **more: str) -> None:
    """Write to the audit log what was done on the command line."""
    from strop.serve.api.audit import AuditLog
    from strop.serve.api.settings import made_state

    log = AuditLog(made_state(user_path(root)))
    log.append(action, actor=whoever(), target=target, outcome="done", **more)


def whoever() -> str:
    """Who gives commands here, as audit log and registry name them."""
    import getpass

    try:
        return f"{getpass.getuser()} (command line)"
    except (OSError, KeyError):
        return "somebody (command line)"


def report(
    run: Annotated[
        Path, typer.Argument(metavar="RUN", help="The folder of a run or pipeline, or its name in `runs/`.")
    ],
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Where to write it; `report.html` in the run's folder.")
    ] = None,
    debug: Debug = False,
) -> None:
    """Write a run as one HTML file that can be mailed, and print its path.

    Curves, scores, samples and configuration; the page loads nothing and runs nothing.

    \b
    Examples:
      strop report runs/quickstart
      strop report quickstart --out quickstart.html
    """
    from strop.serve.report import write_report

    in_runs = Path("runs") / run
    found = in_runs if not run.exists() and in_runs.exists() else user_path(run)
    typer.echo(str(write_report(found, None if out is None else user_path(out))))
