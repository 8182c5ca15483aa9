"""Sibling layers as one product: what they compute, where the copies are, and who is left alone."""

from __future__ import annotations

import asyncio
import gc
import warnings
import weakref
from collections import Counter
from contextlib import ExitStack
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from eager_graphs import EagerDecoder, capture_on_a_cpu
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.utils._python_dispatch import TorchDispatchMode

from strop.config.model import LoraConfig
from strop.errors import RunFailure
from strop.models.attention import running
from strop.models.blocks import ChangedBlocks
from strop.models.consistent_mode import make_consistent
from strop.models.forward import backbone, packed_inputs, score_streams
from strop.models.layout import pack
from strop.models.load import add_lora
from strop.rollout.engine import SampleRequest, SampleResult, SampleSettings, WeightUpdate
from strop.rollout.engines import joined_linear
from strop.rollout.engines.derived import Derived
from strop.rollout.engines.joined_linear import JoinedLinears
from strop.rollout.engines.local import LocalEngine

LAYERS = 3
SHAPE: dict[str, Any] = {
    "vocab_size": 50,
    "hidden_size": 32,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
}
MAKE: dict[str, Any] = {
    "llama": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**SHAPE)),
    "llama, biased": lambda: transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**SHAPE, attention_bias=True, mlp_bias=True)
    ),
    "qwen2": lambda: transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**SHAPE)),
    "qwen3": lambda: transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**SHAPE, head_dim=16)),
    "mistral": lambda: transformers.MistralForCausalLM(transformers.MistralConfig(**SHAPE)),
    "qwen3 moe": lambda: transformers.Qwen3MoeForCausalLM(
        transformers.Qwen3MoeConfig(**SHAPE, head_dim=8, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16)
    ),
    "phi3": lambda: transformers.Phi3ForCausalLM(transformers.Phi3Config(**SHAPE, pad_token_id=0)),
    "gpt2": lambda: transformers.GPT2LMHeadModel(
        transformers.GPT2Config(vocab_size=50, n_positions=128, n_embd=32, n_layer=LAYERS, n_head=4)
    ),
}
JOINED = ["llama", "llama, biased", "qwen2", "qwen3", "mistral"]


def make(family: str = "qwen3") -> Any:
    torch.manual_seed(0)
    model = MAKE[family]().eval()
    draw = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # Biases begin as zeros.
            if name.endswith("bias"):
                parameter.copy_(torch.randn(parameter.shape, generator=draw))
            elif parameter.dim() == 2:
                parameter.mul_(3.0)
    return model


def joined_of(model: nn.Module) -> JoinedLinears:
    joined = JoinedLinears(model)
    joined.copy()
    return joined


def groups(model: nn.Module) -> list[int]:
    """How many layers each joined product is of."""
    return [len(group.layers) for group in JoinedLinears(model)._groups]


class Products(TorchDispatchMode):
    """How often weights are multiplied with, in how many rows."""

    def __init__(self) -> None:
        super().__init__()
        self.weights: Counter[int] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm):
            self.weights[args[-1].shape[1]] += 1
        return func(*args, **(kwargs or {}))


def hidden(model: Any, *entered: Any, length: int = 7) -> Tensor:
    """The last hidden states of a stream [1, length, H]."""
    inputs = packed_inputs(pack([np.arange(length) % 50]), [np.arange(length) > 0], torch.device("cpu"))
    with torch.no_grad(), running(model, inputs.attention), ExitStack() as stack:
        for context in entered:
            stack.enter_context(context)
        found = backbone(model)(input_ids=inputs.input_ids, position_ids=inputs.position_ids, use_cache=False)
    return found.last_hidden_state


# What is computed.


