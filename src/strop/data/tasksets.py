"""Tasksets of the package `verifiers` as sources: `path: verifiers:TASKSET`, with its configuration as arguments.

Rows have the columns `prompt`, `answer` (None where the task has no field of that name) and `task`, all that the task
holds, from which the environment `verifiers` makes it again.
"""

from __future__ import annotations

import importlib.util
from itertools import islice
from typing import Any

from strop.config.data import DataSource
from strop.data.rows import RowsSource, see_working_folder
from strop.errors import DataError, MissingExtra

PREFIX = "verifiers:"


def open_taskset(settings: DataSource) -> RowsSource:
    """The tasks of a taskset, all of them or the first `limit`.

    Raises:
        MissingExtra: the package is not installed.
        DataError: there is no such taskset, its configuration does not fit, or it has no end.
    """
    if importlib.util.find_spec("verifiers") is None:
        raise MissingExtra("verifiers", extra="verifiers", needed_for=f"`path: {settings.path}`")
    name = settings.path.removeprefix(PREFIX)
    see_working_folder()
    import verifiers.v1 as vf

    try:
        taskset = vf.load_taskset(vf.taskset_config_type(name).model_validate({**settings.arguments, "id": name}))
        if not taskset.bounded and settings.limit is None:
            raise DataError("the taskset has no end", where="limit", mend="Say how many of its tasks to take.")
        rows = [_row(task) for task in islice(taskset, settings.limit)]
    except DataError:
        raise
    except Exception as error:
        raise DataError(
            f"the taskset {name!r} cannot be loaded: {type(error).__name__}: {error}",
            where=settings.path,
            mend="Load it with verifiers alone to see the whole traceback.",
        ) from error
    return RowsSource(rows, name=settings.path)


def _row(task: Any) -> dict[str, Any]:
    data = task.data.model_dump(mode="json")
    # Where the user opens the conversation there is no prompt; whoever reads the data wants to see something.
    prompt = data["prompt"] if data["prompt"] is not None else data["name"] or f"task {data['idx']}"
    if isinstance(prompt, list):
        prompt = [{"role": message["role"], "content": message["content"]} for message in prompt]
    return {"prompt": prompt, "answer": data.get("answer"), "task": data}
