"""Batches, mini-batches and micro-batches: everything once, within the budget, the loss the same however it is cut."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from strop.algorithms.batch import TokenBatch
from strop.algorithms.named import build_algorithm
from strop.algorithms.supervised import CrossEntropy
from strop.models.attention import running
from strop.models.forward import packed_logprobs
from strop.training.batching import micro_batches, mini_batches, token_batch

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Stream:
    tokens: np.ndarray
    loss_mask: np.ndarray
    logprobs: np.ndarray
    versions: np.ndarray


def stream_of(prompt: np.ndarray, completion: np.ndarray, *, masked: bool = False) -> Stream:
    tokens = np.concatenate([prompt, completion])
    mask = (np.arange(len(tokens)) >= len(prompt)) & (not masked)
    rng = np.random.default_rng(len(tokens))
    logprobs = np.where(mask, -rng.random(len(tokens)), np.nan).astype(np.float32)
    return Stream(tokens, mask, logprobs, np.where(mask, 0, -1).astype(np.int32))


def batch_of(groups: list[tuple[int, list[int]]], *, masked: tuple[int, ...] = ()) -> TokenBatch:
    """(prompt length, completion lengths) of each group; groups in `masked` have nothing to train."""
    streams, ids = [], []
    for number, (prompt_length, lengths) in enumerate(groups):
        rng = np.random.default_rng([number, prompt_length])
        prompt = rng.integers(3, 45, prompt_length)
        for length in lengths:
            streams.append(stream_of(prompt, rng.integers(3, 45, length), masked=number in masked))
            ids.append(number)
    rewards = np.random.default_rng(0).integers(0, 3, len(ids)).astype(float)
    return token_batch(streams, rewards=rewards.tolist(), group_ids=ids, truncated=[False] * len(ids))


GROUPS = st.lists(
    st.tuples(st.integers(1, 9), st.lists(st.integers(1, 9), min_size=1, max_size=4)), min_size=1, max_size=6
)


def test_a_token_batch_is_the_streams_end_to_end() -> None:
    a, b = stream_of(np.arange(3, 6), np.arange(10, 12)), stream_of(np.arange(7, 8), np.arange(20, 23))
    batch = token_batch([a, b], rewards=[1.0, 0.5], group_ids=[4, 9], truncated=[False, True])
    assert batch.input_ids.tolist() == [3, 4, 5, 10, 11, 7, 20, 21, 22]
    assert batch.position_ids.tolist() == [0, 1, 2, 3, 4, 0, 1, 2, 3]
    assert batch.seq_ids.tolist() == [0] * 5 + [1] * 4
    assert batch.loss_mask.tolist() == [False] * 3 + [True] * 2 + [False] + [True] * 3
    assert torch.isnan(batch.sampler_logprobs).tolist() == (~batch.loss_mask).tolist()
    assert batch.versions.tolist() == [-1, -1, -1, 0, 0, -1, 0, 0, 0]
    assert batch.rewards.tolist() == [1.0, 0.5]
    assert batch.group_ids.tolist() == [4, 9]
    assert batch.truncated.tolist() == [False, True]
    assert batch.lengths().tolist() == [5, 4]


@settings(max_examples=60, deadline=None)
@given(GROUPS, st.integers(1, 9))
def test_mini_batches_hold_whole_groups_each_once(groups: list[tuple[int, list[int]]], parts: int) -> None:
    batch = batch_of(groups)
    found = mini_batches(batch, parts)
    assert torch.cat(found).sort().values.tolist() == list(range(batch.sequences))
    assert len(found) == min(parts, len(groups))
    sizes = []
    seen: set[int] = set()
    for part in found:
        assert part.tolist() == sorted(part.tolist())
        inside = set(batch.group_ids[part].tolist())
        assert not inside & seen
        seen |= inside
        sizes.append(len(inside))
    assert max(sizes) - min(sizes) <= 1


def test_groups_need_not_lie_together_to_stay_together() -> None:
    batch = batch_of([(2, [1])] * 6)
    batch.group_ids = torch.tensor([7, 3, 7, 3, 5, 5])
    assert [part.tolist() for part in mini_batches(batch, 3)] == [[1, 3], [4, 5], [0, 2]]


@settings(max_examples=80, deadline=None)
@given(GROUPS, st.integers(1, 80))
def test_micro_batches_cover_everything_once_within_the_budget(
    groups: list[tuple[int, list[int]]], budget: int
) -> None:
    batch = batch_of(groups, masked=(1,))
    found = micro_batches(batch, budget, CPU)
    assert torch.cat([m.sequences for m in found]).tolist() == list(range(batch.sequences))
    for micro in found:
        assert micro.inputs.tokens <= budget or len(micro.sequences) == 1
        # What a micro-batch is told to predict is exactly what is trained, in order.
        assert micro.inputs.targets.tolist() == micro.batch.input_ids[micro.batch.loss_mask].tolist()
        assert micro.trained.tolist() == torch.nonzero(micro.batch.loss_mask)[:, 0].tolist()
        values = torch.arange(1.0, len(micro.trained) + 1)
        spread = micro.scatter(values)
        assert (spread[micro.batch.loss_mask] == values).all()
        assert (spread[~micro.batch.loss_mask] == 0).all()
    # No micro-batch stops short of a sequence that would still have fitted, its prompt shared or not.
    for micro, after in pairwise(found):
        assert micro.inputs.tokens + int(after.batch.lengths()[0]) > budget


def test_a_shared_prompt_is_counted_and_computed_once() -> None:
    batch = batch_of([(20, [5, 3, 4, 6])])
    (micro,) = micro_batches(batch, 20 + 18, CPU)
    assert micro.inputs.tokens == 38
    assert [len(m.sequences) for m in micro_batches(batch, 37, CPU)] == [3, 1]
    # So is what the prompts of two groups begin with alike.
    alike = batch_of([(20, [5]), (20, [5])])
    alike.input_ids[25:42] = alike.input_ids[:17]
    alike.input_ids[42:45] = 90
    assert [m.inputs.tokens for m in micro_batches(alike, 50, CPU)] == [33]


def test_streams_of_a_group_that_begin_differently_are_counted_in_full() -> None:
    # As the branches of a rewritten conversation do: equally long contexts that are not the same.
    batch = batch_of([(10, [4]), (10, [4]), (10, [4])])
    batch.group_ids[:] = 0
    found = micro_batches(batch, 30, CPU)
    assert [m.inputs.tokens for m in found] == [28, 14]


def test_a_sequence_beyond_the_budget_has_a_pass_of_its_own() -> None:
    batch = batch_of([(5, [3]), (10, [11, 2]), (4, [2]), (3, [1])])
    found = micro_batches(batch, 20, CPU)
    assert [m.inputs.tokens for m in found] == [8, 21, 12 + 6, 4]
    assert [m.sequences.tolist() for m in found] == [[0], [1], [2, 3], [4]]


# Loss and gradients.


def grpo() -> Any:
    return build_algorithm("grpo", group_size=4, max_new_tokens=16)


def dr_grpo() -> Any:
    return build_algorithm("dr_grpo", group_size=4, max_new_tokens=16)


def cross_entropy() -> Any:
    return CrossEntropy()


RAGGED = [(7, [3, 9, 1, 6]), (2, [5, 5]), (12, [8, 2, 4]), (4, [1])]


def loss_and_gradients(model: Any, batch: TokenBatch, objective: Any, budget: int) -> tuple[float, dict[str, Any], int]:
    """Sum over micro-batches, as a trainer takes it; and how many there were."""
    model.zero_grad()
    total, denominators = 0.0, objective.denominators(batch)
    found = micro_batches(batch, budget, CPU)
    for micro in found:
        if not len(micro.trained):
            continue
        with running(model, micro.inputs.attention):
            values, _ = packed_logprobs(model, micro.inputs, temperature=0.7, chunk=5)
            terms = objective.loss(micro.batch, micro.scatter(values), None).terms
            loss = sum(objective.reduce(term, micro.batch, denominators[""]) for term in terms.values())
            loss.backward()
        total += float(loss.detach())
    return total, {name: p.grad.clone() for name, p in model.named_parameters()}, len(found)


def unpacked(model: Any, batch: TokenBatch, objective: Any) -> tuple[float, dict[str, Any]]:
    """The same from the plain model, a sequence at a time, with nothing of the packing."""
    model.zero_grad()
    logprobs = torch.zeros(len(batch.input_ids))
    for sequence in range(batch.sequences):
        inside = batch.seq_ids == sequence
        ids = batch.input_ids[inside][None]
        logp = torch.log_softmax(model(input_ids=ids, use_cache=False).logits[0, :-1] / 0.7, -1)
        values = torch.cat([torch.zeros(1), logp.gather(1, ids[0, 1:, None])[:, 0]])
        logprobs = logprobs.index_put((torch.nonzero(inside)[:, 0],), values)
    logprobs = torch.where(batch.loss_mask, logprobs, 0.0)
    terms = objective.loss(batch, logprobs, None).terms
    loss = sum(objective.reduce(term, batch, objective.denominators(batch)[""]) for term in terms.values())
    loss.backward()
    return float(loss.detach()), {name: p.grad.clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize("family", ["llama", "gemma2"])
@pytest.mark.parametrize("objective", [grpo, dr_grpo, cross_entropy])
def test_loss_and_gradients_do_not_depend_on_the_budget(
    tiny_model: Callable[..., Any], family: str, objective: Callable[[], Any]
) -> None:
    model, algorithm = tiny_model(family), objective()
    batch = batch_of(RAGGED, masked=(1,))
    batch.old_logprobs = torch.where(batch.loss_mask, batch.sampler_logprobs - 2.5, 0.0)
    if hasattr(algorithm, "advantages"):
        batch.advantages = algorithm.advantages(batch)
        assert bool((batch.advantages != 0).any())
    everything = loss_and_gradients(model, batch, algorithm, 1000)
    three = loss_and_gradients(model, batch, algorithm, 40)
    one = loss_and_gradients(model, batch, algorithm, 1)
    assert everything[2] == 1
    assert everything[2] < three[2] < one[2] == batch.sequences
    expected = unpacked(model, batch, algorithm)
    for loss, gradients, _ in (everything, three, one):
        assert loss == pytest.approx(everything[0], rel=1e-6, abs=1e-6)
        assert loss == pytest.approx(expected[0], rel=1e-5, abs=1e-5)
        for name, gradient in expected[1].items():
            scale = max(1.0, float(gradient.abs().max()))
            assert (gradients[name] - everything[1][name]).abs().max() <= 1e-6 * scale, name
            assert (gradients[name] - gradient).abs().max() <= 1e-5 * scale, name
