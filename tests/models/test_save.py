"""Saved folders: what `from_pretrained` loads computes what was saved, adapters included."""

from __future__ import annotations

import copy
import json
import os
import resource
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GPT2Config,
    GPT2LMHeadModel,
    MixtralConfig,
    MixtralForCausalLM,
)

from strop.config.model import LoraConfig, NewModel
from strop.errors import ModelError, RunFailure
from strop.models.create import create_model
from strop.models.load import add_lora
from strop.models.save import merged_weights, save_model

TINY = NewModel(hidden_size=16, layers=2, heads=2, context=32)
IDS = torch.tensor([[4, 5, 20, 13, 6, 7]])


KINDS = {"lora": {}, "rslora": {"rank_stabilised": True}, "dora": {"dora": True}}
KINDS["both"] = KINDS["rslora"] | KINDS["dora"]


def trained_adapter(model, targets="all-linear", scale=0.3, **choices):
    adapted = add_lora(model, LoraConfig(rank=2, alpha=4, targets=targets, **choices), seed=1)
    torch.manual_seed(0)
    with torch.no_grad():
        for name, weight in adapted.named_parameters():
            if "lora_B" in name:
                weight.normal_(std=scale)
            if "magnitude" in name:
                weight.mul_(1 + 0.3 * torch.rand_like(weight))
    return adapted


def test_the_saved_model_computes_the_same(tmp_path: Path) -> None:
    model, tokenizer = create_model(TINY, seed=0)
    save_model(model, tokenizer, tmp_path / "new" / "folder")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "new" / "folder")
    assert torch.equal(loaded(IDS).logits, model(IDS).logits)
    assert loaded.lm_head.weight is loaded.get_input_embeddings().weight
    assert loaded.generation_config.eos_token_id == 1


def test_tokenizer_and_chat_template_are_saved(tmp_path: Path) -> None:
    model, tokenizer = create_model(TINY, seed=0)
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    save_model(model, tokenizer, tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    assert loaded.apply_chat_template([{"role": "user", "content": "1 + 1"}], tokenize=False) == "1 + 1"
    assert loaded("1  + 1")["input_ids"] == tokenizer("1  + 1")["input_ids"]
    assert loaded.model_max_length == 32


def test_nothing_of_how_the_live_model_is_run_gets_into_the_files(tmp_path: Path) -> None:
    model, tokenizer = create_model(TINY, seed=0)
    model.config._attn_implementation_internal = "strop"
    model.config.use_cache = False
    before = copy.deepcopy(model.config.__dict__)
    save_model(model, tokenizer, tmp_path)
    assert "strop" not in (tmp_path / "config.json").read_text()
    assert str(tmp_path) not in "".join(file.read_text() for file in tmp_path.glob("*.json"))
    assert model.config.__dict__ == before
    AutoModelForCausalLM.from_pretrained(tmp_path)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_config_says_the_dtype_of_the_weights(tmp_path: Path, dtype: torch.dtype) -> None:
    model, tokenizer = create_model(TINY, seed=0)
    save_model(model.to(dtype), tokenizer, tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == str(dtype).removeprefix("torch.")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype="auto")
    assert loaded.dtype == dtype
    assert torch.equal(loaded(IDS).logits, model(IDS).logits)


@pytest.mark.parametrize("kind", KINDS)
def test_adapters_are_merged_and_kept_beside(tmp_path: Path, kind: str) -> None:
    model, tokenizer = create_model(TINY, seed=0)
    plain = model(IDS).logits
    adapted = trained_adapter(model, **KINDS[kind])
    expected = adapted(IDS).logits
    assert not torch.allclose(expected, plain, atol=1e-3)
    save_model(adapted, tokenizer, tmp_path)

    merged = AutoModelForCausalLM.from_pretrained(tmp_path)
    torch.testing.assert_close(merged(IDS).logits, expected, atol=1e-6, rtol=1e-5)
    assert merged.lm_head.weight is merged.get_input_embeddings().weight

    base, _ = create_model(TINY, seed=0)
    restored = PeftModel.from_pretrained(base, tmp_path / "adapter")
    assert torch.equal(restored(IDS).logits, expected)


def test_saving_does_not_change_the_live_model(tmp_path: Path) -> None:
    adapted = trained_adapter(create_model(TINY, seed=0)[0])
    before = {name: weight.clone() for name, weight in adapted.state_dict().items()}
    save_model(adapted, create_model(TINY, seed=0)[1], tmp_path)
    after = adapted.state_dict()
    assert list(after) == list(before)
    assert all(torch.equal(after[name], before[name]) for name in before)
    assert any(weight.requires_grad for weight in adapted.parameters())


def test_the_adapters_of_each_kind_compute_something_else() -> None:
    logits = {kind: trained_adapter(create_model(TINY, seed=0)[0], **KINDS[kind])(IDS).logits for kind in KINDS}
    for one in KINDS:
        for other in KINDS:
            assert one == other or not torch.allclose(logits[one], logits[other], atol=1e-3), (one, other)


@pytest.mark.parametrize("kind", KINDS)
def test_merged_bfloat16_weights_are_those_of_the_float32_sum(kind: str) -> None:
    """The same adapters on the same weights, once held in float32 and once in bfloat16."""
    rough = create_model(TINY, seed=0)[0].to(torch.bfloat16)
    exact = trained_adapter(copy.deepcopy(rough).float(), **KINDS[kind])
    adapted = trained_adapter(rough, **KINDS[kind])
    with torch.no_grad():
        for ours, theirs in zip(adapted.parameters(), exact.parameters(), strict=True):
            theirs.copy_(ours)
    found = merged_weights(adapted)
    for name, weight in merged_weights(exact).items():
        assert torch.equal(found[name], weight.bfloat16()), name


def test_adapters_are_merged_in_float32() -> None:
    """Each merged bfloat16 weight is the nearest one to the exact sum; summing in bfloat16 is further off."""
    model = create_model(TINY, seed=0)[0].to(torch.bfloat16)
    adapted = trained_adapter(model, targets=["q_proj"], scale=0.02)
    layer = adapted.get_base_model().model.layers[0].self_attn.q_proj
    a, b = layer.lora_A["default"].weight, layer.lora_B["default"].weight
    assert a.dtype == torch.float32
    exact = layer.base_layer.weight.double() + 2.0 * (b.double() @ a.double())
    merged = merged_weights(adapted)["model.layers.0.self_attn.q_proj.weight"]
    rough = layer.base_layer.weight + 2.0 * (b.bfloat16() @ a.bfloat16())
    assert merged.dtype == torch.bfloat16
    assert (merged.double() - exact).abs().max() <= (exact.bfloat16().double() - exact).abs().max()
    assert (rough.double() - exact).abs().sum() > (merged.double() - exact).abs().sum()


def test_only_adapted_tensors_are_copied() -> None:
    adapted = trained_adapter(create_model(TINY, seed=0)[0], targets=["q_proj"])
    live = {weight.data_ptr() for weight in adapted.get_base_model().state_dict().values()}
    copies = {name for name, weight in merged_weights(adapted).items() if weight.data_ptr() not in live}
    assert copies == {f"model.layers.{layer}.self_attn.q_proj.weight" for layer in (0, 1)}


@pytest.mark.parametrize("kind", KINDS)
def test_transposed_layers_of_gpt2_are_merged_right(tmp_path: Path, kind: str) -> None:
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=48, n_embd=16, n_layer=2, n_head=2, n_positions=32, eos_token_id=1, bos_token_id=1, pad_token_id=0
    )
    adapted = trained_adapter(GPT2LMHeadModel(config).eval(), targets=["c_attn"], **KINDS[kind])
    save_model(adapted, create_model(TINY, seed=0)[1], tmp_path)
    merged = AutoModelForCausalLM.from_pretrained(tmp_path)
    torch.testing.assert_close(merged(IDS).logits, adapted(IDS).logits, atol=1e-5, rtol=1e-5)


