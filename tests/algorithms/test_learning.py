"""Every named algorithm learns: a table of logits over four positions, through the same hooks that a trainer calls.

The reward is 1 if at least three of four sampled tokens are the wanted ones. A policy that knows nothing gets it in 5 %
of its completions. Everything is seeded, so the outcome is the same on every run.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from strop.algorithms.batch import TokenBatch
from strop.algorithms.named import ALGORITHMS, PPO, build_algorithm
from strop.algorithms.policy_gradient import PolicyGradient

LENGTH, VOCABULARY, GROUPS, GROUP_SIZE = 4, 4, 8, 8
WANTED = torch.tensor([2, 0, 3, 1])
COUNT = GROUPS * GROUP_SIZE


def reward(tokens: torch.Tensor) -> torch.Tensor:
    return ((tokens == WANTED).sum(-1) >= 3).float()


def scores(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """[N * LENGTH] log-probability of each token."""
    return logits.log_softmax(-1).expand(len(tokens), -1, -1).gather(2, tokens[..., None]).reshape(-1)


def sample(logits: torch.Tensor, values: torch.Tensor, draw: torch.Generator) -> tuple[TokenBatch, torch.Tensor]:
    chances = logits.detach().softmax(-1).repeat(COUNT, 1)
    tokens = torch.multinomial(chances, 1, generator=draw).reshape(COUNT, LENGTH)
    logprobs = scores(logits.detach(), tokens)
    start = torch.zeros(LENGTH, VOCABULARY)
    teacher = start.scatter(1, WANTED[:, None], 4.0)
    batch = TokenBatch(
        input_ids=tokens.reshape(-1),
        position_ids=torch.arange(LENGTH).repeat(COUNT),
        seq_ids=torch.arange(COUNT).repeat_interleave(LENGTH),
        loss_mask=torch.ones(COUNT * LENGTH, dtype=torch.bool),
        sampler_logprobs=logprobs,
        versions=torch.zeros(COUNT * LENGTH, dtype=torch.int64),
        rewards=reward(tokens),
        group_ids=torch.arange(COUNT) // GROUP_SIZE,
        truncated=torch.zeros(COUNT, dtype=torch.bool),
        old_logprobs=logprobs,
        ref_logprobs=scores(start, tokens),
        teacher_logprobs=scores(teacher, tokens),
        values=values.detach().repeat(COUNT),
        greedy_rewards=reward(logits.detach().argmax(-1)).expand(COUNT),
        extra={"target_logprobs": events(teacher)},
    )
    return batch, tokens


def events(logits: torch.Tensor) -> torch.Tensor:
    """[N * LENGTH, VOCABULARY + 1] log-probabilities of every token, and of a tail of none."""
    told = torch.nn.functional.pad(logits.log_softmax(-1), (0, 1), value=-torch.inf)
    return told.repeat(COUNT, 1)


def train(algorithm: PolicyGradient, *, steps: int = 30) -> list[float]:
    """Mean reward of each step's samples; two updates a step, so that the second one is off-policy."""
    draw = torch.Generator().manual_seed(0)
    logits = torch.zeros(LENGTH, VOCABULARY, requires_grad=True)
    values = torch.zeros(LENGTH, requires_grad=True)
    optimizer = torch.optim.Adam([logits, values], lr=0.1)
    rewards = []
    for _ in range(steps):
        batch, tokens = sample(logits, values, draw)
        algorithm.correct(batch)
        batch.advantages = algorithm.advantages(batch)
        rewards.append(float(batch.rewards.mean()))
        for _ in range(2):
            counts = algorithm.denominators(batch)
            entropy = torch.special.entr(logits.softmax(-1)).sum(-1).repeat(COUNT)
            batch.extra["student_logprobs"] = events(logits)
            terms = algorithm.loss(batch, scores(logits, tokens), entropy).terms
            loss = sum((algorithm.reduce(term, batch, counts[""]) for term in terms.values()), start=torch.zeros(()))
            if isinstance(algorithm, PPO):
                loss = loss + algorithm.value_loss(batch, values.repeat(COUNT))[0].mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return rewards


@pytest.mark.parametrize("name", ALGORITHMS)
def test_the_reward_rises(name: str) -> None:
    rewards = train(build_algorithm(name, group_size=GROUP_SIZE, max_new_tokens=2 * LENGTH))
    assert sum(rewards[:3]) / 3 < 0.2
    assert sum(rewards[-5:]) / 5 > 0.8, rewards[::4]


@pytest.mark.parametrize(
    "choices",
    [
        {"kl_coef": 0.01, "kl_kind": "k2"},
        {"kl_coef": 0.01, "kl_kind": "k1", "kl_in": "reward"},
        {"entropy_coef": 0.01},
        {"correction": "truncate", "correction_high": 2.0},
    ],
    ids=str,
)
def test_the_reward_rises_with_other_terms(choices: dict[str, Any]) -> None:
    rewards = train(build_algorithm("grpo", group_size=GROUP_SIZE, max_new_tokens=2 * LENGTH, **choices))
    assert sum(rewards[-5:]) / 5 > 0.8, rewards[::4]


@pytest.mark.parametrize(("kind", "place"), [("k2", "loss"), ("k3", "loss"), ("k1", "reward")])
def test_a_strong_penalty_holds_the_policy_at_the_reference(kind: str, place: str) -> None:
    rewards = train(
        build_algorithm(
            "grpo", group_size=GROUP_SIZE, max_new_tokens=2 * LENGTH, kl_coef=10.0, kl_kind=kind, kl_in=place
        )
    )
    assert sum(rewards[-20:]) / 20 < 0.3
