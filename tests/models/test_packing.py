"""Packed equals unpacked: log-probabilities and gradients of packed and shared streams, for several families."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

from strop.config.model import LoraConfig
from strop.errors import ModelError
from strop.models import attention_padded
from strop.models.attention import running
from strop.models.blocks import ChangedBlocks
from strop.models.forward import check_forward, packed_inputs, packed_logprobs, score_streams
from strop.models.layout import pack
from strop.models.load import add_lora

VOCABULARY = 97
SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 64,
    "max_position_embeddings": 1024,
}


def tiny(family: str) -> torch.nn.Module:
    torch.manual_seed(0)
    config, model = {
        "llama": (transformers.LlamaConfig(**SHAPE), transformers.LlamaForCausalLM),
        "qwen2": (transformers.Qwen2Config(**SHAPE), transformers.Qwen2ForCausalLM),
        "qwen3": (transformers.Qwen3Config(**SHAPE, head_dim=8), transformers.Qwen3ForCausalLM),
        "mistral": (transformers.MistralConfig(**SHAPE, sliding_window=5), transformers.MistralForCausalLM),
        "gemma2": (
            transformers.Gemma2Config(
                **SHAPE, head_dim=8, sliding_window=5, final_logit_softcapping=3.0, attn_logit_softcapping=2.0
            ),
            transformers.Gemma2ForCausalLM,
        ),
        "gpt2": (
            transformers.GPT2Config(vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=4, n_positions=1024),
            transformers.GPT2LMHeadModel,
        ),
    }[family]
    # Larger than a default initialisation, so that attention and capping matter to the result.
    made = model(config).eval()
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.mul_(4.0)
    return made


def alone(model: torch.nn.Module, stream: np.ndarray) -> torch.Tensor:
    """Log-probabilities by the model's own forward pass, one stream at a time."""
    ids = torch.from_numpy(stream)[None]
    logits = model(input_ids=ids, use_cache=False).logits[0].float()
    return torch.log_softmax(logits[:-1], -1).gather(1, ids[0, 1:, None])[:, 0]


def streams_of(lengths: list[int], seed: int = 0) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, VOCABULARY, size=length) for length in lengths]


def gradients(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "mistral", "gemma2", "gpt2"])
@pytest.mark.parametrize("alone_from", [512, 6], ids=["together", "long-streams-alone"])
def test_packed_equals_unpacked(family: str, alone_from: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_padded, "ALONE_ON_CPU", alone_from)
    model = tiny(family)
    group = streams_of([4, 9, 2, 6])
    prompt = streams_of([7], seed=1)[0]
    streams = [np.concatenate([prompt, tail]) for tail in group] + streams_of([1, 2, 13, 5], seed=2)
    shared = [7, 7, 7, 7, 0, 0, 0, 0]
    weights = [torch.randn(max(len(s) - 1, 0)) for s in streams]

    count = sum(len(w) for w in weights)
    total = sum((alone(model, s) * w).sum() for s, w in zip(streams, weights, strict=True) if len(s) > 1)
    (total / count).backward()
    expected = gradients(model)

    inputs = packed_inputs(pack(streams, shared), [np.arange(len(s)) > 0 for s in streams], torch.device("cpu"))
    assert inputs.tokens == sum(len(s) for s in streams) - 3 * 7
    with running(model, inputs.attention):
        logprobs, _ = packed_logprobs(model, inputs, chunk=3)
        ((logprobs * torch.cat(weights)).sum() / count).backward()
    found = gradients(model)

    reference = torch.cat([alone(model, s) for s in streams if len(s) > 1])
    assert (logprobs - reference).abs().max() < 1e-5
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        # The loss is a mean over tokens, as objectives have it.
        assert (found[name] - gradient).abs().max() <= 1e-5 * max(1.0, float(gradient.abs().max())), name