def test_experts_of_a_mixture_are_merged_right(tmp_path: Path) -> None:
    """Their weights are stacked in memory, one file entry each on the disk, and peft wraps them twice over."""
    torch.manual_seed(0)
    config = MixtralConfig(
        vocab_size=48,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        num_local_experts=3,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=1,
    )
    with pytest.raises(ModelError, match="cannot have adapters there") as caught:
        trained_adapter(MixtralForCausalLM(config), dora=True)
    assert "leave out `dora`" in caught.value.mend
    model, tokenizer = MixtralForCausalLM(config).eval(), create_model(TINY, seed=0)[1]
    save_model(model, tokenizer, tmp_path / "plain")
    assert torch.equal(AutoModelForCausalLM.from_pretrained(tmp_path / "plain")(IDS).logits, model(IDS).logits)
    adapted = trained_adapter(model)
    assert any("experts" in name and "lora_B" in name for name, _ in adapted.named_parameters())
    save_model(adapted, tokenizer, tmp_path / "adapted")
    merged, report = AutoModelForCausalLM.from_pretrained(tmp_path / "adapted", output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    torch.testing.assert_close(merged(IDS).logits, adapted(IDS).logits, atol=1e-5, rtol=1e-5)


def test_generation_settings_that_transformers_refuses_are_kept(tmp_path: Path) -> None:
    model, tokenizer = create_model(TINY, seed=0)
    model.generation_config.temperature = 0.6  # without do_sample: GenerationConfig.save_pretrained raises
    model.generation_config.eos_token_id = [1, 2]
    save_model(model, tokenizer, tmp_path)
    saved = json.loads((tmp_path / "generation_config.json").read_text())
    assert saved["temperature"] == 0.6
    assert saved["eos_token_id"] == [1, 2]


def test_every_file_is_flushed_to_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flushed = set()
    real = os.fsync

    def fsync(handle: int) -> None:
        flushed.add(os.fstat(handle).st_ino)
        real(handle)

    monkeypatch.setattr(os, "fsync", fsync)
    save_model(trained_adapter(create_model(TINY, seed=0)[0]), create_model(TINY, seed=0)[1], tmp_path)
    written = {path.stat().st_ino for path in [tmp_path, *tmp_path.rglob("*")]}
    assert written <= flushed


def test_a_full_disk_is_said_in_one_block(tmp_path: Path) -> None:
    """A limit on the size of files fails where a full disk does: in the middle of writing the weights."""
    model, tokenizer = create_model(NewModel(), seed=0)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, hard))
    try:
        with pytest.raises(RunFailure, match="could not be written") as caught:
            save_model(model, tokenizer, tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert caught.value.where == str(tmp_path)
    assert "disk" in caught.value.mend


def test_files_can_be_read_by_whoever_the_umask_lets(tmp_path: Path) -> None:
    save_model(*create_model(TINY, seed=0), tmp_path)
    assert (tmp_path / "model.safetensors").stat().st_mode == (tmp_path / "config.json").stat().st_mode
