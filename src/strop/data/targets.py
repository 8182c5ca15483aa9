"""A file of targets: what teachers say of given texts, told by their likeliest tokens, and kept compactly.

Parquet. Each row is an example: `example` uint64, the fingerprint of its tokens and of which of them are trained; `ids`
list<int32>, for each of its n trained tokens the K likeliest at that place, n x K in one list; `logprobs`
list<float16>, n x (K + 1), the last of each being that of all other tokens together. The file's metadata has
`strop.targets`, the header as JSON. An example is found by its fingerprint, so the data may be shuffled, cut or joined
with other data, and an example whose tokens have changed in any way is not found.
"""

from __future__ import annotations

import dataclasses
import json
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import xxhash

from strop.errors import DataError

if TYPE_CHECKING:
    import pyarrow

FORMAT = "1"
"""Version of the columns and the header."""
_KEY = b"strop.targets"
GROUP_TOKENS = 2048
"""Trained tokens after which a row group ends: what is read at once, when examples come in a shuffled order."""
HELD_GROUPS = 32
"""Row groups that are held decoded."""
FLOOR = -60000.0
"""Smaller log-probabilities are kept as this: float16 ends at -65504."""


@dataclass(frozen=True)
class TeacherRecord:
    """A teacher as the recipe named it, a name for its weights, and its share in the mixture."""

    path: str
    fingerprint: str
    share: float


@dataclass(frozen=True)
class TargetsHeader:
    """What a file of targets is. k: tokens told apart at each position. temperature: of the distributions. vocabulary:
    tokens that the tokenizer knows. tokenizer: fingerprint of its vocabulary. teachers: whose mixture it is."""

    k: int
    temperature: float
    vocabulary: int
    tokenizer: str
    teachers: tuple[TeacherRecord, ...]
    format: str = FORMAT

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> TargetsHeader:
        values = json.loads(text)
        teachers = tuple(TeacherRecord(**record) for record in values.pop("teachers"))
        return cls(**values, teachers=teachers)


def example_fingerprint(tokens: np.ndarray, loss_mask: np.ndarray) -> int:
    """64 bits that name an example: its tokens [L] and which of them are trained [L]."""
    digest = xxhash.xxh3_64(np.ascontiguousarray(tokens, dtype="<i8").tobytes())
    digest.update(np.ascontiguousarray(loss_mask, dtype=np.uint8).tobytes())
    return digest.intdigest()


def tokenizer_fingerprint(tokenizer: Any) -> str:
    """A name for a tokenizer's vocabulary: every token and its number."""
    listed = sorted(tokenizer.get_vocab().items())
    return xxhash.xxh3_128(json.dumps(listed, ensure_ascii=False).encode()).hexdigest()


class TargetsWriter:
    """Writes a file of targets, example by example; use it as a context manager."""

    def __init__(self, path: Path, header: TargetsHeader) -> None:
        import pyarrow.parquet

        self.header = header
        self.examples = 0
        self.tokens = 0
        self._schema = _schema(header)
        # The high bytes of ids are nearly all 0 and those of log-probabilities alike: laid together they compress well.
        split = {f"{name}.list.element": "BYTE_STREAM_SPLIT" for name in ("ids", "logprobs")}
        self._writer = pyarrow.parquet.ParquetWriter(
            path, self._schema, compression="zstd", use_dictionary=False, column_encoding=split
        )
        self._waiting: list[tuple[int, np.ndarray, np.ndarray]] = []
        self._waiting_tokens = 0

    def add(self, example: int, ids: np.ndarray, logprobs: np.ndarray) -> None:
        """Add an example with n trained tokens: ids [n, K], logprobs [n, K + 1]."""
        count, k = len(ids), self.header.k
        if ids.shape != (count, k) or logprobs.shape != (count, k + 1):
            raise ValueError(f"targets of shapes {ids.shape} and {logprobs.shape} in a file of {k} tokens a position")
        missing = np.isneginf(logprobs)
        kept = np.where(missing, -np.inf, np.maximum(logprobs, FLOOR)).astype(np.float16)
        self._waiting.append((example, ids.astype(np.int32), kept))
        self.examples, self.tokens = self.examples + 1, self.tokens + count
        self._waiting_tokens += count
        if self._waiting_tokens >= GROUP_TOKENS:
            self._flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self._flush()
        self._writer.close()

    def _flush(self) -> None:
        import pyarrow as pa

        if not self._waiting:
            return
        examples, ids, logprobs = zip(*self._waiting, strict=True)
        columns = [pa.array(np.asarray(examples, np.uint64)), _lists(ids, pa.int32()), _lists(logprobs, pa.float16())]
        self._writer.write_table(pa.Table.from_arrays(columns, schema=self._schema))
        self._waiting, self._waiting_tokens = [], 0


