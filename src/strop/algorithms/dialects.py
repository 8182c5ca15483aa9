"""How other frameworks fill in the same functions: dialect -> function -> keyword arguments.

Only what a framework does by default and what differs between them is listed; a function that is missing is used as it
is here. (The deviation of `group_relative` is that of the whole group, for every baseline.) Hand them to the functions,
`group_relative(rewards, groups, **DIALECTS["verl"]["group_relative"])`, or to the fields of an algorithm with the same
meaning.
"""

from __future__ import annotations

from typing import Any

Settings = dict[str, dict[str, Any]]

DIALECTS: dict[str, Settings] = {
    "verl": {
        "group_relative": {"baseline": "mean", "scale": "std", "eps": 1e-6},
        "gae": {"observations": "skip"},
        "kl_estimate": {"kind": "k3", "clamp": 10.0},
        "aggregate": {"mode": "token_mean"},
    },
    "trl": {
        "group_relative": {"baseline": "mean", "scale": "std", "eps": 1e-4},
        "kl_estimate": {"kind": "k3", "importance_weighted": True},
        "aggregate": {"mode": "token_mean"},
    },
    "nemo_rl": {
        "group_relative": {"baseline": "leave_one_out", "scale": "std"},
        "gae": {"observations": "skip"},
        "kl_estimate": {"kind": "k3", "input_clamp": 20.0, "clamp": 10.0},
        "aggregate": {"mode": "token_mean"},
    },
    "slime": {
        "group_relative": {"baseline": "mean", "scale": "std"},
        "gae": {"observations": "state"},
        "kl_estimate": {"kind": "k1"},
        "aggregate": {"mode": "sequence_mean"},
    },
    "skyrl": {
        "group_relative": {"baseline": "mean", "scale": "std", "eps": 1e-6},
        "gae": {"observations": "state"},
    },
    "openrlhf": {"gae": {"observations": "zero"}},
    "prime_rl": {"group_relative": {"baseline": "mean", "scale": "none"}},
}
