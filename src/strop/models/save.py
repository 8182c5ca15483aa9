"""Writing a model as a Hugging Face folder that `from_pretrained` loads as is."""

from __future__ import annotations

import copy
import json
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from strop.errors import RunFailure
from strop.models.adapters import without_adapters
from strop.models.global_state import quiet, silent

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase


def save_model(model: Any, tokenizer: PreTrainedTokenizerBase, folder: str | Path) -> None:
    """Write weights, configuration, generation settings and tokenizer; every file is on the disk when this returns.

    Args:
        model: a Hugging Face causal model, or one wrapped by `add_lora`: its adapters are then merged into copies of
            the weights, in float32, and kept beside them in `adapter/` (peft's format). The model is not changed.
        folder: made when it does not exist. Write to a temporary name and rename for an atomic save.

    Raises:
        RunFailure: the files could not be written, for instance because the disk is full.
    """
    from safetensors import SafetensorError

    target = Path(folder)
    base = without_adapters(model)
    try:
        # A model with a scalar head generates nothing.
        generation = getattr(base, "generation_config", None)
        write_folder(type(base), base.config, merged_weights(model), generation, tokenizer, target)
        if base is not model:
            save_adapters(model, target / "adapter")
        sync_folder(target)
    except (OSError, SafetensorError) as error:
        raise _not_written(error, target) from error


def hold_model(
    model: Any, tokenizer: PreTrainedTokenizerBase, copied: Callable[[torch.Tensor], torch.Tensor]
) -> Callable[[Path], None]:
    """What `save_model` would write now, held in memory; the function that is returned writes the same files.

    It may be called in another thread while the model is trained and the tokenizer is used: it touches neither, nor
    the global random state.

    Args:
        copied: gives a copy of a tensor that nobody changes, or the tensor itself where nobody will.
    """
    from safetensors import SafetensorError

    base = without_adapters(model)
    live = {tensor.data_ptr() for tensor in model.state_dict().values()}
    # What adapters were merged into is a copy already.
    weights = {
        name: copied(tensor) if tensor.data_ptr() in live else tensor for name, tensor in merged_weights(model).items()
    }
    empty = _empty(type(base), base.config, weights)
    generation = copy.deepcopy(getattr(base, "generation_config", None))
    try:
        with tempfile.TemporaryDirectory() as name:
            small = Path(name)
            save_tokenizer(tokenizer, small)
            if base is not model:
                save_adapters(model, small / "adapter")
            files = {path.relative_to(small): path.read_bytes() for path in small.rglob("*") if path.is_file()}
    except (OSError, SafetensorError) as error:
        raise _not_written(error, Path(tempfile.gettempdir())) from error

    def write(folder: Path) -> None:
        try:
            with silent():
                _write_weights(empty, weights, generation, folder)
            for path, content in files.items():
                (folder / path).parent.mkdir(exist_ok=True)
                (folder / path).write_bytes(content)
            sync_folder(folder)
        except (OSError, SafetensorError) as error:
            raise _not_written(error, folder) from error

    return write


def save_adapters(model: Any, folder: Path) -> None:
    """Write the adapters of a model alone, in peft's format; nothing is flushed to the disk."""
    from strop.models.adaptive import ranks_as_they_are

    # "auto" would ask the Hub whether the vocabulary was resized.
    with quiet(), ranks_as_they_are(model):
        model.save_pretrained(folder, save_embedding_layers=False)


def _not_written(error: Exception, folder: Path) -> RunFailure:
    reason = getattr(error, "strerror", None) or str(error)
    return RunFailure(
        f"the model could not be written: {reason}", where=str(folder), mend="free some space on the disk"
    )


def merged_weights(model: Any) -> dict[str, torch.Tensor]:
    """Weights by their Hugging Face names, with adapters merged in on the CPU; see `walk_merged`."""
    return dict(walk_merged(model, device="cpu"))


