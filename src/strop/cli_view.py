"""`strop view`: runs in a browser, while they train and afterwards."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from strop.cli_options import Debug


def view(
    runs: Annotated[
        list[Path] | None,
        typer.Argument(metavar="RUNS", help="Folders of runs, or folders that hold them; `runs` when not given."),
    ] = None,
    host: Annotated[str, typer.Option(help="Address to listen on. Others than this machine's show runs to all.")] = (
        "127.0.0.1"
    ),
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0 takes a free one.")] = 7860,
    open_browser: Annotated[
        bool, typer.Option("--open/--no-open", help="Open the page in this machine's browser, if it has one.")
    ] = True,
    debug: Debug = False,
) -> None:
    """Look at runs in a browser, live while they train.

    Curves, episodes token by token, the timeline of a step, alarms. Reads the folders of runs and writes nothing.

    \b
    Examples:
      strop view
      strop view runs/quickstart runs/quickstart-2
      strop view /data/runs --port 8000 --no-open
    """
    from strop.serve.viewer.server import serve

    serve(runs or [Path("runs")], host=host, port=port, open_browser=open_browser, say=typer.echo)
