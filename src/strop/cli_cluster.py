"""`strop cluster …`: what runs in a Ray cluster."""

from __future__ import annotations

from typing import Annotated

import typer

from strop.cli_options import Debug

cluster = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Ray clusters and what strop runs in them.")


@cluster.callback()
def _cluster() -> None:
    """Ray clusters and what strop runs in them."""


@cluster.command("status")
def status(
    address: Annotated[
        str, typer.Option(metavar="ADDRESS", help="HOST:PORT, ray://HOST:PORT, or auto for the one of this machine.")
    ] = "auto",
    debug: Debug = False,
) -> None:
    """Nodes, resources, and the processes of every run, with the seconds since their last sign of life.

    \b
    Examples:
      strop cluster status
      strop cluster status --address ray://head:10001
    """
    from strop.cluster.session import open_session
    from strop.cluster.status import cluster_status, shown

    session = open_session(address, key="--address")
    try:
        lines = shown(cluster_status())
    finally:
        session.close()
    typer.echo("\n".join(lines))
