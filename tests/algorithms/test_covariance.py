"""Clip-Cov and KL-Cov: which tokens are chosen, and what then happens to them."""

from __future__ import annotations

import pytest
import torch

from strop.algorithms.covariance import clip_cov, kl_cov, select_clip_cov, select_kl_cov, token_covariance
from strop.algorithms.policy_losses import ppo_clip

DRAW = torch.Generator().manual_seed(0)
MASK = torch.rand(200, generator=DRAW) < 0.7
OLD = torch.where(MASK, -torch.rand(200, generator=DRAW) * 3, torch.nan)
ADVANTAGES = torch.where(MASK, torch.randn(200, generator=DRAW), torch.nan)


def test_covariance_is_centred_over_trained_tokens() -> None:
    got = token_covariance(OLD, ADVANTAGES, MASK)
    assert bool((got[~MASK] == 0).all())
    pair = torch.stack([OLD[MASK], ADVANTAGES[MASK]])
    torch.testing.assert_close(got[MASK].mean(), torch.cov(pair, correction=0)[0, 1], atol=1e-6, rtol=1e-5)


def test_kl_cov_selects_the_largest() -> None:
    covariance = token_covariance(OLD, ADVANTAGES, MASK)
    selected = select_kl_cov(covariance, MASK, share=0.1)
    assert int(selected.sum()) == int(0.1 * int(MASK.sum()))
    assert covariance[selected].min() >= covariance[MASK & ~selected].max()
    assert int(select_kl_cov(covariance, MASK, share=1e-9).sum()) == 1
    assert not bool(select_kl_cov(covariance, torch.zeros_like(MASK)).any())


def test_clip_cov_draws_inside_the_band() -> None:
    covariance = token_covariance(OLD, ADVANTAGES, MASK)
    inside = MASK & (covariance > 0.2) & (covariance < 1.0)

    def draw(seed: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(seed)
        return select_clip_cov(covariance, MASK, generator=generator, share=0.05, low=0.2, high=1.0)

    assert int(draw(0).sum()) == int(0.05 * int(MASK.sum())) < int(inside.sum())
    assert bool((inside | ~draw(0)).all())
    assert torch.equal(draw(0), draw(0))
    assert not torch.equal(draw(0), draw(1))


def test_losses() -> None:
    selected = select_kl_cov(token_covariance(OLD, ADVANTAGES, MASK), MASK, share=0.2)
    new = (OLD + 0.1 * torch.randn(200, generator=DRAW)).requires_grad_()
    plain, _ = ppo_clip(new, OLD, ADVANTAGES, mask=MASK)
    clipped, metrics = clip_cov(new, OLD, ADVANTAGES, selected, mask=MASK)
    assert torch.equal(clipped, torch.where(selected, 0.0, plain))
    assert torch.equal(metrics["policy/covariance_fraction"], selected.float())
    gradient = torch.autograd.grad(clipped.sum(), new)[0]
    assert bool((gradient[selected] == 0).all())
    penalised, _ = kl_cov(new, OLD, ADVANTAGES, selected, kl_coef=0.5, mask=MASK)
    free, _ = kl_cov(new, OLD, ADVANTAGES, selected, kl_coef=0.0, mask=MASK)
    expected = torch.where(selected, 0.5 * (new - OLD).abs(), 0.0)
    torch.testing.assert_close((penalised - free)[MASK], expected[MASK])
    with pytest.raises(ValueError, match="kl_coef"):
        kl_cov(new, OLD, ADVANTAGES, selected, kl_coef=-1.0)
