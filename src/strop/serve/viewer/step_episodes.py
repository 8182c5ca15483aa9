"""The episodes of a step as rows of a table, and one episode token by token."""

from __future__ import annotations

import math
import re
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from strop.serve.viewer.catalog import NotFound, inside
from strop.serve.viewer.token_texts import texts, tokenizer_of
from strop.serve.viewer.turn_tree import Node, turn_tree
from strop.tracking.episode_columns import read_columns
from strop.tracking.episodes import beside as file_beside
from strop.tracking.episodes import episodes_file

if TYPE_CHECKING:
    import pyarrow as pa

PER_TOKEN = ("sampler_logprobs", "trainer_logprobs", "advantages", "versions")
PLAIN = ("group", "sample", "stream", "status", "reward", "correct", "prompt_text", "completion_text")
SHOWN = 160
"""Characters of a completion in the table."""


def steps_with_episodes(run: Path) -> dict[str, list[int]]:
    """Steps that have a file of episodes, and those that have one of what was sampled beside."""
    found = {}
    for name, folder in (("steps", "episodes"), ("beside", "episodes/beside")):
        try:
            entries = [entry.name for entry in inside(run, folder).iterdir()]
        except (OSError, NotFound):
            entries = []
        matches = (re.fullmatch(r"step-(\d{6,12})\.parquet", entry, re.ASCII) for entry in entries)
        found[name] = sorted(int(match[1]) for match in matches if match)
    return found


def file_of(run: Path, step: int, *, beside: bool) -> Path:
    """The file of a step's episodes, or of what was sampled beside them.

    Raises:
        NotFound: there is none.
    """
    path = episodes_file(run / "episodes", step)
    path = inside(run, file_beside(path) if beside else path)
    if not path.is_file():
        raise NotFound(
            f"the run keeps no episodes of step {step}",
            where=path.name,
            mend="`tracking.episodes_every` says how often a run writes them",
        )
    return path


class Tables:
    """Tables of the files looked at last, so that going from one episode to the next reads nothing."""

    def __init__(self, most: int = 8) -> None:
        self._most = most
        self._rows: OrderedDict[tuple[Path, int, int], dict[str, list[Any]]] = OrderedDict()

    def rows(self, path: Path, *, trainer_version: int | None) -> dict[str, list[Any]]:
        """Columns of a file's rows: what they are, and numbers to sort them by.

        index: the row in the file. tokens: sampled ones. length: all of the stream. advantage: the mean over sampled
        tokens. staleness: versions between the weights that sampled a token and the trainer's, at most. mismatch: mean
        distance of the trainer's and the sampler's log-probabilities. NaN where a run did not record it.

        Args:
            trainer_version: that of the weights which the step was trained from; None if versions mean nothing.
        """
        status = path.stat()
        key = (path, status.st_mtime_ns, status.st_size)
        found = self._rows.get(key)
        if found is None:
            found = self._rows[key] = _summary(read_columns(path, (*PLAIN, "tokens", "loss_mask", *PER_TOKEN)))
            while len(self._rows) > self._most:
                self._rows.popitem(last=False)
        versions = found["oldest"]
        staleness = [math.nan if trainer_version is None or v is None else trainer_version - v for v in versions]
        return {name: values for name, values in found.items() if name != "oldest"} | {"staleness": staleness}


