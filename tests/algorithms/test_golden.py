"""The reference numbers of golden.json, whose `about` and `dialect` entries say where they come from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from strop.algorithms.advantages import gae, group_relative
from strop.algorithms.aggregation import aggregate, denominators
from strop.algorithms.corrections import importance_weights
from strop.algorithms.kl import kl_estimate
from strop.algorithms.policy_losses import cispo, gspo, ppo_clip, reinforce, value_loss
from strop.algorithms.preference import dpo

GOLDEN = json.loads((Path(__file__).parent / "golden.json").read_text())
TOLERANCE = 1e-4


def close(got: torch.Tensor, expected: Any, tolerance: float = TOLERANCE) -> None:
    torch.testing.assert_close(got, torch.tensor(expected, dtype=got.dtype), atol=tolerance, rtol=0)


@pytest.mark.filterwarnings("ignore:a group holds a single episode")
@pytest.mark.parametrize("case", GOLDEN["group_relative"])
def test_group_relative(case: dict[str, Any]) -> None:
    rewards = torch.tensor(case["rewards"], dtype=torch.float32)
    got = group_relative(
        rewards,
        torch.tensor(case["groups"]),
        baseline=case["baseline"],
        scale=case.get("scale", "none"),
        **({"eps": case["eps"]} if "eps" in case else {}),
    )
    if "baselines" in case:
        close(rewards - got, case["baselines"])
    else:
        close(got, case["advantages"], case.get("tolerance", TOLERANCE))


@pytest.mark.parametrize("case", GOLDEN["gae"], ids=lambda case: case["name"])
@pytest.mark.parametrize("layout", ["one row", "padded", "flat"])
def test_gae(case: dict[str, Any], layout: str) -> None:
    rewards, values, mask = (torch.tensor(case[key], dtype=torch.float32) for key in ("rewards", "values", "mask"))
    mask = mask.bool()
    treatments = case.get("return_0") or {case.get("observations", "skip"): None}
    for observations, return_0 in treatments.items():
        settings = {"gamma": case["gamma"], "lam": case["lam"], "observations": observations}
        if layout == "one row":
            advantages, returns = gae(rewards, values, mask, **settings)
        elif layout == "padded":
            pad = torch.full((2,), torch.nan)
            row = [torch.cat([pad, x, pad]) for x in (rewards, values)] + [torch.cat([pad > 0, mask, pad > 0])]
            both = gae(*(torch.stack([x, x]) for x in row), **settings)
            advantages, returns = (x[1, 2:-2] for x in both)
        else:
            ids = torch.arange(3).repeat_interleave(len(mask))
            both = gae(rewards.repeat(3), values.repeat(3), mask.repeat(3), seq_ids=ids, **settings)
            advantages, returns = (x.reshape(3, -1)[1] for x in both)
        if return_0 is not None:
            close(returns[0], return_0)
        for name, result in (("advantages", advantages), ("returns", returns)):
            if name in case:
                close(result, case[name])
            if f"{name}_where_mask" in case:
                close(result[mask], case[f"{name}_where_mask"])


def test_policy_losses() -> None:
    golden = GOLDEN["policy_loss_token_mean"]
    data = {key: torch.tensor(value, dtype=torch.float32) for key, value in golden["data"].items() if key != "clip"}
    new, old, advantages = data["logprobs"], data["old_logprobs"], data["advantages"]
    clip = {"clip_low": golden["data"]["clip"], "clip_high": golden["data"]["clip"]}
    mask, ids = torch.ones(3, dtype=torch.bool), torch.zeros(3, dtype=torch.int64)

    def weights(**settings: Any) -> torch.Tensor:
        return importance_weights(old, data["sampler_logprobs"], mask, ids, **settings)[0]

    clipped = ppo_clip(new, old, advantages, **clip)[0]
    by_sequence = gspo(new, old, advantages, mask, ids, **clip)[0]
    close(clipped.mean(), golden["ppo_clip"])
    lower = torch.tensor([-0.5, -1.0, -1.5])
    close(reinforce(lower, advantages)[0].mean(), golden["reinforce (logprobs [-0.5,-1,-1.5])"])
    close(cispo(new, old, advantages, **clip)[0].mean(), golden["cispo"])
    close((weights() * clipped).mean(), golden["ppo_clip with plain token importance weights"])
    truncated = weights(kind="truncate", high=0.8)
    close((truncated * clipped).mean(), golden["ppo_clip with truncated token weights, high 0.8"])
    truncated = weights(kind="truncate", level="sequence", high=0.8)
    close((truncated * by_sequence).mean(), golden["gspo with truncated sequence weights, high 0.8"])
    close(by_sequence.mean(), golden["gspo"])


def test_kl() -> None:
    golden = GOLDEN["kl"]
    pair = torch.tensor(golden["logprobs"]).float(), torch.tensor(golden["ref_logprobs"]).float()
    for kind in ("k1", "k2", "k3"):
        close(kl_estimate(*pair, kind), golden[kind])
    close(kl_estimate(*pair, "abs"), [1.0, 14.0, 29.0])


@pytest.mark.parametrize("case", GOLDEN["aggregate"])
def test_aggregate(case: dict[str, Any]) -> None:
    loss, mask = torch.tensor(case["loss"]).float(), torch.tensor(case["mask"]).bool()
    ids = torch.arange(len(loss))[:, None].expand_as(loss)
    count = denominators(mask, ids)[case["mode"]]
    close(aggregate(loss, mask, ids, mode=case["mode"], denominator=count), case["value"])
    flat = aggregate(loss.flatten(), mask.flatten(), ids.flatten(), mode=case["mode"], denominator=count)
    close(flat, case["value"])


@pytest.mark.parametrize("case", GOLDEN["value_loss"])
def test_value_loss(case: dict[str, Any]) -> None:
    values, old, returns = (torch.tensor(case[key]).float() for key in ("values", "old_values", "returns"))
    close(value_loss(values, old, returns, clip=case["clip"])[0].mean(), case["value"])


@pytest.mark.parametrize("case", GOLDEN["dpo"], ids=lambda case: case["name"])
def test_dpo(case: dict[str, Any]) -> None:
    chosen, rejected = torch.tensor([-3.0, -7.0]), torch.tensor([-4.0, -2.0])
    loss, _ = dpo(chosen, rejected, chosen, rejected, beta=0.1)
    close(loss, [case["loss"]] * 2, case["tolerance"])
