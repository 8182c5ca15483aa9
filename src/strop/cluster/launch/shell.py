"""What the scripts have in common: how values get into them, the Ray cluster of the job, and the driver.

All that comes from outside (paths, overrides, hosts) is assigned in the first lines, quoted; what follows is the same
text for every job. So no name of a recipe can change what a script does.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import Any

from strop.cluster.launch.job import WAIT_SECONDS, Job

STRICT = "# Functions are called by traps, too.\n# shellcheck disable=SC2329\nset -euo pipefail\n\n"
"""What stands before the first assignment."""


def assignments(values: dict[str, Any]) -> str:
    """Lines of bash that assign each value; a list or tuple becomes an array.

    Raises:
        ValueError: a text holds the character NUL, which no shell can hold.
    """
    return "".join(f"{name}={_value(value)}\n" for name, value in values.items())


def _value(value: Any) -> str:
    if isinstance(value, list | tuple):
        return f"({' '.join(_value(entry) for entry in value)})"
    if "\0" in str(value):
        raise ValueError("a text with the character NUL cannot be in a script")
    return shlex.quote(str(value))


def of_job(job: Job) -> dict[str, Any]:
    """The variables that the parts below read."""
    return {
        "FOLDER": job.folder,
        "TRAIN": job.train,
        "NODES": job.nodes,
        "GPUS": job.nodes * (job.gpus or 0),
        "RAY_OPTIONS": ray_options(job),
        "WAIT_SECONDS": WAIT_SECONDS,
    }


def ray_options(job: Job) -> Sequence[str]:
    """What `ray start` is told of a node; without a number Ray counts for itself."""
    counts = {"--num-gpus": job.gpus, "--num-cpus": job.cpus}
    return ["--disable-usage-stats", *(f"{option}={count}" for option, count in counts.items() if count is not None)]


CONTROL = r"""
STARTED=()     # processes that hold a part of the Ray cluster
WAITING=""     # the process that is waited for
after() { :; } # called in the end, with the exit status
told() { :; }  # called when USR1 came while the driver runs

# Ray ends with this script whatever happens. Only what was started here is stopped: `ray stop` would also end the Ray
# of others on the same machine.
finish() {
    local status=$? process
    trap - EXIT
    trap '' INT TERM USR1
    for process in "$WAITING" ${STARTED[@]+"${STARTED[@]}"}; do
        [ -z "$process" ] || kill -TERM "$process" 2>/dev/null || true
    done
    for _ in {1..60}; do
        [ -n "$(jobs -rp)" ] || break
        sleep 1
    done
    for process in $(jobs -rp); do
        kill -KILL "$process" 2>/dev/null || true
    done
    after "$status"
    exit "$status"
}
trap finish EXIT
trap 'exit 130' INT
trap 'exit 143' TERM
trap 'exit 138' USR1

# A signal interrupts `wait`, and no other command.
run() {
    "$@" &
    WAITING=$!
    wait "$WAITING"
    WAITING=""
}

join() {
    local process processes=()
    for process in ${STARTED[@]+"${STARTED[@]}"}; do processes+=(--process "$process"); done
    run python3 -P -m strop.cluster.launch.node wait --address "$RAY_ADDRESS" --seconds "$WAIT_SECONDS" \
        --nodes "$1" --gpus "$2" ${processes[@]+"${processes[@]}"}
}

cd -- "$FOLDER"
"""
"""Reads FOLDER and WAIT_SECONDS; defines STARTED, `join`, and two functions to be defined anew, `after` and `told`."""

HEAD = r"""
HERE=$(python3 -P -m strop.cluster.launch.node address)
read -r IP PORT SECRET CLIENT <<<"$HERE"
# `cluster.address=auto` is this cluster, whatever else runs on the machine.
export RAY_ADDRESS="$IP:$PORT"
# Who reaches Ray's ports can run programs there, so only this job knows the token. (Before Ray 2.52 there are none.)
export RAY_AUTH_MODE="${RAY_AUTH_MODE:-token}" RAY_AUTH_TOKEN="${RAY_AUTH_TOKEN:-$SECRET}"
# In the end there is nothing left to move to other nodes, which Ray would wait for.
export RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S=0
HEAD=(ray start --head --block "--node-ip-address=$IP" "--port=$PORT" "${RAY_OPTIONS[@]}")
[ -z "$CLIENT" ] || HEAD+=("--ray-client-server-port=$CLIENT")
"""
"""Reads RAY_OPTIONS; defines HEAD, the command of the first node, and RAY_ADDRESS."""

DRIVER = r"""
join "$NODES" "$GPUS"

# Signals are for the driver, which may save before it ends.
caught=0
forward() {
    caught=1
    kill -s "$1" "$WAITING" 2>/dev/null || true
}
"${TRAIN[@]}" &
WAITING=$!
# A process in the background does not hear INT.
trap 'forward TERM' INT TERM
trap 'forward USR1; told' USR1
while :; do
    caught=0
    status=0
    wait "$WAITING" || status=$?
    [ "$caught" = 1 ] || break
done
WAITING=""
exit "$status"
"""
"""Waits for all nodes, runs TRAIN, and ends as that ends."""
