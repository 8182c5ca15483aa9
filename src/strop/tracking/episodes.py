"""`episodes/step-NNNNNN.parquet`: what was sampled in a step, token by token."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, fields
from functools import cache
from itertools import accumulate
from operator import is_
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from strop.tracking.atomic import replacing

if TYPE_CHECKING:
    import pyarrow as pa

FORMAT = "1"
"""Version of the columns, kept in the file's metadata as `strop.episodes`."""


@dataclass
class EpisodeRecord:
    """One token stream of one episode, as the run directory keeps it.

    Arrays have length L, the tokens of the prompt included: tokens int; loss_mask bool, True where the token was
    sampled and trained; sampler_logprobs and trainer_logprobs float32, at the sampling temperature, meaningful where
    the mask is True; advantages float32; versions int32, the weights that sampled the token, -1 where the mask is
    False. An array of the last four may be None when it was not computed.

    reward: NaN if the verifier failed (`status` says how). correct: None if not known. detail: what the verifier said.
    components: raw score of each verifier. stream: index of the stream within its episode; more than 0 only where an
    episode forked. row: the data row. past: the episode was sampled for an earlier step, which trained it too.
    """

    group: int
    sample: int
    prompt_id: str
    prompt_text: str
    completion_text: str
    answer: str | None
    status: str
    reward: float
    correct: bool | None
    tokens: np.ndarray
    loss_mask: np.ndarray
    sampler_logprobs: np.ndarray | None = None
    trainer_logprobs: np.ndarray | None = None
    advantages: np.ndarray | None = None
    versions: np.ndarray | None = None
    components: Mapping[str, float] = field(default_factory=dict)
    detail: str = ""
    row: Mapping[str, Any] = field(default_factory=dict)
    stream: int = 0
    past: bool = False


@dataclass
class EpisodeColumns:
    """N records field by field: a file is made of this, and a step of hundreds of episodes needs no object for each.

    lengths: [N] tokens of each. values: N values of each field of `EpisodeRecord` that is not an array, under its name.
    arrays: of each field that is one, the numbers of all records end to end, of those left out that have none.
    without: which have none ([N] bool), for each array that some lack.
    """

    lengths: list[int]
    values: dict[str, Sequence[Any]]
    arrays: dict[str, np.ndarray]
    without: dict[str, np.ndarray] = field(default_factory=dict)


def columns_of(records: Sequence[EpisodeRecord]) -> EpisodeColumns:
    """The same, field by field.

    Raises:
        ValueError: an array's length differs from the number of tokens of its record.
    """
    found = EpisodeColumns([len(record.tokens) for record in records], {}, {})
    for name in (one.name for one in fields(EpisodeRecord)):
        values = [getattr(record, name) for record in records]
        if name not in _PER_TOKEN:
            found.values[name] = values
            continue
        missing = np.array([value is None for value in values], dtype=np.bool_)
        parts = [(np.asarray(v), n) for v, n in zip(values, found.lengths, strict=True) if v is not None]
        for part, length in parts:
            if part.shape != (length,):
                entries = f"{len(part)} entries" if part.ndim == 1 else f"the shape {list(part.shape)}"
                raise ValueError(f"{name} has {entries} for {length} tokens")
        empty = np.zeros(0, dtype=_PER_TOKEN[name])
        found.arrays[name] = np.concatenate(
            [empty, *(part for part, _ in parts)], dtype=_PER_TOKEN[name], casting="unsafe"
        )
        if missing.any():
            found.without[name] = missing
    return found


def records_of(columns: EpisodeColumns) -> list[EpisodeRecord]:
    """The same, one by one; their arrays are cuts of the given ones."""
    values = dict(columns.values)
    for name, numbers in columns.arrays.items():
        missing = columns.without.get(name, np.zeros(len(columns.lengths), dtype=np.bool_))
        ends = np.cumsum(np.where(missing, 0, columns.lengths), dtype=np.int64)
        each = zip(columns.lengths, ends, missing, strict=True)
        values[name] = [None if none else numbers[end - length : end] for length, end, none in each]
    return [EpisodeRecord(**dict(zip(values, one, strict=True))) for one in zip(*values.values(), strict=True)]


@cache
def schema() -> pa.Schema:
    """The columns: one row for each `EpisodeRecord`.

    group int64, sample int32, stream int32, prompt_id, prompt_text, completion_text string, answer string?, status
    string, reward double? (null for NaN), correct bool?, components map<string, double?>, detail string, tokens
    list<int32>, loss_mask list<bool>, sampler_logprobs list<float?> and trainer_logprobs list<float?> (null where the
    mask is False), advantages list<float>, versions list<int32>, row string (JSON), past bool. A list that was
    not computed is null.
    """
    import pyarrow as pa

    return pa.schema(
        [
            pa.field("group", pa.int64(), nullable=False),
            pa.field("sample", pa.int32(), nullable=False),
            pa.field("stream", pa.int32(), nullable=False),
            pa.field("prompt_id", pa.string()),
            pa.field("prompt_text", pa.string()),
            pa.field("completion_text", pa.string()),
            pa.field("answer", pa.string()),
            pa.field("status", pa.string()),
            pa.field("reward", pa.float64()),
            pa.field("correct", pa.bool_()),
            pa.field("components", pa.map_(pa.string(), pa.float64())),
            pa.field("detail", pa.string()),
            pa.field("tokens", _list_of(pa.int32())),
            pa.field("loss_mask", _list_of(pa.bool_())),
            pa.field("sampler_logprobs", _list_of(pa.float32())),
            pa.field("trainer_logprobs", _list_of(pa.float32())),
            pa.field("advantages", _list_of(pa.float32())),
            pa.field("versions", _list_of(pa.int32())),
            pa.field("row", pa.string()),
            pa.field("past", pa.bool_()),
        ],
        metadata={"strop.episodes": FORMAT},
    )