class TargetsFile:
    """A file of targets, read by row group; `read` finds an example by its fingerprint.

    Raises:
        DataError: there is no such file, it is damaged, or holds something else.
    """

    def __init__(self, path: Path) -> None:
        import pyarrow
        import pyarrow.parquet

        self.path = path
        if not path.is_file():
            raise DataError(
                "there is no such file of targets",
                where=str(path),
                mend="strop teach RECIPE writes it; it asks the teachers of the recipe once for all of its data",
            )
        try:
            self._file = pyarrow.parquet.ParquetFile(path)
            metadata = self._file.metadata
            self.header = TargetsHeader.from_json((metadata.metadata or {})[_KEY].decode())
            examples = self._file.read(columns=["example"]).column("example").to_numpy()
        except (pyarrow.ArrowException, OSError, KeyError, TypeError, ValueError) as error:
            raise DataError(
                f"not a file that `strop teach` wrote, or a damaged one: {str(error).splitlines()[0]}",
                where=str(path),
                mend="delete it and write it again",
            ) from error
        if self.header.format != FORMAT:
            raise DataError(
                f"the file has format {self.header.format}, and this version of strop reads {FORMAT}",
                where=str(path),
                mend="write it again with this version",
            )
        self._order = np.argsort(examples, kind="stable")
        self._sorted = examples[self._order]
        rows = [metadata.row_group(group).num_rows for group in range(metadata.num_row_groups)]
        self._starts = np.concatenate([[0], np.cumsum(rows)]).astype(np.int64)
        self._held: OrderedDict[int, tuple[Any, Any]] = OrderedDict()

    def __len__(self) -> int:
        """Examples."""
        return len(self._sorted)

    def __contains__(self, example: int) -> bool:
        return self._row(example) is not None

    def read(self, example: int, k: int) -> tuple[np.ndarray, np.ndarray]:
        """The targets of an example with n trained tokens: (ids [n, k] int32, logprobs [n, k + 1] float32).

        Each row of logprobs is a distribution again: what rounding to float16 took is given back in proportion.

        Args:
            k: tokens told apart, at most those of the file; the others join the last.

        Raises:
            KeyError: the file has no such example.
        """
        row = self._row(example)
        if row is None:
            raise KeyError(example)
        group = int(np.searchsorted(self._starts, row, side="right")) - 1
        ids, logprobs = (column[row - int(self._starts[group])].values for column in self._group(group))
        stored = self.header.k
        kept = ids.to_numpy().reshape(-1, stored)[:, :k]
        wide = logprobs.to_numpy(zero_copy_only=False).astype(np.float32).reshape(-1, stored + 1)
        told = np.concatenate([wide[:, :k], _log_sum(wide[:, k:])], axis=1)
        return kept, (told - _log_sum(told)).astype(np.float32)

    def _row(self, example: int) -> int | None:
        at = int(np.searchsorted(self._sorted, np.uint64(example)))
        found = at < len(self._sorted) and int(self._sorted[at]) == example
        return int(self._order[at]) if found else None

    def _group(self, number: int) -> tuple[Any, Any]:
        if number in self._held:
            self._held.move_to_end(number)
            return self._held[number]
        table = self._file.read_row_group(number, columns=["ids", "logprobs"]).combine_chunks()
        self._held[number] = (table.column("ids").chunk(0), table.column("logprobs").chunk(0))
        while len(self._held) > HELD_GROUPS:
            self._held.popitem(last=False)
        return self._held[number]


def _schema(header: TargetsHeader) -> pyarrow.Schema:
    import pyarrow as pa

    fields = [
        pa.field("example", pa.uint64(), nullable=False),
        pa.field("ids", pa.list_(pa.int32()), nullable=False),
        pa.field("logprobs", pa.list_(pa.float16()), nullable=False),
    ]
    return pa.schema(fields, metadata={_KEY: header.to_json().encode()})


def _lists(arrays: Sequence[np.ndarray], kind: Any) -> Any:
    """A list column of arrays, each laid out row after row."""
    import pyarrow as pa

    edges = np.concatenate([[0], np.cumsum([array.size for array in arrays])]).astype(np.int32)
    return pa.ListArray.from_arrays(pa.array(edges), pa.array(np.concatenate([a.reshape(-1) for a in arrays]), kind))


def _log_sum(values: np.ndarray) -> np.ndarray:
    """[n, 1] log of the sum of exponentials of each row [n, m]; -inf where all are."""
    top = values.max(axis=1, keepdims=True)
    safe = np.where(np.isneginf(top), 0.0, top)
    with np.errstate(divide="ignore"):
        found: np.ndarray = np.log(np.exp(values - safe).sum(axis=1, keepdims=True)) + safe
    return found
