"""Loading a model from its folder, or making a new one."""

from __future__ import annotations

import difflib
import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from strop.config.model import LoraConfig, ModelSettings
from strop.errors import ModelError
from strop.models.create import create_model, create_tokenizer
from strop.models.find import resolve_model
from strop.models.folder import check_model_folder, check_tokenizer_files, fingerprint_folder, read_json
from strop.models.global_state import quiet, seeded

if TYPE_CHECKING:
    import torch
    from peft import PeftModel
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

UNBOUNDED = 1 << 20
"""Context of a model that has no longest sequence, in tokens."""


@dataclass(frozen=True)
class ModelFacts:
    """What can be known of a model without its weights.

    eos_ids: every token that ends a text, from the generation settings and the tokenizer. pad_id: the tokenizer's, else
    the first of `eos_ids`. context: longest sequence in tokens. name: as the user gave it, or "created".
    folder: where it was found; None for a model that is made on the spot.
    """

    tokenizer: PreTrainedTokenizerBase
    eos_ids: tuple[int, ...]
    pad_id: int
    context: int
    name: str
    folder: Path | None


@dataclass(frozen=True)
class Loaded:
    """A model in eval mode and what belongs to it; see `ModelFacts`. fingerprint: names the weights it started from."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    eos_ids: tuple[int, ...]
    pad_id: int
    context: int
    name: str
    fingerprint: str


def inspect_model(settings: ModelSettings) -> ModelFacts:
    """Check everything that can be checked before loading, and load the tokenizer: about a second, most of it imports.

    Raises:
        ModelError: the model cannot be used; see `resolve_model` and `check_model_folder`.
    """
    if settings.create is not None:
        return _facts(create_tokenizer(settings.create), [], settings.create.context, "created", None)
    assert settings.path is not None
    folder = resolve_model(settings.path)
    check_model_folder(folder, trust_remote_code=settings.trust_remote_code)
    tokenizer = load_tokenizer(folder, trust_remote_code=settings.trust_remote_code)
    context = context_length(folder, tokenizer, trust_remote_code=settings.trust_remote_code)
    return _facts(tokenizer, _end_tokens(folder), context, settings.path, folder)


def vocabulary_size(facts: ModelFacts) -> int:
    """How many tokens a model knows, without its weights; a head may have rows that its tokenizer has no text for."""
    known = max(facts.tokenizer.get_vocab().values(), default=-1) + 1
    if facts.folder is None:
        return known
    config = read_json(facts.folder / "config.json")
    sizes = [section.get("vocab_size") for section in (config, config.get("text_config") or {})]
    return max([known, *(size for size in sizes if isinstance(size, int))])


def load_tokenizer(path: str | Path, *, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """The tokenizer of anything `resolve_model` understands."""
    folder = path if isinstance(path, Path) else resolve_model(path)
    check_tokenizer_files(folder)
    kind = read_json(folder / "tokenizer_config.json", missing={}).get("tokenizer_class")
    try:
        with quiet():
            if kind in ("PreTrainedTokenizerFast", "TokenizersBackend") and (folder / "tokenizer.json").exists():
                # The class that AutoTokenizer would find, without the second or two of imports that it needs to look.
                from transformers import PreTrainedTokenizerFast

                return PreTrainedTokenizerFast.from_pretrained(folder)
            from transformers import AutoTokenizer

            return AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code)
    except Exception as error:  # transformers, tokenizers and sentencepiece each have errors of their own
        raise ModelError(
            f"the tokenizer cannot be loaded: {_first_line(error)}", where=str(folder), mend=_mend(error)
        ) from error


def load_model(
    settings: ModelSettings,
    *,
    device: torch.device | str,
    dtype: torch.dtype | None = None,
    seed: int,
    attn_implementation: str | None = None,
) -> Loaded:
    """Load or make the model that the settings name, without adapters (see `add_lora`).

    Args:
        dtype: number format of the weights; None takes it from the settings and the device.
        seed: of the weights of a new model; a loaded one does not depend on it.
        attn_implementation: as transformers takes it; None leaves the choice to transformers.

    Raises:
        ModelError: the model cannot be used, or its folder lacks some of the weights.
    """
    import torch

    device = torch.device(device)
    dtype = dtype or resolve_dtype(settings.dtype, device)
    facts = inspect_model(settings)
    if settings.create is not None:
        model: Any = create_model(settings.create, seed=seed)[0]
        fingerprint = fingerprint_weights(model)
        if attn_implementation is not None:
            model.set_attn_implementation(attn_implementation)
        model.to(dtype)
        # transformers writes this down when it loads; a model made here must say the same.
        model.config.dtype = dtype
    else:
        assert facts.folder is not None
        model = _read(facts.folder, dtype, settings.trust_remote_code, attn_implementation)
        fingerprint = fingerprint_folder(facts.folder)
    rows = model.get_input_embeddings().weight.shape[0]
    # Not len(tokenizer): ids may have gaps.
    highest = max(facts.tokenizer.get_vocab().values(), default=0)
    if highest >= rows:
        raise ModelError(
            f"the tokenizer has token {highest}, the model only has embeddings for {rows} tokens",
            where=str(facts.folder),
            mend="use the tokenizer that belongs to the model",
        )
    model.eval()
    return Loaded(
        model=model.to(device),
        tokenizer=facts.tokenizer,
        eos_ids=facts.eos_ids,
        pad_id=facts.pad_id,
        context=facts.context,
        name=facts.name,
        fingerprint=fingerprint,
    )


def resolve_dtype(name: str, device: torch.device | str) -> torch.dtype:
    """`model.dtype` as torch's: `auto` is bfloat16 on a GPU and float32 on a CPU."""
    import torch

    if name == "auto":
        name = "float32" if torch.device(device).type == "cpu" else "bfloat16"
    return {"float32": torch.float32, "bfloat16": torch.bfloat16}[name]


