"""Tasks of Reasoning Gym as a source: `path: reasoning-gym:chain_sum`, or several, `reasoning-gym:chain_sum+countdown`.

Rows have the columns `prompt`, `answer` (None where a task has many), `task`, `task_arguments` and `metadata`; the last
three are for the verifier `reasoning_gym`. The package draws row i of a task from `seed + i`: sources of seeds that are
near share rows.
"""

from __future__ import annotations

import importlib.util
import json
import os
import pickle
import subprocess
import sys
from typing import Any

from strop.config.data import DataSource
from strop.data.columns import listed, nearest
from strop.data.rows import RowsSource
from strop.errors import DataError, MissingExtra

PREFIX = "reasoning-gym:"
SIZE, SEED = 500, 0
"""Rows and seed where the arguments do not say."""
LARGEST_SEED = 2**32


def open_gym(settings: DataSource) -> RowsSource:
    """Make the rows of one task, or of several mixed by weight.

    Raises:
        MissingExtra: the package is not installed.
        DataError: there is no such task, or its arguments do not fit.
    """
    request = _request(settings)
    if importlib.util.find_spec("reasoning_gym") is None:
        raise MissingExtra("reasoning-gym", extra="gym", needed_for=f"`path: {settings.path}`")
    made = subprocess.run(
        [sys.executable, "-c", "from strop.data.gym_rows import main; main()"],
        input=json.dumps(request).encode(),
        capture_output=True,
        env={**os.environ, "PYTHONHASHSEED": "0", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        check=False,
    )
    if made.returncode:
        said = made.stderr.decode(errors="replace").strip().splitlines() or [f"exit code {made.returncode}"]
        raise DataError(
            f"Reasoning Gym made no rows: {said[-1]}", where=settings.path, mend="Try the task alone, in Python."
        )
    found = pickle.loads(made.stdout)
    if "failure" in found:
        raise _refused(found["failure"], settings)
    return RowsSource(found["rows"], name=settings.path)


def tasks_of(path: str) -> list[str]:
    """The names in `reasoning-gym:one+two`.

    Raises:
        DataError: one is empty or stands there twice.
    """
    names = [name.strip() for name in path.removeprefix(PREFIX).split("+")]
    if "" in names or len(set(names)) < len(names):
        raise DataError(
            f"{path!r} names {'no task' if '' in names else 'a task twice'}",
            where="path",
            mend="Write `reasoning-gym:TASK`, or `reasoning-gym:TASK+OTHER` for several.",
        )
    return names


def check_apart(train: DataSource, held_out: DataSource) -> None:
    """Raise DataError where held-out rows are rows of the training, because their seeds are too near.

    Looks at tasks with the same arguments only; the rows of others differ anyway.
    """
    if not (train.path.startswith(PREFIX) and held_out.path.startswith(PREFIX)):
        return
    ours, theirs = (_ranges(settings) for settings in (train, held_out))
    for name, (first, end, arguments) in theirs.items():
        if name not in ours or ours[name][2] != arguments:
            continue
        start, stop, _ = ours[name]
        shared = min(end, stop) - max(first, start)
        if shared > 0:
            raise DataError(
                f"{shared:,} held-out rows of {name!r} are rows of the training too: the package draws row i from "
                f"seed + i, so sizes of {stop - start:,} and {end - first:,} overlap",
                where="data.eval.arguments.seed",
                mend=f"Use a seed that is further away, such as {_request(train)['seed'] + 2 * (stop - start) + 1000}.",
            )


def _ranges(settings: DataSource) -> dict[str, tuple[int, int, str]]:
    """For each task: the first seed that its rows are drawn from, the one behind the last, and the other arguments."""
    request = _request(settings)
    count = request["size"] if settings.limit is None else min(request["size"], settings.limit)
    # A mixture numbers the seeds of its tasks, from one.
    shift = len(request["tasks"]) > 1
    found = {}
    for number, task in enumerate(request["tasks"], start=1):
        first = request["seed"] + number * shift
        found[task["name"]] = (first, first + count, json.dumps(task["arguments"], sort_keys=True))
    return found


def _request(settings: DataSource) -> dict[str, Any]:
    """What `gym_rows` is asked for."""
    names = tasks_of(settings.path)
    arguments = dict(settings.arguments)
    size, seed = arguments.pop("size", SIZE), arguments.pop("seed", SEED)
    for key, value, least in (("size", size, 1), ("seed", seed, 0)):
        if type(value) is not int or not least <= value < LARGEST_SEED:
            raise DataError(f"{key} is {value!r}", where=f"arguments.{key}", mend=f"Use a number from {least} on.")
    if len(names) == 1:
        return {
            "tasks": [{"name": names[0], "arguments": arguments, "weight": 1.0}],
            "size": size,
            "seed": seed,
            "limit": settings.limit,
        }
    tasks = []
    for name in names:
        own = arguments.pop(name, {})
        if not isinstance(own, dict):
            raise DataError(
                f"the arguments of {name!r} are {own!r}", where=f"arguments.{name}", mend="Write a mapping there."
            )
        own = dict(own)
        weight = own.pop("weight", 1.0)
        if type(weight) not in (int, float) or not weight > 0:
            raise DataError(f"the weight is {weight!r}", where=f"arguments.{name}.weight", mend="Use a number above 0.")
        for key in ("size", "seed"):
            if key in own:
                raise DataError(
                    f"several tasks have one {key} together",
                    where=f"arguments.{name}.{key}",
                    mend=f"Set arguments.{key}; `weight` says how often a task occurs.",
                )
        tasks.append({"name": name, "arguments": own, "weight": weight})
    if arguments:
        key = next(iter(arguments))
        raise DataError(
            f"with several tasks {key!r} is no argument",
            where=f"arguments.{key}",
            mend=nearest(key, [*names, "size", "seed"])
            or f"Write `size` and `seed` there, and the arguments of a task under its name: `{names[0]}: {{...}}`.",
        )
    return {"tasks": tasks, "size": size, "seed": seed, "limit": settings.limit}


def _refused(failure: dict[str, Any], settings: DataSource) -> DataError:
    if "unknown" in failure:
        names = failure["names"]
        return DataError(
            f"Reasoning Gym has no task {failure['unknown']!r}",
            where=settings.path,
            mend=nearest(failure["unknown"], names) or f"It has {listed(names, most=200)}.",
        )
    place = "arguments" if "+" not in settings.path else f"arguments.{failure['task']}"
    if "argument" in failure:
        return DataError(
            f"the task {failure['task']!r} has no argument {failure['argument']!r}",
            where=f"{place}.{failure['argument']}",
            mend=nearest(failure["argument"], failure["names"]) or f"It has {listed(failure['names'])}.",
        )
    return DataError(
        f"Reasoning Gym refuses these arguments of {failure['task']!r}: {failure['error']}",
        where="arguments",
        mend=f'`python -c \'import reasoning_gym as g; help(g.factory.DATASETS["{settings.path.removeprefix(PREFIX)}"]'
        "[1])'` shows what there is."
        if "+" not in settings.path
        else "Change them.",
    )
