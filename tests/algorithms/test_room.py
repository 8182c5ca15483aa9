"""What the room may know: torch, the standard library and itself."""

from __future__ import annotations

import ast
import inspect
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest
import torch

import strop.algorithms
from strop.algorithms import advantages, aggregation, kl, policy_losses
from strop.algorithms.dialects import DIALECTS
from strop.algorithms.policy_gradient import PolicyGradient

ROOM = Path(strop.algorithms.__file__).parent


@pytest.mark.parametrize("path", sorted(ROOM.glob("*.py")), ids=lambda path: path.name)
def test_imports(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text())):
        names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        for name in names:
            top = name.split(".")[0]
            assert top in sys.stdlib_module_names or top == "torch" or name.startswith("strop.algorithms"), name


def test_importing_the_room_loads_no_other_room() -> None:
    code = (
        "import strop.algorithms.named, sys;"
        "print([m for m in sys.modules if m.startswith('strop.') and not m.startswith('strop.algorithms')],"
        "'pydantic' in sys.modules, 'transformers' in sys.modules)"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert run.stdout.split("\n")[0] == "[] False False"


def test_every_public_function_has_a_docstring_with_its_source() -> None:
    from strop.algorithms import corrections, covariance, distillation, estimators, preference

    inherits = (covariance, distillation)
    for module in (advantages, corrections, covariance, distillation, estimators, kl, policy_losses, preference):
        for name, function in inspect.getmembers(module, inspect.isfunction):
            if name.startswith("_") or function.__module__ != module.__name__:
                continue
            text = (function.__doc__ or "") + ((module.__doc__ or "") if module in inherits else "")
            assert function.__doc__, name
            if name not in ("no_spread", "whiten", "ratio_metrics"):
                assert "Source:" in text, f"{module.__name__}.{name} does not say where it comes from"


@pytest.mark.parametrize("dialect", DIALECTS)
def test_dialects_are_arguments_of_the_functions(dialect: str) -> None:
    functions = {
        "group_relative": advantages.group_relative,
        "gae": advantages.gae,
        "kl_estimate": kl.kl_estimate,
        "aggregate": aggregation.aggregate,
        "ppo_clip": policy_losses.ppo_clip,
        "whiten": advantages.whiten,
    }
    for name, settings in DIALECTS[dialect].items():
        if name == "algorithm":
            assert settings.keys() <= {f.name for f in fields(PolicyGradient)}
            continue
        assert settings.keys() <= inspect.signature(functions[name]).parameters.keys()


def test_dialects_disagree_as_reported() -> None:
    pair, groups = torch.tensor([0.0, 1.0]), torch.tensor([0, 0])
    best = {
        name: round(float(advantages.group_relative(pair, groups, **settings["group_relative"])[1]), 4)
        for name, settings in DIALECTS.items()
        if "group_relative" in settings
    }
    assert best["verl"] == best["skyrl"] == best["slime"] == 0.7071
    assert best["trl"] == 0.707
    assert best["prime_rl"] == 0.5
    # One trajectory of three tokens, the one in the middle from a tool.
    tokens = torch.tensor([0.0, 0, 3]), torch.tensor([0.5, 1, 1.5]), torch.tensor([True, False, True])
    returns = {
        name: round(float(advantages.gae(*tokens, gamma=0.9, lam=0.9, **settings["gae"])[1][0]), 5)
        for name, settings in DIALECTS.items()
        if "gae" in settings
    }
    assert returns["verl"] == returns["nemo_rl"] == 2.565
    assert returns["slime"] == returns["skyrl"] == 2.16765
    assert returns["openrlhf"] == 2.07765
