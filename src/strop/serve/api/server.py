"""Running a service: TLS, priority, and the way it ends."""

from __future__ import annotations

import os
import sys
from importlib.util import find_spec

from strop.errors import MissingExtra, UserError
from strop.serve.api.settings import ServiceSettings


def need_extra() -> None:
    """Raise MissingExtra unless the packages of the extra `serve` are there."""
    for package in ("fastapi", "uvicorn"):
        if find_spec(package) is None:
            raise MissingExtra(package, extra="serve", needed_for="`strop serve`")


def serve(settings: ServiceSettings) -> None:
    """Answer requests until SIGTERM or Ctrl-C. Runs that were started go on, and are found again at the next start.

    Raises:
        UserError: the settings are not safe, or the address is taken. MissingExtra: FastAPI or uvicorn is missing.
    """
    settings.check()
    need_extra()
    import uvicorn

    from strop.serve.api.app import Service

    lock = _only_one(settings)
    service = Service(settings)
    if not any(token.works for token in service.tokens.list()):
        print("no token is accepted yet; `strop serve token add NAME --role admin` makes one", file=sys.stderr)
    # On Linux this is of this thread and of those that it starts from now on; runs are started by one that is there.
    os.nice(settings.nice)
    config = uvicorn.Config(
        service.app,
        host=settings.host,
        port=settings.port,
        ssl_certfile=settings.certificate,
        ssl_keyfile=settings.key,
        log_level="warning",
        server_header=False,
        date_header=False,
        proxy_headers=False,
        limit_concurrency=1000,
        timeout_keep_alive=30,
        timeout_graceful_shutdown=5,
        h11_max_incomplete_event_size=32 * 1024,
        http="h11",
        ws="none",
    )
    scheme = "https" if settings.certificate else "http"
    print(f"strop serves {settings.root} on {scheme}://{settings.host}:{settings.port}", flush=True)
    try:
        uvicorn.Server(config).run()
    finally:
        service.close()
        os.close(lock)


def _only_one(settings: ServiceSettings) -> int:
    """Take the right to serve a folder; two services would both start what waits.

    Raises:
        UserError: another service has it.
    """
    import fcntl

    path = settings.state_folder() / "service.lock"
    lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(lock)
        raise UserError(
            "another service has this folder", where=str(settings.root), mend="stop it, or name another --root"
        ) from None
    return lock
