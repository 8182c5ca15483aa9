"""`strop export`: a folder that plain transformers or peft loads, whole or not at all."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer
from typer.testing import CliRunner

from strop.cli import app
from strop.config.model import LoraConfig, NewModel
from strop.errors import ModelError, RunFailure, UserError
from strop.models.create import create_model
from strop.models.export import export_model
from strop.models.load import add_lora
from strop.models.save import save_model
from strop.models.scalar import with_scalar_head

TINY = NewModel(hidden_size=16, layers=2, heads=2, context=32)
IDS = torch.tensor([[4, 5, 20, 13, 6, 7]])
TEMPLATE = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
KINDS = {"lora": {}, "rslora": {"rank_stabilised": True}, "dora": {"dora": True}}


def run_of(folder: Path, model: Any, tokenizer: Any) -> Path:
    """As a run leaves it: an older checkpoint, and the latest with the model."""
    checkpoints = folder / "checkpoints"
    save_model(*create_model(TINY, seed=9), checkpoints / "step-000001" / "model")
    save_model(model, tokenizer, checkpoints / "step-000002" / "model")
    (checkpoints / "latest").write_text("step-000002\n")
    return folder


def adapted(**kind: bool) -> Any:
    model = add_lora(create_model(TINY, seed=0)[0], LoraConfig(rank=2, alpha=4, **kind), seed=1)
    torch.manual_seed(0)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "lora_B" in name:
                weight.normal_(std=0.3)
            if "magnitude" in name:
                weight.mul_(1 + 0.3 * torch.rand_like(weight))
    return model


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


@pytest.mark.parametrize("place", ["", "checkpoints", "checkpoints/step-000002", "checkpoints/step-000002/model"])
def test_a_run_a_checkpoint_or_a_folder_becomes_a_model_that_computes_the_same(tmp_path: Path, place: str) -> None:
    model, tokenizer = create_model(TINY, seed=0)
    tokenizer.chat_template = TEMPLATE
    run = run_of(tmp_path / "run", model, tokenizer)
    found = export_model(str(run / place), tmp_path / "deep" / "out")
    assert found == tmp_path / "deep" / "out"
    shutil.rmtree(run)
    loaded = AutoModelForCausalLM.from_pretrained(found)
    torch.testing.assert_close(loaded(IDS).logits, model(IDS).logits, atol=1e-5, rtol=1e-5)
    assert loaded.generation_config.eos_token_id == 1
    again = AutoTokenizer.from_pretrained(found)
    assert again.apply_chat_template([{"role": "user", "content": "1 + 1"}], tokenize=False) == "1 + 1"
    assert again("1 + 1")["input_ids"] == tokenizer("1 + 1")["input_ids"]
    assert names(tmp_path / "deep") == {"out"}


@pytest.mark.parametrize("kind", KINDS)
def test_an_adapter_on_its_base_and_the_merged_model_agree(tmp_path: Path, kind: str) -> None:
    model = adapted(**KINDS[kind])
    run = run_of(tmp_path / "run", model, create_model(TINY, seed=0)[1])
    expected = model(IDS).logits
    base, tokenizer = create_model(TINY, seed=0)
    assert (base(IDS).logits - expected).abs().max() > 1e-2
    save_model(base, tokenizer, tmp_path / "base")

    whole = export_model(str(run), tmp_path / "whole")
    assert "adapter" not in names(whole)
    merged = AutoModelForCausalLM.from_pretrained(whole)(IDS).logits

    alone = export_model(str(run), tmp_path / "alone", adapter=True)
    assert names(alone) == {"adapter_config.json", "adapter_model.safetensors"}
    shutil.rmtree(run)
    with_adapter = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(tmp_path / "base"), alone)
    torch.testing.assert_close(with_adapter(IDS).logits, expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(merged, with_adapter(IDS).logits, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("asked", [None, "float32", "bfloat16"])
def test_the_number_format_is_the_one_asked_for_or_the_stored_one(
    tmp_path: Path, stored: torch.dtype, asked: Any
) -> None:
    model, tokenizer = create_model(TINY, seed=0)
    save_model(model.to(stored), tokenizer, tmp_path / "model")
    found = export_model(str(tmp_path / "model"), tmp_path / "out", dtype=asked)
    wanted = asked or str(stored).removeprefix("torch.")
    assert json.loads((found / "config.json").read_text())["dtype"] == wanted
    loaded = AutoModelForCausalLM.from_pretrained(found, dtype="auto")
    for name, weight in model.to(getattr(torch, wanted)).state_dict().items():
        assert torch.equal(loaded.state_dict()[name], weight), name


def test_an_adapter_in_bfloat16_has_half_the_size_and_stays_readable(tmp_path: Path) -> None:
    save_model(adapted(), create_model(TINY, seed=0)[1], tmp_path / "model")
    sizes = {}
    for dtype in (None, "float32", "bfloat16"):
        found = export_model(str(tmp_path / "model"), tmp_path / f"{dtype}", adapter=True, dtype=dtype)
        sizes[dtype] = (found / "adapter_model.safetensors").stat().st_size
        modes = {path.stat().st_mode for path in found.iterdir()}
        assert len(modes) == 1
    assert sizes[None] == sizes["float32"]
    assert sizes["bfloat16"] < 0.8 * sizes["float32"]
    plain, _ = create_model(TINY, seed=0)
    rounded = PeftModel.from_pretrained(plain, tmp_path / "bfloat16")
    torch.testing.assert_close(rounded(IDS).logits, adapted()(IDS).logits, atol=0.05, rtol=0.05)


def test_an_adapter_of_a_model_without_one_is_refused(tmp_path: Path) -> None:
    save_model(*create_model(TINY, seed=0), tmp_path / "model")
    with pytest.raises(ModelError, match="the model has no adapter") as caught:
        export_model(str(tmp_path / "model"), tmp_path / "out", adapter=True)
    assert "leave out --adapter" in caught.value.mend
    assert names(tmp_path) == {"model"}


@pytest.mark.parametrize("lora", [False, True])
def test_a_reward_model_keeps_its_head_and_has_no_adapter_to_give(tmp_path: Path, lora: bool) -> None:
    causal, tokenizer = create_model(TINY, seed=0)
    model = with_scalar_head(causal)
    torch.nn.init.normal_(model.score.weight)
    if lora:
        model = add_lora(model, LoraConfig(rank=2), seed=1)
    save_model(model, tokenizer, tmp_path / "model")
    found = export_model(str(tmp_path / "model"), tmp_path / "out")
    loaded = AutoModelForSequenceClassification.from_pretrained(found)
    torch.testing.assert_close(loaded(IDS).logits, model(IDS).logits, atol=1e-5, rtol=1e-5)
    assert AutoTokenizer.from_pretrained(found)("1")["input_ids"] == tokenizer("1")["input_ids"]
    with pytest.raises(ModelError, match="not enough"):
        export_model(str(tmp_path / "model"), tmp_path / "alone", adapter=True)


@pytest.mark.parametrize("adapter", [False, True])
def test_what_is_there_is_never_overwritten(tmp_path: Path, adapter: bool) -> None:
    save_model(adapted(), create_model(TINY, seed=0)[1], tmp_path / "model")
    out = tmp_path / "out"
    out.mkdir()
    (out / "mine.txt").write_text("mine")
    arguments = ["export", str(tmp_path / "model"), "--out", str(out), *(["--adapter"] if adapter else [])]
    refused = CliRunner().invoke(app, arguments)
    assert refused.exit_code == 2
    assert "already" in refused.stderr
    assert names(out) == {"mine.txt"}
    assert names(tmp_path) == {"model", "out"}
    with pytest.raises(UserError, match="already"):
        export_model(str(tmp_path / "model"), out / "mine.txt", adapter=adapter)
    # An empty folder is as good as none.
    (out / "mine.txt").unlink()
    done = CliRunner().invoke(app, arguments)
    assert (done.exit_code, done.stdout) == (0, f"{out}\n")
    assert ("adapter_config.json" if adapter else "config.json") in names(out)


def test_a_place_where_nothing_can_be_made_is_the_users_to_mend(tmp_path: Path) -> None:
    save_model(*create_model(TINY, seed=0), tmp_path / "model")
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot be made"):
        export_model(str(tmp_path / "model"), tmp_path / "file" / "out")


def test_a_failure_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_model(*create_model(TINY, seed=0), tmp_path / "model")

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("strop.models.save.save_tokenizer", full)
    with pytest.raises(RunFailure, match="No space left"):
        export_model(str(tmp_path / "model"), tmp_path / "out")
    assert names(tmp_path) == {"model"}


def test_what_a_killed_export_left_is_replaced(tmp_path: Path) -> None:
    save_model(*create_model(TINY, seed=0), tmp_path / "model")
    (tmp_path / ".out.partial").mkdir()
    (tmp_path / ".out.partial" / "half").write_text("")
    assert "half" not in names(export_model(str(tmp_path / "model"), tmp_path / "out"))
    assert names(tmp_path) == {"model", "out"}
