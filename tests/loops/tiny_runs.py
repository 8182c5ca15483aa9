"""Runs of a few seconds' worth: a recipe, and everything that can be seen of a run."""

from __future__ import annotations

import copy
import json
import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import strop

SOURCE = str(Path(strop.__file__).parents[1])
HERE = str(Path(__file__).parent)

RECIPE: dict[str, Any] = {
    "model": {"create": {"characters": "0123456789+=", "hidden_size": 32, "layers": 1, "heads": 2, "context": 32}},
    "data": {"train": {"path": "strop.data.arithmetic:problems", "arguments": {"count": 40, "digits": 1}}},
    "rewards": {"verifiers": [{"kind": "python", "function": "tiny_rewards:spread"}]},
    "rollout": {"groups_per_step": 4, "group_size": 4, "max_new_tokens": 4},
    "training": {"optimizer": {"learning_rate": 1e-2}},
    "tracking": {"display": "off", "tensorboard": False},
    "run": {"steps": 2},
    "hardware": {"threads": 1, "device": "cpu"},
}
HELD_OUT = {"path": "strop.data.arithmetic:problems", "arguments": {"count": 6, "digits": 1, "split": "eval"}}


def recipe(**changes: Any) -> dict[str, Any]:
    """The recipe with other values, `recipe(**{"run.steps": 5})`; an index of a list is written `verifiers.0`."""
    found = copy.deepcopy(RECIPE)
    for key, value in changes.items():
        put(found, key, copy.deepcopy(value))
    return found


def put(data: Any, key: str, value: Any) -> None:
    """Set a dotted key in nested mappings and lists, making mappings on the way."""
    *sections, last = key.split(".")
    for section in sections:
        if isinstance(data, list):
            data = data[int(section)]
        else:
            if data.get(section) is None:
                data[section] = {}
            data = data[section]
    if isinstance(data, list):
        data[int(last)] = value
    else:
        data[last] = value


# --- what a run leaves behind --------------------------------------------------------------------------------------


def steps_of(run: Path) -> list[tuple[str, int, dict[str, Any]]]:
    """Kind, step and metrics of each line, without those that depend on the clock and the machine."""
    found = []
    for line in (run / "metrics.jsonl").read_text().splitlines():
        record = json.loads(line)
        kept = {
            name: value
            for name, value in record["metrics"].items()
            if not name.startswith(("time/", "throughput/", "memory/", "bubble/"))
        }
        found.append((record["kind"], record["step"], kept))
    return found


def weights_of(run: Path) -> bytes:
    """The file of the latest checkpoint's weights."""
    latest = (run / "checkpoints" / "latest").read_text().strip()
    return (run / "checkpoints" / latest / "model" / "model.safetensors").read_bytes()


def episodes_of(run: Path) -> list[Any]:
    """Every record of every step, in order."""
    from strop.tracking.episodes import read_episodes

    return [record for path in sorted((run / "episodes").glob("*.parquet")) for record in read_episodes(path)]


@dataclass
class Seen:
    """What can be seen of a run from outside; `parts` has a name for each thing."""

    run: Path | None
    error: BaseException | None
    parts: dict[str, Any] = field(default_factory=dict)


def observe(data: dict[str, Any], capture: Callable[[], str] = lambda: "") -> Seen:
    """Train in this process, in the current folder, and look at everything.

    Args:
        capture: gives the text that was printed since it was last called.
    """
    import tiny_rewards
    import torch

    from strop.config.loading import load_config
    from strop.errors import StropError
    from strop.loops.train import train

    tiny_rewards.STATE.clear()
    capture()
    threads = torch.get_num_threads()
    before = set(Path.cwd().glob("*/*/run.json"))
    error: BaseException | None = None
    with counted() as counts:
        try:
            train(load_config(None, data=data), fresh=True)
        except StropError as problem:
            error = problem
    parts: dict[str, Any] = {"outcome": "finished" if error is None else str(error), **counts}
    parts["threads"] = torch.get_num_threads()
    parts["deterministic"] = torch.are_deterministic_algorithms_enabled()
    torch.set_num_threads(threads)
    parts["callers"] = tiny_rewards.STATE.get("peak", 0)
    parts["requests"] = tiny_rewards.STATE.get("requests", 0)
    parts["text"] = capture()
    [run] = [path.parent for path in set(Path.cwd().glob("*/*/run.json")) - before] or [None]
    if run is not None:
        parts |= _left_behind(run)
    return Seen(run, error, parts)


