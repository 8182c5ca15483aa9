"""What `auto` becomes: within bounds, the same on the same machine, and refused where it cannot be."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from strop.config import Config
from strop.errors import UserError
from strop.planning import hardware
from strop.planning.hardware import (
    GIB,
    Hardware,
    activation_bytes,
    choose_chunk,
    choose_hardware,
    choose_prefill,
    choose_sizes,
)


def config_of(**sections: Any) -> Config:
    return Config.model_validate(
        {
            "model": {"create": {}},
            "data": {"train": {"path": "train.jsonl"}},
            "rewards": {"verifiers": [{"kind": "exact"}]},
            **sections,
        }
    )


class Shape:
    """The configuration of a Llama-shaped model, and a model that has it."""

    def __init__(self, layers: int = 30, hidden: int = 576, heads: int = 9, shared: int = 3, inner: int = 1536) -> None:
        self.num_hidden_layers, self.hidden_size = layers, hidden
        self.num_attention_heads, self.num_key_value_heads, self.intermediate_size = heads, shared, inner
        self.vocab_size = 49152

    @property
    def config(self) -> Shape:
        return self

    def parameters(self) -> Iterator[torch.Tensor]:
        for _ in range(self.num_hidden_layers):
            yield torch.empty(self.hidden_size, self.hidden_size + self.intermediate_size, device="meta")


def machine(memory: float = 16, device: str = "cpu", dtype: torch.dtype = torch.float32) -> Hardware:
    return Hardware(torch.device(device), dtype, 2, int(memory * GIB), ())


def test_a_device_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    for device in ("cuda", "mps"):
        with pytest.raises(UserError, match=f"no {device} device") as caught:
            choose_hardware(config_of(hardware={"device": device}))
        assert caught.value.where == "hardware.device"
        assert caught.value.exit_code == 2
    with pytest.raises(ValueError, match="device"):
        config_of(hardware={"device": "tpu"})
    chosen = choose_hardware(config_of())
    assert (chosen.device.type, chosen.dtype) == ("cpu", torch.float32)


def test_what_is_asked_for_is_taken() -> None:
    chosen = choose_hardware(
        config_of(hardware={"device": "cpu", "threads": 3}, model={"create": {}, "dtype": "bfloat16"})
    )
    assert chosen.threads == 3
    assert chosen.dtype == torch.bfloat16
    assert chosen.memory > 0
    assert "cpu" in chosen.reasons[0]
    assert "bfloat16" in chosen.reasons[0]


def test_a_containers_limit_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    import psutil

    class Memory:
        total = 64 * GIB

    monkeypatch.setattr(psutil, "virtual_memory", lambda: Memory)
    limits = {"/sys/fs/cgroup/memory.max": "max\n"}

    def fake(path: str, **_: Any) -> Any:
        import io

        if path not in limits:
            raise FileNotFoundError(path)
        return io.StringIO(limits[path])

    monkeypatch.setattr(hardware, "open", fake, raising=False)
    assert hardware._machine_memory(psutil) == 64 * GIB
    limits["/sys/fs/cgroup/memory.max"] = f"{8 * GIB}\n"
    assert hardware._machine_memory(psutil) == 8 * GIB


@settings(max_examples=100, deadline=None)
@given(
    st.floats(0.25, 2000),
    st.sampled_from(["cpu", "cuda"]),
    st.sampled_from([torch.float32, torch.bfloat16]),
    st.integers(1, 100),
    st.sampled_from([64, 576, 2048, 8192]),
    st.sampled_from([1, 400, 4096, 131_072]),
    st.booleans(),
    st.booleans(),
)
def test_sizes_stay_within_bounds(
    memory: float,
    device: str,
    dtype: torch.dtype,
    layers: int,
    hidden: int,
    longest: int,
    recompute: bool,
    sampled: bool,
) -> None:
    kind: dict[str, Any] = {} if sampled else {"rewards": None, "supervised": {}}
    config = config_of(model={"create": {}, "activation_checkpointing": recompute}, **kind)
    shape = Shape(layers=layers, hidden=hidden, heads=8, shared=2, inner=3 * hidden)
    chosen = machine(memory, device, dtype)
    sizes = choose_sizes(config, chosen, shape, longest)
    most = 16384 if device == "cuda" else 4096 if sampled else 512
    assert 256 <= sizes.tokens_per_micro_batch <= most
    rows = 512 if device == "cuda" else 256
    assert 1 <= sizes.max_sequences <= rows
    assert len(sizes.reasons) == (2 if sampled else 1)
    # Choices follow the memory: a quarter of it each, unless a least size asks for more.
    each = activation_bytes(shape, item=dtype.itemsize, recompute=recompute)
    if sizes.tokens_per_micro_batch > 256:
        assert each * sizes.tokens_per_micro_batch <= 0.25 * chosen.memory
    if sizes.tokens_per_micro_batch < most:
        assert each * (sizes.tokens_per_micro_batch + 256) > 0.25 * chosen.memory
    cached = 2 * layers * 2 * (hidden // 8) * dtype.itemsize * longest
    if sizes.max_sequences > 1:
        assert cached * sizes.max_sequences <= 0.25 * chosen.memory
    if sizes.max_sequences < rows:
        assert cached * (sizes.max_sequences + 1) > 0.25 * chosen.memory
    # The same machine chooses the same again, which resuming bit for bit needs.
    assert sizes == choose_sizes(config, chosen, shape, longest)


def test_what_a_recipe_says_is_left_as_it_is() -> None:
    config = config_of(training={"tokens_per_micro_batch": 77}, rollout={"engine": {"max_sequences": 3}})
    sizes = choose_sizes(config, machine(), Shape(), 2048)
    assert (sizes.tokens_per_micro_batch, sizes.max_sequences, sizes.reasons) == (77, 3, ())


def test_an_engine_on_several_gpus_has_room_for_more_sequences() -> None:
    shape, longest = Shape(layers=64, hidden=8192, heads=64, shared=8), 32_768
    rows = {}
    for tensor in (1, 4):
        config = config_of(rollout={"engine": {"kind": "vllm", "tensor": tensor}})
        rows[tensor] = choose_sizes(config, machine(80, "cuda", torch.bfloat16), shape, longest).max_sequences
    assert 4 * rows[1] <= rows[4] <= 4 * rows[1] + 3
    config = config_of(rollout={"engine": {"kind": "vllm", "tensor": 4}})
    on_a_cpu = choose_sizes(config, machine(80, "cpu", torch.bfloat16), shape, longest)
    assert on_a_cpu.max_sequences == rows[1]


def test_recomputing_keeps_less() -> None:
    kept, recomputed = (activation_bytes(Shape(), item=4, recompute=r) for r in (False, True))
    assert recomputed * 10 < kept
    assert activation_bytes(Shape(), item=2, recompute=False) * 2 == kept


def test_activations_are_counted_right_within_a_third(tiny_model: Any) -> None:
    """The bytes that autograd really keeps for a token of a real model."""
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = LlamaConfig(
        vocab_size=64, hidden_size=128, intermediate_size=384, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=4, max_position_embeddings=512,
    )  # fmt: skip
    model = LlamaForCausalLM(shape)
    tokens, held = 256, {}
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            held[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        out = model.model(input_ids=torch.zeros(1, tokens, dtype=torch.int64), use_cache=False).last_hidden_state
    each = sum(held.values()) / tokens
    assert out.requires_grad
    assert each == pytest.approx(activation_bytes(shape, item=4, recompute=False), rel=1 / 3)


@pytest.mark.parametrize(
    ("device", "memory", "vocabulary", "chunk"),
    [
        ("cpu", 64 * GIB, 151_936, 512),
        ("cuda", 140 * GIB, 151_936, 4096),
        ("cuda", 24 * GIB, 151_936, 1024),
        ("cuda", 8 * GIB, 262_144, 256),
        ("cuda", 1 * GIB, 262_144, 256),
    ],
)
def test_logits_that_exist_at_a_time_fit(device: str, memory: int, vocabulary: int, chunk: int) -> None:
    hardware = Hardware(torch.device(device), torch.bfloat16, 1, memory, ())
    assert choose_chunk(hardware, vocabulary) == chunk


@pytest.mark.parametrize(
    ("device", "memory", "hidden", "inner", "engine", "tokens"),
    [
        ("cuda", 140 * GIB, 1024, 3072, "local", 16384),
        ("cuda", 140 * GIB, 4096, 14336, "local", 16384),
        ("cuda", 24 * GIB, 1024, 3072, "local", 16384),
        ("cuda", 24 * GIB, 2560, 9728, "local", 8192),
        ("cuda", 24 * GIB, 4096, 14336, "local", 4096),
        ("cuda", 8 * GIB, 4096, 14336, "local", 4096),
        ("cuda", 140 * GIB, 1024, 3072, "vllm", 4096),
        ("cpu", 140 * GIB, 1024, 3072, "local", 4096),
    ],
)
def test_a_pass_over_prompts_is_long_where_a_gpu_has_room(
    device: str, memory: int, hidden: int, inner: int, engine: str, tokens: int
) -> None:
    hardware = Hardware(torch.device(device), torch.bfloat16, 4, memory, ())
    assert choose_prefill(hardware, SimpleNamespace(hidden_size=hidden, intermediate_size=inner), engine) == tokens