def episodes_file(folder: Path, step: int) -> Path:
    """Where a step's episodes are."""
    return folder / f"step-{step:06d}.parquet"


def beside(path: Path) -> Path:
    """Where the file is of what was sampled for a step beside its groups: most likely completions that were baselines
    (sample -1), and groups that dynamic sampling replaced, in the order in which it did. It has the same columns, and
    is there only if there was anything of the kind.
    """
    return path.parent / "beside" / path.name


def write_episodes(path: Path, records: Sequence[EpisodeRecord]) -> None:
    """Write a step's episodes to one file, as `write_table` does.

    Raises:
        ValueError: an array's length differs from the number of tokens of its record. OSError: as `write_table`.
    """
    write_table(path, episode_table(columns_of(records)))


def write_table(path: Path, table: pa.Table) -> None:
    """Write what `episode_table` made to one file, whole or not at all; the folder is made.

    Raises:
        OSError: the file cannot be written.
    """
    import pyarrow as pa
    import pyarrow.parquet as parquet

    # Of what is in lists nobody asks for the least and the most.
    plain = [field.name for field in table.schema if not pa.types.is_nested(field.type)]
    with replacing(path) as temporary, _new_file(temporary) as file:
        parquet.write_table(
            table,
            file,
            compression="zstd",
            compression_level=1,
            use_dictionary=_REPEATED,
            write_statistics=plain,
        )


def _new_file(path: Path) -> pa.OSFile:
    """A file to write to, whose folder is made.

    Opened here, as each look at the disk is one more at which the thread that writes has to wait for the interpreter,
    and takes it from the loop.
    """
    import pyarrow as pa

    try:
        return pa.OSFile(str(path), "wb")
    except FileNotFoundError:
        path.parent.mkdir(parents=True, exist_ok=True)
        return pa.OSFile(str(path), "wb")


class EpisodeWriter:
    """Writes files of episodes in a thread, one after the other and one at a time, while the run goes on."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="strop-episodes")
        self._last: Future[None] | None = None

    def write(self, path: Path, columns: EpisodeColumns) -> None:
        """Begin to write, as `write_episodes` does, when the file before is there. Nobody may change the arrays.

        Raises:
            OSError: the file before could not be written.
        """
        self.wait()
        # The table is not made in the thread: that needs the interpreter, as does the loop, which runs meanwhile, and
        # to hand it back and forth costs nearly as much again. To write it does not.
        self._last = self._thread.submit(write_table, path, episode_table(columns))

    def wait(self) -> None:
        """Wait until all that was given is on the disk.

        Raises:
            OSError: it could not be written.
        """
        last, self._last = self._last, None
        if last is not None:
            last.result()

    def close(self) -> Exception | None:
        """Write what there is and end the thread; returns why it could not be written."""
        self._thread.shutdown()
        return None if self._last is None else self._last.exception()  # type: ignore[return-value]


def read_episodes(path: Path) -> list[EpisodeRecord]:
    """Read a step's episodes, in read-only arrays; log-probabilities are NaN where the file has null."""
    import pyarrow.parquet as parquet

    table = parquet.read_table(path).combine_chunks()
    arrays = {name: _split(table.column(name)) for name in _PER_TOKEN}
    plain = [name for name in table.column_names if name not in arrays]
    records = []
    for index, values in enumerate(table.select(plain).to_pylist()):
        values["components"] = {
            name: math.nan if score is None else score for name, score in values["components"] or ()
        }
        values["reward"] = math.nan if values["reward"] is None else values["reward"]
        values["row"] = json.loads(values["row"] or "{}")
        values.update({name: column[index] for name, column in arrays.items()})
        records.append(EpisodeRecord(**values))
    return records


def drop_episodes_after(folder: Path, step: int) -> None:
    """Delete the files of later steps, to go on from a checkpoint of `step`."""
    for path in [*folder.glob("step-*.parquet"), *(folder / "beside").glob("step-*.parquet")]:
        number = path.stem.removeprefix("step-")
        if number.isdigit() and int(number) > step:
            path.unlink()


