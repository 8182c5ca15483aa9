"""FLOPs of training against those that torch counts as they are computed, and against counts by hand."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from strop.models.attention import running
from strop.models.forward import backbone, packed_inputs
from strop.models.layout import pack
from strop.planning.cards import peak_rate
from strop.planning.flops import ModelWork, causal_pairs, work_of, work_of_config

HIDDEN, INNER, LAYERS, HEADS, KV, SIZE, VOCABULARY = 32, 80, 3, 4, 2, 12, 48
SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV,
    "head_dim": SIZE,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
BLOCKS = LAYERS * (HIDDEN * SIZE * (2 * HEADS + 2 * KV) + 3 * HIDDEN * INNER)


def make(kind: str, **changes: Any) -> Any:
    import transformers

    config = getattr(transformers, f"{kind}Config")(**SHAPE, **changes)
    return getattr(transformers, f"{kind}ForCausalLM")(config)


def with_lora(model: Any) -> Any:
    from peft import LoraConfig, get_peft_model

    model.enable_input_require_grads()
    return get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"]))


def streams(lengths: list[int]) -> list[np.ndarray]:
    made = np.random.default_rng(0)
    return [made.integers(3, VOCABULARY, length) for length in lengths]


def counted(model: Any, lengths: list[int], *, shared: int = 0, attention: bool = False) -> tuple[float, Any]:
    """FLOPs that torch sees in a packed forward and backward pass, and the layout.

    The head is applied to every token but the first of each stream. shared: tokens that all streams begin with alike.
    attention: in plain products, which torch counts; it sees nothing of the CPU's kernel.
    """
    given_streams = streams(lengths)
    for stream in given_streams:
        stream[:shared] = given_streams[0][:shared]
    packed = pack(given_streams, [shared] * len(lengths) if shared else None)
    inputs = packed_inputs(packed, [np.arange(length) > 0 for length in lengths], torch.device("cpu"))
    model.train()
    kernel = SDPBackend.MATH if attention else SDPBackend.FLASH_ATTENTION
    with FlopCounterMode(display=False) as counter, running(model, inputs.attention), sdpa_kernel(kernel):
        hidden = backbone(model)(
            input_ids=inputs.input_ids, position_ids=inputs.position_ids, use_cache=False
        ).last_hidden_state[0]
        model.get_output_embeddings()(hidden[inputs.predictors]).float().pow(2).sum().backward()
    return float(counter.get_total_flops()), packed.layout


def without_attention(work: ModelWork) -> ModelWork:
    return ModelWork(work.trained, work.frozen, work.head, work.head_trained, ())


@pytest.mark.parametrize("kind", ["Llama", "Qwen3"])
def test_all_weights_cost_what_torch_counts(kind: str) -> None:
    model = make(kind, tie_word_embeddings=False)
    lengths = [17, 30, 9]
    found, layout = counted(model, lengths)
    work = work_of(model)
    assert work is not None
    assert (work.trained, work.frozen, work.head) == (BLOCKS, 0, HIDDEN * VOCABULARY)
    expected = without_attention(work).computed(sum(lengths), layout.pairs, sum(lengths) - 3, np.array(lengths))
    assert found == expected


@pytest.mark.parametrize("kind", ["Llama", "Qwen3"])
def test_frozen_weights_and_adapters_cost_what_torch_counts(kind: str) -> None:
    model = with_lora(make(kind, tie_word_embeddings=False))
    lengths = [17, 30, 9]
    found, layout = counted(model, lengths)
    work = work_of(model)
    assert work is not None
    adapters = LAYERS * 4 * (HIDDEN + HEADS * SIZE + HIDDEN + KV * SIZE + INNER + HIDDEN)
    assert (work.trained, work.frozen, work.head_trained) == (adapters, BLOCKS, False)
    expected = without_attention(work).computed(sum(lengths), layout.pairs, sum(lengths) - 3, np.array(lengths))
    assert found == expected


def test_a_shared_prompt_is_counted_once() -> None:
    model = make("Llama", tie_word_embeddings=False)
    lengths = [40, 44, 50]
    found, layout = counted(model, lengths, shared=32)
    work = work_of(model)
    assert work is not None
    packed = 32 + 8 + 12 + 18
    assert len(layout.input_ids) == packed
    # Each completion sees the prompt and itself.
    assert layout.pairs == causal_pairs(np.array([32])) + sum(32 * n + n * (n + 1) // 2 for n in (8, 12, 18))
    expected = without_attention(work).computed(packed, layout.pairs, sum(lengths) - 3, np.array(lengths))
    assert found == expected


def test_full_attention_is_what_torch_counts_of_whole_squares() -> None:
    """Plain products leave nothing out: 12 x layers x heads x head size x length for each token."""
    model = make("Llama", tie_word_embeddings=False)
    lengths = [24, 60]
    found, layout = counted(model, lengths)
    with_squares, _ = counted(model, lengths, attention=True)
    work = work_of(model)
    assert work is not None
    squares = sum(12 * LAYERS * HEADS * SIZE * length * length for length in lengths)
    lengths_of = np.array(lengths)
    assert work.full(lengths_of) == without_attention(work).full(lengths_of) + squares
    assert work.full(lengths_of) == 6 * (BLOCKS + HIDDEN * VOCABULARY) * sum(lengths) + squares
    assert with_squares - found == squares
    computed = work.computed(sum(lengths), layout.pairs, 0, lengths_of)
    assert computed - without_attention(work).computed(sum(lengths), layout.pairs, 0, lengths_of) == (
        12 * LAYERS * HEADS * SIZE * causal_pairs(lengths_of)
    )


def test_of_experts_those_count_that_a_token_uses() -> None:
    experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 20, "tie_word_embeddings": False}
    model = make("Qwen3Moe", **experts)
    work = work_of(model)
    assert work is not None
    attention = HIDDEN * SIZE * (2 * HEADS + 2 * KV)
    assert work.trained == LAYERS * (attention + 8 * HIDDEN + 2 * 3 * HIDDEN * 20)
    assert work_of_config(model.config) == work
    nameless = copy.deepcopy(model)
    nameless.config.__dict__["num_experts_per_tok"] = None
    assert work_of(nameless) is None


def test_a_config_alone_gives_the_same_as_the_model() -> None:
    for kind in ("Llama", "Qwen3"):
        for tied in (False, True):
            model = make(kind, tie_word_embeddings=tied)
            assert work_of_config(model.config) == work_of(model)


def test_the_critic_trains_what_is_frozen_in_the_policy() -> None:
    plain, adapted = work_of(make("Llama")), work_of(with_lora(make("Llama")))
    assert plain is not None
    assert adapted is not None
    assert adapted.all_trained() == plain.all_trained()
    assert plain.all_trained().head == 0


@given(st.lists(st.integers(1, 200), min_size=1, max_size=20), st.integers(1, 250) | st.none())
def test_pairs_are_those_of_the_mask(lengths: list[int], window: int | None) -> None:
    limit = 10**6 if window is None else window
    expected = sum(min(at + 1, limit) for length in lengths for at in range(length))
    assert causal_pairs(np.array(lengths), window) == expected


def test_a_window_counts_where_the_layers_have_one() -> None:
    import transformers

    config = transformers.Gemma3TextConfig(
        **SHAPE, sliding_window=8, layer_types=["sliding_attention", "sliding_attention", "full_attention"]
    )
    work = work_of_config(config)
    assert work is not None
    width = 2 * HEADS * SIZE
    assert sorted(work.attention, key=str) == sorted([(None, width), (8, 2 * width)], key=str)
    lengths = np.array([5, 40])
    pairs = causal_pairs(lengths)
    expected = 6 * width * pairs + 12 * width * causal_pairs(lengths, 8)
    assert work.computed(0, pairs, 0, lengths) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("card", "bfloat16", "float32"),
    [
        ("NVIDIA A100-SXM4-80GB", 312, 19.5),
        ("NVIDIA A100 80GB PCIe", 312, 19.5),
        ("NVIDIA H100 80GB HBM3", 989.4, 66.9),
        ("NVIDIA H100 PCIe", 756, 51.2),
        ("NVIDIA H100 NVL", 835.5, 60),
        ("NVIDIA H200", 989.4, 66.9),
        ("NVIDIA B200", 2250, 75),
        ("NVIDIA L40S", 362.05, 91.6),
        ("NVIDIA A10", 125, 31.2),
        ("NVIDIA GeForce RTX 4090", 165.2, 82.6),
        ("NVIDIA GeForce RTX 4090 D", None, None),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None, None),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", None, None),
        ("NVIDIA A10G", None, None),
        ("cpu", None, None),
    ],
)
def test_the_peak_is_that_of_the_card_that_is_named(card: str, bfloat16: float | None, float32: float | None) -> None:
    for dtype, rate in (("bfloat16", bfloat16), ("float32", float32)):
        found = peak_rate(card, dtype)
        assert found == (None if rate is None else pytest.approx(1e12 * rate))
    assert peak_rate(card, "float8") is None