def fingerprint_weights(model: PreTrainedModel) -> str:
    """A name for the weights in memory, 16 hexadecimal digits; reads all of them."""
    import torch

    digest = hashlib.sha256()
    for name, tensor in model.state_dict().items():
        digest.update(f"{name}:{tuple(tensor.shape)}:{tensor.dtype}\n".encode())
        digest.update(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]


def context_length(folder: Path, tokenizer: PreTrainedTokenizerBase, *, trust_remote_code: bool = False) -> int:
    """Longest sequence in tokens: what the model's configuration says, else the tokenizer's limit if that is sane.

    Tokenizers often carry a limit of 10^30 (none known) or that of another model of the family.
    """
    config = read_json(folder / "config.json")
    for section in (config.get("text_config") or {}, config):
        for key in ("max_position_embeddings", "n_positions"):
            if section.get(key):
                return int(section[key])
    # config.json may leave out what is the default of its class. This is not the first thing tried because the import
    # behind it takes a second or two.
    positions = getattr(_config(folder, trust_remote_code).get_text_config(), "max_position_embeddings", None)
    if positions:
        return int(positions)
    return int(tokenizer.model_max_length) if 0 < tokenizer.model_max_length < UNBOUNDED else UNBOUNDED


def add_lora(model: PreTrainedModel, settings: LoraConfig, seed: int, *, updates: int = 1) -> PeftModel:
    """Freeze the weights and put a float32 adapter on each target; the model computes the same until it is trained.

    The adapters' first values depend on the seed only; the global random state is left as it was.

    Args:
        updates: optimizer updates of the whole run; with `adaptive`, the ranks move by them.

    Raises:
        ModelError: a target is no linear layer of the model, or is an output head tied to the embeddings.
    """
    import peft
    import torch

    from strop.models.adapters import compute_like_inputs
    from strop.models.adaptive import adaptive_config

    training = model.training
    _check_targets(model, settings.targets)
    scalar = isinstance(getattr(model, "score", None), torch.nn.Linear)
    common: dict[str, Any] = {
        "task_type": None if scalar else "CAUSAL_LM",
        # A scalar head is new and has to be learned whole.
        "exclude_modules": ["score"] if scalar else None,
        "lora_alpha": settings.alpha,
        "lora_dropout": settings.dropout,
        "target_modules": settings.targets,
    }
    if settings.adaptive is not None:
        config = adaptive_config(settings, updates, **common)
    else:
        config = peft.LoraConfig(r=settings.rank, use_rslora=settings.rank_stabilised, use_dora=settings.dora, **common)
    try:
        with seeded(seed), quiet():
            adapted = peft.get_peft_model(model, config, autocast_adapter_dtype=True)
    except ValueError as error:
        raise ModelError(
            f"the model cannot have adapters there: {_first_line(error)}",
            where="model.lora.targets",
            mend="name other modules in `targets`" + (", or leave out `dora`" if settings.dora else ""),
        ) from error
    if scalar:
        adapted.get_base_model().score.requires_grad_(True)
    if settings.dora:
        _measure_rows(adapted)
    elif settings.adaptive is None:
        compute_like_inputs(adapted)
    return adapted.train(training)


