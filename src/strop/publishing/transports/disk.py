"""Through a folder that all can read: a folder of safetensors for each version, and its manifest.

A version is written under a temporary name, flushed, and renamed; so what has the name of a version is whole. The files
can be read with any program that knows safetensors.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterable
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from strop.errors import RunFailure
from strop.models.save import sync_path
from strop.publishing.manifest import Manifest, Recording
from strop.publishing.receiver import Receiver
from strop.publishing.transports.protocol import Offer

MANIFEST = "manifest.json"
_NAME = re.compile(r"version-(\d{6,})")
_UNFINISHED = ".writing-"


def version_folder(folder: Path, version: int) -> Path:
    return folder / f"version-{version:06d}"


class DiskSender:
    """Writes versions; the newest `keep` stay.

    Args:
        folder: where the folders of the versions lie. shard_bytes: a file is closed when it holds this much.
    """

    def __init__(self, folder: Path, *, keep: int = 2, shard_bytes: int = 1 << 30) -> None:
        self._folder = folder.absolute()
        self._keep = keep
        self._shard_bytes = shard_bytes
        self._folder.mkdir(parents=True, exist_ok=True)

    def offer(self, version: int, *, takers: int, whole: bool = False) -> Offer:
        return Offer("disk", version, streams=False, details={"folder": str(self._folder)})

    def send(self, recording: Recording, tensors: Iterable[tuple[str, Tensor]]) -> Offer:
        version = recording.version
        final = version_folder(self._folder, version)
        writing = self._folder / f"{_UNFINISHED}{final.name}"
        try:
            shutil.rmtree(writing, ignore_errors=True)
            writing.mkdir()
            shard: dict[str, Tensor] = {}
            held = files = 0
            for name, tensor in tensors:
                # A copy: the trainer may change its weights, and two names may share one memory.
                shard[name] = tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
                held += tensor.nbytes
                if held >= self._shard_bytes:
                    _write(shard, writing / f"weights-{files:05d}.safetensors")
                    shard, held, files = {}, 0, files + 1
            if shard:
                _write(shard, writing / f"weights-{files:05d}.safetensors")
            (writing / MANIFEST).write_text(recording.manifest().to_json(), encoding="utf-8")
            sync_path(writing / MANIFEST)
            sync_path(writing)
            shutil.rmtree(final, ignore_errors=True)  # of a run that was resumed from before this version
            writing.rename(final)
            sync_path(self._folder)
        except OSError as error:
            raise RunFailure(
                f"version {version} of the weights could not be written: {error}",
                where=str(final),
                mend="make room, or set cluster.publishing.folder to a folder that can be written",
            ) from error
        self._prune(version)
        return self.offer(version, takers=0)

    def close(self) -> None:
        """Versions stay where they are."""

    def _prune(self, newest: int) -> None:
        versions = sorted(int(m[1]) for path in self._folder.iterdir() if (m := _NAME.fullmatch(path.name)))
        # Above the newest: what a run left that was resumed from an earlier step.
        older = [version for version in versions if version <= newest]
        for version in {*versions} - {*older[-self._keep :]}:
            shutil.rmtree(version_folder(self._folder, version), ignore_errors=True)


class DiskTaker:
    """Reads versions that a `DiskSender` wrote."""

    def take(self, offer: Offer, receiver: Receiver) -> None:
        folder = version_folder(Path(offer.details["folder"]), offer.version)
        written = read_manifest(folder)
        if written.version != offer.version:
            raise RunFailure(f"the folder of version {offer.version} holds {written.version}", where=str(folder))
        receiver.begin(offer.version)
        try:
            for path in sorted(folder.glob("weights-*.safetensors")):
                with safe_open(path, framework="pt") as shard:
                    for name in shard.keys():  # noqa: SIM118  (no mapping)
                        receiver.put(name, shard.get_tensor(name))
        except (OSError, SafetensorError) as error:
            raise RunFailure(f"weights could not be read: {error}", where=str(folder)) from error

    def close(self) -> None: ...


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a version's folder.

    Raises:
        RunFailure: it is missing or damaged.
    """
    try:
        return Manifest.from_json((folder / MANIFEST).read_text(encoding="utf-8"))
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise RunFailure(
            f"there is no whole version of the weights here: {error}",
            where=str(folder),
            mend="all nodes must see cluster.publishing.folder",
        ) from error


def _write(shard: dict[str, Tensor], path: Path) -> None:
    save_file(shard, path)
    sync_path(path)
