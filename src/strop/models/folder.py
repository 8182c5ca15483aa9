"""What a Hugging Face model folder holds: everything that can be checked before the weights are read.

Only `json` and file sizes are used, so a check takes milliseconds and imports neither torch nor transformers.
"""

from __future__ import annotations

import hashlib
import json
import struct
from pathlib import Path
from typing import Any

from strop.errors import ModelError

WEIGHTS = ("model.safetensors", "pytorch_model.bin")
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "tekken.json")
SCALAR_ENDING = "ForSequenceClassification"
CAUSAL_ENDINGS = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")


def check_model_folder(path: str | Path, *, trust_remote_code: bool = False, scalar: bool = False) -> None:
    """Check that a folder holds a causal language model: configuration, complete weights, tokenizer.

    Args:
        scalar: it must hold a model with a scalar head instead, as a reward model is saved.

    Raises:
        ModelError: the first thing that is missing, broken or of the wrong kind, and how to mend it.
    """
    folder = Path(path)
    if folder.is_file():
        raise ModelError(
            "a model is a folder, this is a file", where=str(folder), mend=f"name the folder {folder.parent}"
        )
    if not folder.is_dir():
        raise ModelError("the model folder does not exist", where=str(folder), mend="check the path")
    config = _config(folder)
    if scalar:
        _check_scalar(config, folder)
    else:
        _check_architecture(config, folder, trust_remote_code)
    _check_weights(folder)
    check_tokenizer_files(folder)


def check_tokenizer_files(folder: Path) -> None:
    """Raises ModelError when a folder has no tokenizer."""
    if any((folder / name).exists() for name in TOKENIZER_FILES):
        return
    # A tokenizer written in Python (auto_map) may keep its vocabulary under any name.
    if "auto_map" in read_json(folder / "tokenizer_config.json", missing={}):
        return
    raise ModelError(
        "the model folder has no tokenizer",
        where=str(folder),
        mend="copy tokenizer.json and tokenizer_config.json of the model into it",
    )


