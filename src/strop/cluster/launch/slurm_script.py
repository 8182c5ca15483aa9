"""`strop launch slurm`: a batch script for Slurm."""

from __future__ import annotations

import re

from strop import __version__
from strop.cluster.launch.job import Job, slurm_name
from strop.cluster.launch.shell import CONTROL, DRIVER, HEAD, STRICT, assignments, of_job
from strop.errors import UserError

SAVE_SECONDS = 300
"""Seconds before the end of its time at which a job is told to save; Slurm may do so a minute earlier."""

BODY = r"""
# The batch shell runs on the first node of the job. Each node holds its part of Ray in a step of its own.
REQUEUE=0
trap 'REQUEUE=1; exit 0' USR1
STEP=(srun --overlap --ntasks-per-node=1 "--cpus-per-task=$CPUS")
read -r FIRST < <(scontrol show hostnames "$SLURM_JOB_NODELIST")

after() {
    # The job goes on later unless it failed by itself (1) or by what the recipe says (2).
    if [ "$REQUEUE" = 1 ] && [ "$1" != 1 ] && [ "$1" != 2 ]; then
        scontrol requeue "$SLURM_JOB_ID"
    fi
}

# The driver saves at the end of its step. If it is not done when the time is nearly over, it is ended, so that there is
# time left to put the job into the queue again.
told() {
    [ "$REQUEUE" = 0 ] || return 0
    REQUEUE=1
    (
        for ((second = 90; second < SAVE_SECONDS; second++)); do
            sleep 1
            kill -0 "$WAITING" 2>/dev/null || exit 0
        done
        kill -TERM "$WAITING" 2>/dev/null
    ) &
}

"${STEP[@]}" --nodes=1 --ntasks=1 "--nodelist=$FIRST" "${HEAD[@]}" >&2 &
STARTED+=("$!")
join 1 0
if [ "$NODES" -gt 1 ]; then
    "${STEP[@]}" "--nodes=$((NODES - 1))" "--ntasks=$((NODES - 1))" "--exclude=$FIRST" \
        ray start --block "--address=$RAY_ADDRESS" "${RAY_OPTIONS[@]}" >&2 &
    STARTED+=("$!")
fi
"""


def slurm_script(job: Job, stem: str, *, partition: str | None, account: str | None, time: str | None) -> str:
    """The batch script.

    Args:
        stem: what the job is named for.
        time: as Slurm writes it; checked already.

    Raises:
        UserError: a partition or an account is written in a way that Slurm does not take.
    """
    name = slurm_name(stem)
    directives = {
        "job-name": name,
        "nodes": job.nodes,
        "ntasks-per-node": 1,
        "gpus-per-node": job.gpus or None,
        "cpus-per-task": job.cpus,
        "mem": None if job.memory is None else f"{job.memory}G",
        "time": time,
        "partition": _word(partition, "--partition"),
        "account": _word(account, "--account"),
        "output": f"{name}-%j.out",
        "open-mode": "append",
        "signal": f"B:USR1@{SAVE_SECONDS}",
    }
    head = "".join(f"#SBATCH --{key}={value}\n" for key, value in directives.items() if value is not None)
    values = {**of_job(job), "CPUS": job.cpus, "SAVE_SECONDS": SAVE_SECONDS}
    return (
        f"#!/usr/bin/env bash\n{head}#SBATCH --requeue\n"
        f"# Written by `strop launch slurm` of strop {__version__}; submit it with sbatch.\n"
        f"{STRICT}{assignments(values)}{CONTROL}{HEAD}{BODY}{DRIVER}"
    )


def _word(value: str | None, option: str) -> str | None:
    if value is not None and not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.,@+-]*", value):
        raise UserError(f"{value!r} is not a name that Slurm takes", where=option, mend="write it as sinfo shows it")
    return value
