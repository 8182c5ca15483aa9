"""Ray itself: attaching to a cluster or starting one, with workers that import strop from where the driver has it."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import strop
from strop.errors import MissingExtra, RunFailure, UserError

NAMESPACE = "strop"
"""Of the names of all actors, so that `strop cluster status` finds those of every run."""
PASSED = ("STROP_", "HF_", "TRANSFORMERS_", "TOKENIZERS_", "NCCL_", "GLOO_", "TORCH_", "PYTORCH_", "OMP_", "MKL_")
"""What variables of the driver's environment begin with that workers get too."""
KNOCK = 10.0
"""Seconds that a cluster has to take a connection."""
SECRET = ("TOKEN", "KEY", "SECRET", "PASSWORD")
"""Variables with such words in their names are not passed: Ray shows an actor's environment to everybody."""


@dataclass
class Session:
    """A connection to Ray.

    reasons: lines that say what was chosen and why. owned: the cluster was started here and ends with `close`.
    """

    owned: bool
    reasons: list[str] = field(default_factory=list)

    def gpus(self) -> int:
        """How many GPUs the cluster has, whoever holds them."""
        return int(import_ray().cluster_resources().get("GPU", 0))

    def free_cpus(self) -> float:
        """How many CPUs of the cluster nobody holds."""
        return float(import_ray().available_resources().get("CPU", 0.0))

    def close(self) -> None:
        """Let go of the cluster, and end it if it was started here."""
        import ray

        if ray.is_initialized():
            ray.shutdown()


def import_ray() -> Any:
    """Ray.

    Raises:
        MissingExtra: it is not installed.
    """
    # Ray asks for these when it is imported: no statistics to its makers, no second environment under `uv run`, and no
    # cluster that a late call starts by itself after this one has ended.
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ENABLE_AUTO_CONNECT", "0")
    os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    try:
        import ray
    except ImportError as error:
        raise MissingExtra("ray", extra="ray", needed_for="cluster.kind: ray") from error
    return ray


def open_session(
    address: str | None, *, cpus: int | None = None, store_mb: int | None = None, key: str = "cluster.address"
) -> Session:
    """Attach to the cluster at an address, or start one on this machine.

    Args:
        address: `auto`, `ray://HOST:PORT`, `HOST:PORT`, or None to start one. cpus: what a started one counts as its
            CPUs; never fewer than the machine has. store_mb: of its object store; Ray decides when not given. key: what
            messages call the address.

    Raises:
        MissingExtra: Ray is not installed. UserError: there is no cluster at the address.
        RunFailure: none could be started.
    """
    ray = import_ray()
    if ray.is_initialized():
        raise RunFailure("this process is already connected to a Ray cluster", mend="call ray.shutdown() before")
    options: dict[str, Any] = {
        "namespace": NAMESPACE,
        "log_to_driver": False,
        "logging_level": "ERROR",
        "runtime_env": {"env_vars": worker_environment(os.environ)},
    }
    if address is not None:
        try:
            _knock(address)
            ray.init(address=address, **options)
        except (OSError, RuntimeError, ValueError) as error:
            raise UserError(
                f"there is no Ray cluster at {address!r}: {str(error).splitlines()[0]}",
                where=key,
                mend="start one with `ray start --head` and name its address, or run with cluster.address not set; "
                "where a cluster asks for a token, set RAY_AUTH_MODE=token and RAY_AUTH_TOKEN",
            ) from error
        return Session(False, [f"attached to the Ray cluster at {address}: cluster.address"])
    own = os.cpu_count() or 1
    counted = max(own, cpus or 0)
    store = {} if store_mb is None else {"object_store_memory": store_mb * 2**20}
    # An address in the environment would turn "start one" into "attach".
    kept = os.environ.pop("RAY_ADDRESS", None)
    try:
        ray.init(address="local", num_cpus=counted, include_dashboard=False, **store, **options)
    except Exception as error:
        raise RunFailure(f"Ray could not be started on this machine: {error}") from error
    finally:
        if kept is not None:
            os.environ["RAY_ADDRESS"] = kept
    reasons = ["started a Ray cluster on this machine: cluster.address is not set"]
    if counted > own:
        reasons.append(f"it counts {counted} CPUs, the machine has {own}: the processes share them")
    return Session(True, reasons)


def _knock(address: str) -> None:
    """Ray itself takes minutes to find that nobody is there, and then ends the process.

    Raises:
        OSError: nobody is there.
    """
    if address == "auto":
        from ray._private import services

        address = services.canonicalize_bootstrap_address("auto") or ""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if host and port.isdigit():
        socket.create_connection((host, int(port)), timeout=KNOCK).close()


def worker_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Variables for workers: where strop is, and what the libraries read."""
    home = str(Path(strop.__file__).parents[1])
    paths = [home, *environment.get("PYTHONPATH", "").split(os.pathsep)]
    # A script's folder, or the current one, is where the driver finds the user's own modules.
    paths += [entry or os.getcwd() for entry in sys.path[:1]]
    passed = {
        name: value
        for name, value in environment.items()
        if name.startswith(PASSED) and not any(word in name for word in SECRET)
    }
    return passed | {
        "RAY_ENABLE_AUTO_CONNECT": "0",
        "PYTHONPATH": os.pathsep.join(dict.fromkeys(path for path in paths if path)),
    }