def fingerprint_folder(folder: Path) -> str:
    """A name for the contents of a model folder, 16 hexadecimal digits; it does not depend on where the folder is.

    Configuration and tokenizer files count whole. Of a weights file its size and 64 blocks count, the first and the
    last among them: a training step changes every tensor, so this tells models apart without reading all of them.
    """
    digest = hashlib.sha256()
    small = [f for f in folder.iterdir() if f.name in ("config.json", "generation_config.json", *TOKENIZER_FILES)]
    weights = [f for f in folder.iterdir() if f.suffix in (".safetensors", ".bin")]
    for file in sorted(small + weights):
        size = file.stat().st_size
        digest.update(f"{file.name}:{size}\n".encode())
        with file.open("rb") as stream:
            if file in small:
                digest.update(stream.read())
                continue
            block = 65536
            for part in range(64):
                stream.seek(max(0, (size - block) * part // 63))
                digest.update(stream.read(block))
    return digest.hexdigest()[:16]


def _config(folder: Path) -> dict[str, Any]:
    if not (folder / "config.json").exists():
        if (folder / "adapter_config.json").exists():
            raise ModelError(
                "this is a LoRA adapter, not a whole model",
                where=str(folder),
                mend="name the folder of the merged model (in a strop checkpoint: `model/`)",
            )
        if any(folder.glob("*.gguf")):
            raise ModelError(
                "a GGUF file cannot be trained",
                where=str(folder),
                mend="use the model's Hugging Face folder, with config.json and safetensors",
            )
        raise ModelError(
            "the folder has no config.json, so it is not a Hugging Face model",
            where=str(folder),
            mend="name the folder that holds config.json and model.safetensors",
        )
    return read_json(folder / "config.json")


def read_json(file: Path, missing: dict[str, Any] | None = None) -> dict[str, Any]:
    """The object in a JSON file; `missing`, if given, when there is no such file. Raises ModelError if it is broken."""
    if missing is not None and not file.exists():
        return missing
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise ModelError(
            f"the file cannot be read: {error}", where=str(file), mend="fetch or save the model again"
        ) from error
    if not isinstance(value, dict):
        raise ModelError("the file does not hold a JSON object", where=str(file), mend="fetch or save the model again")
    return value


def _check_architecture(config: dict[str, Any], folder: Path, trust_remote_code: bool) -> None:
    where = str(folder / "config.json")
    architectures = config.get("architectures") or []
    if "model_type" not in config and not architectures:
        raise ModelError("config.json names no model type", where=where, mend="use the config.json of the model")
    if config.get("is_encoder_decoder"):
        raise ModelError(
            f"{(architectures or [config.get('model_type')])[0]} is an encoder-decoder model",
            where=where,
            mend="strop trains causal (decoder-only) language models",
        )
    if any(name.endswith(SCALAR_ENDING) for name in architectures):
        raise ModelError(
            f"{architectures[0]} gives scores, not text",
            where=where,
            mend="name it as a verifier (`kind: reward_model`), and a language model as the model to train",
        )
    if architectures and not any(name.endswith(CAUSAL_ENDINGS) for name in architectures):
        raise ModelError(
            f"{architectures[0]} is not a causal language model",
            where=where,
            mend="use a model whose architecture ends in ForCausalLM",
        )
    if "AutoModelForCausalLM" in config.get("auto_map", {}) and "model_type" not in config and not trust_remote_code:
        raise ModelError(
            "the model comes with Python code of its own",
            where=where,
            mend="if you trust it, set model.trust_remote_code=true",
        )


def _check_weights(folder: Path) -> None:
    for name in WEIGHTS:
        index = folder / f"{name}.index.json"
        if index.exists():
            shards = sorted(set(read_json(index).get("weight_map", {}).values()))
            missing = [shard for shard in shards if not (folder / shard).exists()]
            if missing or not shards:
                raise ModelError(
                    f"{len(missing)} of {len(shards)} weight files are missing, {missing[0]} for one"
                    if missing
                    else "the index of the weight files is empty",
                    where=str(index),
                    mend="fetch or copy the model again",
                )
            for shard in shards:
                _check_weight_file(folder / shard)
            return
        if (folder / name).exists():
            _check_weight_file(folder / name)
            return
    raise ModelError(
        "the model folder has no weights",
        where=str(folder),
        mend="it needs model.safetensors, or model.safetensors.index.json and its shards",
    )


def _check_weight_file(file: Path) -> None:
    """A file that is a git-lfs pointer or was cut off is found out here, not after minutes of loading."""
    size = file.stat().st_size
    with file.open("rb") as stream:
        start = stream.read(64)
        if start.startswith(b"version https://git-lfs"):
            raise ModelError(
                "the weights are a git-lfs pointer, not the file itself", where=str(file), mend="run `git lfs pull`"
            )
        if file.suffix != ".safetensors":
            return
        whole = None
        if size >= 8:
            length = struct.unpack("<Q", start[:8])[0]
            if length <= size - 8:
                stream.seek(8)
                try:
                    header = json.loads(stream.read(length))
                    ends = [entry["data_offsets"][1] for key, entry in header.items() if key != "__metadata__"]
                    whole = 8 + length + max(ends, default=0)
                except (ValueError, KeyError, TypeError, IndexError, AttributeError):
                    whole = None
    if whole != size:
        detail = f": {size} bytes, its header says {whole}" if whole else ""
        raise ModelError(
            f"the weights are cut off or not safetensors{detail}", where=str(file), mend="fetch or save the model again"
        )


def is_scalar_folder(folder: Path) -> bool:
    """Whether a folder holds a model with a scalar head, as reward models are saved."""
    config = read_json(folder / "config.json", missing={})
    return any(str(name).endswith(SCALAR_ENDING) for name in config.get("architectures") or [])


def _check_scalar(config: dict[str, Any], folder: Path) -> None:
    architectures = config.get("architectures") or []
    if not any(str(name).endswith(SCALAR_ENDING) for name in architectures):
        raise ModelError(
            f"{(architectures or ['the model'])[0]} is a language model, which gives no score",
            where=str(folder / "config.json"),
            mend="train a reward model with supervised.method: reward_model, and name its run",
        )
    # transformers leaves the names out where there are two labels, which is what it takes when nothing is said.
    labels = len(config.get("id2label") or (0, 1))
    if labels != 1:
        raise ModelError(
            f"the model has {labels} labels, and a reward is one number",
            where=str(folder / "config.json"),
            mend="use a model that was trained with num_labels = 1",
        )