@pytest.mark.parametrize("alone_from", [512, 6], ids=["together", "long-streams-alone"])
def test_a_pass_without_a_gradient_gives_the_same_bits(alone_from: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_padded, "ALONE_ON_CPU", alone_from)
    model = tiny("llama")
    prompt = streams_of([7], seed=1)[0]
    streams = [np.concatenate([prompt, tail]) for tail in streams_of([4, 9, 2])] + streams_of([13, 5], seed=2)
    inputs = packed_inputs(
        pack(streams, [7, 7, 7, 0, 0]), [np.arange(len(s)) > 0 for s in streams], torch.device("cpu")
    )
    found = []
    for gradient in (True, False):
        with running(model, inputs.attention), torch.set_grad_enabled(gradient):
            found.append(packed_logprobs(model, inputs)[0])
    assert torch.equal(*found)


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 9), st.lists(st.integers(1, 12), min_size=1, max_size=4)), min_size=1, max_size=4)
)
def test_any_layout_scores_the_same(groups: list[tuple[int, list[int]]]) -> None:
    model = MODEL
    streams, shared = [], []
    for number, (prompt_length, tails) in enumerate(groups):
        prompt, *rest = streams_of([prompt_length, *tails], seed=number)
        streams += [np.concatenate([prompt, tail]) for tail in rest]
        shared += [prompt_length] * len(rest)
    packed = pack(streams, shared)
    covered = np.zeros(len(packed.layout.input_ids), int)
    for segment in packed.layout.segments:
        covered[segment.start : segment.start + segment.length] += 1
    assert (covered == 1).all()
    for stream, places in zip(streams, packed.places, strict=True):
        assert (packed.layout.input_ids[places] == stream).all()
        assert (packed.layout.position_ids[places] == np.arange(len(stream))).all()
    inputs = packed_inputs(packed, [np.arange(len(s)) > 0 for s in streams], torch.device("cpu"))
    with torch.no_grad(), running(model, inputs.attention):
        logprobs, _ = packed_logprobs(model, inputs)
    reference = np.concatenate([scores[1:] for scores in score_streams(model, streams)])
    assert np.abs(logprobs.numpy() - reference).max() < 1e-5


MODEL = tiny("llama")


def test_model_is_plain_outside_a_pass() -> None:
    model = tiny("llama")
    before = model.config._attn_implementation
    score_streams(model, streams_of([5, 3]))
    assert model.config._attn_implementation == before
    assert "strop" not in str(model.config.to_dict())


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2", "gpt2"])
@pytest.mark.parametrize("recompute", [True, "keep_attention"])
def test_recomputed_blocks_give_the_same_gradients(family: str, recompute: bool | str) -> None:
    model = tiny(family)
    streams = streams_of([6, 11, 3])
    inputs = packed_inputs(pack(streams), [np.arange(len(s)) > 0 for s in streams], torch.device("cpu"))
    with running(model, inputs.attention):
        packed_logprobs(model, inputs)[0].sum().backward()
    expected = gradients(model)
    blocks = ChangedBlocks(model, compiled=False, recompute=recompute)
    kept: list[int] = []
    with running(model, inputs.attention), blocks.used():
        with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x.numel()) or x, lambda x: x):
            logprobs = packed_logprobs(model, inputs)[0]
        logprobs.sum().backward()
    # One input of each of the two blocks, and what lies outside of them.
    assert len(kept) < 25
    for name, gradient in gradients(model).items():
        assert torch.equal(gradient, expected[name]), name


def test_first_token_cannot_be_scored() -> None:
    with pytest.raises(ValueError, match="first token"):
        packed_inputs(pack(streams_of([3])), [np.array([True, True, True])], torch.device("cpu"))


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt2"])
def test_check_forward_accepts(family: str) -> None:
    check_forward(tiny(family), vocabulary=VOCABULARY)


@pytest.mark.parametrize("kind", [{}, {"rank_stabilised": True}, {"dora": True}], ids=["lora", "rslora", "dora"])
def test_check_forward_accepts_adapters(kind: dict[str, bool]) -> None:
    plain, adapted = tiny("llama"), add_lora(tiny("llama"), LoraConfig(rank=4, **kind), seed=0)
    with torch.no_grad():
        for name, weight in adapted.named_parameters():
            if "lora_B" in name or "magnitude" in name:
                weight += 0.1 * torch.randn_like(weight)
    check_forward(adapted, vocabulary=VOCABULARY)
    streams = streams_of([7, 9])
    assert np.nanmax(np.abs(score_streams(adapted, streams)[0] - score_streams(plain, streams)[0])) > 1e-2


def test_check_forward_refuses_what_it_cannot_reproduce() -> None:
    torch.manual_seed(0)
    config = transformers.GraniteConfig(**SHAPE, logits_scaling=3.0)
    model = transformers.GraniteForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4.0)
    with pytest.raises(ModelError, match="does not reproduce"):
        check_forward(model, vocabulary=VOCABULARY)


def test_check_forward_refuses_recurrent_models() -> None:
    config = transformers.MambaConfig(vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=1)
    with pytest.raises(ModelError):
        check_forward(transformers.MambaForCausalLM(config).eval(), vocabulary=VOCABULARY)
