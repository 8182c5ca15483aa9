"""How other frameworks fill in the same functions: dialect -> function -> keyword arguments.

Only what a framework does by default is listed; a function that is missing is used as it is here. (The deviation of
`group_relative` is that of the whole group, for every baseline.) Hand them to the functions,
`group_relative(rewards, groups, **DIALECTS["verl"]["group_relative"])`, or name the dialect in a recipe. What is no
argument of a function stands under "algorithm", as a field of it.
"""

from __future__ import annotations

from typing import Any

Settings = dict[str, dict[str, Any]]

DIALECTS: dict[str, Settings] = {
    "verl": {
        "group_relative": {"baseline": "mean", "scale": "std", "eps": 1e-6},
        "gae": {"observations": "skip"},
        "ppo_clip": {"clip_low": 0.2, "clip_high": 0.2, "dual_clip": 3.0},
        "kl_estimate": {"kind": "k3", "input_clamp": 20.0, "clamp": 10.0},
        "aggregate": {"mode": "token_mean"},
    },
    "trl": {
        "group_relative": {"baseline": "mean", "scale": "std", "eps": 1e-4},
        "ppo_clip": {"clip_low": 0.2, "clip_high": 0.2},
        "kl_estimate": {"kind": "k3", "importance_weighted": True},
        "aggregate": {"mode": "token_mean"},
    },
    "nemo_rl": {
        "group_relative": {"baseline": "leave_one_out", "scale": "std", "eps": 1e-6},
        "gae": {"observations": "skip"},
        "ppo_clip": {"clip_low": 0.2, "clip_high": 0.2},
        "kl_estimate": {"kind": "k3", "input_clamp": 20.0, "clamp": 10.0},
        "aggregate": {"mode": "token_mean"},
    },
    "slime": {
        "group_relative": {"baseline": "mean", "scale": "std", "eps": 1e-6},
        "gae": {"observations": "state"},
        "ppo_clip": {"clip_low": 0.2, "clip_high": 0.2},
        "kl_estimate": {"kind": "k1"},
        "aggregate": {"mode": "sequence_mean"},
    },
    "openrlhf": {
        "group_relative": {"baseline": "mean", "scale": "std", "eps": 1e-9},
        "gae": {"observations": "zero"},
        "whiten": {"unbiased": False},
        "ppo_clip": {"clip_low": 0.2, "clip_high": 0.2},
        "kl_estimate": {"kind": "k1"},
        "algorithm": {"kl_in": "reward"},
        "aggregate": {"mode": "token_mean"},
    },
    "skyrl": {
        "group_relative": {"baseline": "mean", "scale": "std", "eps": 1e-6},
        "gae": {"observations": "state"},
        "ppo_clip": {"clip_low": 0.2, "clip_high": 0.2},
        "kl_estimate": {"kind": "k3"},
        "aggregate": {"mode": "token_mean"},
    },
    "prime_rl": {
        "group_relative": {"baseline": "mean", "scale": "none"},
        "aggregate": {"mode": "token_mean"},
    },
}

FIELDS: dict[str, dict[str, str]] = {
    "group_relative": {"baseline": "baseline", "scale": "scale", "eps": "scale_eps"},
    "aggregate": {"mode": "aggregation"},
    "ppo_clip": {"clip_low": "clip_low", "clip_high": "clip_high", "dual_clip": "dual_clip"},
    "algorithm": {"kl_in": "kl_in"},
    "kl_estimate": {
        "kind": "kl_kind",
        "clamp": "kl_clamp",
        "input_clamp": "kl_input_clamp",
        "importance_weighted": "kl_importance_weighted",
    },
    "gae": {"observations": "observations"},
    "whiten": {"unbiased": "whiten_unbiased"},
}
"""function -> argument -> the algorithm's field with the same meaning; a switch before what it switches."""


def preset(dialect: str) -> dict[str, Any]:
    """The fields of an algorithm that a dialect sets: name -> value."""
    said = DIALECTS[dialect]
    return {
        name: said[function][argument]
        for function, names in FIELDS.items()
        for argument, name in names.items()
        if argument in said.get(function, {})
    }
