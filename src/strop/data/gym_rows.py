"""Makes rows with Reasoning Gym, in a process of its own: `data/gym.py` starts it.

Some tasks go through sets of texts, whose order follows the hash seed of the process, or draw from Python's own random
numbers, so that one and the same seed gives other rows in the next process. In this one both are fixed, for each row
anew: a row depends on its number, not on those that were made before.
"""

from __future__ import annotations

import dataclasses
import json
import pickle
import random
import sys
from typing import Any

Failure = dict[str, Any]


def main() -> None:
    """Reads a request `{tasks: [{name, arguments, weight}], size, seed, limit}` as JSON, writes a pickle of the rows or
    of what is wrong."""
    request = json.loads(sys.stdin.read())
    out, sys.stdout = sys.stdout.buffer, sys.stderr
    try:
        found: Any = {"rows": _rows(**request)}
    except _Refused as refused:
        found = {"failure": refused.args[0]}
    out.write(pickle.dumps(found))
    out.flush()


class _Refused(Exception):
    """A request that cannot be met; holds what is wrong."""


def _rows(tasks: list[dict[str, Any]], size: int, seed: int, limit: int | None) -> list[dict[str, Any]]:
    from reasoning_gym.composite import CompositeConfig, DatasetSpec
    from reasoning_gym.factory import DATASETS, create_dataset

    known = [name for name in DATASETS if name != "composite"]
    for task in tasks:
        if task["name"] not in known:
            raise _Refused({"unknown": task["name"], "names": known})
        fields = [field.name for field in dataclasses.fields(DATASETS[task["name"]][1])]
        for argument in task["arguments"]:
            if argument not in fields:
                raise _Refused({"task": task["name"], "argument": argument, "names": sorted(fields)})
    count = size if limit is None else min(size, limit)
    at = tasks[0]["name"]
    try:
        if len(tasks) == 1:
            dataset = create_dataset(at, **tasks[0]["arguments"], size=size, seed=seed)
        else:
            for task in tasks:
                at = task["name"]
                create_dataset(at, **task["arguments"], size=size, seed=seed)
            at = "+".join(task["name"] for task in tasks)
            specs = [DatasetSpec(task["name"], task["weight"], task["arguments"]) for task in tasks]
            composite = CompositeConfig(size=size, seed=seed, datasets=specs)
            dataset = create_dataset("composite", **vars(composite))
        arguments = {task["name"]: task["arguments"] for task in tasks}
        return [_row(_drawn(dataset, index, seed), arguments) for index in range(count)]
    except Exception as error:
        raise _Refused({"task": at, "error": f"{type(error).__name__}: {error}"}) from error


def _drawn(dataset: Any, index: int, seed: int) -> dict[str, Any]:
    import numpy

    random.seed(seed + index)
    numpy.random.seed((seed + index) % 2**32)
    entry: dict[str, Any] = dataset[index]
    return entry


def _row(entry: dict[str, Any], arguments: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """An entry of the package as a row."""
    name = entry["metadata"]["source_dataset"]
    return {
        "prompt": entry["question"],
        "answer": entry["answer"],
        "task": name,
        "task_arguments": arguments[name],
        "metadata": entry["metadata"],
    }
