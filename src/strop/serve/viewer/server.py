"""The viewer's own server, for one machine's browser."""

from __future__ import annotations

import ipaddress
import os
import socket
import sys
import threading
import webbrowser
from collections.abc import Callable, Sequence
from pathlib import Path

from strop.errors import MissingExtra, UserError
from strop.paths import user_path


def serve(
    run_roots: Sequence[Path], *, host: str, port: int, open_browser: bool, say: Callable[[str], None] = print
) -> None:
    """Serve the viewer until Ctrl-C.

    Raises:
        MissingExtra: fastapi or uvicorn is not installed. UserError: a folder that was named is not there, or the
            address cannot be had.
    """
    try:
        import uvicorn
    except ImportError:
        raise MissingExtra("uvicorn", extra="serve", needed_for="the viewer of runs") from None
    from strop.serve.viewer.app import build

    roots = [_checked(user_path(root)) for root in run_roots]
    # Only a listener on this machine's own address can say by which names it may be asked for.
    names = ["127.0.0.1", "localhost", "[::1]", host] if is_loopback(host) else None
    application = build(roots, hosts=names)
    with _listen(host, port) as listener:
        address = f"http://{_shown(host)}:{listener.getsockname()[1]}/"
        say(f"runs in {', '.join(map(str, roots))}: {address}")
        if names is None:
            say("anyone who can reach this address can read these runs")
        say("Ctrl-C ends it")
        if open_browser and has_screen():
            threading.Thread(target=webbrowser.open, args=(address,), name="browser", daemon=True).start()
        settings = uvicorn.Config(application, log_level="warning", lifespan="off", timeout_graceful_shutdown=2)
        uvicorn.Server(settings).run(sockets=[listener])


def has_screen() -> bool:
    """Whether a browser has somewhere to open; without, one for terminals would take this one."""
    return sys.platform != "linux" or any(os.environ.get(name) for name in ("DISPLAY", "WAYLAND_DISPLAY"))


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach an address."""
    try:
        return host == "localhost" or ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def _checked(root: Path) -> Path:
    # `runs` itself may come later, with the first run.
    if not root.is_dir() and root != Path("runs"):
        raise UserError(
            "there is no such folder",
            where=str(root),
            mend="name folders of runs, or folders that hold them; `strop runs list` shows those in runs/",
        )
    return root


def _listen(host: str, port: int) -> socket.socket:
    host = host.strip("[]")
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            listener.listen(128)
        except BaseException:
            listener.close()
            raise
        return listener
    except OSError as error:
        raise UserError(
            f"this address cannot be listened on: {error.strerror or error}",
            where=f"--host {host} --port {port}",
            mend="choose another port, 0 for a free one",
        ) from error


def _shown(host: str) -> str:
    return f"[{host}]" if ":" in host and not host.startswith("[") else host