def walk_merged(model: Any, *, device: str | None = None) -> Iterator[tuple[str, torch.Tensor]]:
    """(Hugging Face name, weight with its adapters merged in), one by one; without an adapter it is not copied.

    The sum of W and what its adapters add (see `adapter_delta`) is computed in float32 and cast to the type of W once,
    at the end: summing in bfloat16 would lose most of a small update.

    Args:
        device: where sums are computed, and stay; None for where the weight is.
    """
    if not hasattr(model, "peft_config"):
        yield from model.state_dict().items()
        return
    base = model.get_base_model()
    adapters: dict[str, list[Any]] = {}
    for name, module in base.named_modules():
        if hasattr(module, "lora_A"):
            # Wrappers of a parameter, as peft puts on the stacked experts of a mixture, name it and may be nested.
            plain = f"{_unwrapped(name)}.{getattr(module, 'parameter_name', 'weight')}"
            adapters.setdefault(plain, []).append(module)
    for plain, tensor in walk_plain(model):
        yield plain, _merge(adapters[plain], tensor, device) if plain in adapters else tensor


def walk_plain(model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """(Hugging Face name, weight as it is without its adapters), one by one; none is copied."""
    base = without_adapters(model)
    for name, tensor in base.state_dict().items():
        if not any(part.startswith("lora_") or part == "ranknum" for part in name.split(".")):
            yield _unwrapped(name), tensor


def _unwrapped(name: str) -> str:
    return ".".join(part for part in name.split(".") if part != "base_layer")


def _merge(layers: list[Any], weight: torch.Tensor, device: str | None) -> torch.Tensor:
    import torch

    from strop.models.adapters import adapter_delta

    plain = weight.detach().to(device or weight.device, torch.float32)
    merged = plain.clone()
    for layer in layers:
        for adapter in layer.active_adapters:
            if adapter in layer.lora_A:
                merged += adapter_delta(layer, adapter, plain)
    return merged.to(weight.dtype)


def write_folder(
    architecture: type[PreTrainedModel],
    config: PreTrainedConfig,
    weights: dict[str, torch.Tensor],
    generation_config: Any,
    tokenizer: PreTrainedTokenizerBase,
    folder: Path,
) -> None:
    """Write a model given as weights by name; `config` is not changed.

    An empty model of the same architecture does the writing: it knows which weights are tied and how their names and
    shapes look on the disk, and nothing of how the live model is run (attention, adapters, hooks) gets into the files.
    """
    with quiet():
        _write_weights(_empty(architecture, config, weights), weights, generation_config, folder)
    save_tokenizer(tokenizer, folder)


def _empty(architecture: type[PreTrainedModel], config: PreTrainedConfig, weights: dict[str, torch.Tensor]) -> Any:
    import torch

    config = copy.deepcopy(config)
    config._attn_implementation_internal = "eager"
    dtype = next(tensor.dtype for tensor in weights.values() if tensor.is_floating_point())
    make: Any = architecture
    with torch.random.fork_rng(devices=[]), torch.device("meta"):
        empty = make(config)
    return empty.to(dtype=dtype)


def _write_weights(empty: Any, weights: dict[str, torch.Tensor], generation_config: Any, folder: Path) -> None:
    empty.save_pretrained(folder, state_dict=dict(weights))
    # safetensors leaves its files to their owner alone, whatever the umask says.
    for file in folder.glob("*.safetensors"):
        file.chmod((folder / "config.json").stat().st_mode)
    if generation_config is not None:
        # Its own save_pretrained refuses settings that published models have (a temperature without do_sample).
        generation_config.to_json_file(folder / "generation_config.json", use_diff=True, keys_to_pop=["compile_config"])


def save_tokenizer(tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Write a tokenizer and its chat template, loadable by transformers 4 and 5 and by servers built on either."""
    tokenizer.save_pretrained(folder)
    file = folder / "tokenizer_config.json"
    settings = json.loads(file.read_text(encoding="utf-8"))
    # Where the tokenizer was loaded from is nobody's business.
    for key in ("is_local", "local_files_only", "name_or_path"):
        settings.pop(key, None)
    if settings.get("tokenizer_class") == "TokenizersBackend":
        # The older name of the same class, known to both versions.
        settings["tokenizer_class"] = "PreTrainedTokenizerFast"
    file.write_text(json.dumps(settings, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def sync_folder(folder: Path) -> None:
    """Flush every file below a folder, and the folders themselves, to the disk."""
    for path in [*folder.rglob("*"), folder]:
        sync_path(path)


def sync_path(path: Path) -> None:
    """Flush a file, or the names in a folder, to the disk."""
    if os.name == "nt" and path.is_dir():
        return  # Windows cannot open a folder
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
