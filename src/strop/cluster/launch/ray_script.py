"""`strop launch ray`: Ray on machines that ssh reaches."""

from __future__ import annotations

from collections.abc import Sequence

from strop import __version__
from strop.cluster.launch.job import Job
from strop.cluster.launch.shell import CONTROL, DRIVER, HEAD, STRICT, assignments, of_job

HEADER = f"""\
#!/usr/bin/env bash
# Written by `strop launch ray` of strop {__version__}. Run it on the machine that is to be the first node.
"""

BODY = r"""
# A worker holds its part of the cluster while its standard input is open: it ends with the connection, also when this
# script is killed. The token comes the same way, since all can see the arguments of a process.
# shellcheck disable=SC2016
{
    WORKER='cd -- "$1" && export PATH="$2" RAY_AUTH_MODE="$3" && shift 3 || exit; '
    WORKER+='export RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S=0; '
    WORKER+='exec 3<&0; read -r RAY_AUTH_TOKEN <&3 && export RAY_AUTH_TOKEN || exit; "$@" </dev/null 3<&- & ray=$!; '
    WORKER+='{ cat <&3; kill -TERM "$ray"; } >/dev/null 2>&1 & exec 3<&-; wait "$ray"'
}

"${HEAD[@]}" >&2 &
STARTED+=("$!")
join 1 0
for host in ${WORKERS[@]+"${WORKERS[@]}"}; do
    printf -v remote ' %q' bash -c "$WORKER" worker "$FOLDER" "$PATH" "$RAY_AUTH_MODE" \
        ray start --block "--address=$RAY_ADDRESS" "${RAY_OPTIONS[@]}"
    # shellcheck disable=SC2029
    ssh -o BatchMode=yes -o ServerAliveInterval=15 -- "$host" "$remote" >&2 \
        < <(printf '%s\n' "$RAY_AUTH_TOKEN"; exec tail -f --pid="$$" /dev/null) &
    STARTED+=("$!")
done
"""


def ray_script(job: Job, hosts: Sequence[str]) -> str:
    """The script that starts Ray here and on `hosts`, runs the recipe, and stops Ray."""
    return HEADER + STRICT + assignments({**of_job(job), "WORKERS": list(hosts)}) + CONTROL + HEAD + BODY + DRIVER