def _summary(table: pa.Table) -> dict[str, list[Any]]:
    rows: dict[str, list[Any]] = {name: table.column(name).to_pylist() for name in PLAIN}
    rows["index"] = list(range(table.num_rows))
    prompts, completions = rows.pop("prompt_text"), rows.pop("completion_text")
    rows["prompt"] = [_cut(text, SHOWN // 2) for text in prompts]
    rows["completion"] = [_cut(text, SHOWN) for text in completions]
    lengths = _lengths(table.column("tokens"))
    masks = lists_of(table, "loss_mask")
    columns = {name: lists_of(table, name) for name in PER_TOKEN}
    rows["length"] = lengths
    names = ("tokens", "advantage", "mismatch", "oldest")
    rows |= {name: [] for name in names}
    for at, mask in enumerate(masks):
        mask = np.zeros(lengths[at], dtype=np.bool_) if mask is None or len(mask) != lengths[at] else mask
        sampler, trainer, advantages, versions = (_fitting(columns[name][at], lengths[at], mask) for name in PER_TOKEN)
        rows["tokens"].append(int(mask.sum()))
        rows["advantage"].append(_mean(advantages))
        gaps = None if sampler is None or trainer is None else np.abs(trainer - sampler)
        rows["mismatch"].append(math.nan if gaps is None else _mean(gaps))
        rows["oldest"].append(None if versions is None or not len(versions) else int(versions.min()))
    return rows


def _fitting(values: np.ndarray | None, length: int, mask: np.ndarray) -> np.ndarray | None:
    return None if values is None or len(values) != length else values[mask]


def _lengths(column: pa.ChunkedArray) -> list[int]:
    import pyarrow.compute as compute

    return [length or 0 for length in compute.list_value_length(column).to_pylist()]


def lists_of(table: pa.Table, name: str) -> list[np.ndarray | None]:
    """A column's lists as arrays; None for one that is null. A missing number in a list is NaN."""
    found: list[np.ndarray | None] = []
    for chunk in table.column(name).chunks:
        values = chunk.values.to_numpy(zero_copy_only=False)
        if values.dtype == object:
            # A mask with nothing in some of its places, in a file that strop did not write.
            values = np.array([bool(value) for value in values])
        edges = chunk.offsets.to_numpy()
        there = chunk.is_valid().to_numpy(zero_copy_only=False)
        found += [
            values[start:end] if known else None for start, end, known in zip(edges[:-1], edges[1:], there, strict=True)
        ]
    return found


def _mean(values: np.ndarray | None) -> float:
    if values is None:
        return math.nan
    known = values[np.isfinite(values)]
    return float(known.mean(dtype=np.float64)) if len(known) else math.nan


def _cut(text: str | None, most: int) -> str:
    text = text or ""
    return text if len(text) <= most else text[: most - 1] + "…"


def episode(run: Path, path: Path, index: int, *, whole_group: bool) -> dict[str, Any]:
    """One episode: its tree of turns with every token's numbers, and what the verifiers said.

    Args:
        index: a row of the file; the rows of the same episode belong to it. whole_group: all episodes of the prompt,
            as one tree.

    Raises:
        NotFound: the file has no such row. StropError: it cannot be read.
    """
    keys = read_columns(path, ("group", "sample"))
    if not 0 <= index < keys.num_rows:
        raise NotFound(f"this step has {keys.num_rows} rows of episodes, and none of number {index}", where=path.name)
    groups, samples = keys.column("group").to_pylist(), keys.column("sample").to_pylist()
    chosen = [
        row
        for row in range(keys.num_rows)
        if groups[row] == groups[index] and (whole_group or samples[row] == samples[index])
    ]
    names = ("tokens", "loss_mask", *PER_TOKEN, *PLAIN, "prompt_id", "answer", "components", "detail", "row")
    table = read_columns(path, names).take(chosen)
    tokens = [_or_empty(values, np.int32) for values in lists_of(table, "tokens")]
    masks = [_as_long(values, len(ids)) for values, ids in zip(lists_of(table, "loss_mask"), tokens, strict=True)]
    numbers = {name: lists_of(table, name) for name in PER_TOKEN}
    tokenizer = tokenizer_of(run)
    words = [texts(tokenizer, ids.tolist()) for ids in tokens]
    nodes = turn_tree(tokens, masks)
    plain = table.select([name for name in table.column_names if name not in ("tokens", "loss_mask", *PER_TOKEN)])
    facts = [_facts(values) | {"index": row} for row, values in zip(chosen, plain.to_pylist(), strict=True)]
    siblings = [row for row in range(keys.num_rows) if groups[row] == groups[index]]
    return {
        "streams": facts,
        "shown": chosen.index(index),
        "nodes": [_node(node, nodes, tokens, words, numbers) for node in nodes],
        "has_texts": tokenizer is not None,
        "siblings": [{"index": row, "sample": samples[row]} for row in siblings],
        "rows": keys.num_rows,
    }


def _node(
    node: Node,
    nodes: Sequence[Node],
    tokens: Sequence[np.ndarray],
    words: Sequence[list[str | None]],
    numbers: dict[str, list[np.ndarray | None]],
) -> dict[str, Any]:
    part = slice(node.start, node.end)
    kind = "sampled" if node.sampled else ("prompt" if node.parent < 0 else "observation")
    found: dict[str, Any] = {
        "parent": node.parent,
        "kind": kind,
        "start": node.start,
        "streams": list(node.streams),
        "stream": node.stream,
        "tokens": tokens[node.stream][part].tolist(),
        "texts": words[node.stream][part],
    }
    for name, columns in numbers.items():
        values = columns[node.stream]
        known = node.sampled and values is not None and len(values) == len(tokens[node.stream])
        found[name] = shortest(values[part]) if known and values is not None else None
    return found


def shortest(values: np.ndarray) -> list[float | int]:
    """Numbers with the fewest digits that are the same number again in the type of the array.

    A float32 of 0.1 is 0.10000000149011612 as a float64; whoever reads it here should see 0.1.
    """
    if values.dtype != np.float32:
        found: list[float | int] = values.tolist()
        return found
    return [float(str(value)) for value in values]


def _facts(values: dict[str, Any]) -> dict[str, Any]:
    values["components"] = dict(values["components"] or ())
    for name in ("prompt_text", "completion_text", "detail", "row", "answer", "prompt_id", "status"):
        values[name] = values[name] or ("" if name != "answer" else values[name])
    return values


def _or_empty(values: np.ndarray | None, kind: type) -> np.ndarray:
    return np.zeros(0, dtype=kind) if values is None else values


def _as_long(mask: np.ndarray | None, length: int) -> np.ndarray:
    return np.zeros(length, dtype=np.bool_) if mask is None or len(mask) != length else mask
