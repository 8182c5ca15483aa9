"""Promise 7: every setting works or is refused. A walk over the schema: each key is changed, and a run must show it.

The table below has one entry for each key: the recipe in which the key matters, another value for it, and what must
then differ between the two runs. A key without an entry fails, so a new key cannot be forgotten.
"""

from __future__ import annotations

import copy
import importlib.util
import json
import os
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_openenv import tiny_openenv
from tiny_runs import HELD_OUT, Seen, observe, put, recipe
from tiny_server import tiny_server

from strop.config.alarms import SecondOpinionSettings
from strop.config.explain import annotation_of, items_of, leaves
from strop.config.rewards import RewardSettings
from strop.config.run import EvaluationSettings


@dataclass(frozen=True)
class Case:
    """One change of one key.

    new: the other value. shows: the part of `Seen.parts` that must differ; with "refused" the recipe must not be
    accepted at all. context: the recipe in `CONTEXTS` that is changed. says: a pattern in the refusal or failure.
    steady: the trained weights must be the same to 1e-6 (root mean square), because the key is only about how they are
        computed.
    """

    new: Any
    shows: str = "parameters"
    context: str = "plain"
    says: str = ""
    steady: bool = False


# --- recipes -------------------------------------------------------------------------------------------------------

RARELY = {"kind": "regex", "pattern": "[0-4]$"}
LETTERS = {
    "model.create.characters": "aA =",
    "data.train": {"path": "letters.jsonl"},
    "rollout.group_size": 16,
    "rollout.max_new_tokens": 2,
}
NUMBERS = {
    "model.create.characters": "1234 ",
    "data.train": {"path": "numbers.jsonl"},
    "rollout.group_size": 16,
}
TAGS = {
    "model.create.characters": "<>/ab01",
    "data.train": {"path": "tags.jsonl"},
    "rollout.max_new_tokens": 10,
    "warmup": {"steps": 40, "batch_size": 8, "optimizer": {"learning_rate": 2e-2, "schedule": "constant"}},
}
# Completions are numbers, which are programs; what stands before them does something.
PROGRAMS = {
    "model.create.characters": "1234",
    "data.train": {"path": "programs.jsonl"},
    "rollout": {"groups_per_step": 1, "group_size": 2, "max_new_tokens": 2},
    "run.steps": 1,
}
WARMUP = {"steps": 3, "batch_size": 4, "optimizer": {"learning_rate": 1e-2, "warmup_steps": 0, "schedule": "constant"}}
OFF_POLICY = {"training.mini_batches": 2, "training.epochs": 2}
OFTEN_EVALUATED = {"data.eval": HELD_OUT, "evaluation.every": 1, "evaluation.temperature": 1.0, "run.steps": 9}
# Where the held-out prompts matter, the completions of a model that is not trained are the same in both runs.
FILES = {"data.eval": HELD_OUT, "warmup": {**WARMUP, "data": {"path": "rows.jsonl"}}}


CHOICES = {**LETTERS, "model.create.characters": "aAB=\n", "rollout.max_new_tokens": 7, "rollout.group_size": 32}
DECIMALS = {**NUMBERS, "model.create.characters": "12. "}
SERVER: dict[str, str] = {}
"""The address of the server that judges, while there is one."""


