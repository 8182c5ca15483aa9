"""Finding, checking and loading models, and putting adapters on them."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import BertConfig, BertForMaskedLM, T5Config, T5ForConditionalGeneration

from strop.config.model import LoraConfig, ModelSettings, NewModel
from strop.errors import ModelError
from strop.models.create import create_model
from strop.models.load import (
    add_lora,
    check_model_folder,
    inspect_model,
    load_model,
    load_tokenizer,
    resolve_dtype,
    resolve_model,
)
from strop.models.save import save_model

TINY = NewModel(hidden_size=16, layers=2, heads=2, context=32)
IDS = torch.tensor([[4, 5, 20, 13, 6, 7]])


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    save_model(*create_model(TINY, seed=0), folder)
    return folder


@pytest.fixture
def folder(saved: Path, tmp_path: Path) -> Path:
    """A copy that a test may break."""
    return Path(shutil.copytree(saved, tmp_path / "model"))


def edit(file: Path, **changes: object) -> None:
    settings = json.loads(file.read_text()) | changes
    file.write_text(json.dumps({key: value for key, value in settings.items() if value is not ...}))


# --- checks before loading


def test_a_whole_folder_passes(folder: Path) -> None:
    check_model_folder(folder)


BROKEN: dict[str, tuple[Callable[[Path], object], str, str]] = {
    "no config": (lambda f: (f / "config.json").unlink(), "config.json", "safetensors"),
    "config not JSON": (lambda f: (f / "config.json").write_text("{"), "cannot be read", "fetch or save"),
    "config a list": (lambda f: (f / "config.json").write_text("[]"), "object", "fetch or save"),
    "no weights": (lambda f: (f / "model.safetensors").unlink(), "no weights", "model.safetensors"),
    "no tokenizer": (lambda f: (f / "tokenizer.json").unlink(), "no tokenizer", "tokenizer.json"),
    "cut off": (lambda f: truncate(f / "model.safetensors", 1000), "cut off", "again"),
    "cut off in the header": (lambda f: truncate(f / "model.safetensors", 50), "cut off", "again"),
    "empty weights": (lambda f: truncate(f / "model.safetensors", 0), "cut off", "again"),
    "lfs pointer": (
        lambda f: (f / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\n"),
        "git-lfs",
        "git lfs pull",
    ),
    "encoder": (lambda f: edit(f / "config.json", architectures=["BertForMaskedLM"]), "not a causal", "ForCausalLM"),
    "encoder-decoder": (lambda f: edit(f / "config.json", is_encoder_decoder=True), "encoder-decoder", "decoder-only"),
    "no model type": (
        lambda f: edit(f / "config.json", architectures=..., model_type=...),
        "no model type",
        "config.json",
    ),
}


def truncate(file: Path, size: int) -> None:
    with file.open("r+b") as stream:
        stream.truncate(size)


@pytest.mark.parametrize("fault", BROKEN)
def test_a_broken_folder_is_named_with_its_mend(folder: Path, fault: str) -> None:
    damage, what, mend = BROKEN[fault]
    damage(folder)
    with pytest.raises(ModelError) as caught:
        check_model_folder(folder)
    assert what in caught.value.what
    assert mend in caught.value.mend
    assert str(folder) in caught.value.where


def test_a_missing_shard_is_named(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors")
    names = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    with pytest.raises(ModelError, match=r"1 of 2 weight files are missing, model-00002-of-00002"):
        check_model_folder(folder)


def test_kinds_of_folders_that_are_no_model(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="does not exist"):
        check_model_folder(tmp_path / "nowhere")
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(ModelError, match="LoRA adapter"):
        check_model_folder(tmp_path)
    (tmp_path / "adapter_config.json").rename(tmp_path / "model.gguf")
    with pytest.raises(ModelError, match="GGUF"):
        check_model_folder(tmp_path)
    with pytest.raises(ModelError, match="this is a file"):
        check_model_folder(tmp_path / "model.gguf")


def test_real_encoders_are_refused(tmp_path: Path) -> None:
    small = {"vocab_size": 8, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    BertForMaskedLM(BertConfig(**small, intermediate_size=8)).save_pretrained(tmp_path / "bert")
    T5ForConditionalGeneration(
        T5Config(vocab_size=8, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=1)
    ).save_pretrained(tmp_path / "t5")
    with pytest.raises(ModelError, match="BertForMaskedLM is not a causal"):
        check_model_folder(tmp_path / "bert")
    with pytest.raises(ModelError, match="encoder-decoder"):
        check_model_folder(tmp_path / "t5")


def test_checking_needs_neither_torch_nor_transformers(saved: Path) -> None:
    """So that a wrong path is answered at once."""
    code = (
        "import sys; from strop.models.load import resolve_model, check_model_folder;"
        "check_model_folder(resolve_model(sys.argv[1]));"
        "assert not {'torch', 'transformers', 'huggingface_hub'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code, str(saved)], check=True)


# --- what a path means


def test_relative_paths_and_home_are_understood(folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(folder.parent)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert resolve_model("model").resolve() == folder.resolve()
    assert resolve_model("./model/").resolve() == folder.resolve()
    assert resolve_model("~/model") == folder
    assert resolve_model(str(folder)) == folder


def test_runs_and_checkpoints_mean_their_model(saved: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    for step in (9, 10):
        shutil.copytree(saved, run / "checkpoints" / f"step-{step:06d}" / "model")
    (run / "checkpoints" / "latest").write_text("step-000009\n")  # the pointer decides, not the name
    expected = run / "checkpoints" / "step-000009" / "model"
    assert resolve_model(str(run)) == expected
    assert resolve_model(str(run / "checkpoints")) == expected
    assert resolve_model(str(run / "checkpoints" / "step-000010")) == run / "checkpoints" / "step-000010" / "model"
    shutil.rmtree(expected)
    with pytest.raises(ModelError, match="latest checkpoint has no model"):
        resolve_model(str(run))


def test_a_run_without_a_checkpoint_says_so(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text("{}")
    with pytest.raises(ModelError, match="no checkpoint yet"):
        resolve_model(str(tmp_path))


def test_a_known_name_that_is_not_here_is_to_be_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STROP_HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelError) as caught:
        resolve_model("smollm2-135m")
    assert caught.value.mend == "strop models fetch smollm2-135m"


def test_the_nearest_name_is_suggested(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder.parent)
    with pytest.raises(ModelError) as caught:
        resolve_model("modle")
    assert "'model'" in caught.value.mend
    with pytest.raises(ModelError) as caught:
        resolve_model("smollm-135m")
    assert "'smollm2-135m'" in caught.value.mend


# --- loading


def test_a_folder_is_loaded_as_saved(saved: Path) -> None:
    loaded = load_model(ModelSettings(path=str(saved)), device="cpu", seed=3)
    original = create_model(TINY, seed=0)[0]
    assert torch.equal(loaded.model(IDS).logits, original(IDS).logits)
    assert not loaded.model.training
    assert (loaded.eos_ids, loaded.pad_id, loaded.context, loaded.name) == ((1,), 0, 32, str(saved))
    assert loaded.tokenizer("12")["input_ids"] == [4, 5]


def test_a_new_model_is_made_from_the_seed() -> None:
    loaded = load_model(ModelSettings(create=TINY), device="cpu", seed=4)
    again = load_model(ModelSettings(create=TINY), device="cpu", seed=4)
    other = load_model(ModelSettings(create=TINY), device="cpu", seed=5)
    assert torch.equal(loaded.model(IDS).logits, create_model(TINY, seed=4)[0](IDS).logits)
    assert loaded.fingerprint == again.fingerprint != other.fingerprint
    assert (loaded.eos_ids, loaded.pad_id, loaded.context, loaded.name) == ((1,), 0, 32, "created")


@pytest.mark.parametrize("origin", ["path", "create"])
def test_the_dtype_asked_for_is_the_dtype_got(saved: Path, origin: str) -> None:
    settings = ModelSettings(path=str(saved)) if origin == "path" else ModelSettings(create=TINY)
    loaded = load_model(settings, device="cpu", dtype=torch.bfloat16, seed=0)
    assert {weight.dtype for weight in loaded.model.parameters()} == {torch.bfloat16}
    assert loaded.model.config.dtype == torch.bfloat16
    asked = load_model(settings.model_copy(update={"dtype": "bfloat16"}), device="cpu", seed=0)
    assert asked.model.dtype == torch.bfloat16


def test_auto_dtype_follows_the_device() -> None:
    assert resolve_dtype("auto", "cpu") == torch.float32
    assert resolve_dtype("auto", "cuda") == torch.bfloat16
    assert resolve_dtype("float32", "cuda") == torch.float32


@pytest.mark.parametrize("origin", ["path", "create"])
def test_the_attention_implementation_is_passed_on(saved: Path, origin: str) -> None:
    settings = ModelSettings(path=str(saved)) if origin == "path" else ModelSettings(create=TINY)
    loaded = load_model(settings, device="cpu", seed=0, attn_implementation="eager")
    assert loaded.model.config._attn_implementation == "eager"


def test_every_end_token_counts(folder: Path) -> None:
    edit(folder / "generation_config.json", eos_token_id=[5, 7])
    assert inspect_model(ModelSettings(path=str(folder))).eos_ids == (5, 7, 1)
    edit(folder / "tokenizer_config.json", pad_token=None, eos_token=None)
    facts = inspect_model(ModelSettings(path=str(folder)))
    assert (facts.eos_ids, facts.pad_id) == ((5, 7), 5)
    (folder / "generation_config.json").unlink()
    assert inspect_model(ModelSettings(path=str(folder))).eos_ids == (1,)  # config.json's
    edit(folder / "config.json", eos_token_id=None)
    with pytest.raises(ModelError, match="ends a text"):
        inspect_model(ModelSettings(path=str(folder)))


@pytest.mark.parametrize(
    ("config", "limit", "context"),
    [
        ({"max_position_embeddings": 64}, 16, 64),  # a tokenizer's limit is not the model's
        ({"max_position_embeddings": 64}, 10**30, 64),
        ({"max_position_embeddings": ...}, 16, 2048),  # the default of its class
        ({"max_position_embeddings": ..., "text_config": {"max_position_embeddings": 96}}, 16, 96),
        ({"max_position_embeddings": ..., "model_type": "bloom"}, 16, 16),
        ({"max_position_embeddings": ..., "model_type": "bloom"}, 10**30, 1 << 20),
    ],
)
def test_the_context_is_the_models(folder: Path, config: dict, limit: int, context: int) -> None:
    edit(folder / "config.json", **config)
    edit(folder / "tokenizer_config.json", model_max_length=limit)
    assert inspect_model(ModelSettings(path=str(folder))).context == context


def test_missing_weights_are_not_filled_with_random_numbers(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"lacks 1 .*layers\.1\.mlp\.up_proj"):
        load_model(ModelSettings(path=str(folder)), device="cpu", seed=0)


def test_weights_of_another_shape_are_refused(folder: Path) -> None:
    edit(folder / "config.json", intermediate_size=8)
    with pytest.raises(ModelError, match="cannot be loaded"):
        load_model(ModelSettings(path=str(folder)), device="cpu", seed=0)


def test_a_tokenizer_of_another_model_is_refused(folder: Path) -> None:
    other = create_model(TINY.model_copy(update={"characters": TINY.characters + "ABC"}), seed=0)[1]
    other.save_pretrained(folder)
    with pytest.raises(ModelError, match="only has embeddings for 48"):
        load_model(ModelSettings(path=str(folder)), device="cpu", seed=0)


def test_a_broken_tokenizer_is_named(folder: Path) -> None:
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelError, match="tokenizer cannot be loaded"):
        load_tokenizer(folder)


def test_an_unknown_model_type_is_named(folder: Path) -> None:
    edit(folder / "config.json", model_type="nonesuch", architectures=["NonesuchForCausalLM"])
    with pytest.raises(ModelError, match="nonesuch"):
        load_model(ModelSettings(path=str(folder)), device="cpu", seed=0)


def test_the_fingerprint_follows_the_contents_and_not_the_place(saved: Path, folder: Path) -> None:
    def fingerprint(path: Path) -> str:
        return load_model(ModelSettings(path=str(path)), device="cpu", seed=0).fingerprint

    assert fingerprint(folder) == fingerprint(saved)
    weights = load_file(folder / "model.safetensors")
    weights["model.layers.1.mlp.up_proj.weight"][0, 0] += 1e-3
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    assert fingerprint(folder) != fingerprint(saved)


# --- adapters


def test_adapters_start_at_nothing_and_train_alone() -> None:
    model = create_model(TINY, seed=0)[0]
    expected = model(IDS).logits
    adapted = add_lora(model, LoraConfig(rank=2), seed=1)
    assert torch.equal(adapted(IDS).logits, expected)
    trained = {name for name, weight in adapted.named_parameters() if weight.requires_grad}
    assert trained == {name for name, _ in adapted.named_parameters() if "lora_" in name}
    assert len(trained) == 2 * 2 * 7  # A and B, two blocks, seven linear layers: not the output head
    assert not adapted.training


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("transposed", [False, True])
def test_dora_starts_at_nothing_and_trains_lengths_of_rows_too(dtype: torch.dtype, transposed: bool) -> None:
    if transposed:
        config = transformers.GPT2Config(vocab_size=48, n_embd=16, n_layer=2, n_head=2, n_positions=32)
        model = transformers.GPT2LMHeadModel(config).eval().to(dtype)
    else:
        model = create_model(TINY, seed=0)[0].to(dtype)
    expected = model(IDS).logits
    adapted = add_lora(model, LoraConfig(rank=2, dora=True, targets=["c_attn"] if transposed else "all-linear"), seed=1)
    assert torch.equal(adapted(IDS).logits, expected)
    lengths = [w for name, w in adapted.named_parameters() if "lora_magnitude_vector" in name]
    assert len(lengths) == (2 if transposed else 2 * 7)
    assert all(w.requires_grad and w.dtype == torch.float32 and w.ndim == 1 for w in lengths)


def test_the_scale_of_an_adapter_is_that_of_its_kind() -> None:
    def scale(**choices: bool) -> float:
        adapted = add_lora(create_model(TINY, seed=0)[0], LoraConfig(rank=4, alpha=8, **choices), seed=1)
        return float(adapted.get_base_model().model.layers[0].self_attn.q_proj.scaling["default"])

    assert scale() == 2.0
    assert scale(rank_stabilised=True) == 4.0


def test_adapters_follow_the_seed_alone() -> None:
    def adapter(seed: int, disturb: int) -> torch.Tensor:
        torch.manual_seed(disturb)
        adapted = add_lora(create_model(TINY, seed=0)[0], LoraConfig(rank=2), seed=seed)
        return torch.cat([weight.flatten() for name, weight in adapted.named_parameters() if "lora_A" in name])

    assert torch.equal(adapter(1, 5), adapter(1, 6))
    assert not torch.equal(adapter(1, 5), adapter(2, 5))
    torch.manual_seed(5)
    expected = torch.rand(2)
    adapter(1, 5)
    assert torch.equal(torch.rand(2), expected)


def test_adapters_are_float32_on_bfloat16_weights() -> None:
    adapted = add_lora(create_model(TINY, seed=0)[0].to(torch.bfloat16), LoraConfig(rank=2), seed=1)
    for name, weight in adapted.named_parameters():
        assert weight.dtype == (torch.float32 if "lora_" in name else torch.bfloat16)


def test_only_the_named_targets_get_adapters() -> None:
    adapted = add_lora(create_model(TINY, seed=0)[0], LoraConfig(rank=2, targets=["q_proj", "layers.1.mlp.up_proj"]), 1)
    layers = {name.split(".lora_")[0].split("layers.")[1] for name, _ in adapted.named_parameters() if "lora_" in name}
    assert layers == {"0.self_attn.q_proj", "1.self_attn.q_proj", "1.mlp.up_proj"}


def test_an_unknown_target_is_answered_with_the_names_there_are() -> None:
    with pytest.raises(ModelError) as caught:
        add_lora(create_model(TINY, seed=0)[0], LoraConfig(targets=["q_proj", "up_porj"]), seed=1)
    assert "'up_porj'" in caught.value.what
    assert "did you mean 'up_proj'" in caught.value.mend
    assert "gate_proj, k_proj" in caught.value.mend
    with pytest.raises(ModelError, match="embed_tokens"):
        add_lora(create_model(TINY, seed=0)[0], LoraConfig(targets=["embed_tokens"]), seed=1)


def test_a_tied_output_head_gets_no_adapter() -> None:
    with pytest.raises(ModelError, match="shares its weights"):
        add_lora(create_model(TINY, seed=0)[0], LoraConfig(targets=["lm_head"]), seed=1)
