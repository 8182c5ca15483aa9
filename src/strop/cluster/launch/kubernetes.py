"""`strop launch kubernetes`: a RayJob for the KubeRay operator, with the recipe in a ConfigMap beside it.

Field names are those of KubeRay's API ray.io/v1 (`RayJobSpec`, `RayClusterSpec`) and of Kubernetes' core/v1.
"""

from __future__ import annotations

import re
from typing import Any

import yaml

from strop import __version__
from strop.cluster.launch.job import WAIT_SECONDS, Job, kubernetes_name
from strop.cluster.launch.shell import CONTROL, DRIVER, STRICT, assignments
from strop.errors import UserError

FILES = "/etc/strop"
"""Where the ConfigMap is in the containers."""
SHARED = "/strop"
"""Where the volume that all nodes share is; the job runs there, so a relative `run.folder` lies on it."""
GRACE_SECONDS = 300
"""Seconds between the sign that a pod is to end and its end; the driver saves in them."""

MAIN = r"""
echo "$$" >/tmp/strop-launch.pid
"""

STOP = r"""#!/usr/bin/env bash
# Runs before a pod ends. On the head it lets the driver save; a worker stays for as long as the head does.
if process=$(cat /tmp/strop-launch.pid 2>/dev/null); then
    kill -USR1 "$process" 2>/dev/null || exit 0
    for ((second = 60; second < GRACE_SECONDS; second++)); do
        sleep 1
        kill -0 "$process" 2>/dev/null || exit 0
    done
    kill -TERM "$process" 2>/dev/null
elif [ -n "${FQ_RAY_IP:-}" ]; then
    while (exec 3<>"/dev/tcp/$FQ_RAY_IP/${RAY_PORT:-6379}") 2>/dev/null; do sleep 1; done
fi
exit 0
"""


class _Dumper(yaml.SafeDumper):
    """Texts of several lines as they are, so that recipe and scripts can be read in the manifest."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.Node:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Dumper.add_representer(str, _text)


def manifest(job: Job, stem: str, recipe: str, *, image: str, claim: str) -> str:
    """The YAML file: a ConfigMap with the recipe and the scripts, and a RayJob.

    Args:
        stem: what the job is named for.
        recipe: the whole recipe, with all that it extends and all overrides, as YAML.
        image: with strop and Ray in it; the same on all nodes.
        claim: a PersistentVolumeClaim that all pods can mount at once.

    Raises:
        UserError: the image or the claim is written in a way that Kubernetes does not take.
    """
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._/:@-]*", image):
        raise UserError(f"{image!r} is not an image", where="--image", mend="write REGISTRY/NAME:TAG")
    if not re.fullmatch(r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?", claim):
        mend = "write its name as `kubectl get pvc` shows it"
        raise UserError(f"{claim!r} is not the name of a volume claim", where="--claim", mend=mend)
    name = kubernetes_name(stem)
    values = {
        "FOLDER": SHARED,
        "TRAIN": ["strop", "train", f"{FILES}/recipe.yaml"],
        "NODES": job.nodes,
        "GPUS": job.nodes * (job.gpus or 0),
        "WAIT_SECONDS": WAIT_SECONDS,
    }
    main = f"#!/usr/bin/env bash\n{STRICT}{assignments(values)}{CONTROL}{MAIN}{DRIVER}"
    stop = STOP.replace("\n", f"\nGRACE_SECONDS={GRACE_SECONDS}\n", 1)
    config_map = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": name},
        "data": {"recipe.yaml": recipe, "main.sh": main, "stop.sh": stop},
    }
    spec: dict[str, Any] = {
        "entrypoint": f"bash {FILES}/main.sh",
        "shutdownAfterJobFinishes": True,
        "ttlSecondsAfterFinished": 300,
        "rayClusterSpec": {
            "headGroupSpec": {
                "rayStartParams": {"dashboard-host": "0.0.0.0"},
                "template": {"spec": _pod(job, name, "ray-head", image, claim)},
            }
        },
    }
    if job.seconds is not None:
        spec["activeDeadlineSeconds"] = job.seconds
    if job.nodes > 1:
        spec["rayClusterSpec"]["workerGroupSpecs"] = [
            {
                "groupName": "workers",
                "replicas": job.nodes - 1,
                "minReplicas": job.nodes - 1,
                "maxReplicas": job.nodes - 1,
                "rayStartParams": {},
                "template": {"spec": _pod(job, name, "ray-worker", image, claim)},
            }
        ]
    ray_job = {"apiVersion": "ray.io/v1", "kind": "RayJob", "metadata": {"name": name}, "spec": spec}
    head = f"# Written by `strop launch kubernetes` of strop {__version__}, for the KubeRay operator.\n"
    documents = (yaml.dump(part, Dumper=_Dumper, sort_keys=False, width=1000) for part in (config_map, ray_job))
    return head + "---\n".join(documents)


def _pod(job: Job, name: str, container: str, image: str, claim: str) -> dict[str, Any]:
    # Kubernetes gives GPUs only where limit and request are the same; the same for the rest keeps pods from being
    # evicted before others.
    amounts: dict[str, Any] = {"cpu": str(job.cpus)} if job.cpus is not None else {}
    amounts |= {"memory": f"{job.memory}Gi"} if job.memory is not None else {}
    amounts |= {"nvidia.com/gpu": str(job.gpus)} if job.gpus else {}
    return {
        "terminationGracePeriodSeconds": GRACE_SECONDS,
        "containers": [
            {
                "name": container,
                "image": image,
                "workingDir": SHARED,
                # How long a Ray job that is stopped may take to end.
                "env": [{"name": "RAY_JOB_STOP_WAIT_TIME_S", "value": str(GRACE_SECONDS - 60)}],
                "resources": {"limits": amounts, "requests": dict(amounts)},
                "volumeMounts": [
                    {"name": "strop-files", "mountPath": FILES, "readOnly": True},
                    {"name": "strop-shared", "mountPath": SHARED},
                ],
                "lifecycle": {"preStop": {"exec": {"command": ["bash", f"{FILES}/stop.sh"]}}},
            }
        ],
        "volumes": [
            {"name": "strop-files", "configMap": {"name": name}},
            {"name": "strop-shared", "persistentVolumeClaim": {"claimName": claim}},
        ],
    }
