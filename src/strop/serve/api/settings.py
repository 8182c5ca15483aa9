"""What a service is told: where the runs are, where it listens, what it allows."""

from __future__ import annotations

import ipaddress
import os
from dataclasses import dataclass, field
from pathlib import Path

from strop.errors import UserError

STATE = ".service"
"""Folder below the runs where a service keeps what is its own; hidden names are never served."""
MAX_RECIPE = 256 * 1024
"""Bytes of a recipe that is submitted."""


@dataclass(frozen=True)
class Limits:
    """What one caller may take.

    body: bytes of a request. rate, burst: requests a second of one token, and how many at once. failures: refused
    tokens of one address in a minute, after which it waits. streams: event streams that are open at the same time.
    body_seconds: how long a request may take to arrive.
    """

    body: int = 1 << 20
    rate: float = 50.0
    burst: int = 200
    failures: int = 10
    streams: int = 200
    body_seconds: float = 30.0


@dataclass(frozen=True)
class ServiceSettings:
    """A service.

    root: the folder of the runs. host, port: where it listens. certificate, key: files of TLS. allow_plain: listen
    beyond this machine without TLS. names: what callers may call it (`Host`), beside the names of this machine.
    jobs: runs that train at the same time on this machine. models: how many are kept loaded for sampling. allow_hub:
    operators may name models and data on the Hub. allowed: folders beyond `root` that recipes of operators may read.
    ray: address of the Ray dashboard that jobs go to, such as `http://127.0.0.1:8265`. nice: how far the service gives
    way to training. patience: seconds that a run is given to save and leave before it is ended.
    """

    root: Path
    host: str = "127.0.0.1"
    port: int = 8420
    certificate: Path | None = None
    key: Path | None = None
    allow_plain: bool = False
    names: tuple[str, ...] = ()
    jobs: int = 1
    models: int = 1
    allow_hub: bool = False
    allowed: tuple[Path, ...] = ()
    ray: str | None = None
    nice: int = 15
    patience: float = 120.0
    limits: Limits = field(default_factory=Limits)

    @property
    def state(self) -> Path:
        """Where the service keeps queue, tokens and audit log."""
        return self.root / STATE

    def check(self) -> None:
        """Refuse what would be unsafe or cannot work.

        Raises:
            UserError: it would listen beyond this machine without TLS, or a file of TLS is missing.
        """
        if (self.certificate is None) != (self.key is None):
            raise UserError("TLS needs a certificate and its key", where="--certificate, --key", mend="give both")
        for option, file in (("--certificate", self.certificate), ("--key", self.key)):
            if file is not None and not file.is_file():
                raise UserError(f"there is no file {file}", where=option, mend="name a file in PEM format")
        if self.certificate is None and not self.allow_plain and not is_loopback(self.host):
            raise UserError(
                f"{self.host} can be reached from other machines, and tokens would travel in plain text",
                where=f"--host {self.host}",
                mend="give --certificate and --key; or --allow-plain, where something else encrypts",
            )

    def state_folder(self) -> Path:
        """The state's folder, made where it is missing; only its owner may look into it.

        Raises:
            UserError: it cannot be made, or is not a folder of its own.
        """
        return made_state(self.root)


def made_state(root: Path) -> Path:
    """The folder of a service's state below the folder of runs; see `ServiceSettings.state_folder`."""
    state = root / STATE
    try:
        root.mkdir(parents=True, exist_ok=True)
        state.mkdir(mode=0o700, exist_ok=True)
        if state.is_symlink() or not state.is_dir():
            raise UserError(f"{STATE} is not a folder of its own", where=str(state), mend="remove the link")
        os.chmod(state, 0o700)
    except OSError as error:
        raise UserError(f"the service's folder cannot be made: {error.strerror}", where=str(state)) from error
    return state


def is_loopback(host: str) -> bool:
    """Whether an address is of this machine only."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