# `json.dumps` makes such an encoder for each call.
_AS_JSON = json.JSONEncoder(ensure_ascii=False, default=str).encode
_REPEATED = [
    *("prompt_id", "prompt_text", "answer", "status", "detail", "row", "components.key_value.key"),
    "tokens.list.element",
]
"""Columns of which a dictionary makes less. One of log-probabilities takes as long to make as everything else does, and
is larger than they are; of advantages and versions, long rows of the same number, little is left without one."""
_PER_TOKEN: dict[str, type[np.generic]] = {
    "tokens": np.int32,
    "loss_mask": np.bool_,
    "sampler_logprobs": np.float32,
    "trainer_logprobs": np.float32,
    "advantages": np.float32,
    "versions": np.int32,
}


def episode_table(episodes: EpisodeColumns) -> pa.Table:
    """What a file of episodes holds, in the columns of `schema`."""
    import pyarrow as pa

    wanted = schema()
    lengths, inside = np.array(episodes.lengths, dtype=np.int64), episodes.arrays["loss_mask"]
    columns: list[pa.Array] = []
    for name in wanted.names:
        if name in _PER_TOKEN:
            numbers = episodes.arrays[name].astype(_PER_TOKEN[name], copy=False)
            missing = episodes.without.get(name)
            if missing is not None and not missing.any():
                missing = None
            hidden = None
            if name.endswith("logprobs"):
                mask = inside if missing is None else inside[np.repeat(~missing, lengths)]
                hidden = np.isnan(numbers)
                np.logical_or(hidden, ~mask, out=hidden)
            columns.append(_lists(numbers, lengths, hidden=hidden, missing=missing))
            continue
        values = episodes.values[name]
        if name == "components":
            columns.append(_maps(values))
            continue
        if name == "row":
            values = _in_json(values)
        elif (cell := _CELLS.get(name)) is not None:
            values = [cell(value) for value in values]
        columns.append(_plain(values, wanted.field(name).type))
    return pa.table(columns, schema=wanted)


def _list_of(kind: pa.DataType) -> pa.DataType:
    import pyarrow as pa

    # The name that parquet gives to what is in a list; with Arrow's own the file's schema would not be this one.
    return pa.list_(pa.field("element", kind))


def _lists(
    values: np.ndarray, lengths: np.ndarray, *, hidden: np.ndarray | None = None, missing: np.ndarray | None = None
) -> pa.Array:
    """A list array from flat values; `hidden` values and `missing` lists are null.

    Raises:
        ValueError: there are more values than the lists hold, or fewer.
    """
    import pyarrow as pa

    sizes = lengths if missing is None else np.where(missing, 0, lengths)
    offsets = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int32)
    if len(values) != offsets[-1]:
        raise ValueError(f"{len(values)} entries for {offsets[-1]} tokens")
    mask = None if missing is None else pa.array(missing)
    flat = pa.array(values, mask=hidden)
    return pa.ListArray.from_arrays(pa.array(offsets), flat, type=_list_of(flat.type), mask=mask)


def _maps(scores: Sequence[Mapping[str, float]]) -> pa.Array:
    """A map array of names and numbers, null for NaN."""
    import pyarrow as pa

    names = _plain([name for one in scores for name in one], pa.string())
    numbers = pa.array([float(value) for one in scores for value in one.values()], type=pa.float64(), from_pandas=True)
    offsets = pa.array([0, *accumulate(map(len, scores))], type=pa.int32())
    return pa.MapArray.from_arrays(offsets, names, numbers)


def _number(value: float) -> float | None:
    return None if math.isnan(value) else float(value)


_CELLS: dict[str, Callable[[Any], Any]] = {
    "reward": _number,
    "answer": lambda answer: None if answer is None else str(answer),
    # A StrEnum is a string to Python but not to Arrow.
    "status": str,
    "prompt_id": str,
}
"""What a column holds of a value, where it is not the value itself."""


def _in_json(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Each row as JSON. Those of a group follow each other and hold the same objects, mostly long texts."""
    found: list[str] = []
    before: list[Any] = []
    for row in rows:
        # 1, 1.0 and True are equal, and other objects.
        held = [*row, *row.values()]
        same = found and len(held) == len(before) and all(map(is_, held, before))
        found.append(found[-1] if same else _AS_JSON(dict(row)))
        before = held
    return found


def _plain(values: Sequence[Any], kind: pa.DataType) -> pa.Array:
    import pyarrow as pa

    try:
        return pa.array(values, type=kind)
    except UnicodeEncodeError:
        # JSON may hold half of a surrogate pair, which UTF-8 has no bytes for.
        return pa.array(
            [text.encode("utf-8", "replace").decode() if isinstance(text, str) else text for text in values], type=kind
        )


def _split(column: pa.ChunkedArray) -> list[np.ndarray | None]:
    """The lists of a column as arrays, views of one; None for a null list."""
    lists = column.combine_chunks()
    offsets = lists.offsets.to_numpy()
    # Null lists are empty, so the offsets fit the values as they are.
    values = lists.values.to_numpy(zero_copy_only=False)
    present = lists.is_valid().to_numpy(zero_copy_only=False)
    return [
        values[start:end] if there else None
        for start, end, there in zip(offsets[:-1], offsets[1:], present, strict=True)
    ]