def _left_behind(run: Path) -> dict[str, Any]:
    from safetensors.torch import load_file

    metrics = steps_of(run)
    files = [str(path.relative_to(run)) for path in run.rglob("*") if path.is_file()]
    episodes = episodes_of(run)
    parts: dict[str, Any] = {
        # Runs of one name count up, which says nothing of their settings.
        "folder": re.sub(r"-\d+$", "", str(run.relative_to(Path.cwd()))),
        "metrics": metrics,
        "names": sorted({name for _, _, line in metrics for name in line}),
        "evaluations": [line for line in metrics if line[0] == "eval"],
        "files": sorted(re.sub(r"tfevents.*", "tfevents", name) for name in files),
        "prompts": [record.prompt_text for record in episodes],
        "completions": [record.completion_text for record in episodes],
        "rewards": [record.reward for record in episodes],
    }
    pointer = run / "checkpoints" / "latest"
    parts["pointers"] = {
        name: (run / "checkpoints" / name).read_text()
        for name in ("latest", "best")
        if (run / "checkpoints" / name).exists()
    }
    if pointer.exists():
        model = run / "checkpoints" / pointer.read_text().strip() / "model"
        parts["parameters"] = load_file(model / "model.safetensors")
        parts["model config"] = json.loads((model / "config.json").read_text())
    return parts


@contextmanager
def counted() -> Iterator[dict[str, Any]]:
    """Count what the model is asked for, while it is used.

    passes: tokens of each forward pass. blocks: passes through a feed-forward layer, those that are recomputed
    included. logits: how often logits of a chunk of tokens are made. packed: matrices laid out for small products.
    exact: products whose sums are exact, of the consistent mode. sleeps: how often the engine gave its memory back.
    behind: checkpoints that are written while training goes on. compiled: passes through compiled blocks.
    Of verifiers: workers is how many processes were started, timeouts the seconds that were given to them, to threads
    and to requests; sandboxes is how many jobs could run in them at a time, and how many of them waited for one.
    """
    from transformers.models.llama.modeling_llama import LlamaMLP, LlamaModel

    from strop.models import exact_sums, logprobs
    from strop.models.blocks import ChangedBlocks
    from strop.rewards import client
    from strop.rewards.calls import Crew
    from strop.rewards.process import Worker
    from strop.rollout.engines import packed_linear
    from strop.rollout.engines.local import LocalEngine
    from strop.sandbox.pool import Pool
    from strop.training.background import Background

    counts: dict[str, Any] = {
        "passes": [],
        "blocks": 0,
        "logits": 0,
        "packed": 0,
        "exact": 0,
        "sleeps": 0,
        "behind": 0,
        "compiled": 0,
        "workers": 0,
        "timeouts": [],
        "sandboxes": [],
    }
    forward, mlp, logits, product = (
        LlamaModel.forward,
        LlamaMLP.forward,
        logprobs._logits,
        packed_linear.packed_product,
    )

    def count_pass(self: Any, *arguments: Any, **keywords: Any) -> Any:
        counts["passes"].append(keywords["input_ids"].shape[1])
        return forward(self, *arguments, **keywords)

    def count(name: str, function: Any) -> Any:
        def counting(*arguments: Any, **keywords: Any) -> Any:
            counts[name] += 1
            return function(*arguments, **keywords)

        return counting

    used = ChangedBlocks.used

    def noting_used(self: Any) -> Any:
        counts["compiled"] += self.compiled
        return used(self)

    def note(seconds: float) -> None:
        counts["timeouts"] = sorted({*counts["timeouts"], seconds})

    close = Pool.close

    def noting_close(self: Any) -> None:
        counts["sandboxes"].append((self.workers, self.warm))
        close(self)

    call, begin, post = Crew.call, Worker.begin, client._post

    async def noting_call(self: Any, function: Any, *, name: str, timeout: float | None = None) -> Any:
        if timeout is not None:
            note(timeout)
        return await call(self, function, name=name, timeout=timeout)

    def noting_begin(self: Any, settings: Any, timeout: float, payloads: Any) -> None:
        note(timeout)
        begin(self, settings, timeout, payloads)

    def noting_post(server: Any, payload: bytes) -> Any:
        note(server.timeout)
        return post(server, payload)

    with (
        mock.patch.object(Crew, "call", noting_call),
        mock.patch.object(Worker, "begin", noting_begin),
        mock.patch.object(Worker, "__init__", count("workers", Worker.__init__)),
        mock.patch.object(client, "_post", noting_post),
        mock.patch.object(Pool, "close", noting_close),
        mock.patch.object(LlamaModel, "forward", count_pass),
        mock.patch.object(LlamaMLP, "forward", count("blocks", mlp)),
        mock.patch.object(logprobs, "_logits", count("logits", logits)),
        mock.patch.object(packed_linear, "packed_product", count("packed", product)),
        mock.patch.object(exact_sums, "linear", count("exact", exact_sums.linear)),
        mock.patch.object(LocalEngine, "sleep", count("sleeps", LocalEngine.sleep)),
        mock.patch.object(Background, "start", count("behind", Background.start)),
        mock.patch.object(ChangedBlocks, "used", noting_used),
    ):
        yield counts


# --- other processes -----------------------------------------------------------------------------------------------


def environment() -> dict[str, str]:
    """Of a process that finds strop and the tests' reward functions, and computes with one thread."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join([SOURCE, HERE]), "OMP_NUM_THREADS": "1"}


def command(*arguments: str) -> list[str]:
    """`strop …` as a process."""
    return [sys.executable, "-m", "strop", *arguments]
