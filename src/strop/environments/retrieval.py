"""A tool that searches the text files of a folder, by SQLite's full-text index."""

from __future__ import annotations

import json
import re
import sqlite3
import threading
from collections.abc import Iterator
from pathlib import Path

from strop.environments.tools import CallError
from strop.errors import DataError

_KINDS = (".txt", ".md", ".jsonl")


class Passages:
    """Passages of the `.txt`, `.md` and `.jsonl` files below a folder, in an index in memory.

    Args:
        folder: where the files are. words: longest passage.

    Raises:
        DataError: the folder is not there, or holds no text.
    """

    def __init__(self, folder: Path, *, words: int = 120) -> None:
        self._lock = threading.Lock()
        self._index = sqlite3.connect(":memory:", check_same_thread=False)
        self._index.execute("CREATE VIRTUAL TABLE passages USING fts5(source UNINDEXED, body, tokenize='porter')")
        if not folder.is_dir():
            raise DataError("there is no such folder", where=str(folder), mend="name a folder with text files")
        rows = [(source, part) for source, text in _texts(folder) for part in _cut(text, words)]
        if not rows:
            raise DataError(
                "the folder holds no text", where=str(folder), mend=f"put files there that end in {', '.join(_KINDS)}"
            )
        self._index.executemany("INSERT INTO passages VALUES (?, ?)", rows)
        self.count = len(rows)

    def search(self, query: str, top: int) -> list[tuple[str, str]]:
        """(source, passage) of the best passages for the words of a query, best first; BM25."""
        words = re.findall(r"\w+", query.lower())
        if not words:
            raise CallError("the query holds no word")
        match = " OR ".join(f'"{word}"' for word in words[:64])
        with self._lock:
            found = self._index.execute(
                "SELECT source, body FROM passages WHERE passages MATCH ? ORDER BY bm25(passages), rowid LIMIT ?",
                (match, top),
            )
            return list(found)

    def close(self) -> None:
        """Give the memory back."""
        with self._lock:
            self._index.close()


def _texts(folder: Path) -> Iterator[tuple[str, str]]:
    for path in sorted(path for path in folder.rglob("*") if path.suffix in _KINDS and path.is_file()):
        name = str(path.relative_to(folder))
        text = path.read_text(encoding="utf-8", errors="replace")
        if path.suffix != ".jsonl":
            yield name, text
            continue
        for number, line in enumerate(text.splitlines(), start=1):
            if not line.strip():
                continue
            try:
                yield f"{name}:{number}", str(json.loads(line)["text"])
            except (ValueError, KeyError, TypeError) as error:
                raise DataError(
                    f"the line is not a JSON object with a `text`: {error}", where=f"{path}:{number}"
                ) from error


def _cut(text: str, words: int) -> Iterator[str]:
    """Pieces of at most so many words; paragraphs stay together where they fit."""
    piece: list[str] = []
    for paragraph in re.split(r"\n\s*\n", text):
        found = paragraph.split()
        if piece and len(piece) + len(found) > words:
            yield " ".join(piece)
            piece = []
        piece += found
        while len(piece) > words:
            yield " ".join(piece[:words])
            piece = piece[words:]
    if piece:
        yield " ".join(piece)
