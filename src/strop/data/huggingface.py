"""Hugging Face datasets: a folder written by `save_to_disk`, or a name on the Hub; memory-mapped either way."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from strop.config.data import Columns, DataSource
from strop.data.columns import listed, nearest
from strop.data.fingerprints import combined, rows_fingerprint, sample_indices
from strop.errors import DataError
from strop.paths import user_path

REACH_SECONDS = 2.0
"""How long the Hub may take to accept a connection before it counts as out of reach."""


class HuggingFaceSource:
    """Rows of a Hugging Face dataset.

    Raises:
        DataError: the dataset has no rows.
    """

    blocks = None

    def __init__(self, dataset: Any, *, name: str) -> None:
        self.mapping = Columns()
        self._dataset = dataset
        self._name = name
        self.columns = list(dataset.column_names)
        if not len(dataset):
            raise DataError("the dataset holds no rows", where=name, mend="Choose another split.")
        # Not the library's own fingerprint: that one changes when equal rows are saved again.
        sample = dataset.select(sample_indices(len(dataset)))
        self.fingerprint = combined([str(len(dataset)), rows_fingerprint(sample.to_list())])

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, i: int) -> dict[str, Any]:
        if not 0 <= i < len(self):
            raise IndexError(f"row {i} of {len(self)}")
        row: dict[str, Any] = self._dataset[i]
        return row

    def location(self, i: int) -> str:
        return f"{self._name}, row {i} counted from 0"

    def describe(self) -> str:
        return f"Hugging Face dataset {self._name}, {len(self):,} rows, columns {listed(self.columns)}"


def open_huggingface(settings: DataSource) -> HuggingFaceSource:
    """Open a folder written by `datasets` or load a dataset by its name on the Hub."""
    path = user_path(settings.path)
    if path.is_dir() and any((path / name).exists() for name in ("dataset_dict.json", "state.json")):
        return _open_saved(path, settings)
    return _open_named(settings)


def _open_saved(path: Path, settings: DataSource) -> HuggingFaceSource:
    import datasets

    try:
        found = datasets.load_from_disk(str(path))
    except Exception as error:
        raise DataError(
            f"the folder cannot be read as a saved dataset: {_first_line(error)}",
            where=str(path),
            mend="Save it again with `dataset.save_to_disk(...)`.",
        ) from error
    if not isinstance(found, datasets.DatasetDict):
        return HuggingFaceSource(found, name=str(path))
    if settings.split not in found:
        raise DataError(
            f"the dataset has no split {settings.split!r}; it has {listed(found)}",
            where=str(path),
            mend=nearest(settings.split, found) or "Set `split` to one of them.",
        )
    return HuggingFaceSource(found[settings.split], name=f"{path} [{settings.split}]")


def _open_named(settings: DataSource) -> HuggingFaceSource:
    import datasets

    offline = not _hub_answers()
    try:
        with _offline_mode() if offline else nullcontext():
            found = datasets.load_dataset(settings.path, settings.subset, split=settings.split)
    except Exception as error:
        if offline:
            raise DataError(
                f"{settings.path!r} is no file or folder here, and the Hugging Face Hub cannot be reached "
                "to look for a dataset of that name",
                where=settings.path,
                mend="Check the path; or go online, or save the dataset to a folder with `save_to_disk` elsewhere.",
            ) from error
        raise DataError(
            f"the dataset {settings.path!r} could not be loaded from the Hub: {_first_line(error)}",
            where=settings.path,
            mend="Check the path (a file or folder here, or a name on the Hub), `subset` and `split`.",
        ) from error
    subset = f"/{settings.subset}" if settings.subset else ""
    return HuggingFaceSource(found, name=f"{settings.path}{subset} [{settings.split}]")


def _hub_answers() -> bool:
    # Without this, a machine without a network waits some 25 seconds in the library's retries before a wrong path is
    # reported. Behind a proxy a direct connection says nothing, so there the library decides.
    if any(os.environ.get(name) for name in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy")):
        return True
    url = urlsplit(os.environ.get("HF_ENDPOINT") or "https://huggingface.co")
    port = url.port or (80 if url.scheme == "http" else 443)
    try:
        with socket.create_connection((url.hostname or "", port), timeout=REACH_SECONDS):
            return True
    except OSError:
        return False


@contextmanager
def _offline_mode() -> Iterator[None]:
    """Let the library look only at what it has downloaded before; it reads the switch once, at import."""
    import datasets
    import huggingface_hub

    before = huggingface_hub.constants.HF_HUB_OFFLINE, datasets.config.HF_HUB_OFFLINE
    huggingface_hub.constants.HF_HUB_OFFLINE = datasets.config.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        huggingface_hub.constants.HF_HUB_OFFLINE, datasets.config.HF_HUB_OFFLINE = before


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
