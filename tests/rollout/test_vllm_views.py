"""Where the values of Hugging Face's weights are in a model of vLLM; needs no vLLM."""

from __future__ import annotations

from typing import ClassVar

import torch

from strop.rollout.engines.vllm_core import views


def test_parts_of_fused_weights_are_found() -> None:
    class Fused(torch.nn.Module):
        packed_modules_mapping: ClassVar = {"qkv_proj": ["q_proj", "k_proj", "v_proj"]}

        def __init__(self) -> None:
            super().__init__()
            self.qkv_proj = torch.nn.Linear(4, 8, bias=False)
            self.embed = torch.nn.Embedding(10, 4)
            self.packed = torch.nn.Parameter(torch.zeros(0))

    class Whole(torch.nn.Module):
        packed_modules_mapping: ClassVar = Fused.packed_modules_mapping

        def __init__(self) -> None:
            super().__init__()
            self.attn = Fused()

    model = Whole()
    weights = {f"attn.{name}_proj.weight": torch.zeros(rows, 4) for name, rows in (("q", 4), ("k", 2), ("v", 2))}
    weights |= {"attn.embed.weight": torch.zeros(7, 4), "attn.packed": torch.zeros(3, 4)}
    found = dict(views(model, weights))
    assert set(found) == set(weights) - {"attn.packed"}
    fused = model.attn.qkv_proj.weight
    assert torch.equal(found["attn.k_proj.weight"], fused[4:6])
    assert torch.equal(found["attn.v_proj.weight"], fused[6:8])
    assert torch.equal(found["attn.embed.weight"], model.attn.embed.weight[:7])