def _measure_rows(model: PeftModel) -> None:
    """Set DoRA's magnitudes to the lengths of the rows in float32.

    peft measures them in the number format of the weights but divides by lengths in that of the adapters: under
    bfloat16 a model with untrained adapters would not be the model without them.
    """
    import torch
    from peft.tuners.lora import LoraLayer

    for layer in model.modules():
        if isinstance(layer, LoraLayer):
            lora: Any = layer
            rows = lora.get_base_layer().weight.detach().float()
            lengths = torch.linalg.norm(rows.T if getattr(lora, "fan_in_fan_out", False) else rows, dim=1)
            for magnitudes in lora.lora_magnitude_vector.values():
                magnitudes.weight.data.copy_(lengths)


def _check_targets(model: PreTrainedModel, targets: list[str] | str) -> None:
    from torch import nn
    from transformers.pytorch_utils import Conv1D

    if isinstance(targets, str):
        return
    if not targets:
        raise ModelError("no module gets an adapter", where="model.lora.targets", mend="name one, or use all-linear")
    linear = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear | Conv1D)}
    head = model.get_output_embeddings()
    tied = head is not None and head.weight is model.get_input_embeddings().weight
    for target in targets:
        chosen = [module for name, module in linear.items() if name == target or name.endswith(f".{target}")]
        if not chosen:
            names = sorted({name.rsplit(".", 1)[-1] for name in linear})
            near = difflib.get_close_matches(target, names, n=1)
            raise ModelError(
                f"the model has no linear layer called {target!r}",
                where="model.lora.targets",
                mend=(f"did you mean {near[0]!r}? " if near else "") + f"its linear layers are {', '.join(names)}",
            )
        if tied and head in chosen:
            raise ModelError(
                f"{target!r} shares its weights with the embeddings, so an adapter on it could not be merged",
                where="model.lora.targets",
                mend="leave it out; all-linear does",
            )


def load_scalar_model(folder: Path, *, device: torch.device | str, dtype: torch.dtype) -> PreTrainedModel:
    """Load a model with a scalar head, in eval mode.

    Raises:
        ModelError: it is not one (`check_model_folder` says what it is), or lacks some of its weights.
    """
    check_model_folder(folder, scalar=True)
    model: Any = _read(folder, dtype, False, None, scalar=True)
    return model.eval().to(device)


def _read(
    folder: Path, dtype: torch.dtype, trust_remote_code: bool, attn_implementation: str | None, *, scalar: bool = False
) -> Any:
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

    options = {} if attn_implementation is None else {"attn_implementation": attn_implementation}
    loader: Any = AutoModelForSequenceClassification if scalar else AutoModelForCausalLM
    try:
        with quiet():
            model, report = loader.from_pretrained(
                folder, dtype=dtype, trust_remote_code=trust_remote_code, output_loading_info=True, **options
            )
    except (OSError, ValueError, RuntimeError, KeyError, ImportError) as error:
        raise ModelError(
            f"the model cannot be loaded: {_first_line(error)}", where=str(folder), mend=_mend(error)
        ) from error
    missing = sorted(report["missing_keys"])
    if missing:
        # transformers fills these with random numbers and goes on.
        raise ModelError(
            f"the folder lacks {len(missing)} of the model's weights, {missing[0]!r} for one",
            where=str(folder),
            mend="fetch or save the model again",
        )
    return model


def _config(folder: Path, trust_remote_code: bool) -> PreTrainedConfig:
    from transformers import AutoConfig

    try:
        with quiet():
            return AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
    except Exception as error:  # a broken value may raise anything
        raise ModelError(
            f"the model's configuration cannot be read: {_first_line(error)}", where=str(folder), mend=_mend(error)
        ) from error


def _end_tokens(folder: Path) -> list[int]:
    """What generation_config.json, or where there is none config.json, gives as `eos_token_id`: a number or several."""
    settings = read_json(folder / "generation_config.json", missing={})
    if "eos_token_id" not in settings:
        config = read_json(folder / "config.json")
        settings = {**(config.get("text_config") or {}), **config}
    given = settings.get("eos_token_id")
    return [token for token in (given if isinstance(given, list) else [given]) if token is not None]


def _facts(tokenizer: Any, end_tokens: list[int], context: int, name: str, folder: Path | None) -> ModelFacts:
    ids = [*end_tokens, tokenizer.eos_token_id]
    eos_ids = tuple(dict.fromkeys(int(token) for token in ids if token is not None))
    if not eos_ids:
        raise ModelError(
            "neither the generation settings nor the tokenizer say which token ends a text",
            where=str(folder),
            mend="set eos_token_id in generation_config.json",
        )
    pad_id = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else eos_ids[0]
    return ModelFacts(tokenizer, eos_ids, pad_id, context, name, folder)


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0][:300]


def _mend(error: BaseException) -> str:
    if "trust_remote_code" in str(error):
        return "it comes with Python code of its own; if you trust it, set model.trust_remote_code=true"
    return "fetch or save the model again; if that does not help, it may need another version of transformers"
