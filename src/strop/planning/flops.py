"""Floating-point operations of training: what a step takes at least, for TFLOP/s and MFU.

Counted are matrix products, a multiplication and an addition being two operations; not norms, activations, softmaxes or
look-ups of embeddings. A weight of a block costs 2 for each token in the forward pass, 2 for the gradient of what goes
in, and 2 for its own gradient: 6 where it is trained and 4 where it is frozen, as with LoRA, whose adapters cost 6. In
attention a pair of tokens costs 2 (query and key) + 2 (weights and values) for each number of a head, and twice that in
the backward pass. What is computed a second time (recomputed blocks, logits of the output head) does not count: the
count is of the model, not of how it is trained.

There are two conventions:

- `computed`: the tokens and pairs that have to be computed. A prompt that a group shares counts once, a token sees
  those before it only, and the output head is applied to trained tokens only.
- `full`: what others publish. Every sequence has its own prompt, each of its tokens sees all of its tokens (12 x
  layers x heads x head size x length for each token), and the output head is applied to all of them.

Source: PaLM (arXiv 2204.02311), appendix B, for MFU and the second convention; for LoRA and the rest, the count itself,
which `tests/planning/test_flops.py` compares with that of torch.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

_EXPERTS = re.compile(r"(^|\.)experts(\.|$)")
# Biases of experts are matrices; peft keeps what it replaces.
_NOT_MULTIPLIED = re.compile(r"bias$|\.original_module\.")
_CHOSEN = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_top_k", "moe_k", "top_k_experts")
_SOFTMAX = ("full_attention", "sliding_attention", "chunked_attention", "attention")


@dataclass(frozen=True)
class ModelWork:
    """What a token and a pair of tokens cost in one model: all that is constant of it.

    trained, frozen: weights of the blocks that are multiplied for one token; of experts, those that one token uses.
    head: weights of the output head, 0 without one. head_trained: whether they are trained. attention: for each kind
    of layer (window, width): width is layers x heads x (size of a key + size of a value), window the most tokens that a
    token sees there, None for all before it.
    """

    trained: int
    frozen: int
    head: int
    head_trained: bool
    attention: tuple[tuple[int | None, int], ...]

    def computed(self, tokens: int, pairs: int, head_tokens: int, lengths: np.ndarray) -> float:
        """FLOPs of a forward and backward pass, as far as they have to be computed.

        Args:
            tokens: of the packed rows. pairs: of a token and one that it sees, itself included, without windows.
            head_tokens: to which the output head is applied. lengths: of all streams, int64 [N], which say what of the
                pairs lies within a window.
        """
        found = self._of_tokens(tokens) + self._of_head(head_tokens)
        for window, width in self.attention:
            share = 1.0 if window is None else causal_pairs(lengths, window) / max(1, causal_pairs(lengths))
            found += 6.0 * width * pairs * share
        return found

    def full(self, lengths: np.ndarray) -> float:
        """FLOPs as others count them; see the head of this file. lengths: tokens of each stream, int64 [N]."""
        tokens = int(lengths.sum())
        square = float(np.dot(lengths, lengths))
        widths = sum(width for _, width in self.attention)
        return self._of_tokens(tokens) + self._of_head(tokens) + 6.0 * widths * square

    def all_trained(self) -> ModelWork:
        """The same blocks without adapters, all trained, and without an output head: a critic on a copy of them."""
        return replace(self, trained=self.frozen or self.trained, frozen=0, head=0, head_trained=True)

    def _of_tokens(self, tokens: int) -> float:
        return (6.0 * self.trained + 4.0 * self.frozen) * tokens

    def _of_head(self, tokens: int) -> float:
        return (6.0 if self.head_trained else 4.0) * self.head * tokens


def causal_pairs(lengths: np.ndarray, window: int | None = None) -> int:
    """Pairs of a token and one that it sees, itself included, over streams of these lengths, int64 [N].

    Args:
        window: the most tokens that one sees.
    """
    inside = lengths if window is None else np.minimum(lengths, window)
    # The first `inside` tokens see 1, 2, ... tokens; each later one sees `window`.
    return int((inside * (inside + 1) // 2 + (lengths - inside) * inside).sum())


def work_of(model: Any) -> ModelWork | None:
    """What a causal model, or a peft model, costs; its weights are not read and may be on the device "meta".

    Ask before the weights are divided among ranks.

    Returns:
        None where the config does not say how many of its experts a token uses.
    """
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    blocks = base.get_decoder() if hasattr(base, "get_decoder") else base.base_model
    config = base.config.get_text_config() if hasattr(base.config, "get_text_config") else base.config
    output = base.get_output_embeddings() if hasattr(base, "get_output_embeddings") else None
    head = getattr(getattr(output, "base_layer", output), "weight", None)
    skipped = {id(p) for module in blocks.modules() if _looks_up(module) for p in module.parameters()}
    share: float | None = None
    counts = {True: 0.0, False: 0.0}
    for name, weight in blocks.named_parameters():
        if weight.ndim < 2 or id(weight) in skipped or weight is head or _NOT_MULTIPLIED.search(name):
            continue
        size = float(weight.numel())
        if _EXPERTS.search(name):
            share = _share_of_experts(config) if share is None else share
            if share is None:
                return None
            size *= share
        counts[weight.requires_grad] += size
    return ModelWork(
        trained=round(counts[True]),
        frozen=round(counts[False]),
        head=0 if head is None else head.numel(),
        head_trained=head is not None and head.requires_grad,
        attention=_attention(config),
    )


def work_of_config(config: Any) -> ModelWork | None:
    """What the causal model of a Hugging Face config costs with all of its weights trained; nothing is allocated.

    See `work_of`.
    """
    import torch
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        loader: Any = AutoModelForCausalLM
        model = loader.from_config(config)
    return work_of(model)


def _looks_up(module: Any) -> bool:
    """Whether a module picks rows of its weight, and multiplies nothing."""
    import torch

    return isinstance(module, torch.nn.Embedding)


def _share_of_experts(config: Any) -> float | None:
    """Experts that a token uses, of all there are."""
    total = next(
        (
            found
            for name in ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
            if (found := _number(config, name))
        ),
        None,
    )
    used = next((found for name in _CHOSEN if (found := _number(config, name))), None)
    return None if total is None or used is None else min(1.0, used / total)


def _number(config: Any, name: str) -> int | None:
    value = getattr(config, name, None)
    if isinstance(value, list | tuple):  # one for each layer
        value = max(value, default=None)
    return int(value) if isinstance(value, int) and value > 0 else None


def _attention(config: Any) -> tuple[tuple[int | None, int], ...]:
    """(window, width) of the layers with softmax attention; see `ModelWork`."""
    heads, layers = config.num_attention_heads, config.num_hidden_layers
    plain = getattr(config, "head_dim", None) or config.hidden_size // heads
    key = plain
    if _number(config, "qk_nope_head_dim") is not None:  # latent attention has keys of two parts
        key = config.qk_nope_head_dim + config.qk_rope_head_dim
    value = _number(config, "v_head_dim") or plain
    width = heads * (key + value)
    window = _number(config, "sliding_window")
    kinds = getattr(config, "layer_types", None)
    if kinds is None:
        window = window if getattr(config, "use_sliding_window", True) else None
        return ((window, layers * width),)
    whole = sum(kind in _SOFTMAX and "sliding" not in kind for kind in kinds)
    windowed = sum("sliding" in kind for kind in kinds)
    parts = ((None, whole * width), (window, windowed * width))
    return tuple((limit, size) for limit, size in parts if size)
