"""Writes `docs/maths.md` from the code: `python docs/generate_maths.py`."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from strop.algorithms import (
    advantages,
    aggregation,
    corrections,
    covariance,
    distillation,
    estimators,
    kl,
    policy_losses,
    preference,
    sampling_rules,
)
from strop.algorithms.dialects import DIALECTS, preset
from strop.algorithms.named import ALGORITHMS, build_algorithm
from strop.algorithms.policy_gradient import PolicyGradient, resolved, shown

PAGE = Path(__file__).parent / "maths.md"
CHAPTERS: dict[str, ModuleType] = {
    "Advantages": advantages,
    "More advantages": estimators,
    "Policy losses": policy_losses,
    "Losses that watch the covariance": covariance,
    "Divergence from a reference": kl,
    "Trainer and sampler disagree": corrections,
    "From token losses to one number": aggregation,
    "Rules on the sampling side": sampling_rules,
    "Distillation": distillation,
    "Preferences": preference,
}
HEAD = """# The maths

Written by `python docs/generate_maths.py` from the code in `src/strop/algorithms/`; edit the docstrings, not this page.
A test keeps it current. Every function is pure: tensors in, tensors out, float32, exact under masks. The values below
each formula were computed by it when this page was made. `strop algorithms show NAME` prints what an algorithm chooses;
[algorithms.md](algorithms.md) says how to choose, and how to write one of your own.
"""
SETUP = """a, b = tensor([0.5, -1.0, 2.0]), tensor([True, False, True])        # numbers, a mask
new, old = tensor([-1.2, -1.0, -0.5]), tensor([-1.0, -1.0, -1.0])      # log-probabilities
one = tensor([0, 0, 0])                                               # three tokens of one sequence
rewards, groups = tensor([0.0, 1, 1, 0, 0, 3]), tensor([0, 0, 0, 1, 1, 1])
everyone = tensor([True, True, True])"""
LOST = "tensor([-3.0, -1.0, -1.0])"

EXAMPLES: dict[str, list[str]] = {
    "group_relative": [
        "group_relative(rewards, groups)",
        'group_relative(rewards, groups, scale="std")',
        'group_relative(rewards, groups, scale="population_std")',
        'group_relative(rewards, groups, baseline="leave_one_out")',
        "group_relative(tensor([0.7, 0.7, 0.7]), one)",
    ],
    "no_spread": ["no_spread(rewards, tensor([0, 1, 1, 0, 0, 2]))"],
    "gae": [
        f'gae(tensor([0.0, 0, 3]), tensor([0.5, 1, 1.5]), b, gamma=0.9, lam=0.9, observations="{way}")'
        for way in ("skip", "state", "state_drop_rewards", "zero")
    ],
    "discounted_returns": ["discounted_returns(tensor([0.0, 0, 3]), b, gamma=0.9)"],
    "whiten": ["whiten(a, everyone)", "whiten(a, everyone, unbiased=False)", "whiten(a, b, shift_mean=False)"],
    "batch_baseline": ["batch_baseline(rewards)"],
    "running_baseline": ["running_baseline(rewards, 0.5, decay=0.9)"],
    "remax": ["remax(rewards, tensor([1.0, 1, 1, 0, 0, 0]))"],
    "opo": ["opo(rewards, tensor([1, 2, 1, 1, 1, 2]), groups)"],
    "maxrl": ["maxrl(rewards, groups)"],
    "pass_at_k": ["pass_at_k(rewards > 0, groups, k=2)"],
    "gdpo": ["gdpo(tensor([[0.0, 1], [1, 0], [1, 1]]), one)"],
    "token_rewards": ["token_rewards(tensor([2.0]), b, one, kl=a, kl_coef=0.1)"],
    "gae_decoupled": ["gae_decoupled(tensor([0.0, 0, 3]), tensor([0.5, 1, 1.5]), everyone, gamma=1.0, lam=0.9)"],
    "length_adaptive_lam": ["length_adaptive_lam(everyone, one, alpha=0.5)"],
    "ppo_clip": [
        "ppo_clip(new, old, a)",
        "ppo_clip(new, old, a, clip_high=0.28)",
        "ppo_clip(tensor([1.0]), tensor([-1.0]), tensor([-1.0]), dual_clip=3.0)",
    ],
    "reinforce": ["reinforce(new, a)"],
    "gspo": ["gspo(new, old, a, everyone, one)"],
    "topr": [
        "topr(new, old, -everyone.float(), everyone, one)",
        "topr(new - 0.5, old, -everyone.float(), everyone, one)",
        "topr(new - 0.5, old, everyone.float(), everyone, one)",
    ],
    "gmpo": ["gmpo(new, old, a, everyone, one)"],
    "cispo": ["cispo(new, old, a)"],
    "sapo": ["sapo(new, old, a)"],
    "dppo": ["dppo(new, old, a)", 'dppo(new, old, a, divergence="kl", threshold=0.05)'],
    "value_loss": ["value_loss(tensor([2.0]), tensor([0.0]), tensor([1.0]), clip=0.5)"],
    "entropy_bonus": ["entropy_bonus(tensor([0.5, 1.0]), coef=0.1)"],
    "positive_nll": ["positive_nll(new, a > 0, coef=0.1)"],
    "ratio_metrics": ["ratio_metrics(new, old)"],
    "token_covariance": ["token_covariance(new, a, everyone)"],
    "select_clip_cov": ["select_clip_cov(a, everyone, generator=torch.Generator().manual_seed(0), low=0.0)"],
    "select_kl_cov": ["select_kl_cov(a, everyone)"],
    "clip_cov": ["clip_cov(new, old, a, b)"],
    "kl_cov": ["kl_cov(new, old, a, b)"],
    "kl_estimate": [
        *(f'kl_estimate(new, old, "{kind}")' for kind in ("k1", "k2", "k3", "abs")),
        f"kl_estimate({LOST}, tensor([-0.1, -1.0, -0.5]), clamp=10.0)",
        f"kl_estimate({LOST}, tensor([-0.1, -1.0, -0.5]), importance_weighted=True, old_logprobs=old)",
    ],
    "kl_in_reward": ["kl_in_reward(tensor([2.0]), a, b, one, kl_coef=0.1)"],
    "adaptive_kl_coef": ["adaptive_kl_coef(0.1, 9.0, target=6.0, horizon=10000, steps=256)"],
    "importance_weights": [
        f'importance_weights({LOST}, old, everyone, one, {rest})[:2]'
        for rest in (
            'kind="truncate", high=2.0',
            'kind="band", low=0.5, high=2.0',
            'kind="mask", low=0.5, high=2.0',
            'kind="truncate", high=2.0, level="sequence"',
            'kind="truncate", high=2.0, level="geometric"',
        )
    ],
    "mismatch_metrics": [f"mismatch_metrics({LOST}, old, everyone)"],
    "three_policies": [f"three_policies(old, {LOST}, new, everyone)"],
    "effective_sample_size": ["effective_sample_size(tensor([1.0, 1.0, 0.1]), everyone)"],
    "veto": ["veto(tensor([-12.0, -1.0, -1.0]), old, everyone, tensor([0, 0, 1]))"],
    "off_policy_sequence_mask": [f"off_policy_sequence_mask({LOST}, old, -a, everyone, one, threshold=0.5)"],
    "denominators": ["denominators(b, tensor([0, 0, 1]), max_new_tokens=4)"],
    "aggregate": [
        "aggregate(tensor([1.0, 2, 4, 6]), tensor([True, True, False, True]), tensor([0, 0, 1, 1]), "
        f'mode="{mode}", denominator={count})'
        for mode, count in (("token_mean", 3), ("sequence_mean", 2), ("sequence_mean_token_sum", 2), ("constant", 8))
    ],
    "dynamic_sampling": [
        "dynamic_sampling(tensor([0.0, 1, 1, 1]), tensor([0, 0, 1, 1]), wanted=2)",
        "dynamic_sampling(tensor([0.0, 1, 1, 1]), tensor([0, 0, 1, 1]), wanted=2, refills=3, max_refills=3)",
    ],
    "overlong_filter": ["overlong_filter(everyone, tensor([False, True]), tensor([0, 0, 1]))"],
    "soft_overlong_penalty": ["soft_overlong_penalty(tensor([10, 16, 18, 20, 25]), max_tokens=20, buffer=4)"],
    "reverse_kl_advantages": ["reverse_kl_advantages(new, old)"],
    "topk_kl": [
        f'topk_kl(tensor([[0.5, 0.3]]).log(), tensor([[0.6, 0.3]]).log(), direction="{way}")'
        for way in ("reverse", "forward")
    ],
    "event_divergence": [
        f'event_divergence(tensor([[0.5, 0.3, 0.2]]).log(), tensor([[0.2, 0.7, 0.1]]).log(), "{kind}")'
        for kind in ("forward_kl", "reverse_kl", "jensen_shannon")
    ]
    + [
        'event_divergence(tensor([[0.5, 0.3, 0.2]]).log(), tensor([[0.2, 0.7, 0.1]]).log(), "jensen_shannon", beta=0.1)'
    ],
    "mixture": ["mixture(tensor([[0.5, 0.5], [0.1, 0.9]]).log(), [1.0, 3.0]).exp()"],
    "dpo": [
        "dpo(tensor([-1.0]), tensor([-2.0]), tensor([-1.0]), tensor([-2.0]))",
        "dpo(tensor([-1.0]), tensor([-4.0]), tensor([-1.0]), tensor([-2.0]))",
    ],
    "cdpo": ["cdpo(tensor([-1.0]), tensor([-4.0]), tensor([-1.0]), tensor([-2.0]))"],
    "robust_dpo": ["robust_dpo(tensor([-1.0]), tensor([-4.0]), tensor([-1.0]), tensor([-2.0]))"],
    "plackett_luce": ["plackett_luce(tensor([2.0, 1.0, 0.0]), tensor([0, 0, 0]))"],
    "ipo": ["ipo(tensor([-1.0]), tensor([-4.0]), tensor([-1.0]), tensor([-2.0]))"],
    "simpo": ["simpo(tensor([-4.0]), tensor([-6.0]), tensor([4]), tensor([4]))"],
    "orpo": ["orpo(tensor([-4.0]), tensor([-6.0]), tensor([4]), tensor([4]))"],
    "kto": ["kto(tensor([-1.0, -3.0]), tensor([-2.0, -2.0]), tensor([True, False]), 0.0)"],
    "bradley_terry": ["bradley_terry(tensor([1.0]), tensor([0.0]))"],
}  # fmt: skip
"""function -> expressions that are computed for the page; the names of `SETUP` stand for its values."""


def functions(module: ModuleType) -> list[Any]:
    """The public functions of a module, in the order in which they are written."""
    found = [
        f for name, f in inspect.getmembers(module, inspect.isfunction)
        if not name.startswith("_") and f.__module__ == module.__name__
    ]  # fmt: skip
    return sorted(found, key=lambda f: f.__code__.co_firstlineno)


def page() -> str:
    """The whole page."""
    return "\n\n".join([HEAD.rstrip(), *_named(), *_dialects(), *_chapters()]) + "\n"


def _named() -> Iterator[str]:
    yield "## The named algorithms"
    yield "What each chooses where nothing else is said; `own` keys are what a dialect does not touch."
    for name, kind in ALGORITHMS.items():
        algorithm = build_algorithm(name, group_size=8, max_new_tokens=256)
        own = set(kind.identity)
        base = {shown(f.name): f.default for f in fields(PolicyGradient)}
        chosen = {key: value for key, value in resolved(algorithm).items() if key not in ("name", "max_new_tokens")}
        told = [f"`{key}` {_value(value)}" for key, value in chosen.items() if base.get(key, ...) != value]
        text = inspect.cleandoc(kind.__doc__ or "")
        yield f"### `{name}`\n\n{text}"
        lines = [f"Differs from the common defaults: {', '.join(told) or 'nothing'}."]
        if own:
            lines.append(f"Own: {', '.join(f'`{shown(key)}`' for key in sorted(own))}.")
        yield "\n".join(lines)
    common = build_algorithm(PolicyGradient, group_size=8, max_new_tokens=256)
    rest = {key: value for key, value in resolved(common).items() if key not in ("name", "max_new_tokens")}
    yield "Common defaults: " + ", ".join(f"`{key}` {_value(value)}" for key, value in rest.items()) + "."


def _dialects() -> Iterator[str]:
    yield "## The dialects"
    yield (
        "`algorithm.dialect` fills in what an algorithm's paper leaves open as that framework does by default; a key "
        "that a recipe sets wins. An empty cell is strop's own default."
    )
    names = list(dict.fromkeys(key for dialect in DIALECTS for key in preset(dialect)))
    rows = [["key", *DIALECTS], ["---"] * (len(DIALECTS) + 1)]
    for key in names:
        cells = [_value(preset(dialect)[key]) if key in preset(dialect) else "" for dialect in DIALECTS]
        rows.append([f"`{shown(key)}`", *cells])
    yield "\n".join("| " + " | ".join(row) + " |" for row in rows)


def _chapters() -> Iterator[str]:
    yield "## The functions"
    yield f"In the examples:\n\n```python\n{SETUP}\n```"
    for title, module in CHAPTERS.items():
        file = f"algorithms/{module.__name__.rpartition('.')[2]}.py"
        yield f"### {title}\n\n{_paragraphs(module)}\n\n`{file}`"
        for function in functions(module):
            yield from _function(function, module)


def _function(function: Any, module: ModuleType) -> Iterator[str]:
    name = function.__name__
    text = inspect.cleandoc(function.__doc__ or "")
    yield f"#### `{name}`"
    yield _body(text)
    source = _source(text) or _source(inspect.cleandoc(module.__doc__ or ""))
    if source:
        yield f"*Source: {source}*"
    yield "```python\n" + "\n".join(f">>> {line}\n{evaluate(line)}" for line in EXAMPLES[name]) + "\n```"
    said = {dialect: settings[name] for dialect, settings in DIALECTS.items() if name in settings}
    if said:
        listed = [
            f"| {dialect} | {', '.join(f'{key} {_value(value)}' for key, value in arguments.items())} |"
            for dialect, arguments in said.items()
        ]
        yield "\n".join(["| dialect | defaults |", "|---|---|", *listed])


def evaluate(expression: str) -> str:
    """The value of an example, to four decimals."""
    names: dict[str, Any] = {"torch": torch, "tensor": torch.tensor}
    for module in CHAPTERS.values():
        names |= {function.__name__: function for function in functions(module)}
    exec(SETUP, names)
    return _result(eval(expression, names))


def _result(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return _result(value.tolist())
    if isinstance(value, tuple):
        return ", ".join(_result(part) for part in value)
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {_result(part)}" for key, part in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(_result(part) for part in value) + "]"
    if isinstance(value, bool) or value is None:
        return str(value)
    if isinstance(value, int | float):
        return f"{round(float(value), 4) + 0.0:.4f}".rstrip("0").rstrip(".")
    return str(value)


def _value(value: Any) -> str:
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def _body(text: str) -> str:
    """What a docstring says before its sections, and of `Metrics` and `Returns`."""
    kept = []
    for part in re.split(r"\n\s*\n", text):
        head = re.match(r"(Args|Raises|Source|Returns):", part)
        if head is None:
            kept.append(part)
    return "\n\n".join(kept)


def _paragraphs(module: ModuleType) -> str:
    return _body(inspect.cleandoc(module.__doc__ or ""))


def _source(text: str) -> str:
    found = re.search(r"^Source:(.*?)(?:\n\s*\n|\Z)", text, re.MULTILINE | re.DOTALL)
    return " ".join(found[1].split()) if found else ""


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    print(f"{PAGE} written: {sum(len(functions(module)) for module in CHAPTERS.values())} functions")
