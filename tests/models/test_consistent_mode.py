"""Models in the consistent mode: their gradients are those of the ordinary mode, and what the mode does not know is
refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from strop.config.model import LoraConfig
from strop.errors import ModelError
from strop.models.attention import running
from strop.models.blocks import ChangedBlocks
from strop.models.consistent_mode import FAMILIES, is_consistent, make_consistent
from strop.models.forward import packed_inputs, packed_logprobs
from strop.models.layout import pack
from strop.models.load import add_lora

Make = Callable[..., Any]
SMALL = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 64, "vocab_size": 40, "max_position_embeddings": 128,
}  # fmt: skip


def passed(model: Any, recompute: Any, entropy: Any = "graph") -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
    """(log-probabilities, entropies, gradients) of a packed row with shared beginnings."""
    rng = np.random.default_rng(0)
    prompt = rng.integers(3, 40, 11)
    streams = [np.concatenate([prompt, rng.integers(3, 40, n)]) for n in (4, 1, 20)] + [rng.integers(3, 40, 30)]
    wanted = [np.arange(len(stream)) >= 6 for stream in streams]
    inputs = packed_inputs(pack(streams, [10, 10, 10, 0]), wanted, torch.device("cpu"))
    blocks = ChangedBlocks(model, compiled=False, recompute=recompute)
    if recompute and hasattr(model, "enable_input_require_grads"):
        model.enable_input_require_grads()
    model.zero_grad()
    with running(model, inputs.attention), blocks.used():
        logprobs, spread = packed_logprobs(model, inputs, temperature=0.7, chunk=16, entropy=entropy)
        weights = torch.linspace(-1, 1, len(logprobs))
        ((logprobs * weights).sum() + spread.sum() * 0.1).backward()
    grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return logprobs.detach(), spread.detach(), grads


def gap(found: torch.Tensor, truth: torch.Tensor) -> float:
    return float((found.double() - truth.double()).norm() / truth.double().norm())


@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("adapted", [False, True])
@pytest.mark.parametrize("recompute", [False, True, "keep_attention"])
def test_gradients_are_those_of_the_ordinary_mode(tiny_model: Make, family: str, adapted: bool, recompute: Any) -> None:
    def made() -> Any:
        model = tiny_model(family)
        if adapted:
            model = add_lora(model, LoraConfig(rank=3), seed=0)
            with torch.no_grad():
                for name, parameter in model.named_parameters():
                    if "lora_B" in name:
                        parameter.normal_(std=0.3, generator=torch.Generator().manual_seed(len(name)))
        return model

    ordinary, consistent = made(), made()
    make_consistent(consistent)
    theirs, ours = passed(ordinary, recompute), passed(consistent, recompute)
    truth = passed(made().double(), False)
    assert not torch.equal(ours[0], theirs[0])
    assert ours[2].keys() == truth[2].keys()
    assert len(ours[2]) == len([p for p in consistent.parameters() if p.requires_grad])
    # As near to the numbers without rounding as the ordinary mode, of which this model makes much.
    for at in (0, 1):
        assert gap(ours[at], truth[at]) < 4 * gap(theirs[at], truth[at]) + 1e-6
    furthest = max(gap(theirs[2][name], grad) for name, grad in truth[2].items())
    assert furthest < 1e-3
    for name, grad in truth[2].items():
        assert gap(ours[2][name], grad) < 4 * furthest, name
    # Twice is the same, and so is a pass that keeps its activations.
    again = passed(consistent, False)
    assert torch.equal(again[0], ours[0])


@pytest.mark.parametrize("entropy", ["none", "value"])
def test_a_measured_entropy_changes_no_log_probability(tiny_model: Make, entropy: Any) -> None:
    model = tiny_model()
    make_consistent(model)
    assert torch.equal(passed(model, False, entropy)[0], passed(model, False, "graph")[0])


def test_compiled_blocks_are_refused(tiny_model: Make) -> None:
    model = tiny_model()
    make_consistent(model)
    with pytest.raises(ValueError, match="compiled blocks"):
        ChangedBlocks(model, compiled=True, recompute=False)


def test_outside_of_a_pass_a_model_is_what_it_was(tiny_model: Make) -> None:
    model, untouched = tiny_model("qwen3"), tiny_model("qwen3")
    make_consistent(model)
    passed(model, False)
    assert is_consistent(model)
    assert not is_consistent(untouched)
    assert not any("forward" in module.__dict__ for module in model.modules())
    ids = torch.arange(3, 20)[None]
    assert torch.equal(model(input_ids=ids).logits, untouched(input_ids=ids).logits)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_can_be_made_consistent(family: str) -> None:
    config = transformers.AutoConfig.for_model(family, **SMALL)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    ordinary = passed(model, False)
    make_consistent(model)
    torch.testing.assert_close(passed(model, False)[0], ordinary[0], rtol=0, atol=1e-4)


def test_rotations_of_a_position_do_not_depend_on_the_table(tiny_model: Make) -> None:
    from strop.models.consistent_mode import _Rotations

    rotary = tiny_model().model.rotary_emb
    x = torch.zeros(1, 1, 32)
    grown, at_once = _Rotations(rotary), _Rotations(rotary)
    for last in (3, 300, 700):
        grown(x, torch.tensor([[last]]))
    places = torch.tensor([[0, 699, 255, 256, 12]])
    for ours, theirs, plain in zip(grown(x, places), at_once(x, places), rotary(x, places), strict=True):
        assert torch.equal(ours, theirs)
        torch.testing.assert_close(ours, plain, rtol=0, atol=1e-6)


def refused(model: Any, says: str) -> None:
    with pytest.raises(ModelError, match=says) as caught:
        make_consistent(model)
    assert caught.value.where == "rollout.engine.consistent"
    assert not is_consistent(model)


def test_what_the_mode_does_not_know_is_refused(tiny_model: Make) -> None:
    refused(tiny_model("gemma2"), "not those of gemma2")
    refused(add_lora(tiny_model(), LoraConfig(rank=2, dora=True), seed=0), "an adapter of this kind")
    refused(add_lora(tiny_model(), LoraConfig(rank=2, dropout=0.1), seed=0), "dropout")
    refused(add_lora(tiny_model(), LoraConfig(rank=2, targets=["lm_head"]), seed=0), "an adapter on the output head")

    class Quantised(torch.nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x).round()

    model = tiny_model()
    model.model.layers[1].mlp.up_proj.__class__ = Quantised
    refused(model, r"a linear layer of the class Quantised \(model\.layers\.1\.mlp\.up_proj\)")
    model = tiny_model()
    model.model.layers[0].mlp.act_fn = torch.nn.GELU()
    refused(model, "act_fn, a GELU")
    stretched = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10_000.0}
    config = transformers.LlamaConfig(**SMALL, rope_parameters=stretched)
    refused(transformers.LlamaForCausalLM(config), "the rotary embedding dynamic")
