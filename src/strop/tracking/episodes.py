"""`episodes/step-NNNNNN.parquet`: what was sampled in a step, token by token."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
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
    """Write a step's episodes to one file, whole or not at all; the folder is made.

    Raises:
        ValueError: an array's length differs from the number of tokens of its record.
        OSError: the file cannot be written.
    """
    import pyarrow as pa
    import pyarrow.parquet as parquet

    table = _table(records)
    # Of what is in lists nobody asks for the least and the most.
    plain = [field.name for field in table.schema if not pa.types.is_nested(field.type)]
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as temporary:
        parquet.write_table(
            table,
            temporary,
            compression="zstd",
            compression_level=1,
            use_dictionary=_REPEATED,
            write_statistics=plain,
        )


class EpisodeWriter:
    """Writes files of episodes in a thread, one after the other and one at a time, while the run goes on."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="strop-episodes")
        self._last: Future[None] | None = None

    def write(self, path: Path, records: Sequence[EpisodeRecord]) -> None:
        """Begin to write, as `write_episodes` does, when the file before is there. Nobody may change the records.

        Raises:
            ValueError, OSError: the file before could not be written.
        """
        self.wait()
        self._last = self._thread.submit(write_episodes, path, records)

    def wait(self) -> None:
        """Wait until all that was given is on the disk.

        Raises:
            ValueError, OSError: it could not be written.
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
    arrays = {name: _split(table.column(name)) for name in ("tokens", "loss_mask", *_PER_TOKEN)}
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
_PER_TOKEN = {
    "sampler_logprobs": np.float32,
    "trainer_logprobs": np.float32,
    "advantages": np.float32,
    "versions": np.int32,
}


def _table(records: Sequence[EpisodeRecord]) -> pa.Table:
    import pyarrow as pa

    fields = schema()
    lengths = np.array([len(record.tokens) for record in records], dtype=np.int64)
    mask = _flat([record.loss_mask for record in records], lengths, np.bool_, "loss_mask")
    columns: dict[str, Any] = {
        "tokens": _lists(_flat([record.tokens for record in records], lengths, np.int32, "tokens"), lengths),
        "loss_mask": _lists(mask, lengths),
    }
    for name, dtype in _PER_TOKEN.items():
        parts = [getattr(record, name) for record in records]
        known = np.array([part is not None for part in parts], dtype=np.bool_)
        shown = np.where(known, lengths, 0)
        values = _flat([part for part in parts if part is not None], lengths[known], dtype, name)
        hidden = None
        if name.endswith("logprobs"):
            hidden = ~(mask if known.all() else mask[np.repeat(known, lengths)]) | np.isnan(values)
        columns[name] = _lists(values, shown, hidden=hidden, missing=~known)
    for name in fields.names:
        if name not in columns:
            values = [getattr(record, name) for record in records]
            if (cell := _CELLS.get(name)) is not None:
                values = [cell(value) for value in values]
            columns[name] = _plain(values, fields.field(name).type)
    return pa.table([columns[name] for name in fields.names], schema=fields)


def _flat(parts: Sequence[np.ndarray], lengths: np.ndarray, dtype: type, name: str) -> np.ndarray:
    parts = [np.asarray(part) for part in parts]
    for part, length in zip(parts, lengths.tolist(), strict=True):
        if part.shape != (length,):
            found = f"{len(part)} entries" if part.ndim == 1 else f"the shape {list(part.shape)}"
            raise ValueError(f"{name} has {found} for {length} tokens")
    formats = {part.dtype for part in parts}
    if len(formats) != 1 or parts[0].dtype.hasobject:
        return np.concatenate([np.zeros(0, dtype=dtype), *parts], dtype=dtype, casting="unsafe")
    # `concatenate` lets go of the interpreter lock at each part, and so does the loop, which runs meanwhile: handing it
    # back and forth would cost the loop more than all of this.
    joined = b"".join([np.ascontiguousarray(part).data for part in parts])
    return np.frombuffer(joined, dtype=parts[0].dtype).astype(dtype, copy=False)


def _list_of(kind: pa.DataType) -> pa.DataType:
    import pyarrow as pa

    # The name that parquet gives to what is in a list; with Arrow's own the file's schema would not be this one.
    return pa.list_(pa.field("element", kind))


def _lists(
    values: np.ndarray, lengths: np.ndarray, *, hidden: np.ndarray | None = None, missing: np.ndarray | None = None
) -> pa.Array:
    """A list array from flat values; `hidden` values and `missing` lists are null."""
    import pyarrow as pa

    offsets = pa.array(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32))
    mask = pa.array(missing) if missing is not None and missing.any() else None
    flat = pa.array(values, mask=hidden)
    return pa.ListArray.from_arrays(offsets, flat, type=_list_of(flat.type), mask=mask)


def _number(value: float) -> float | None:
    return None if math.isnan(value) else float(value)


_CELLS: dict[str, Callable[[Any], Any]] = {
    "row": lambda row: _AS_JSON(dict(row)),
    "components": lambda scores: [(name, _number(score)) for name, score in scores.items()],
    "reward": _number,
    "answer": lambda answer: None if answer is None else str(answer),
    # A StrEnum is a string to Python but not to Arrow.
    "status": str,
    "prompt_id": str,
}
"""What a column holds of a value, where it is not the value itself."""


def _plain(values: list[Any], kind: pa.DataType) -> pa.Array:
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