@pytest.mark.parametrize("family", JOINED)
def test_joined_products_are_the_separate_ones(family: str) -> None:
    model = make(family)
    joined = joined_of(model)
    assert groups(model) == [3, 2] * LAYERS
    with Products() as separate:
        expected = hidden(model)
    with Products() as together:
        found = hidden(model, joined.active())
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    assert separate.weights.total() == 7 * LAYERS
    # One for q, k and v, one for gate and up, and the two that have no siblings.
    assert together.weights.total() == 4 * LAYERS
    assert together.weights[2 * SHAPE["intermediate_size"]] == LAYERS
    # The model is its own again.
    assert all("forward" not in vars(module) for module in model.modules())


class Attention(nn.Module):
    """Calls its layers as a test asks for, [(name, input)]."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = nn.Linear(8, 12), nn.Linear(8, 4), nn.Linear(8, 4)

    def get_decoder(self) -> Attention:
        return self

    def forward(self, calls: list[tuple[str, Tensor]]) -> list[Tensor]:
        return [getattr(self, name)(x) for name, x in calls]


Q, K, V = "q_proj", "k_proj", "v_proj"
CALLS = {
    "in their order": [(Q, 0), (K, 0), (V, 0)],
    "backwards": [(V, 0), (K, 0), (Q, 0)],
    "another first": [(K, 0), (Q, 0), (V, 0)],
    "alone": [(V, 0)],
    "alone, twice": [(K, 0), (K, 0)],
    "another input on the way": [(Q, 0), (K, 1), (V, 0)],
    "two inputs in turn": [(Q, 0), (Q, 1), (K, 0), (K, 1), (V, 1), (V, 0)],
    "one left out": [(Q, 0), (V, 0), (Q, 1), (V, 1)],
}


@pytest.mark.parametrize("order", CALLS)
@pytest.mark.parametrize("compiled", [False, True])
@torch.no_grad()
def test_any_order_of_calls(order: str, compiled: bool) -> None:
    model = Attention()
    joined = joined_of(model)
    inputs = [torch.randn(1, 5, 8) for _ in range(2)]
    calls = [(name, inputs[number]) for name, number in CALLS[order]]
    expected = model(calls)
    torch._dynamo.reset()
    compute = torch.compile(model.forward, dynamic=True, fullgraph=True, backend="aot_eager") if compiled else model
    with joined.active():
        for _ in range(2):
            for mine, theirs in zip(compute(calls), expected, strict=True):
                torch.testing.assert_close(mine, theirs)


@torch.no_grad()
def test_nothing_is_held_longer_than_needed() -> None:
    model = Attention()
    joined = joined_of(model)
    with joined.active():
        x = torch.randn(1, 5, 8)
        left = weakref.ref(x)
        found = model([(Q, x), (K, x), (V, x)])
        product = weakref.ref(found[0].untyped_storage())
        del x, found
        assert left() is None
        assert product() is None
        # What nobody has taken goes with the pass at the latest.
        x = torch.randn(1, 5, 8)
        left = weakref.ref(x)
        model([(K, x)])
        del x
        assert left() is not None
    assert left() is None
    x = torch.randn(1, 5, 8)
    left = weakref.ref(x)
    wrong = torch.randn(1, 5, 9)
    with pytest.raises(RuntimeError, match="shapes"), joined.active():
        model([(Q, x), (K, wrong)])
    del x
    assert left() is None


@pytest.mark.parametrize(("family", "first"), [("qwen2", "joined"), ("qwen3", "joined"), ("qwen3", "plain")])
def test_compiled_blocks(family: str, first: str) -> None:
    torch._dynamo.reset()
    counters.clear()
    model = make(family)
    joined = joined_of(model)
    blocks = ChangedBlocks(model, compiled=True, recompute=False)
    expected = {length: hidden(model, length=length) for length in (5, 9, 12)}
    graphs_of: dict[str, int] = {}
    for kind in [first, "plain" if first == "joined" else "joined"]:
        before = counters["stats"]["unique_graphs"]
        for length in (5, 9):
            entered = [joined.active()] if kind == "joined" else []
            found = hidden(model, *entered, blocks.used(), length=length)
            torch.testing.assert_close(found, expected[length], rtol=1e-4, atol=1e-5)
        graphs_of[kind] = counters["stats"]["unique_graphs"] - before
    # Blocks share what is compiled: not a graph for each of them. The plain ones are others than the joined.
    assert 2 <= graphs_of["joined"] < 2 * LAYERS
    assert 2 <= graphs_of["plain"] < 2 * LAYERS
    reasons = list(counters["graph_break"])
    assert all("torch.compiler.disable" in reason for reason in reasons), reasons
    # Neither is used for the other; the copies are read where they are, and nothing is compiled again.
    counters.clear()
    with torch.no_grad():
        for group in joined._groups:
            group.weight.mul_(1.5)
    torch.testing.assert_close(hidden(model, blocks.used(), length=12), expected[12], rtol=1e-4, atol=1e-5)
    changed = hidden(model, joined.active(), blocks.used(), length=12)
    assert not torch.allclose(changed, expected[12], rtol=1e-2, atol=1e-2)
    torch.testing.assert_close(changed, hidden(model, joined.active(), length=12), rtol=1e-4, atol=1e-5)
    joined.copy()
    found = hidden(model, joined.active(), blocks.used(), length=12)
    torch.testing.assert_close(found, expected[12], rtol=1e-4, atol=1e-5)
    assert counters["stats"]["unique_graphs"] == 0


# The copies.


def derived_of(model: Any, **options: Any) -> Derived:
    return Derived(model, **{"packs": False, "rows": 4, "consistent": False, "joins": True, **options})


def shake(model: Any) -> None:
    draw = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=draw) * parameter.std() * 0.3)


def places(joined: JoinedLinears) -> list[int]:
    return [parameter.data_ptr() for group in joined._groups for parameter in group.parameters()]


def test_new_weights_come_to_the_same_places() -> None:
    model = make("llama, biased")
    derived = derived_of(model)
    joined = derived.joined(0)
    assert joined is not None
    before = places(joined)
    assert len(before) == 4 * LAYERS
    # Another version, and the same one again, of which the engine was told that it is not what it was.
    for version in (1, 1):
        shake(model)
        derived.drop()
        assert derived.joined(version) is joined
        assert places(joined) == before
        torch.testing.assert_close(hidden(model, joined.active()), hidden(model), rtol=1e-5, atol=1e-5)


def test_a_version_is_copied_once(monkeypatch: pytest.MonkeyPatch) -> None:
    copied = []
    monkeypatch.setattr(JoinedLinears, "copy", lambda joined: copied.append(joined))
    derived = derived_of(make())
    for _ in range(3):
        derived.joined(4)
    assert len(copied) == 1
    derived.drop()
    assert len(copied) == 1
    derived.joined(5)
    assert len(copied) == 2


def test_copies_of_another_version_cannot_be_used() -> None:
    derived = derived_of(make())
    derived.joined(0)
    with pytest.raises(RunFailure, match="serves version 1 with weights copied from version 0"):
        derived.joined(1)


def test_memory_is_given_back() -> None:
    derived = derived_of(make())
    joined = derived.joined(0)
    assert joined is not None
    sizes = [4 * 16 + 2 * 2 * 16, 2 * 48]
    assert derived.joined_bytes() == joined.bytes() == LAYERS * sum(sizes) * 32 * 4
    left = weakref.ref(joined._groups[0].weight)
    del joined
    derived.give_back()
    gc.collect()
    assert left() is None
    assert derived.joined_bytes() == 0
    assert derived.joined(1) is not None


# Who is left alone.


@pytest.mark.parametrize("family", ["phi3", "gpt2"])
def test_models_without_such_layers(family: str) -> None:
    assert groups(make(family)) == []


def test_experts_are_left_alone() -> None:
    model = make("qwen3 moe")
    assert groups(model) == [3] * LAYERS
    torch.testing.assert_close(hidden(model, joined_of(model).active()), hidden(model), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("targets", "left"),
    [("all-linear", []), (["v_proj"], [2] * LAYERS), (["up_proj", "o_proj"], [3] * LAYERS)],
    ids=["all", "v", "up"],
)
def test_layers_with_adapters(targets: Any, left: list[int]) -> None:
    model = add_lora(make(), LoraConfig(rank=2, targets=targets), seed=0)
    assert groups(model) == left
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.fill_(0.1)
    model.eval()
    torch.testing.assert_close(hidden(model, joined_of(model).active()), hidden(model), rtol=1e-5, atol=1e-5)


def test_large_products(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make()
    attention, mlp = (4 * 16 + 2 * 2 * 16) * 32 * 4, 2 * 48 * 32 * 4
    assert attention > mlp
    for largest, left in [(attention, [3, 2]), (attention - 1, [2]), (mlp, [2]), (mlp - 1, [])]:
        monkeypatch.setattr(joined_linear, "LARGEST", largest)
        assert groups(model) == left * LAYERS


class Scaled(nn.Linear):
    """As quantised layers are: a linear layer that computes in another way."""

    def forward(self, input: Tensor) -> Tensor:
        return 2 * super().forward(input)


class Described(nn.Parameter):
    """As weights are that are divided among ranks: a tensor of a class of its own."""


def changed(kind: str) -> Any:
    model = Attention()
    if kind == "subclass":
        model.k_proj.__class__ = Scaled
    elif kind == "weight of a class of its own":
        model.k_proj.weight = Described(model.k_proj.weight.detach())
    elif kind == "one without a bias":
        model.k_proj.bias = None
    elif kind == "tied":
        model.v_proj.weight = model.k_proj.weight
    elif kind == "tied to what is not joined":
        model.other = nn.Linear(8, 12)
        model.other.weight = model.q_proj.weight
    elif kind == "other inputs":
        model.v_proj = nn.Linear(6, 4)
    elif kind == "other numbers":
        model.v_proj.bfloat16()
    elif kind == "meta":
        model.to("meta")
    elif kind == "partly meta":
        model.v_proj.to("meta")
    elif kind == "replaced":
        # As layers are whose weights are elsewhere until they are used.
        own = model.q_proj.forward
        model.q_proj.forward = lambda input: own(input)  # type: ignore[method-assign]
    elif kind == "not there":
        del model.k_proj
    elif kind == "none":
        model.k_proj = None  # type: ignore[assignment]
    return model


def test_plain_siblings_are_joined() -> None:
    assert groups(changed("in no way")) == [3]


@pytest.mark.parametrize(
    "kind",
    [
        "subclass",
        "weight of a class of its own",
        "one without a bias",
        "tied",
        "tied to what is not joined",
        "other inputs",
        "other numbers",
        "meta",
        "partly meta",
        "replaced",
        "not there",
        "none",
    ],
)
def test_siblings_that_are_not_alike_or_not_plain(kind: str) -> None:
    assert groups(changed(kind)) == []


def test_the_consistent_mode() -> None:
    model = make()
    make_consistent(model)
    assert derived_of(model, consistent=True).joined(0) is None
    assert derived_of(make(), joins=False).joined(0) is None


# In the engine.


@pytest.fixture
def graphs_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    capture_on_a_cpu(monkeypatch)


def engine_of(model: Any, *, joins: bool) -> LocalEngine:
    return LocalEngine(model, None, eos_ids=(), seed=3, context=64, max_sequences=4, pack_weights=False, graphs=joins)


async def sample(engine: LocalEngine) -> list[SampleResult]:
    requests = [SampleRequest((5, 6, 7 + n % 2), SampleSettings(6 + n, 1.0), (0, n)) for n in range(6)]
    return list(await asyncio.gather(*(engine.generate(request) for request in requests)))


def same(found: list[SampleResult], expected: list[SampleResult]) -> None:
    assert [result.tokens for result in found] == [result.tokens for result in expected]
    for mine, theirs in zip(found, expected, strict=True):
        np.testing.assert_allclose(mine.logprobs, theirs.logprobs, atol=1e-4)


@pytest.mark.usefixtures("graphs_on_a_cpu")
async def test_captured_steps_use_the_weights_of_each_version() -> None:
    model = make()
    plain, engine = engine_of(model, joins=False), engine_of(model, joins=True)
    seen = []
    # The last time the version stays the same, as when weights are loaded again.
    for version in (0, 1, 2, 2):
        await plain.update_weights(WeightUpdate(version))
        await engine.update_weights(WeightUpdate(version))
        found = await sample(engine)
        same(found, await sample(plain))
        seen.append([result.tokens for result in found])
        joined = engine._derived.joined(version)
        assert joined is not None
        # Graphs of the first version are still replayed.
        assert engine._graphs is not None
        assert {id(entry[0]._copies) for entry in engine._graphs._graphs.values()} == {id(joined)}
        shake(model)
    assert all(one != other for one, other in pairwise(seen))
    # Memory is asked for, and given back.
    assert engine.take_stats().extra["joined_bytes"] > 0
    await engine.sleep()
    assert "joined_bytes" not in engine.take_stats().extra
    await engine.update_weights(WeightUpdate(3))
    await plain.update_weights(WeightUpdate(3))
    same(await sample(engine), await sample(plain))
    await engine.close()
    assert engine._derived.joined_bytes() == 0


@pytest.mark.usefixtures("graphs_on_a_cpu")
async def test_weights_that_are_sent_come_to_the_copies() -> None:
    model, other = make(), make()
    shake(other)
    engine = engine_of(model, joins=True)
    await sample(engine)
    await engine.update_weights(WeightUpdate(1, tensors=other.named_parameters()))
    same(await sample(engine), await sample(engine_of(other, joins=False)))


@pytest.mark.usefixtures("graphs_on_a_cpu")
async def test_a_version_that_was_announced_past_the_engine_stops_it() -> None:
    engine = engine_of(make(), joins=True)
    await sample(engine)
    engine._version = 1
    with pytest.raises(RunFailure, match="serves version 1 with weights copied from version 0"):
        await sample(engine)


@pytest.mark.usefixtures("graphs_on_a_cpu")
async def test_a_model_that_cannot_be_captured_keeps_no_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make()
    engine, capture = engine_of(model, joins=True), EagerDecoder._capture

    def few_rows_only(decoder: EagerDecoder, size: int) -> Any:
        if size > 2:
            raise ValueError("too many rows")
        return capture(decoder, size)

    monkeypatch.setattr(EagerDecoder, "_capture", few_rows_only)
    await engine.generate(SampleRequest((5, 6, 7), SampleSettings(3), (1,)))
    assert engine._derived.joined_bytes() > 0
    with pytest.warns(RuntimeWarning, match="without CUDA graphs.*too many rows"):
        found = await sample(engine)
    same(found, await sample(engine_of(model, joins=False)))
    assert engine._derived.joined_bytes() == 0


@pytest.mark.usefixtures("graphs_on_a_cpu")
async def test_without_room_for_copies_layers_are_computed_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_room(_: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(JoinedLinears, "copy", no_room)
    model = make()
    engine = engine_of(model, joins=True)
    with pytest.warns(RuntimeWarning, match="no memory to join them, CUDA out of memory") as warned:
        found = await sample(engine)
    same(found, await sample(engine_of(model, joins=False)))
    assert len(warned) == 1
    assert engine._graphs is not None
    assert engine._derived.joined_bytes() == 0


@pytest.mark.usefixtures("graphs_on_a_cpu")
async def test_a_pass_that_finds_no_memory_fails_and_the_next_one_is_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make()
    engine = engine_of(model, joins=True)
    expected = await sample(engine)
    passes, compute = iter([True]), LocalEngine._pass

    def short(engine: LocalEngine, *given: Any) -> Any:
        if next(passes, False):
            raise torch.OutOfMemoryError("CUDA out of memory")
        return compute(engine, *given)

    monkeypatch.setattr(LocalEngine, "_pass", short)
    with pytest.raises(RunFailure, match="CUDA out of memory"):
        await sample(engine)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        same(await sample(engine), expected)
    assert engine._capture


@pytest.mark.usefixtures("graphs_on_a_cpu")
async def test_weights_that_are_somewhere_else_are_captured_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make()
    engine, plain = engine_of(model, joins=True), engine_of(model, joins=False)
    await sample(engine)
    decoder = engine._graphs
    await engine.update_weights(WeightUpdate(1))
    await sample(engine)
    assert engine._graphs is decoder
    task = asyncio.create_task(sample(engine))
    while engine._launched is None:
        await asyncio.sleep(0)
    # In the middle of completions too.
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()
    await engine.update_weights(WeightUpdate(2))
    same(await task, await sample(plain))
    assert engine._graphs is not decoder


async def test_no_layer_is_joined_on_a_cpu() -> None:
    engine = engine_of(make(), joins=False)
    await sample(engine)
    assert engine._derived.joined(0) is None
    assert engine._derived.joined_bytes() == 0


@pytest.mark.usefixtures("graphs_on_a_cpu")
@pytest.mark.parametrize("what", ["prompts", "scores"])
async def test_passes_that_are_not_captured_use_the_copies_too(monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    engine = engine_of(make(), joins=True)
    computed, forward = [], joined_linear._Joined.forward

    def noted(group: Any, *given: Any) -> Any:
        computed.append(group)
        return forward(group, *given)

    monkeypatch.setattr(joined_linear._Joined, "forward", noted)
    if what == "scores":
        await engine.score([[3, 4, 5]])
    else:
        await engine.generate(SampleRequest((3, 4), SampleSettings(1), (9,)))
    joined = engine._derived.joined(0)
    assert joined is not None
    assert set(computed) == set(joined._groups)


@pytest.mark.usefixtures("graphs_on_a_cpu")
@pytest.mark.parametrize("what", ["prompts", "scores"])
async def test_where_the_copies_cannot_be_used_everything_is_computed_plainly(
    monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    def no_kernel(_: Any) -> Any:
        raise ValueError("no such kernel")

    model = make()
    requests = [SampleRequest((5, 6, 7 + n), SampleSettings(20), (n,)) for n in range(3)]
    plain = engine_of(model, joins=False)
    expected = [await plain.generate(request) for request in requests]
    engine = engine_of(model, joins=True)
    begun = [asyncio.create_task(engine.generate(request)) for request in requests[:2]]
    while engine._launched is None:
        await asyncio.sleep(0)
    # A step is under way, and nothing of it is lost.
    monkeypatch.setattr(JoinedLinears, "active", no_kernel)

    async def further() -> SampleResult:
        if what == "scores":
            scores = await engine.score([[3, 4, 5]])
            np.testing.assert_allclose(scores[0][1:], (await plain.score([[3, 4, 5]]))[0][1:], atol=1e-4)
        return await engine.generate(requests[2])

    with pytest.warns(RuntimeWarning, match="without CUDA graphs.*no such kernel"):
        last = await further()
    same([*await asyncio.gather(*begun), last], expected)
    assert engine._derived.joined_bytes() == 0


@pytest.mark.usefixtures("graphs_on_a_cpu")
async def test_the_proof_of_delivery_finds_copies_of_older_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make()
    engine = engine_of(model, joins=True)
    probe = [[3, 4, 5, 6, 7], [9, 8, 7]]
    for version in range(1, 4):
        shake(model)
        if version == 3:
            monkeypatch.setattr(joined_linear.JoinedLinears, "copy", lambda _: None)
        await engine.update_weights(WeightUpdate(version))
        found = await engine.score(probe)
        expected = score_streams(model, [np.asarray(tokens) for tokens in probe])
        gap = max(np.abs(mine[1:] - theirs[1:]).max() for mine, theirs in zip(found, expected, strict=True))
        assert (gap < 1e-4) == (version < 3)