def verified(verifier: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return recipe(**{"rewards.verifiers": [verifier], **changes})


def judged(verifier: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """A recipe whose held-out prompts, here those of the training, have a verifier of their own."""
    found = recipe(**changes)
    put(found, "data.eval", copy.deepcopy(found["data"]["train"]))
    # Beside another one, which makes the score of each a number of its own.
    other = {"kind": "python", "function": "tiny_rewards:lengths", "name": "other"}
    put(found, "evaluation", {"temperature": 1.0, "samples": 16, "verifiers": [dict(verifier), other]})
    return found


def graded(path: str = "", **options: Any) -> dict[str, Any]:
    """A recipe whose completions, of two letters, are often the same."""
    verifier = {"kind": "judge", "base_url": f"{SERVER['url']}{path}/v1", "model": "m", **options}
    return verified(verifier, **LETTERS, **{"rewards.retries": 0})


def watched(*verifiers: dict[str, Any], **alarms: Any) -> dict[str, Any]:
    """A recipe whose alarms look at every step, of which the first is what is usual. There are two characters, so that
    completions repeat themselves; beside the verifier that decides, given ones are asked."""
    found = recipe(
        **{
            "model.create.characters": "12",
            "data.train": {"path": "ones.jsonl"},
            "rollout.max_new_tokens": 12,
            "rollout.group_size": 8,
            "run.steps": 8,
            "alarms": {"baseline_steps": 1, "patience": 1, **alarms},
        }
    )
    found["rewards"]["verifiers"] += verifiers
    return found


def doubted(verifier: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """A recipe in which everything that is sampled counts as correct, and a second opinion on all of it."""
    settings = {"verifiers": [dict(verifier)], "share": 1.0, "disagreement": 0.01}
    return recipe(**{"alarms.second_opinion": settings, "rewards.correct_at": -1.0, **changes})


def served(path: str = "", **options: Any) -> dict[str, Any]:
    verifier = {"kind": "http", "url": f"{SERVER['url']}{path}/score", **options}
    return verified(verifier, **{"rewards.retries": 0})


def programs(column: str, verifier: dict[str, Any] | None = None, **changes: Any) -> dict[str, Any]:
    """A recipe with a verifier of programs, which do what a column says and are tested by calls."""
    code = {"kind": "code", "tests": "calls", "take": "whole", "before": column, **(verifier or {})}
    return verified(code, **{**PROGRAMS, **changes})


def sources(prefix: str, **settings: Any) -> dict[str, Any]:
    """A recipe with files everywhere, of which one source is what the key is about."""
    found = recipe(**{"data.train": {"path": "rows.jsonl"}, "data.eval": {"path": "rows.jsonl"}})
    put(found, "warmup", {**copy.deepcopy(WARMUP), "data": {"path": "rows.jsonl"}})
    for place in ("data.train", "data.eval", "warmup.data"):
        put(found, f"{place}.columns", {"answer": "first"})
    put(found, prefix, {"columns": {"answer": "first"}, **settings})
    return found


def examples(method: str, **changes: Any) -> dict[str, Any]:
    """A recipe that learns from examples."""
    # Steps of a solution are joined by line ends.
    found = recipe(
        **{
            "model.create.characters": "0123456789+=\n",
            "data.train": {"path": "examples.jsonl"},
            "supervised": {"method": method, "batch_size": 4},
        }
    )
    del found["rewards"], found["rollout"]
    for key, value in changes.items():
        put(found, key, copy.deepcopy(value))
    return found


def recorded(path: str = "rollouts.jsonl", **changes: Any) -> dict[str, Any]:
    """A recipe that learns from completions in a file."""
    found = recipe(**{"data": {"train": {"path": path}}, "offline": {}})
    del found["rewards"], found["rollout"]["group_size"]
    for key, value in changes.items():
        put(found, key, value)
    return found


def replaying(select: str) -> dict[str, Any]:
    """A recipe that trains past groups again."""
    past = {"groups": 2, "keep": 24, "select": select}
    # Few completions of a prompt differ by little or by much.
    changes = {"rollout.window.past": past, "rollout.group_size": 3, "rewards.correct_at": 0.5, "run.steps": 12}
    return recipe(**changes)


TOOLS = {
    "kind": "tools",
    "tools": [{"kind": "function", "path": "tiny_worlds:twice"}],
    "style": "tag",
    "opening": "[",
    "closing": "]",
}


def tools(**changes: Any) -> dict[str, Any]:
    """A recipe whose policy calls a tool by chance: `[...]`."""
    found = recipe(
        **{
            "model.create.characters": "12+[]",
            "model.create.context": 96,
            "data.train": {"path": "ones.jsonl"},
            "rollout.group_size": 16,
            "rollout.max_new_tokens": 8,
            "environment": TOOLS,
        }
    )
    for key, value in changes.items():
        put(found, key, value)
    return found


def asked_settings() -> dict[str, Any]:
    return {
        "environment": {"kind": "python", "factory": "tiny_worlds:Asks"},
        "rollout.max_new_tokens": 12,
        "rewards.verifiers": [{"kind": "environment"}],
    }


def asked(**changes: Any) -> dict[str, Any]:
    """A recipe with an environment of one's own, which gives the rewards."""
    return recipe(**{**asked_settings(), **changes})


def played(**changes: Any) -> dict[str, Any]:
    """A recipe whose policy plays two roles."""
    return recipe(
        **{
            "environment": {
                "kind": "self_play",
                "factory": "tiny_worlds:Echoes",
                "arguments": {"turns": 4},
                "max_turn_tokens": 3,
            },
            "rollout.max_new_tokens": 8,
            "rewards.verifiers": [{"kind": "environment"}],
            **changes,
        }
    )


def doors(**changes: Any) -> dict[str, Any]:
    """A recipe whose policy goes through doors by chance."""
    found = recipe(
        **{
            "model.create.characters": "123[]:",
            "model.create.context": 512,
            "data": {"train": {"path": "doors.jsonl"}, "render": "text"},
            "rollout.group_size": 8,
            "rollout.max_new_tokens": 9,
            "rewards.verifiers": [{"kind": "environment"}],
            "environment": {
                "kind": "gymnasium",
                "id": "tiny_gym:Doors-v0",
                "opening": "{observation}:",
                "max_turn_tokens": 3,
            },
        }
    )
    for key, value in changes.items():
        put(found, key, value)
    return found


def generated(**changes: Any) -> dict[str, Any]:
    """A recipe whose completions are made by a function of slime's form."""
    found = recipe(
        **{
            "rollout.max_new_tokens": 8,
            "rewards.verifiers": [{"kind": "environment"}],
            "environment": {"kind": "slime", "generate": "tiny_slime:two_turns", "arguments": {"says": "1"}},
        }
    )
    for key, value in changes.items():
        put(found, key, value)
    return found


def guessed(server: str = "openenv", **changes: Any) -> dict[str, Any]:
    """A recipe whose policy guesses numbers on a server of OpenEnv."""
    found = doors()
    put(found, "environment", {"kind": "openenv", "url": SERVER[server], "max_turn_tokens": 2})
    put(found, "environment.action", {"number": "{action}"})
    for key, value in changes.items():
        put(found, key, value)
    return found


def worded(**changes: Any) -> dict[str, Any]:
    """A recipe whose episodes are played by the package verifiers."""
    found = recipe(
        **{
            "data": {"train": {"path": "verifiers:tiny_taskset"}, "render": "text"},
            "rollout.max_new_tokens": 8,
            "rewards.verifiers": [{"kind": "environment"}],
            "environment": {"kind": "verifiers", "taskset": "tiny_taskset"},
        }
    )
    for key, value in changes.items():
        put(found, key, value)
    return found


CALLING = {
    "model": {"path": "caller"},
    "environment.arguments": {"shared": True},
    "rollout.group_size": 8,
    "rollout.max_new_tokens": 12,
}
DISTILLED = {"model": {"path": "first"}, "supervised.teachers": [{"path": "second"}]}
METHODS = ("sft", "dpo", "cdpo", "simpo", "kto", "reward_model", "process_reward")

CONTEXTS: dict[str, Callable[[], dict[str, Any]]] = {
    "plain": recipe,
    "evaluated": lambda: recipe(**{"data.eval": HELD_OUT}),
    "evaluated by chance": lambda: recipe(**{"data.eval": HELD_OUT, "evaluation.temperature": 1.0}),
    "folder": lambda: recipe(model={"path": "first"}),
    "code": lambda: recipe(model={"path": "code"}),
    "wide": lambda: recipe(**{"model.create.hidden_size": 128, "model.create.intermediate_size": 1024}),
    "lora": lambda: recipe(**{"model.lora": {"rank": 4}}),
    "adaptive": lambda: recipe(
        **{
            "model.lora": {"rank": 4, "adaptive": {"target_rank": 2, "tinit": 1, "tfinal": 2, "delta_t": 1}},
            **OFF_POLICY,
        }
    ),
    "chat": lambda: recipe(model={"path": "chat"}),
    "chat rendered": lambda: recipe(model={"path": "chat"}, **{"data.render": "chat"}),
    "two digits": lambda: recipe(**{"data.train.arguments.digits": 2, "data.max_prompt_tokens": 5}),
    "letters": lambda: verified({"kind": "exact"}, **LETTERS),
    "numbers": lambda: verified({"kind": "numeric"}, **NUMBERS),
    "pattern": lambda: verified(RARELY),
    "curriculum": lambda: verified(
        RARELY,
        **{
            "data.train.arguments.count": 8,
            "data.curriculum": {"floor": 0.1},
            "rollout.group_size": 2,
            "run.steps": 12,
        },
    ),
    "tags": lambda: verified({"kind": "format", "tags": ["a"]}, **TAGS),
    "json": lambda: verified({"kind": "format", "json_schema": {"type": "integer"}}),
    "maths": lambda: verified({"kind": "math"}, **DECIMALS),
    "choices": lambda: verified({"kind": "choice"}, **CHOICES),
    "graded": graded,
    "graded by pattern": lambda: graded(read="pattern", pattern=r"style\W+(?P<score>\d+)"),
    "graded by many": lambda: graded(votes=3, temperature=1.0),
    "graded at the second try": lambda: graded("/once"),
    "served": served,
    "served in small parts": lambda: served(batch_size=1),
    "served at the second try": lambda: served("/once"),
    "together": lambda: verified({"kind": "python", "function": "tiny_rewards:together"}),
    "two": lambda: recipe(
        **{
            "rewards.verifiers": [
                {"kind": "python", "function": "tiny_rewards:spread"},
                {"kind": "python", "name": "other", "function": "tiny_rewards:first_digit"},
            ]
        }
    ),
    "gated": lambda: recipe(
        **{
            "rewards.verifiers": [
                {"kind": "python", "function": "tiny_rewards:spread", "gate": True},
                {"kind": "python", "name": "other", "function": "tiny_rewards:first_digit"},
            ]
        }
    ),
    "scored": lambda: verified({"kind": "reward_model", "path": "judge-1"}),
    "judged exact": lambda: judged({"kind": "exact"}, **LETTERS),
    "judged numeric": lambda: judged({"kind": "numeric"}, **NUMBERS, **{"rewards.verifiers": [RARELY]}),
    "judged regex": lambda: judged(RARELY),
    "judged format": lambda: judged({"kind": "format", "tags": ["a"]}, **TAGS),
    "judged python": lambda: judged({"kind": "python", "function": "tiny_rewards:spread"}),
    "judged reward_model": lambda: judged({"kind": "reward_model", "path": "judge-1"}),
    "watched": watched,
    "watched touchy": lambda: watched(repetition=0.001, stuffing=0.001, length=1.001, sameness=0.001),
    "watched long": lambda: {**watched(), "run": {"steps": 12}},
    "watched parts": lambda: watched({"kind": "python", "name": "other", "function": "tiny_rewards:lengths"}),
    "watched and evaluated": lambda: {
        **watched(),
        "data": {"train": {"path": "ones.jsonl"}, "eval": {"path": "ones.jsonl"}},
        "evaluation": {"every": 1},
    },
    "doubted": lambda: doubted({"kind": "python", "function": "tiny_rewards:spread"}),
    "ranked": lambda: recipe(
        **{**OFTEN_EVALUATED, "checkpoint": {"keep": 1, "best": {"metric": "eval/reward", "mode": "max"}}}
    ),
    "patient": lambda: recipe(
        **{**OFTEN_EVALUATED, "evaluation.early_stop": {"metric": "eval/reward", "mode": "max", "patience": 5}}
    ),
    **{
        f"programs {column}": lambda column=column: programs(column)
        for column in ("plain", "numpy", "busy", "sleepy", "large", "long", "threads", "loud")
    },
    "programs unsandboxed": lambda: programs(
        "plain", **{"sandbox.backend": "none", "sandbox.allow_unsandboxed": True, "sandbox.warm": 0}
    ),
    "programs served": lambda: programs("plain", **{"sandbox.url": "http://127.0.0.1:9"}),
    "programs asserted": lambda: programs("plain", {"tests": "asserts", "before": "plain"}),
    "programs printing": lambda: programs("printing", {"tests": "outputs"}),
    "unhurried": lambda: verified({"kind": "python", "function": "tiny_rewards:unhurried"}),
    "callers": lambda: verified({"kind": "python", "function": "tiny_rewards:counts_callers"}),
    "fails once": lambda: verified({"kind": "python", "function": "tiny_rewards:fails_once"}),
    "fails later": lambda: verified(
        {"kind": "python", "function": "tiny_rewards:fails_later"}, **{"rewards.retries": 0}
    ),
    "off-policy": lambda: recipe(**OFF_POLICY),
    "reference": lambda: recipe(**{"algorithm.kl_coef": 0.5}),
    "own": lambda: recipe(algorithm={"name": "own_algorithm:Own", "arguments": {"strength": 1.0}}),
    "taught": lambda: recipe(
        model={"path": "first"}, **{"algorithm.name": "opd", "algorithm.teacher": "second"}
    ),
    "taught whole": lambda: recipe(
        model={"path": "first"}, **{"algorithm.name": "gkd", "algorithm.teacher": "second"}
    ),
    "taught by two": lambda: recipe(
        model={"path": "first"},
        **{"algorithm.name": "opd", "algorithm.teachers": [{"path": "second"}, {"path": "chat"}]},
    ),
    "critic": lambda: recipe(
        **{
            "algorithm.name": "ppo",
            "critic": {"optimizer": {"learning_rate": 1e-2}},
            # The critic's first update shows in the policy of the second step, and its own settings in the third.
            "run.steps": 3,
            **OFF_POLICY,
        }
    ),
    "critic falling": lambda: recipe(
        **{
            "algorithm.name": "ppo",
            "critic": {"optimizer": {"learning_rate": 1e-2, "schedule": "linear"}},
            "run.steps": 3,
            **OFF_POLICY,
        }
    ),
    "critic of files": lambda: recipe(
        model={"path": "first"}, **{"algorithm.name": "ppo", "critic.optimizer.learning_rate": 1e-2}
    ),
    "shared critic": lambda: recipe(
        **{
            "algorithm.name": "ppo",
            "critic": {"shared": True, "optimizer": {"learning_rate": 1e-2}},
            "run.steps": 3,
            **OFF_POLICY,
        }
    ),
    "discounted": lambda: recipe(**{"algorithm.name": "reinforce_pp"}),
    "solved": lambda: verified(
        {"kind": "regex", "pattern": "^"}, algorithm={"name": "grpo", "without_spread": "resample"}
    ),
    "overlong": lambda: recipe(**{"algorithm.overlong.penalty": 1.0}),
    "half weight": lambda: recipe(**{"algorithm.correction": {"kind": "truncate", "high": 0.5}}),
    # The log-probabilities that the file has are not those of the policy.
    "other sampler": lambda: recorded(
        **{"offline.columns.logprobs": "other_logprobs", "algorithm.correction": {"kind": "truncate", "high": 2.0}}
    ),
    "falling": lambda: recipe(**{"training.optimizer.schedule": "linear"}),
    "warmup": lambda: recipe(warmup=WARMUP),
    "warmup falling": lambda: recipe(warmup={**WARMUP, "optimizer": {**WARMUP["optimizer"], "schedule": "linear"}}),
    **{f"examples of {method}": lambda method=method: examples(method) for method in METHODS},
    "recorded": recorded,
    "recorded as texts": lambda: recorded("texts.jsonl", **{"offline.logprobs": "none"}),
    "recorded and evaluated": lambda: recorded(
        **{"data.eval": HELD_OUT, "rewards": {"verifiers": [{"kind": "regex", "pattern": "[0-4]$"}]}}
    ),
    "distilled": lambda: examples("distillation", **DISTILLED),
    "distilled between": lambda: examples(
        "distillation", **{**DISTILLED, "supervised.divergence": "jensen_shannon"}
    ),
    "distilled by two": lambda: examples(
        "distillation", **{**DISTILLED, "supervised.teachers": [{"path": "second"}, {"path": "chat"}]}
    ),
    "distilled from a file": lambda: examples(
        "distillation", **{"model": {"path": "first"}, "supervised.targets": "targets.parquet"}
    ),
    "tools": tools,
    "programs called": lambda: tools(**{"environment.tools": [{"kind": "python"}], "run.steps": 1}),
    "calculator": lambda: tools(**{"environment.tools": [{"kind": "calculator"}]}),
    "texts": lambda: tools(**{"environment.tools": [{"kind": "retrieval", "folder": "texts", "passage_words": 4}]}),
    "server": lambda: tools(**{"environment.tools": [{"kind": "mcp", "command": [sys.executable, "server.py"]}]}),
    "dawdling": lambda: tools(**{"environment.tools": [{"kind": "function", "path": "tiny_worlds:dawdles"}]}),
    "calls": lambda: recipe(
        **{
            "model": {"path": "caller"},
            "data.train": {"path": "ones.jsonl"},
            "rollout.group_size": 16,
            "rollout.max_new_tokens": 24,
            "environment": {
                "kind": "tools",
                "tools": [{"kind": "calculator"}],
                "style": "hermes",
                "max_turn_tokens": 12,
                "max_turns": 2,
            },
        }
    ),
    "asked": asked,
    "asked slowly": lambda: asked(**{"environment.arguments": {"pause": 0.2}}),
    # Few rows, so that completions are under way when the weights change.
    "ahead": lambda: recipe(
        **{"rollout.max_staleness": 2, "rollout.engine.max_sequences": 5, "rollout.max_new_tokens": 12, "run.steps": 4}
    ),
    "ready": lambda: recipe(
        **{"rollout.max_staleness": 3, "rollout.window.order": "ready", "rollout.max_new_tokens": 12, "run.steps": 6}
    ),
    "past": lambda: replaying("uniform"),
    "past by priority": lambda: replaying("priority"),
    "past by pass rate": lambda: replaying("stratified"),
    "tree": lambda: tools(**{"rollout.tree": {"at": [1]}, "environment.max_turns": 4}),
    "played": played,
    "played slowly": lambda: played(**{"environment.arguments.pause": 0.2}),
    "played forgetfully": lambda: played(model={"path": "forgetful"}, **{"data.render": "chat"}),
    "penalised": lambda: tools(
        **{
            "rewards.verifiers": [{"kind": "environment"}, {"kind": "python", "function": "tiny_rewards:spread"}],
            "environment.malformed_penalty": 0.5,
        }
    ),
    "forgetful": lambda: asked(
        model={"path": "forgetful"}, **{"data.render": "chat", "rewards.verifiers": [{"kind": "environment"}]}
    ),
    "forgetful tools": lambda: tools(
        **{
            "model": {"path": "forgetful"},
            "data.render": "chat",
            "environment.opening": "+",
            "environment.closing": "=",
        }
    ),
    "judged environment": lambda: judged({"kind": "environment"}, **asked_settings()),
    "doors": doors,
    "doors slowly": lambda: doors(**{"environment.arguments": {"pause": 0.2}}),
    "doors penalised": lambda: doors(**{"environment.malformed_penalty": 0.5}),
    "forgetful doors": lambda: doors(
        **{"model": {"path": "forgetful"}, "data.render": "chat", "environment.render": "observation"}
    ),
    "generated": generated,
    "generated slowly": lambda: generated(
        **{"environment.generate": "tiny_slime:dawdles", "environment.arguments": {"says": "1", "pause": 0.2}}
    ),
    "generated in a chat": lambda: generated(model={"path": "chat"}, **{"data.render": "chat"}),
    "guessed": guessed,
    "guessed slowly": lambda: guessed("slow"),
    "guessed by name": lambda: guessed(**{"environment.actions": ["1", "2", "3"]}),
    "guessed penalised": lambda: guessed(**{"environment.malformed_penalty": 0.5}),
    "forgetful guesses": lambda: guessed(
        **{
            "model": {"path": "forgetful"},
            "data.render": "chat",
            "environment.action": {"number": "1"},
            "environment.action.metadata": {"said": "{action}"},
            "environment.show": "hint",
            "environment.max_turn_tokens": 3,
        }
    ),
    "worded": worded,
    "worded slowly": lambda: worded(**{"environment.arguments": {"task": {"pause": 0.2}}}),
    "worded calls": lambda: worded(**CALLING, **{"environment.style": "hermes"}),
    "forgetful words": lambda: worded(**{**CALLING, "model": {"path": "forgetful caller"}, "data.render": "chat"}),
    "slime": lambda: verified({"kind": "slime", "function": "tiny_slime:ones"}),
    "slime parts": lambda: verified({"kind": "slime", "function": "tiny_slime:parts", "reward_key": "ones"}),
    "slime groups": lambda: verified({"kind": "slime", "function": "tiny_slime:either"}),
    "gym": lambda: verified({"kind": "reasoning_gym"}, **{"data": {"train": {"path": "gym.jsonl"}}}),
    "conversations": lambda: examples("sft", model={"path": "chat"}),
    "often saved": lambda: recipe(**{"checkpoint.every": 1}),
    **{
        f"{prefix} {kind}": lambda prefix=prefix, settings=settings: sources(prefix, **settings)
        for prefix in ("data.train", "data.eval", "warmup.data")
        for kind, settings in {
            "file": {"path": "rows.jsonl"},
            "mixed": {"path": "mixed"},
            "saved": {"path": "saved"},
            "named": {"path": "named", "format": "huggingface", "subset": "one"},
            "python": {
                "path": "strop.data.arithmetic:problems",
                "arguments": {"count": 30, "digits": 1},
                "columns": {},
            },
        }.items()
    },
}  # fmt: skip


# --- the table -----------------------------------------------------------------------------------------------------


def of_a_source(prefix: str, shows: str) -> dict[str, Case]:
    return {
        f"{prefix}.path": Case("more.jsonl", shows, f"{prefix} file"),
        f"{prefix}.format": Case("jsonl", "outcome", f"{prefix} mixed"),
        f"{prefix}.split": Case("other", shows, f"{prefix} saved"),
        f"{prefix}.subset": Case("two", shows, f"{prefix} named"),
        f"{prefix}.arguments": Case({"count": 30, "digits": 1, "seed": 3}, shows, f"{prefix} python"),
        f"{prefix}.columns.prompt": Case("question", shows, f"{prefix} file"),
        f"{prefix}.columns.answer": Case("second", shows, f"{prefix} file"),
        f"{prefix}.limit": Case(2, shows, f"{prefix} file"),
    }  # fmt: skip


def of_a_verifier(kind: str, context: str, other: dict[str, Any]) -> dict[str, Case]:
    return {
        f"rewards.verifiers[{kind}].name": Case("mine", "names", context),
        f"rewards.verifiers[{kind}].weight": Case(0.5, "rewards", context),
        f"rewards.verifiers[{kind}].kind": Case(other, "names", context),
        f"rewards.verifiers[{kind}].clip": Case([0.1, 0.2], "rewards", context),
        f"rewards.verifiers[{kind}].when": Case(
            {"prompt": ["none", "such"]}, "outcome", context, says="no verifier applies"
        ),
        f"rewards.verifiers[{kind}].gate": Case(True, "refused", context, says="gate` has no effect"),
        f"rewards.verifiers[{kind}].requires": Case("other", "refused", context, says="requires 'other'"),
        f"rewards.verifiers[{kind}].passes_at": Case(0.5, "refused", context, says="passes_at` has no effect"),
        f"rewards.verifiers[{kind}].timeout": Case(29.0, "timeouts", context, steady=True),
    }


def of_an_optimizer(prefix: str, context: str, falling: str) -> dict[str, Case]:
    return {
        f"{prefix}.learning_rate": Case(1e-3, context=context),
        f"{prefix}.beta1": Case(0.5, context=context),
        f"{prefix}.beta2": Case(0.5, context=context),
        f"{prefix}.eps": Case(1e-2, context=context),
        f"{prefix}.weight_decay": Case(1.0, context=context),
        f"{prefix}.max_grad_norm": Case(1e-6, context=context),
        f"{prefix}.schedule": Case("linear", context=context),
        f"{prefix}.warmup_steps": Case(2, context=context),
        f"{prefix}.final_share": Case(0.5, context=falling),
        f"{prefix}.name": Case("muon", context=context),
        f"{prefix}.offload": Case(True, "refused", says=rf"{prefix}\.offload` has no effect on a CPU", context=context),
    }


def of_a_judge(kind: str, other: dict[str, Any], own: dict[str, Any]) -> dict[str, Case]:
    """A verifier of the evaluations, which touch nothing that is trained. own: other values of the kind's own keys."""
    changes = {"name": "mine", "weight": 0.5, "kind": other, **own}
    return {
        f"evaluation.verifiers[{kind}].{key}": Case(value, "evaluations", f"judged {kind}", steady=True)
        for key, value in changes.items()
    }


def of_an_environment(kind: str, context: str, slowly: str) -> dict[str, Case]:
    """The limits that environments of all kinds have."""
    late = "the environment failed in"
    return {
        f"environment[{kind}].max_turns": Case(1, context=context),
        f"environment[{kind}].max_turn_tokens": Case(1, context=context),
        f"environment[{kind}].max_tokens": Case(4, context=context),
        f"environment[{kind}].step_timeout": Case(0.01, "outcome", slowly, says=late),
        f"environment[{kind}].episode_timeout": Case(0.01, "outcome", slowly, says=late),
    }


NUMERIC = {"kind": "numeric"}
JUDGE = {"kind": "judge", "base_url": "http://localhost/v1", "model": "m"}
MISSING = {name: importlib.util.find_spec(name) is None for name in ("wandb", "mlflow")}

TABLE: dict[str, Case] = {
    "model.path": Case("second", context="folder"),
    "model.create.characters": Case("0123456789=+"),
    "model.create.hidden_size": Case(16),
    "model.create.layers": Case(2),
    "model.create.heads": Case(4),
    "model.create.key_value_heads": Case(1),
    "model.create.intermediate_size": Case(48),
    "model.create.context": Case(24, "model config"),
    "model.dtype": Case("bfloat16"),
    "model.lora.rank": Case(2, context="lora"),
    "model.lora.alpha": Case(4.0, context="lora"),
    "model.lora.rank_stabilised": Case(True, context="lora"),
    "model.lora.dora": Case(True, context="lora"),
    "model.lora.dropout": Case(0.5, context="lora"),
    "model.lora.targets": Case(["q_proj"], context="lora"),
    "model.lora.adaptive.target_rank": Case(1, context="adaptive"),
    "model.lora.adaptive.tinit": Case(4, context="adaptive"),
    "model.lora.adaptive.tfinal": Case(5, context="adaptive"),
    "model.lora.adaptive.delta_t": Case(3, context="adaptive"),
    "model.lora.adaptive.beta1": Case(0.01, context="adaptive"),
    "model.lora.adaptive.beta2": Case(0.01, context="adaptive"),
    "model.lora.adaptive.orth_reg_weight": Case(5.0, context="adaptive"),
    "model.activation_checkpointing": Case(True, "blocks", steady=True),
    "model.trust_remote_code": Case(True, "outcome", "code"),
    **of_a_source("data.train", "parameters"),
    **of_a_source("data.eval", "evaluations"),
    "data.shuffle": Case(False, "prompts"),
    "data.curriculum.solved_at": Case(0.5, "prompts", "curriculum"),
    "data.curriculum.failed_at": Case(0.5, "prompts", "curriculum"),
    "data.curriculum.floor": Case(0.9, "prompts", "curriculum"),
    "data.curriculum.memory": Case(1, "prompts", "curriculum"),
    "data.curriculum.min_attempts": Case(4, "prompts", "curriculum"),
    "data.curriculum.passes_at": Case(2.0, "prompts", "curriculum"),
    "data.curriculum.prefer": Case("uncertain", "prompts", "curriculum"),
    "data.render": Case("chat", "prompts", "chat"),
    "data.system_prompt": Case("1+1=2", "prompts", "chat rendered"),
    "data.prompt_template": Case("0{prompt}", "prompts"),
    "data.max_prompt_tokens": Case(3, "refused", says="data.max_prompt_tokens"),
    "data.overlong_prompts": Case("skip", "outcome", "two digits"),
    **of_a_verifier("exact", "letters", RARELY),
    "rewards.verifiers[exact].ignore_case": Case(True, "rewards", "letters"),
    "rewards.verifiers[exact].strip": Case(False, "rewards", "letters"),
    **of_a_verifier("numeric", "numbers", {"kind": "exact"}),
    "rewards.verifiers[numeric].take": Case("first", "rewards", "numbers"),
    "rewards.verifiers[numeric].tolerance": Case(20.0, "rewards", "numbers"),
    **of_a_verifier("regex", "pattern", NUMERIC),
    "rewards.verifiers[regex].pattern": Case("[5-9]", "rewards", "pattern"),
    **of_a_verifier("format", "tags", NUMERIC),
    "rewards.verifiers[format].tags": Case(["a", "b"], "rewards", "tags"),
    "rewards.verifiers[format].json_schema": Case({"type": "integer", "maximum": 99}, "rewards", "json"),
    "rewards.verifiers[format].json_tag": Case("a", "rewards", "json"),
    **of_a_verifier("math", "maths", NUMERIC),
    "rewards.verifiers[math].take": Case("boxed", "rewards", "maths"),
    "rewards.verifiers[math].tolerance": Case(20.0, "rewards", "maths"),
    **of_a_verifier("choice", "choices", RARELY),
    "rewards.verifiers[choice].letters": Case("BCDE", "outcome", "choices", says="none of the letters"),
    "rewards.verifiers[choice].answers": Case("index", "outcome", "choices", says="no index of"),
    "rewards.verifiers[choice].take": Case("only", "rewards", "choices"),
    **of_a_verifier("judge", "graded", RARELY),
    "rewards.verifiers[judge].base_url": Case("http://127.0.0.1:1/v1", "outcome", "graded", says="refused"),
    "rewards.verifiers[judge].model": Case("other", "rewards", "graded"),
    "rewards.verifiers[judge].api_key_env": Case("NO_SUCH_KEY", "refused", "graded", says="NO_SUCH_KEY' is not set"),
    "rewards.verifiers[judge].rubric": Case("Good? {completion}", "rewards", "graded"),
    "rewards.verifiers[judge].system": Case("Be kind.", "rewards", "graded"),
    "rewards.verifiers[judge].read": Case("number", "rewards", "graded"),
    "rewards.verifiers[judge].score_key": Case("style", "rewards", "graded"),
    "rewards.verifiers[judge].pattern": Case(r"else (?P<score>\d+)", "rewards", "graded by pattern"),
    "rewards.verifiers[judge].scale": Case([0, 20], "rewards", "graded"),
    "rewards.verifiers[judge].votes": Case(2, "rewards", "graded by many"),
    "rewards.verifiers[judge].combine": Case("median", "rewards", "graded by many"),
    "rewards.verifiers[judge].temperature": Case(0.5, "rewards", "graded"),
    "rewards.verifiers[judge].max_tokens": Case(64, "rewards", "graded"),
    "rewards.verifiers[judge].arguments": Case({"seed": 1}, "rewards", "graded"),
    "rewards.verifiers[judge].cache": Case("judge.sqlite", "requests", "graded", steady=True),
    "rewards.verifiers[judge].concurrency": Case(1, "callers", "graded", steady=True),
    "rewards.verifiers[judge].retries": Case(0, "outcome", "graded at the second try", says="HTTP 500"),
    **of_a_verifier("http", "served", RARELY),
    "rewards.verifiers[http].url": Case("http://127.0.0.1:1/", "outcome", "served", says="refused"),
    "rewards.verifiers[http].api_key_env": Case("NO_SUCH_KEY", "refused", "served", says="NO_SUCH_KEY' is not set"),
    "rewards.verifiers[http].columns": Case(["answer"], "rewards", "served"),
    "rewards.verifiers[http].batch_size": Case(3, "requests", "served", steady=True),
    "rewards.verifiers[http].concurrency": Case(1, "callers", "served in small parts", steady=True),
    "rewards.verifiers[http].retries": Case(0, "outcome", "served at the second try", says="HTTP 500"),
    **of_a_verifier("python", "plain", RARELY),
    # What these three do is the same for all kinds.
    "rewards.verifiers[python].gate": Case(True, "rewards", "two"),
    "rewards.verifiers[python].requires": Case("other", "rewards", "two"),
    "rewards.verifiers[python].passes_at": Case(0.5, "rewards", "gated"),
    "rewards.verifiers[python].timeout": Case(0.05, "outcome", "unhurried", says=r"timeout.*rewards\.timeout"),
    "rewards.verifiers[python].isolate": Case("process", "workers", steady=True),
    "rewards.verifiers[python].call_with": Case("completion", "rewards", "together"),
    "rewards.verifiers[python].function": Case("tiny_rewards:lengths", "rewards"),
    "rewards.verifiers[python].arguments": Case({"scale": 2.0}, "rewards"),
    **of_a_verifier("code", "programs plain", RARELY),
    "rewards.verifiers[code].timeout": Case(3.0, "refused", "programs plain", says=r"sandbox\.limits"),
    "rewards.verifiers[code].tests": Case("wrong", "rewards", "programs plain"),
    "rewards.verifiers[code].style": Case("stdin", "rewards", "programs plain"),
    "rewards.verifiers[code].entry_point": Case("other", "rewards", "programs plain"),
    "rewards.verifiers[code].setup": Case("first", "rewards", "programs asserted"),
    "rewards.verifiers[code].before": Case("nothing", "rewards", "programs plain"),
    "rewards.verifiers[code].take": Case("block", "rewards", "programs plain"),
    "rewards.verifiers[code].credit": Case("share", "rewards", "programs asserted"),
    "rewards.verifiers[code].compare": Case("words", "rewards", "programs printing"),
    "rewards.verifiers[code].tolerance": Case(0.0, "rewards", "programs plain"),
    "rewards.verifiers[code].max_tests": Case(1, "rewards", "programs asserted"),
    "sandbox.backend": Case("none", "refused", "programs plain", says="does not isolate"),
    "sandbox.allow_unsandboxed": Case(False, "outcome", "programs unsandboxed", says="does not isolate"),
    "sandbox.url": Case("http://127.0.0.1:9", "refused", "programs plain", says="does not answer"),
    "sandbox.token_variable": Case("NO_SUCH", "refused", "programs served", says="NO_SUCH is not set"),
    "sandbox.python": Case("/no/such/python", "refused", "programs plain", says=r"no interpreter '/no/such/python'"),
    "sandbox.packages": Case(False, "rewards", "programs numpy"),
    "sandbox.workers": Case(3, "sandboxes", "programs plain", steady=True),
    "sandbox.warm": Case(0, "sandboxes", "programs plain", steady=True),
    "sandbox.limits.cpu_seconds": Case(1, "rewards", "programs busy"),
    "sandbox.limits.wall_seconds": Case(0.2, "rewards", "programs sleepy"),
    "sandbox.limits.total_seconds": Case(0.7, "rewards", "programs sleepy"),
    "sandbox.limits.memory_mib": Case(128, "rewards", "programs large"),
    "sandbox.limits.disk_mib": Case(4, "rewards", "programs long"),
    "sandbox.limits.processes": Case(4, "rewards", "programs threads"),
    "sandbox.limits.output_kib": Case(8, "rewards", "programs loud"),
    **of_a_verifier("reward_model", "scored", RARELY),
    "rewards.verifiers[reward_model].path": Case("judge-2", "rewards", "scored"),
    "rewards.verifiers[reward_model].render": Case("chat", "rewards", "scored"),
    "rewards.verifiers[reward_model].device": Case(
        "cuda" if not torch.cuda.is_available() else "mps", "refused", "scored", says="there is no (cuda|mps) device"
    ),
    "rewards.clip": Case([0.1, 0.2], "rewards"),
    "rewards.worker_memory": Case(0.01, "outcome", "pattern", says="worker"),
    "rewards.timeout": Case(0.05, "outcome", "unhurried", says=r"timeout.*rewards\.timeout"),
    "rewards.retries": Case(0, "outcome", "fails once", says="busy"),
    "rewards.max_error_share": Case(0.0, "outcome", "fails later", says=r"max_error_share allows 0%"),
    "rewards.correct_at": Case(0.5, "metrics", steady=True),
    "rewards.workers": Case(1, "callers", "callers", steady=True),
    "algorithm.name": Case("dr_grpo"),
    "algorithm.baseline": Case("none"),
    "algorithm.scale": Case("none"),
    "algorithm.loss": Case("reinforce", context="off-policy"),
    "algorithm.clip_low": Case(0.01, context="off-policy"),
    "algorithm.clip_high": Case(0.01, context="off-policy"),
    "algorithm.dual_clip": Case(1.01, context="off-policy"),
    "algorithm.aggregation": Case("token_mean"),
    "algorithm.kl_coef": Case(0.5),
    "algorithm.kl_kind": Case("k1", context="reference"),
    "algorithm.kl_in": Case("reward", context="reference"),
    "algorithm.entropy_coef": Case(0.1),
    "algorithm.dialect": Case("prime_rl"),
    "algorithm.arguments": Case({"strength": 2.0}, context="own"),
    "algorithm.teacher": Case("chat", context="taught"),
    "algorithm.teachers[].path": Case("first", context="taught by two"),
    "algorithm.teachers[].weight": Case(5.0, context="taught by two"),
    "algorithm.divergence": Case("forward_kl", context="taught whole"),
    "algorithm.jsd_beta": Case(0.1, context="taught whole"),
    "algorithm.top_k": Case(2, context="taught whole"),
    "algorithm.scale_eps": Case(0.1),
    "algorithm.gamma": Case(0.5, context="discounted"),
    "algorithm.whiten_unbiased": Case(False, context="discounted"),
    "algorithm.lam": Case(0.5, context="critic"),
    "algorithm.observations": Case("state", "refused", says="observations is not a choice"),
    "algorithm.value_clip": Case(0.001, context="critic"),
    "algorithm.kl_clamp": Case(1e-5, context="reference"),
    "algorithm.kl_input_clamp": Case(1e-4, context="reference"),
    "algorithm.kl_importance_weighted": Case(True, context="reference"),
    "algorithm.positive_nll": Case(0.5),
    "algorithm.without_spread": Case("resample", "completions", "pattern"),
    "algorithm.max_refills": Case(1, "metrics", "solved"),
    "algorithm.overlong.filter": Case(True),
    "algorithm.overlong.penalty": Case(1.0),
    "algorithm.overlong.buffer": Case(3, context="overlong"),
    "algorithm.correction.kind": Case("mask", context="half weight"),
    "algorithm.correction.level": Case("sequence", context="other sampler"),
    "algorithm.correction.low": Case(1.0, context="other sampler"),
    "algorithm.correction.high": Case(0.3, context="other sampler"),
    "algorithm.correction.veto": Case(0.9999, context="other sampler"),
    "algorithm.correction.off_policy": Case(0.0, context="off-policy"),
    "rollout.groups_per_step": Case(2),
    "rollout.group_size": Case(3),
    "rollout.max_new_tokens": Case(3, "completions"),
    "rollout.temperature": Case(0.5, "completions"),
    "rollout.stop": Case(["1", "3"], "completions"),
    "rollout.max_staleness": Case(1),
    "rollout.in_flight_updates": Case(False, context="ahead"),
    "rollout.update_every": Case(2, "refused", context="ahead", says=r"rollout\.update_every` has no effect"),
    # With vLLM itself they are in tests/loops/test_vllm_run.py, which needs an environment of its own.
    "rollout.engine.kind": Case("vllm", "refused", says=r"rollout\.engine\.kind: vllm` needs the package 'vllm'"),
    "rollout.engine.max_sequences": Case(3, "passes", steady=True),
    "rollout.engine.prefill_tokens": Case(5, "passes", steady=True),
    "rollout.engine.pack_weights": Case(False, "packed", "wide", steady=True),
    "rollout.engine.memory": Case(0.5, "refused", says=r"rollout\.engine\.memory` has no effect on the engine local"),
    "rollout.engine.eager": Case(False, "refused", says=r"rollout\.engine\.eager: false` compiles for a GPU"),
    "rollout.engine.consistent": Case(True, "exact", steady=True),
    "rollout.engine.tensor": Case(2, "refused", says=r"rollout\.engine\.tensor` has no effect on the engine local"),
    "rollout.engine.merge_adapters": Case(
        False, "refused", says=r"rollout\.engine\.merge_adapters` has no effect on the engine local"
    ),
    "rollout.engine.prefix_caching": Case(
        False, "refused", says=r"rollout\.engine\.prefix_caching` has no effect on the engine local"
    ),
    "rollout.engine.after_update": Case("recompute", context="ahead"),
    "rollout.engine.sleep": Case("always", "sleeps", steady=True),
    "training.offload": Case(True, "refused", says=r"training\.offload` has no effect on a CPU"),
    **of_an_optimizer("training.optimizer", "plain", "falling"),
    "training.mini_batches": Case(2),
    "training.epochs": Case(2),
    "training.tokens_per_micro_batch": Case(24, "passes", steady=True),
    "training.logprob_chunk": Case(8, "logits", steady=True),
    "critic.shared": Case(True, context="critic"),
    "critic.value_coef": Case(1.0, context="shared critic"),
    "critic.path": Case("judge-1", context="critic of files"),
    "critic.warmup_steps": Case(1, context="critic"),
    **of_an_optimizer("critic.optimizer", "critic", "critic falling"),
    **of_a_source("warmup.data", "parameters"),
    "warmup.steps": Case(2, context="warmup"),
    "warmup.batch_size": Case(2, context="warmup"),
    **of_an_optimizer("warmup.optimizer", "warmup", "warmup falling"),
    "supervised.method": Case("orpo", context="examples of simpo"),
    "supervised.batch_size": Case(2, context="examples of sft"),
    "supervised.max_tokens": Case(3, "refused", "examples of sft", says="at most 3 fit"),
    "supervised.columns.messages": Case("talk", context="conversations"),
    "supervised.columns.chosen": Case("third", context="examples of dpo"),
    "supervised.columns.rejected": Case("third", context="examples of dpo"),
    "supervised.columns.margin": Case("by", context="examples of reward_model"),
    "supervised.columns.ranked": Case("best", context="examples of reward_model"),
    "supervised.columns.completion": Case("third", context="examples of kto"),
    "supervised.columns.label": Case("unlike", context="examples of kto"),
    "supervised.columns.steps": Case("best", context="examples of process_reward"),
    "supervised.columns.labels": Case("others", context="examples of process_reward"),
    "supervised.beta": Case(0.5, context="examples of dpo"),
    "supervised.label_smoothing": Case(0.3, context="examples of cdpo"),
    "supervised.length_normalised": Case(True, context="examples of dpo"),
    "supervised.margin": Case(0.2, context="examples of simpo"),
    "supervised.nll_coef": Case(0.5, context="examples of dpo"),
    "supervised.desirable_weight": Case(2.0, context="examples of kto"),
    "supervised.undesirable_weight": Case(2.0, context="examples of kto"),
    "supervised.centre": Case(0.5, context="examples of reward_model"),
    "offline.columns.group": Case("other_group", context="recorded"),
    "offline.columns.prompt_ids": Case("other_prompt_ids", context="recorded"),
    "offline.columns.completion": Case("other_completion", context="recorded as texts"),
    "offline.columns.completion_ids": Case("other_completion_ids", context="recorded"),
    "offline.columns.logprobs": Case("other_logprobs", context="recorded"),
    "offline.columns.reward": Case("other_reward", context="recorded"),
    "offline.columns.status": Case("other_status", context="recorded"),
    "offline.columns.temperature": Case(
        "other_temperature", "refused", "recorded", says=r"sampled at temperature 0\.5, and rollout\.temperature is 1"
    ),
    "offline.logprobs": Case("none", context="recorded"),
    "offline.rewards": Case("verify", context="recorded and evaluated"),
    "supervised.reference": Case("precomputed", "files", "examples of dpo", steady=True),
    "supervised.neftune_alpha": Case(5.0, context="examples of sft"),
    "supervised.teachers[].path": Case("chat", context="distilled"),
    "supervised.teachers[].weight": Case(5.0, context="distilled by two"),
    "supervised.targets": Case("other-targets.parquet", context="distilled from a file"),
    "supervised.divergence": Case("reverse_kl", context="distilled"),
    "supervised.jsd_beta": Case(0.1, context="distilled between"),
    "supervised.top_k": Case(2, context="distilled"),
    "supervised.temperature": Case(3.0, context="distilled"),
    "supervised.cross_entropy_weight": Case(0.5, context="distilled"),
    "environment[tools].kind": Case({"kind": "python", "factory": "tiny_worlds:Asks"}, context="tools"),
    "environment[tools].max_turns": Case(1, context="tools"),
    "environment[tools].max_turn_tokens": Case(3, context="tools"),
    "environment[tools].max_tokens": Case(6, context="tools"),
    "environment[tools].step_timeout": Case(0.01, "outcome", "dawdling", says="the environment failed in"),
    "environment[tools].episode_timeout": Case(0.01, "outcome", "dawdling", says="the environment failed in"),
    "environment[tools].keep_history": Case(True, context="forgetful tools"),
    "environment[python].kind": Case(TOOLS, "outcome", "asked", says="no verifier applies"),
    "environment[python].max_turns": Case(1, context="asked"),
    "environment[python].max_turn_tokens": Case(2, context="asked"),
    "environment[python].max_tokens": Case(4, context="asked"),
    "environment[python].step_timeout": Case(0.01, "outcome", "asked slowly", says="the environment failed in"),
    "environment[python].episode_timeout": Case(0.01, "outcome", "asked slowly", says="the environment failed in"),
    "environment[python].keep_history": Case(True, context="forgetful"),
    "environment[tools].tools[calculator].kind": Case(
        {"kind": "function", "path": "tiny_worlds:twice"}, context="calculator"
    ),
    "environment[tools].tools[function].kind": Case({"kind": "calculator"}, context="tools"),
    "environment[tools].tools[function].path": Case("tiny_worlds:backwards", context="tools"),
    "environment[tools].tools[python].kind": Case({"kind": "calculator"}, context="programs called"),
    "environment[tools].tools[retrieval].kind": Case({"kind": "calculator"}, context="texts"),
    "environment[tools].tools[retrieval].folder": Case("other-texts", context="texts"),
    "environment[tools].tools[retrieval].top": Case(1, context="texts"),
    "environment[tools].tools[retrieval].passage_words": Case(1, context="texts"),
    "environment[tools].tools[mcp].kind": Case({"kind": "calculator"}, context="server"),
    "environment[tools].tools[mcp].command": Case([sys.executable, "server.py", "other"], context="server"),
    "environment[tools].tools[mcp].url": Case(
        "http://localhost:1", "refused", "server", says="either `command` or `url`"
    ),
    "environment[tools].style": Case("hermes", "refused", "tools", says="`opening` and `closing` are for"),
    "environment[tools].opening": Case("1", context="tools"),
    "environment[tools].closing": Case("+", context="tools"),
    "environment[tools].result": Case("1{result}2", context="tools"),
    "environment[tools].malformed_penalty": Case(2.0, "rewards", "penalised"),
    "environment[tools].max_calls": Case(1, context="calls"),
    "environment[tools].call_timeout": Case(0.01, context="dawdling"),
    "environment[tools].max_result_characters": Case(1, context="tools"),
    "environment[python].factory": Case("tiny_worlds:Insists", context="asked"),
    "environment[python].arguments": Case({"text": "2"}, context="asked"),
    "environment[self_play].kind": Case({"kind": "python", "factory": "tiny_worlds:Asks"}, context="played"),
    "environment[self_play].max_turns": Case(3, context="played"),
    "environment[self_play].max_turn_tokens": Case(1, context="played"),
    "environment[self_play].max_tokens": Case(2, context="played"),
    "environment[self_play].step_timeout": Case(0.01, "outcome", "played slowly", says="the environment failed in"),
    "environment[self_play].episode_timeout": Case(0.01, "outcome", "played slowly", says="the environment failed in"),
    "environment[self_play].keep_history": Case(True, context="played forgetfully"),
    "environment[self_play].factory": Case("tiny_worlds:Mirrors", context="played"),
    "environment[self_play].arguments": Case({"turns": 2}, context="played"),
    "rollout.window.order": Case("ready", "names", "ahead"),
    "rollout.window.slack": Case(2, "metrics", "ready"),
    "rollout.window.past.groups": Case(3, context="past"),
    "rollout.window.past.keep": Case(4, context="past"),
    "rollout.window.past.max_age": Case(1, context="past"),
    "rollout.window.past.select": Case("priority", context="past"),
    "rollout.window.past.priority": Case("advantage", context="past by priority"),
    "rollout.window.past.exponent": Case(5.0, context="past by priority"),
    "rollout.window.past.strata": Case(2, context="past by pass rate"),
    "rollout.tree.at": Case([2], context="tree"),
    "rollout.tree.branches": Case(3, context="tree"),
    **of_a_verifier("environment", "asked", RARELY),
    "alarms.action": Case("off", "names", steady=True),
    "alarms.baseline_steps": Case(2, "metrics", "watched", steady=True),
    "alarms.half_life": Case(1, "metrics", "watched", steady=True),
    "alarms.patience": Case(3, "metrics", "watched touchy", steady=True),
    "alarms.repetition": Case(0.5, "metrics", "watched", steady=True),
    "alarms.stuffing": Case(0.5, "metrics", "watched", steady=True),
    "alarms.length": Case(1.1, "metrics", "watched", steady=True),
    "alarms.sameness": Case(0.5, "metrics", "watched", steady=True),
    "alarms.dominance": Case(None, "names", "watched parts", steady=True),
    "alarms.jump": Case(None, "names", "watched long", steady=True),
    "alarms.held_out": Case(None, "names", "watched and evaluated", steady=True),
    "alarms.second_opinion.share": Case(0.5, "metrics", "doubted", steady=True),
    "alarms.second_opinion.correct_at": Case(0.5, "metrics", "doubted", steady=True),
    "alarms.second_opinion.disagreement": Case(0.999, "metrics", "doubted", steady=True),
    "alarms.second_opinion.verifiers[python].function": Case(
        "tiny_rewards:lengths", "metrics", "doubted", steady=True
    ),
    **of_a_verifier("reasoning_gym", "gym", RARELY),
    "rewards.verifiers[reasoning_gym].take": Case("tag", "rewards", "gym"),
    **of_a_verifier("slime", "slime", RARELY),
    "rewards.verifiers[slime].function": Case("tiny_slime:twos", "rewards", "slime"),
    "rewards.verifiers[slime].arguments": Case({"scale": 2.0}, "rewards", "slime"),
    "rewards.verifiers[slime].reward_key": Case("twos", "rewards", "slime parts"),
    "rewards.verifiers[slime].isolate": Case("process", "workers", "slime", steady=True),
    "rewards.verifiers[slime].call_with": Case("group", "rewards", "slime groups"),
    **of_an_environment("gymnasium", "doors", "doors slowly"),
    "environment[gymnasium].kind": Case({"kind": "python", "factory": "tiny_worlds:Asks"}, context="doors"),
    "environment[gymnasium].keep_history": Case(True, context="forgetful doors"),
    "environment[gymnasium].id": Case("tiny_gym:BriefDoors-v0", context="doors"),
    "environment[gymnasium].arguments": Case({"rounds": 1}, context="doors"),
    "environment[gymnasium].render": Case("observation", context="doors"),
    "environment[gymnasium].actions": Case(["3", "1", "2"], context="doors"),
    "environment[gymnasium].take": Case("whole", context="doors"),
    "environment[gymnasium].seed": Case("other", context="doors"),
    "environment[gymnasium].observation": Case("{observation}{step}", context="doors"),
    "environment[gymnasium].opening": Case("{prompt}{observation}", context="doors"),
    "environment[gymnasium].malformed": Case("end", context="doors"),
    "environment[gymnasium].malformed_penalty": Case(2.0, "rewards", "doors penalised"),
    **of_an_environment("openenv", "guessed", "guessed slowly"),
    "environment[openenv].kind": Case({"kind": "python", "factory": "tiny_worlds:Asks"}, context="guessed"),
    "environment[openenv].keep_history": Case(True, context="forgetful guesses"),
    "environment[openenv].url": Case("http://127.0.0.1:1", "refused", "guessed", says="does not answer"),
    "environment[openenv].arguments": Case({"high": 1}, context="guessed"),
    "environment[openenv].action": Case({"number": "1{action}"}, "rewards", "guessed"),
    "environment[openenv].actions": Case(["1", "2", "3"], "rewards", "guessed"),
    "environment[openenv].take": Case("whole", "rewards", "guessed by name"),
    "environment[openenv].show": Case("hint", context="guessed"),
    "environment[openenv].seed": Case("other", "rewards", "guessed"),
    "environment[openenv].sessions": Case(2, "callers", "guessed", steady=True),
    "environment[openenv].observation": Case("{observation}{step}", context="guessed"),
    "environment[openenv].opening": Case("{observation}{prompt}", context="guessed"),
    "environment[openenv].malformed": Case("end", context="guessed"),
    "environment[openenv].malformed_penalty": Case(2.0, "rewards", "guessed penalised"),
    **of_an_environment("verifiers", "worded calls", "worded slowly"),
    "environment[verifiers].kind": Case({"kind": "python", "factory": "tiny_worlds:Asks"}, context="worded"),
    "environment[verifiers].keep_history": Case(True, context="forgetful words"),
    "environment[verifiers].taskset": Case("other_taskset", "rewards", "worded"),
    "environment[verifiers].arguments": Case({"count": "x"}, "refused", "worded", says="count"),
    "environment[verifiers].settings": Case({"id": "best-of-n", "n": 2}, context="worded"),
    "environment[verifiers].style": Case("llama3", context="worded calls"),
    **of_an_environment("slime", "generated", "generated slowly"),
    "environment[slime].kind": Case({"kind": "python", "factory": "tiny_worlds:Asks"}, context="generated"),
    "environment[slime].keep_history": Case(True, "refused", "generated", says="keep_history` has no effect"),
    "environment[slime].generate": Case("tiny_slime:by_text", "completions", "generated"),
    "environment[slime].arguments": Case({"says": "2"}, context="generated"),
    "environment[slime].prompt": Case("given", context="generated in a chat"),
    "evaluation.every": Case(1, "evaluations", "evaluated", steady=True),
    "evaluation.prompts": Case(2, "evaluations", "evaluated", steady=True),
    "evaluation.samples": Case(3, "evaluations", "evaluated by chance", steady=True),
    "evaluation.temperature": Case(1.0, "evaluations", "evaluated", steady=True),
    "evaluation.max_new_tokens": Case(1, "evaluations", "evaluated", steady=True),
    "evaluation.correct_at": Case(0.5, "evaluations", "judged python", steady=True),
    "evaluation.early_stop.metric": Case("eval/completion_length", "metrics", "patient"),
    "evaluation.early_stop.mode": Case("min", "metrics", "patient"),
    "evaluation.early_stop.patience": Case(1, "metrics", "patient"),
    "evaluation.early_stop.min_delta": Case(5.0, "metrics", "patient"),
    **of_a_judge("exact", RARELY, {"ignore_case": True, "strip": False}),
    **of_a_judge("numeric", {"kind": "exact"}, {"take": "first", "tolerance": 20.0}),
    **of_a_judge("regex", NUMERIC, {"pattern": "[5-9]"}),
    **of_a_judge("format", NUMERIC, {"tags": ["a", "b"]}),
    **of_a_judge("python", RARELY, {"function": "tiny_rewards:first_digit", "arguments": {"scale": 2.0}}),
    **of_a_judge("environment", RARELY, {}),
    **of_a_judge("reward_model", RARELY, {"path": "judge-2", "render": "chat"}),
    "evaluation.verifiers[reward_model].device": Case(
        "mps" if torch.cuda.is_available() else "cuda", "refused", "judged reward_model", says="there is no (cuda|mps)"
    ),
    "checkpoint.best.metric": Case("eval/completion_length", "pointers", "ranked", steady=True),
    "checkpoint.best.mode": Case("min", "pointers", "ranked", steady=True),
    "checkpoint.best.keep": Case(2, "files", "ranked", steady=True),
    "checkpoint.every": Case(1, "files", steady=True),
    "checkpoint.keep": Case(1, "files", "often saved", steady=True),
    "training.compile": Case(True, "compiled", steady=True),
    "checkpoint.in_background": Case(True, "behind", steady=True),
    "tracking.display": Case("plain", "text", steady=True),
    "tracking.tensorboard": Case(True, "files", steady=True),
    "tracking.wandb_project": Case("p", "refused", says="tracking.wandb_project"),
    "tracking.mlflow_uri": Case("http://localhost:1", "refused", says="tracking.mlflow_uri"),
    "tracking.episodes_every": Case(2, "files", steady=True),
    "tracking.load_every": Case(0.0, "files", steady=True),
    "run.steps": Case(1),
    "run.seed": Case(1),
    "run.name": Case("mine", "folder", steady=True),
    "run.folder": Case("elsewhere", "folder", steady=True),
    "hardware.device": Case("cuda" if torch.backends.mps.is_available() else "mps", "refused", says="hardware.device"),
    "hardware.threads": Case(2, "threads", steady=True),
    "hardware.deterministic": Case(False, "deterministic", steady=True),
}  # fmt: skip


# --- what the recipes need -----------------------------------------------------------------------------------------


OWN = """
from dataclasses import dataclass
from strop.algorithms.policy_gradient import PolicyGradient

@dataclass(kw_only=True)
class Own(PolicyGradient):
    strength: float = 1.0

    def rewards(self, batch):
        return super().rewards(batch) ** self.strength
"""


MCP_SERVER = """
import sys
from mcp.server.mcpserver import MCPServer

server = MCPServer("words")

@server.tool()
def say(text: str) -> str:
    "Says something."
    return "2" if len(sys.argv) > 1 else text + "1"

server.run("stdio")
"""


OTHER_TASKSET = """
import tiny_taskset
import verifiers.v1 as vf

class OtherTask(tiny_taskset.WordTask):
    @vf.reward(weight=1.0)
    async def long(self, trace: vf.Trace) -> float:
        return len(trace.last_reply) / 8

class OtherTaskset(vf.Taskset[OtherTask, tiny_taskset.WordTasksetConfig]):
    def load(self):
        return []

__all__ = ["OtherTaskset"]
"""
RETURNS = "def f(): return 1.0000001\ndef g(): return 2\n"
DOES = {
    "plain": RETURNS,
    "nothing": "\n",
    "numpy": RETURNS + "import numpy\n",
    "busy": RETURNS + "import time\nwhile time.process_time() < 1.6: pass\n",
    "sleepy": RETURNS + "import time\ntime.sleep(0.5)\n",
    "large": RETURNS + "block = bytearray(200 << 20)\n",
    "long": RETURNS + "open('f', 'wb').write(bytes(8 << 20))\n",
    "threads": RETURNS
    + "import threading\nstay = threading.Event()\n"
    + "for n in range(8): threading.Thread(target=stay.wait, daemon=True).start()\n",
    "loud": RETURNS + "print('x' * (32 << 10))\n",
    "printing": RETURNS + "print('1  2')\n",
}
TESTED = {
    "prompt": "1",
    "calls": [{"args": [], "expected": 1.0}, {"args": [], "expected": 1.0}],
    "wrong": [{"args": [], "expected": 2.0}],
    "asserts": ["assert g() == 2", "assert g() == ANSWER"],
    "first": "ANSWER = 2",
    "outputs": [{"input": "", "output": "1 2"}],
    "entry_point": "f",
    "other": "g",
    **DOES,
}


def write_rows(path: Path, rows: list[dict[str, Any]]) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with the data and models that the recipes name; the working folder of every run."""
    folder = tmp_path_factory.mktemp("walk")
    rows = [
        {"prompt": f"{n}+{n + 1}=", "question": f"{n}=", "first": str(2 * n + 1), "second": str(n)} for n in range(9)
    ]
    others = [{**row, "prompt": f"{row['question']}{row['prompt']}"} for row in rows]
    write_rows(folder / "rows.jsonl", rows)
    write_rows(folder / "more.jsonl", others)
    write_rows(folder / "letters.jsonl", [{"prompt": "a=", "answer": "a"}, {"prompt": "A=", "answer": "A"}])
    write_rows(folder / "numbers.jsonl", [{"prompt": "1 ", "answer": 1}, {"prompt": "2 ", "answer": 2}])
    write_rows(folder / "tags.jsonl", [{"prompt": "0", "answer": "<a>1</a>"}, {"prompt": "1", "answer": "<a>0</a>"}])
    write_rows(folder / "programs.jsonl", [TESTED])
    write_rows(folder / "mixed" / "rows.jsonl", rows)
    write_rows(
        folder / "examples.jsonl",
        [
            {
                "prompt": f"{n}=",
                "answer": str(n),
                "chosen": str(n),
                "rejected": str(n + 11),
                "third": str(n + 22),
                "by": n / 4,
                "best": [str(n), str(n + 1), str(n + 2)],
                "completion": str(n),
                "label": n % 2 == 0,
                "unlike": n % 3 == 0,
                "steps": [str(n), "1", "2"],
                "labels": [True, False, n % 2 == 0],
                "others": [False, True, True],
                "talk": [{"role": "user", "content": "1"}, {"role": "assistant", "content": str(n)}],
            }
            for n in range(9)
        ],
    )
    (folder / "own_algorithm.py").write_text(OWN)
    (folder / "server.py").write_text(MCP_SERVER)
    write_rows(folder / "ones.jsonl", [{"prompt": "1", "answer": "1"}, {"prompt": "11", "answer": "2"}])
    numbers = [{"prompt": "1", "seed": n, "other": 100 + n} for n in range(6)]
    write_rows(folder / "doors.jsonl", numbers)
    sums = [{"prompt": f"{n}+{n}=", "answer": str(2 * n), "task": "chain_sum", "metadata": {}} for n in range(5)]
    write_rows(folder / "gym.jsonl", sums)
    for name, word in (("texts", "1 2 1 2 1 2"), ("other-texts", "2 2 1 1 1 2")):
        (folder / name).mkdir()
        (folder / name / "a.txt").write_text(f"{word}\n\n1 1 2 2")
    _datasets(folder, rows, others)
    _models(folder)
    patch = pytest.MonkeyPatch()
    patch.chdir(folder)
    # Nothing here outlives the machine, and flushing to the disk is most of the time of so short a run.
    patch.setattr("os.fsync", lambda _: None)
    patch.setattr("strop.rewards.client.FIRST_PAUSE", 0.01)
    patch.setattr("strop.data.huggingface._hub_answers", lambda: False)
    patch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(folder / "modules"))
    patch.syspath_prepend(str(folder / "modules"))
    _rollouts(folder)
    _targets()
    patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))
    (folder / "other_taskset.py").write_text(OTHER_TASKSET)
    patch.syspath_prepend(str(folder))
    with tiny_server() as SERVER["url"], tiny_openenv() as SERVER["openenv"], tiny_openenv(0.05) as SERVER["slow"]:
        yield folder
    patch.undo()


def _rollouts(folder: Path) -> None:
    """Completions of the plain recipe, in which every column has another one beside it."""
    from strop.config.loading import load_config
    from strop.loops.rollout import rollout

    rollout(load_config(None, data=recipe()), "made.jsonl", prompts=10)
    rows = [json.loads(line) for line in (folder / "made.jsonl").read_text().splitlines()]
    for number, row in enumerate(rows):
        ids = row["completion_ids"]
        row["other_group"] = row["group"] if row["sample"] < 2 else f"{row['group']} too"
        row["other_prompt_ids"] = row["prompt_ids"][::-1]
        row["other_completion"] = str(number % 7)
        row["other_completion_ids"] = [3 + (token + number) % 9 for token in ids]
        row["other_logprobs"] = [logprob / 2 for logprob in row["logprobs"]]
        row["other_reward"] = number % 3
        row["other_status"] = "verifier_error" if number % 5 == 0 else "stop"
        row["other_temperature"] = 0.5
        row["completion"] = str(number % 5)
    write_rows(folder / "rollouts.jsonl", rows)
    names = ("prompt", "completion", "other_completion", "reward", "group", "status")
    write_rows(folder / "texts.jsonl", [{name: row[name] for name in names} for row in rows])


def _datasets(folder: Path, rows: list[dict[str, Any]], others: list[dict[str, Any]]) -> None:
    import datasets

    train, other = datasets.Dataset.from_list(rows), datasets.Dataset.from_list(others)
    datasets.DatasetDict({"train": train, "other": other}).save_to_disk(str(folder / "saved"))
    train.save_to_disk(str(folder / "single"))
    train.to_parquet(str(folder / "mixed" / "rows.parquet"))
    write_rows(folder / "named" / "one.jsonl", rows)
    write_rows(folder / "named" / "two.jsonl", others)
    configs = "".join(f"- config_name: {name}\n  data_files: {name}.jsonl\n" for name in ("one", "two"))
    (folder / "named" / "README.md").write_text(f"---\nconfigs:\n{configs}---\n")


def _models(folder: Path) -> None:
    from strop.config.model import NewModel
    from strop.models.create import create_model
    from strop.models.save import save_model
    from strop.models.scalar import with_scalar_head

    settings = NewModel(characters="0123456789+=u:", hidden_size=32, layers=1, heads=2, context=48)
    for seed, name in enumerate(("first", "second", "chat", "code", "forgetful", "caller", "forgetful caller")):
        long = settings.model_copy(update={"context": 512 if name in ("caller", "forgetful") else settings.context})
        model, tokenizer = create_model(long, seed=seed)
        if name.endswith("caller"):
            tokenizer.add_tokens(["<tool_call>", "</tool_call>"])
            model.resize_token_embeddings(len(tokenizer))
        if name.startswith("forgetful"):
            # Of what the policy said, only the end is left once it is history.
            tokenizer.chat_template = (
                "{% for m in messages %}{% if m['role'] == 'user' %}{{ 'u:' + m['content'] }}"
                "{% elif m['role'] == 'assistant' %}{{ m['content'].split('+')[-1] }}{% endif %}{% endfor %}"
            )
        if name == "chat":
            tokenizer.chat_template = "{% for m in messages %}{{ 'u:' + m['content'] }}{% endfor %}"
        save_model(model, tokenizer, folder / name)
    for seed in (1, 2):
        model, tokenizer = create_model(settings, seed=seed)
        tokenizer.chat_template = "{% for m in messages %}{{ 'u:' + m['content'] }}{% endfor %}"
        scalar = with_scalar_head(model)
        torch.nn.init.normal_(scalar.score.weight, generator=torch.Generator().manual_seed(seed))
        save_model(scalar, tokenizer, folder / f"judge-{seed}")
    config = json.loads((folder / "code" / "config.json").read_text())
    config |= {
        "model_type": "mine",
        "auto_map": {"AutoConfig": "mine.Mine", "AutoModelForCausalLM": "mine.MineForCausalLM"},
    }
    (folder / "code" / "config.json").write_text(json.dumps(config | {"architectures": ["MineForCausalLM"]}))
    (folder / "code" / "mine.py").write_text(
        "from transformers import LlamaConfig, LlamaForCausalLM\n"
        "class Mine(LlamaConfig):\n    model_type = 'mine'\n"
        "class MineForCausalLM(LlamaForCausalLM):\n    config_class = Mine\n"
    )


def _targets() -> None:
    """What two teachers say of the examples."""
    from strop.config.loading import load_config
    from strop.loops.teach import teach

    for name, teacher in (("targets", "second"), ("other-targets", "chat")):
        data = examples("distillation", **{**DISTILLED, "supervised.teachers": [{"path": teacher}]})
        teach(load_config(None, data=data), out=Path(f"{name}.parquet"))


# --- the walk ------------------------------------------------------------------------------------------------------

_BASES: dict[str, Seen] = {}


def base_of(context: str, capture: Callable[[], str]) -> Seen:
    if context not in _BASES:
        _BASES[context] = observe(CONTEXTS[context](), capture)
    return _BASES[context]


def changed(leaf: str, case: Case) -> dict[str, Any]:
    data = CONTEXTS[case.context]()
    key = re.sub(
        r"\[\w*\]",
        ".0",
        re.sub(r"^environment\[\w+\]", "environment", leaf),
    )
    # A verifier of another kind has other keys, so the whole entry is replaced.
    put(
        data,
        key.removesuffix(".kind")
        if leaf.startswith(("rewards.", "evaluation.", "environment"))
        and isinstance(case.new, dict)
        and leaf.endswith(".kind")
        else key,
        case.new,
    )
    return data


def differ(a: Any, b: Any) -> bool:
    if isinstance(a, dict) and any(isinstance(value, torch.Tensor) for value in a.values()):
        return a.keys() != b.keys() or not all(torch.equal(a[name], b[name]) for name in a)
    return json.dumps(a) != json.dumps(b)


def walked() -> list[str]:
    """The keys to walk. The verifiers of evaluations and second opinions are the same models, built as those of
    training: a key of theirs that has no case is walked there."""
    elsewhere = (
        "evaluation.verifiers[",
        "alarms.second_opinion.verifiers[",
        # Whole runs on Ray take too long for each key: `tests/cluster/test_every_cluster_key.py` walks these.
        "cluster.",
        # These need a server that samples: `tests/loops/test_every_server_key.py`.
        "rollout.engine.server.",
    )
    return [leaf.path for leaf in leaves() if not leaf.path.startswith(elsewhere) or leaf.path in TABLE]


def test_every_key_is_in_the_table_and_no_other() -> None:
    assert sorted(walked()) == sorted(TABLE)
    models = (RewardSettings, EvaluationSettings, SecondOpinionSettings)
    training, evaluation, second = (items_of(annotation_of(found.model_fields["verifiers"])) for found in models)
    assert training
    assert training == evaluation == second


@pytest.mark.parametrize("leaf", walked())
def test_key(leaf: str, workplace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    case = TABLE[leaf]

    def capture() -> str:
        return capsys.readouterr().out

    if leaf in ("tracking.wandb_project", "tracking.mlflow_uri") and not MISSING[leaf[9:].partition("_")[0]]:
        pytest.skip("the package is installed; tests/tracking has its test")
    found = observe(changed(leaf, case), capture)
    if case.shows == "refused":
        assert found.error is not None
        assert found.run is None
        assert re.search(case.says, str(found.error)), found.error
        return
    base = base_of(case.context, capture)
    assert base.parts["outcome"] == "finished" or case.shows == "outcome", base.error
    assert found.parts["outcome"] == "finished" or case.shows == "outcome", found.error
    assert differ(base.parts[case.shows], found.parts[case.shows]), f"{leaf} = {case.new!r} has no effect"
    if case.shows == "outcome":
        assert "finished" in (base.parts["outcome"], found.parts["outcome"])
        assert re.search(case.says, str(found.error or base.error), re.DOTALL), found.error
    else:
        assert (base.parts["outcome"], found.parts["outcome"]) == ("finished", "finished")
    if case.steady:
        for name, tensor in base.parts["parameters"].items():
            apart = (found.parts["parameters"][name] - tensor).abs()
            # Where a gradient is next to nothing, rounding decides which share of its step of 1e-2 Adam takes.
            assert float(apart.square().mean().sqrt()) <= 1e-6, f"{leaf} moves {name}"
            assert float(apart.max()) <= 1e-4, f"{leaf} moves {name}"


@pytest.mark.parametrize("context", ["plain", "evaluated by chance", "off-policy", "lora", "warmup", "often saved"])
def test_without_a_change_there_is_no_difference(
    context: str, workplace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Or the walk would show nothing."""

    def capture() -> str:
        return capsys.readouterr().out

    first, again = base_of(context, capture), observe(CONTEXTS[context](), capture)
    assert first.parts.keys() == again.parts.keys()
    assert [name for name in first.parts if differ(first.parts[name], again.parts[name])] == []


IDLE: dict[str, Any] = {
    "evaluation.every": 5,
    "evaluation.temperature": 1.0,
    "training.optimizer.final_share": 0.5,
    "model.trust_remote_code": True,
    "data.train.split": "test",
    "data.train.subset": "main",
    "rewards.verifiers.0.gate": True,
    "rewards.verifiers.0.passes_at": 0.5,
    "rewards.worker_memory": 3.0,
    "alarms.held_out": 0.5,
    "alarms.dominance": 0.5,
}


@pytest.mark.parametrize("key", IDLE)
def test_a_key_that_would_have_no_effect_beside_the_others_is_refused(key: str, workplace: Path) -> None:
    found = observe(recipe(**{key: IDLE[key]}))
    assert found.run is None
    assert f"`{key}` has no effect" in str(found.error)


@pytest.mark.parametrize(
    ("key", "value", "changes"),
    [
        ("evaluation.samples", 3, {"data.eval": HELD_OUT}),
        ("alarms.patience", 5, {"alarms.action": "off"}),
        ("sandbox.url", "http://a", {"rewards.verifiers": [{"kind": "code"}], "sandbox.backend": "bubblewrap"}),
        ("sandbox.token_variable", "A", {"rewards.verifiers": [{"kind": "code"}]}),
        ("sandbox.warm", 3, {"rewards.verifiers": [{"kind": "code"}], "sandbox.url": "http://a"}),
        (
            "sandbox.allow_unsandboxed",
            True,
            {"rewards.verifiers": [{"kind": "code"}], "sandbox.backend": "bubblewrap"},
        ),
        ("warmup.optimizer.final_share", 0.5, {"warmup": WARMUP}),
        ("training.optimizer.beta1", 0.5, {"training.optimizer.name": "adafactor"}),
        ("training.optimizer.beta2", 0.5, {"training.optimizer.name": "adafactor"}),
        ("training.optimizer.eps", 0.1, {"training.optimizer.name": "adafactor"}),
        ("training.optimizer.beta2", 0.5, {"training.optimizer.name": "muon", "model.lora": {"rank": 4}}),
        ("warmup.optimizer.eps", 0.1, {"warmup": WARMUP, "warmup.optimizer.name": "muon", "model.lora": {"rank": 4}}),
        ("warmup.optimizer.beta2", 0.5, {"warmup": WARMUP, "warmup.optimizer.name": "adafactor"}),
        ("rewards.verifiers.0.json_tag", "a", {"rewards.verifiers": [{"kind": "format", "tags": ["b"]}]}),
        ("rewards.verifiers.0.votes", 3, {"rewards.verifiers": [JUDGE]}),
        ("rewards.verifiers.0.combine", "median", {"rewards.verifiers": [JUDGE]}),
        ("rewards.verifiers.0.pattern", "(?P<score>1)", {"rewards.verifiers": [JUDGE]}),
        ("rewards.verifiers.0.score_key", "grade", {"rewards.verifiers": [{**JUDGE, "read": "number"}]}),
        ("data.train.arguments", {"count": 3}, {"data.train": {"path": "rows.jsonl"}}),
        ("data.train.split", "other", {"data.train": {"path": "rows.jsonl"}}),
        ("data.train.subset", "one", {"data.train": {"path": "saved"}}),
        ("data.train.split", "other", {"data.train": {"path": "single"}}),
        *(
            (
                "environment.malformed_penalty",
                0.5,
                {"environment": settings, "rewards.verifiers": [{"kind": "python", "function": "tiny_rewards:spread"}]},
            )
            for settings in (
                {"kind": "tools", "tools": [{"kind": "calculator"}]},
                {"kind": "gymnasium", "id": "tiny_gym:Doors-v0"},
                {"kind": "openenv", "url": "http://localhost:1"},
            )
        ),
    ],
)
def test_so_is_one_that_the_data_or_another_setting_leaves_no_room_for(
    key: str, value: Any, changes: dict[str, Any], workplace: Path
) -> None:
    found = observe(recipe(**{**changes, key: value}))
    assert found.run is None
    assert f"`{key}` has no effect" in str(found.error)


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"rewards.verifiers": [{**NUMERIC, "when": {"sourc": "art"}}]}, "rewards.verifiers.0.when"),
        (
            {"rewards.verifiers": [{"kind": "http", "url": "http://localhost", "columns": ["asnwer"]}]},
            "rewards.verifiers.0.columns",
        ),
    ],
)
def test_a_column_that_the_data_lacks_is_refused(changes: dict[str, Any], key: str, workplace: Path) -> None:
    found = observe(recipe(**changes))
    assert found.run is None
    assert key in str(found.error)
    assert "there is no column" in str(found.error)


@pytest.mark.parametrize("key", ["training.optimizer", "warmup.optimizer"])
def test_an_optimizer_whose_package_is_missing_is_refused(
    key: str, workplace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name == "bitsandbytes" else find(name, *rest)
    )
    found = observe(recipe(warmup=WARMUP, **{f"{key}.name": "adamw_8bit"}))
    assert found.run is None
    assert f"`{key}.name: adamw_8bit` needs the package 'bitsandbytes'" in str(found.error)
    assert "strop[bnb]" in str(found.error)


def test_optimizers_are_looked_at_beside_examples_too(workplace: Path) -> None:
    changes = {"model.lora": {"rank": 4}, "training.optimizer.name": "muon", "training.optimizer.beta2": 0.5}
    found = observe(examples("sft", **changes))
    assert "`training.optimizer.beta2` has no effect with muon and adapters" in str(found.error)
    # AdamW updates the scalar head of a reward model.
    assert observe(examples("reward_model", **changes)).error is None
    found = observe(examples("sft", **{"training.optimizer.offload": True}))
    assert "`training.optimizer.offload` has no effect on a CPU" in str(found.error)
    found = observe(examples("sft", **{"training.offload": True}))
    assert "`training.offload` has no effect with `supervised`" in str(found.error)
