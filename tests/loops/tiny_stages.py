"""A pipeline of three stages that takes seconds: demonstrations, a reward model, PPO that is paid by it."""

from __future__ import annotations

import copy
from typing import Any

from tiny_runs import HELD_OUT, RECIPE, put

PAIRS = {"path": "strop.data.arithmetic:pairs", "arguments": {"count": 40, "digits": 1}}
PIPELINE: dict[str, Any] = {
    "defaults": {
        "tracking": {"display": "off", "tensorboard": False},
        "hardware": {"threads": 1, "device": "cpu"},
        "checkpoint": {"every": 2},
        "training": {"optimizer": {"learning_rate": 1e-2}},
    },
    "stages": {
        "sft": {
            "model": RECIPE["model"],
            "data": {"train": RECIPE["data"]["train"], "eval": HELD_OUT},
            "supervised": {"method": "sft", "batch_size": 8},
            "evaluation": {"every": 2},
            "run": {"steps": 6},
        },
        "judge": {
            "model": {"path": "stage:sft"},
            "data": {"train": PAIRS},
            "supervised": {"method": "reward_model", "batch_size": 8},
            "run": {"steps": 6},
        },
        "ppo": {
            "model": {"path": "stage:sft"},
            "data": {"train": RECIPE["data"]["train"], "eval": HELD_OUT},
            "algorithm": {"name": "ppo"},
            "critic": {"path": "stage:judge", "optimizer": {"learning_rate": 1e-2}},
            "rewards": {"verifiers": [{"kind": "reward_model", "path": "stage:judge"}]},
            "rollout": {"groups_per_step": 8, "group_size": 1, "max_new_tokens": 4},
            "evaluation": {"verifiers": [{"kind": "exact"}]},
            "run": {"steps": 4},
        },
    },
}


def pipeline(**changes: Any) -> dict[str, Any]:
    """The pipeline with other values, `pipeline(**{"stages.sft.run.steps": 5})`."""
    found = copy.deepcopy(PIPELINE)
    for key, value in changes.items():
        put(found, key, copy.deepcopy(value))
    return found
