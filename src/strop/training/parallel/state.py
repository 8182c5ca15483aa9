"""Sharded checkpoints: each rank writes what it holds, and any other number of ranks reads what it needs of it.

The format is that of torch.distributed.checkpoint. A tensor is described by its whole shape and by where each rank's
piece lies in it, so how it was divided when it was written does not matter when it is read.
"""

from __future__ import annotations

import io
import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from strop.errors import RunFailure
from strop.training.parallel.ranks import Alone, Ranks

FOLDER = "sharded"


def save_sharded(ranks: Ranks, tensors: Mapping[str, Tensor], directory: Path) -> None:
    """Write tensors, called `KIND/NAME` with the name of the trained weight they belong to; all ranks have to ask."""
    state = {key: _described(ranks, key, value) for key, value in tensors.items()}
    with _quiet():
        save(state, storage_writer=FileSystemWriter(directory / FOLDER, sync_files=True))


class HeldFiles(FileSystem):
    """Files in memory, by their paths, for a writer of torch.distributed.checkpoint."""

    def __init__(self) -> None:
        self.files: dict[Path, io.BytesIO] = {}

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[io.IOBase]:
        self.files[Path(path)] = _Kept()
        yield self.files[Path(path)]

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        self.files[Path(new_path)] = self.files.pop(Path(path))

    def mkdir(self, path: str | os.PathLike[str]) -> None:
        """Folders need not be made."""

    def exists(self, path: str | os.PathLike[str]) -> bool:
        return Path(path) in self.files

    def rm_file(self, path: str | os.PathLike[str]) -> None:
        del self.files[Path(path)]


class _Kept(io.BytesIO):
    """Whose content stays when whoever wrote it closes it."""

    def close(self) -> None:
        pass


def hold_sharded(ranks: Ranks, tensors: Mapping[str, Tensor]) -> Callable[[Path], None]:
    """What `save_sharded` would write now; all ranks have to ask, and talk to each other while they do.

    The function that is returned writes this rank's files below a directory and flushes them to the disk, and needs no
    other rank.
    """
    state = {key: _described(ranks, key, value) for key, value in tensors.items()}
    root = Path(FOLDER)
    writer = FileSystemWriter(root, sync_files=False)
    held = writer.fs = HeldFiles()
    with _quiet():
        save(state, storage_writer=writer)

    def write(directory: Path) -> None:
        for path, content in held.files.items():
            target = directory / path
            target.parent.mkdir(parents=True, exist_ok=True)
            with target.open("wb") as file:
                file.write(content.getbuffer())
                file.flush()
                os.fsync(file.fileno())

    return write


def load_sharded(ranks: Alone, parameters: Mapping[str, Tensor], directory: Path) -> dict[str, Tensor]:
    """What `save_sharded` wrote, each tensor divided as the weight of its name is now.

    Args:
        parameters: the trained weights of this rank by name.

    Raises:
        RunFailure: the files belong to other weights.
    """
    reader = FileSystemReader(directory / FOLDER)
    state: dict[str, Any] = {}
    for key, stored in reader.read_metadata().state_dict_metadata.items():
        parameter = parameters.get(key.partition("/")[2])
        if parameter is None:
            raise RunFailure(f"the checkpoint holds {key!r}, and nothing of that name is trained", where=str(directory))
        size, dtype = getattr(stored, "size", None), stored.properties.dtype  # type: ignore[union-attr]
        like = torch.zeros(size, dtype=dtype, device="meta") if size is not None else None
        assert like is not None, f"{key} is no tensor"
        empty = _empty(ranks, key, like, parameter)
        state[key] = _described(ranks, key, empty)
    with _quiet():
        load(state, storage_reader=reader, no_dist=ranks.world == 1)
    return {key: _as_held(value, parameters[key.partition("/")[2]]) for key, value in state.items()}


def divided(ranks: Alone, whole: Mapping[str, Tensor], parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Whole tensors, called `KIND/NAME`, divided as the weights of their names are."""
    if not isinstance(ranks, Ranks):
        return dict(whole)
    found = {}
    for key, value in whole.items():
        parameter = parameters[key.partition("/")[2]]
        if value.dim():
            value = ranks.local(key.partition("/")[2], value).contiguous()
        if isinstance(parameter, DTensor) and value.shape == parameter.shape:
            value = distribute_tensor(value.to(parameter.device), parameter.device_mesh, parameter.placements)
        found[key] = value
    return found


def _described(ranks: Alone, key: str, value: Tensor) -> Tensor:
    """A tensor of this rank with where it lies in the whole."""
    name = key.partition("/")[2]
    if not isinstance(ranks, Ranks) or value.dim() == 0:
        return value
    part = ranks.part(name)
    sharded = isinstance(value, DTensor)
    if part.kind != "divided" and not sharded:
        return value
    shape = list(value.shape)
    if part.kind == "divided":
        shape[part.dim] = part.size
    local = value.to_local() if isinstance(value, DTensor) else value
    placements = [
        Shard(part.dim) if part.kind == "divided" else Replicate(),
        Replicate(),
        Shard(0) if sharded else Replicate(),
    ]
    size = torch.Size(shape)
    stride = torch.empty(size, device="meta").stride()
    return DTensor.from_local(local, ranks.mesh.nested, placements, run_check=False, shape=size, stride=stride)


def _empty(ranks: Alone, key: str, like: Tensor, parameter: Tensor) -> Tensor:
    """Room for a stored tensor, divided as its weight is."""
    device = parameter.device
    name = key.partition("/")[2]
    if isinstance(ranks, Ranks) and like.dim():
        part = ranks.part(name)
        shape = list(like.shape)
        if part.kind == "divided" and shape[part.dim] == part.size:
            shape[part.dim] = parameter.shape[part.dim]
        if tuple(shape) == tuple(parameter.shape):
            if isinstance(parameter, DTensor):
                return torch.zeros_like(parameter, dtype=like.dtype)
            return torch.zeros(shape, dtype=like.dtype, device=device)
    return torch.zeros(like.shape, dtype=like.dtype, device=device if like.dim() else "cpu")


def _as_held(value: Tensor, parameter: Tensor) -> Tensor:
    """What was read, in the form in which its weight is held."""
    if not isinstance(value, DTensor):
        return value
    local = value.to_local()
    if not isinstance(parameter, DTensor):
        return local
    return DTensor.from_local(
        local,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )


@contextmanager
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        # That one process reads alone is meant.
        warnings.filterwarnings("ignore", module="torch.distributed")
        yield
