"""What is to be run, on how much of a cluster, and whether the recipe fits it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from strop.config.loading import is_pipeline, read_layers
from strop.errors import UserError
from strop.paths import user_path

WAIT_SECONDS = 600
"""Seconds in which all nodes must have joined."""
_SETS = {"cluster.kind": "ray", "cluster.address": "auto"}


@dataclass(frozen=True)
class Job:
    """A recipe and the nodes that it gets.

    Args:
        recipe: the recipe's file, absolute.
        overrides: `key=value`, as `strop train` takes them, with those of `attaching`.
        folder: where the job runs, absolute; relative paths in the recipe begin there.
        nodes: nodes, with the one on which Ray's head and `strop train` are.
        gpus: GPUs of each node; None lets Ray count them.
        cpus: CPUs of each node; None lets Ray count them.
        memory: GiB of each node; None takes what the cluster gives.
        seconds: longest time of the job; None takes what the cluster gives.
    """

    recipe: Path
    overrides: tuple[str, ...]
    folder: Path
    nodes: int
    gpus: int | None = None
    cpus: int | None = None
    memory: int | None = None
    seconds: int | None = None

    @property
    def train(self) -> list[str]:
        """The command of the driver."""
        return ["strop", "train", str(self.recipe), *self.overrides]


def attaching(recipe: Path, overrides: Sequence[str]) -> list[str]:
    """The overrides that let a recipe attach to the Ray that the job starts; for a pipeline, those of each stage.

    Raises:
        UserError: an override gives one of these keys another value.
        ConfigError: the recipe's file cannot be read.
    """
    merged = read_layers(recipe, None).merged()
    prefixes = [""]
    if is_pipeline(merged):
        stages = merged["stages"] if isinstance(merged["stages"], dict) else {}
        prefixes = [f"stages.{name}." for name, value in stages.items() if isinstance(name, str) and value is not None]
    for text in overrides:
        key, _, value = text.partition("=")
        key = key.strip()
        if any((key == own or key.endswith(f".{own}")) and value.strip() != ours for own, ours in _SETS.items()):
            raise UserError(
                f"`{key}` is set by `strop launch`, which starts the Ray cluster that the run attaches to",
                where=f"command line: {text}",
                mend="remove it; `strop train` attaches to a cluster that is there already",
            )
    return [f"{prefix}{key}={value}" for prefix in prefixes for key, value in _SETS.items()]


def slurm_name(stem: str) -> str:
    """A job name that is one word everywhere, in file names too: letters, digits, `.`, `_` and `-`; at most 64."""
    return "strop-" + (re.sub(r"[^A-Za-z0-9._-]+", "-", stem)[:58].strip("-.") or "run")


def kubernetes_name(stem: str) -> str:
    """A name for Kubernetes: lower-case letters, digits and `-`, a letter first.

    A label of RFC 1123 may have 63 characters and a RayJob's name 47, since KubeRay makes longer ones of it. It must
    begin with a letter, since it becomes the name of a service (RFC 1035).
    """
    return "strop-" + (re.sub(r"[^a-z0-9]+", "-", stem.lower())[:34].strip("-") or "run")


def seconds_of(time: str) -> int:
    """The seconds of a time as Slurm writes it: `M`, `M:S`, `H:M:S`, `D-H`, `D-H:M` or `D-H:M:S`.

    Raises:
        UserError: it is written in another way, or is no time at all.
    """
    found = re.fullmatch(r"(?:(\d{1,4})-)?(\d{1,6})(?::(\d{1,2}))?(?::(\d{1,2}))?", time, re.ASCII)
    total = 0
    if found is not None:
        days, *parts = (None if part is None else int(part) for part in found.groups())
        first, second, third = (part or 0 for part in parts)
        if days is not None or parts[2] is not None:
            total = (days or 0) * 86400 + first * 3600 + second * 60 + third
        else:
            total = first * 60 + second
    if total == 0:
        raise UserError(
            f"{time!r} is not a time limit",
            where="--time",
            mend="write hours, minutes and seconds such as 12:00:00, or days before them, 2-12:00:00",
        )
    return total


def hosts_of(given: str) -> list[str]:
    """The hosts of `--hosts`: a list with commas, or a file with one on each line (`#` begins a comment).

    Raises:
        UserError: there is none, one is written in a way that ssh would not take as a host, or one is there twice.
    """
    file = user_path(given)
    if "," not in given and ("/" in given or file.is_file()):
        try:
            lines = [line.partition("#")[0].split() for line in file.read_text(encoding="utf-8").splitlines()]
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"the list of hosts cannot be read: {error}", where=f"--hosts {given}") from None
        # What follows the host, such as `slots=8` in a file for MPI, is not for ssh.
        hosts = [words[0] for words in lines if words]
    else:
        hosts = [host.strip() for host in given.split(",") if host.strip()]
    if not hosts:
        raise UserError("there is no host in the list", where=f"--hosts {given}", mend="name hosts that ssh reaches")
    for host in hosts:
        if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.@:%\[\]-]*", host):
            raise UserError(f"{host!r} is not a host", where=f"--hosts {given}", mend="write HOST or USER@HOST")
    if twice := [host for host in dict.fromkeys(hosts) if hosts.count(host) > 1]:
        raise UserError(f"{twice[0]} is there twice", where=f"--hosts {given}", mend="name each host once")
    return hosts
