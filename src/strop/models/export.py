"""Taking a model out of a run: the whole model as a Hugging Face folder, or its adapter alone as a peft folder."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from strop.config.model import ModelSettings
from strop.errors import ModelError, RunFailure, UserError
from strop.models.find import resolve_model
from strop.models.folder import is_scalar_folder, read_json
from strop.models.load import load_model, load_scalar_model, load_tokenizer
from strop.paths import user_path

if TYPE_CHECKING:
    pass

Dtype = Literal["float32", "bfloat16"]
ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors")


def export_model(model: str, out: str | Path, *, adapter: bool = False, dtype: Dtype | None = None) -> Path:
    """Write a model, with tokenizer and chat template, or its adapter into a new folder; whole or not at all.

    Args:
        model: what `resolve_model` understands. In a checkpoint adapters are already merged, in float32.
        out: the folder; made with those above it. It may exist if it is empty.
        adapter: write the adapter in peft's format instead.
        dtype: number format of the weights; None leaves it as it is in the model's folder.

    Returns:
        `out`, absolute.

    Raises:
        UserError: the folder is not empty or cannot be made, the model cannot be used, or it has no adapter.
        RunFailure: the files could not be written, for instance because the disk is full.
    """
    target = user_path(out).absolute()
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise UserError(
            "there is something at the place of the exported folder already",
            where=str(target),
            mend="name a folder that does not exist yet, or empty this one",
        )
    folder = resolve_model(model)
    if adapter:
        source = _adapter_inside(folder)
        with _placed(target) as temporary:
            _write_adapter(source, temporary, dtype)
    else:
        _write_merged(folder, target, dtype)
    return target


def _write_merged(folder: Path, target: Path, dtype: Dtype | None) -> None:
    import torch

    from strop.models.save import save_model

    chosen = getattr(torch, dtype or _dtype_of(folder))
    if is_scalar_folder(folder):
        model, tokenizer = load_scalar_model(folder, device="cpu", dtype=chosen), load_tokenizer(folder)
    else:
        loaded = load_model(ModelSettings(path=str(folder)), device="cpu", dtype=chosen, seed=0)
        model, tokenizer = loaded.model, loaded.tokenizer
    with _placed(target) as temporary:
        save_model(model, tokenizer, temporary)


def _write_adapter(source: Path, folder: Path, dtype: Dtype | None) -> None:
    import torch
    from safetensors.torch import load_file, save_file

    from strop.models.save import sync_folder

    for name in ADAPTER_FILES:
        shutil.copyfile(source / name, folder / name)
    if dtype is not None:
        weights = folder / ADAPTER_FILES[1]
        tensors = {name: tensor.to(getattr(torch, dtype)) for name, tensor in load_file(source / weights.name).items()}
        save_file(tensors, weights, metadata={"format": "pt"})
        # safetensors leaves its files to their owner alone, whatever the umask says.
        weights.chmod((folder / ADAPTER_FILES[0]).stat().st_mode)
    sync_folder(folder)


def _adapter_inside(folder: Path) -> Path:

    adapter = folder / "adapter"
    if is_scalar_folder(folder):
        raise ModelError(
            "the adapter of a reward model is not enough: its scalar head was trained whole beside it",
            where=str(folder),
            mend="leave out --adapter for the whole model",
        )
    if not all((adapter / name).is_file() for name in ADAPTER_FILES):
        raise ModelError(
            "the model has no adapter",
            where=str(folder),
            mend="leave out --adapter for the whole model; checkpoints of runs with model.lora have one",
        )
    return adapter


def _dtype_of(folder: Path) -> str:
    """The number format that config.json names, under its newer name or its older one."""
    config = read_json(folder / "config.json")
    sections = (config, config.get("text_config") or {})
    named = (section.get(key) for section in sections for key in ("dtype", "torch_dtype"))
    return next((name for name in named if name), "float32")


@contextmanager
def _placed(target: Path) -> Iterator[Path]:
    """A temporary folder beside `target`, which takes its place when the block ends without an error."""
    from safetensors import SafetensorError

    temporary = target.with_name(f".{target.name}.partial")
    try:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
    except OSError as error:
        raise UserError(
            f"the folder cannot be made: {error.strerror}",
            where=str(target),
            mend="name a folder in a place where you may write",
        ) from error
    try:
        yield temporary
        if target.exists():
            target.rmdir()  # empty, as was checked; Windows cannot rename onto it
        temporary.rename(target)
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise RunFailure(
            f"the model could not be written: {reason}", where=str(target), mend="free some space on the disk"
        ) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
