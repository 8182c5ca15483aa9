"""A reward model that strop trained, as a verifier: the scores of transformers, and a policy that learns from them."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch

import strop
from strop.config.loading import load_config
from strop.config.rewards import RewardModelVerifier
from strop.errors import ModelError
from strop.models.scoring import ScoringModel
from strop.rewards.protocol import Completed
from strop.rewards.scored import RewardModel

MODEL = {"characters": "0123456789=", "hidden_size": 32, "layers": 1, "heads": 2, "context": 16}
QUIET = {"tracking": {"display": "off", "tensorboard": False}, "hardware": {"threads": 1, "device": "cpu"}}


@pytest.fixture(scope="module")
def judge(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A reward model that prefers larger digits."""
    folder = tmp_path_factory.mktemp("judge")
    digits = [str(digit) for digit in range(10)]
    rows = [{"prompt": f"{a}=", "chosen": b, "rejected": c} for a in digits for b in digits for c in digits if c < b]
    # Anything but one digit is worse than any digit, or a policy would find out that nobody told the judge.
    others = ["".join(pair) for pair in itertools.product([*digits, "="], repeat=2)] + ["=", "", "", ""] * 5
    rows += [{"prompt": f"{n % 10}=", "chosen": digits[n % 7], "rejected": other} for n, other in enumerate(others)]
    rows += [{"prompt": f"{n % 10}=", "chosen": digits[n % 3], "rejected": o + o[:1]} for n, o in enumerate(others)]
    (folder / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = {
        "model": {"create": MODEL},
        "data": {"train": {"path": str(folder / "pairs.jsonl")}},
        "supervised": {"method": "reward_model", "batch_size": 32},
        # At a constant rate the loss may leap up again, and whether it does hangs on the rounding of the processor.
        "training": {"optimizer": {"learning_rate": 5e-3, "schedule": "linear"}},
        "run": {"steps": 300, "folder": str(folder / "runs")},
        **QUIET,
    }
    return strop.train(load_config(None, data=data)).folder


def test_scores_are_those_of_transformers(judge: Path) -> None:
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    verifier = RewardModel(RewardModelVerifier(kind="reward_model", path=str(judge)))
    asked = [
        Completed(f"{a}=", str(b), finish=finish) for a in (1, 5) for b in (2, 37, 9) for finish in ("stop", "length")
    ]
    verdicts = verifier.verify(asked)
    folder = judge / "checkpoints" / "step-000300" / "model"
    model, tokenizer = AutoModelForSequenceClassification.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    for one, verdict in zip(asked, verdicts, strict=True):
        ids = tokenizer(f"{one.prompt}{one.completion}", add_special_tokens=False)["input_ids"]
        ids += [tokenizer.eos_token_id] if one.finish == "stop" else []
        expected = float(model(input_ids=torch.tensor([ids])).logits[0, 0].detach())
        assert verdict.score == pytest.approx(expected, abs=1e-5)


def policy_recipe(judge: Path, **sections: Any) -> dict[str, Any]:
    """A policy that begins with any one digit, so that completions are like those that the judge has seen."""
    rows = [{"prompt": f"{a}=", "answer": str(b)} for a in range(10) for b in range(10)]
    Path("prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {
        "model": {"create": MODEL},
        "data": {"train": {"path": "prompts.jsonl"}},
        "rewards": {"verifiers": [{"kind": "reward_model", "path": str(judge)}]},
        "warmup": {"steps": 60, "batch_size": 50, "optimizer": {"learning_rate": 5e-3}},
        "rollout": {"groups_per_step": 8, "group_size": 8, "max_new_tokens": 3},
        "training": {"optimizer": {"learning_rate": 5e-3}},
        "run": {"steps": 25},
        "checkpoint": {"every": 100},
        **QUIET,
        **sections,
    }


def true_score(run: Path, step: int) -> float:
    """What only the test knows: the digit itself; 0 for anything but one digit."""
    from strop.tracking.episodes import read_episodes

    records = read_episodes(run / "episodes" / f"step-{step:06d}.parquet")
    digits = [int(r.completion_text) if r.completion_text in "0123456789" and r.completion_text else 0 for r in records]
    return sum(digits) / len(digits)


def test_the_judge_knows_the_order(judge: Path) -> None:
    verifier = RewardModel(RewardModelVerifier(kind="reward_model", path=str(judge)))
    right = []
    for a in range(10):
        verdicts = verifier.verify([Completed(f"{a}=", str(b), finish="stop") for b in range(10)])
        scores = [verdict.score or 0.0 for verdict in verdicts]
        right += [scores[b] > scores[c] for b in range(10) for c in range(b)]
    assert sum(right) / len(right) >= 0.95


def test_a_policy_learns_what_the_judge_prefers(judge: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    summary = strop.train(load_config(None, data=policy_recipe(judge)))
    assert true_score(summary.folder, 25) > true_score(summary.folder, 1) + 1.5


@pytest.mark.parametrize("kind", ["own", "shared"])
def test_ppo_with_the_judge_raises_the_true_score(
    judge: Path, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One completion of each prompt, a critic, and the divergence from the reference in the reward."""
    monkeypatch.chdir(tmp_path)
    critic: dict[str, Any] = {"optimizer": {"learning_rate": 5e-3}, "warmup_steps": 3}
    critic |= {"path": str(judge)} if kind == "own" else {"shared": True}
    summary = strop.train(
        load_config(
            None,
            data=policy_recipe(
                judge,
                algorithm={"name": "ppo", "kl_coef": 0.02, "kl_in": "reward"},
                critic=critic,
                rollout={"groups_per_step": 64, "group_size": 1, "max_new_tokens": 3},
                training={"optimizer": {"learning_rate": 5e-3}, "mini_batches": 2},
                run={"steps": 30},
            ),
        )
    )
    assert true_score(summary.folder, 30) > true_score(summary.folder, 1) + 1.5
    lines = [json.loads(line) for line in (summary.folder / "metrics.jsonl").read_text().splitlines()]
    steps = [line["metrics"] for line in lines if line["kind"] == "train"]
    assert all({"critic/explained_variance", "value/clip_fraction"} <= step.keys() for step in steps)
    assert steps[-1]["kl/ref"] > 0


def test_a_chat_prompt_is_read_through_the_template(tiny_model: Any, character_tokenizer: Any) -> None:
    import copy

    from strop.models.scalar import with_scalar_head

    tokenizer = copy.deepcopy(character_tokenizer)
    tokenizer.chat_template = (
        "{% for m in messages %}{{ '(' + m['content'] + ')' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '(' }}{% endif %}"
    )
    model = ScoringModel(with_scalar_head(tiny_model()), tokenizer)
    shown = tokenizer.decode(model.tokens([{"role": "user", "content": "ab"}], "cd", True))
    assert shown == "(ab)(cd)<eos>"
    assert tokenizer.decode(model.tokens([{"role": "user", "content": "ab"}], "cd", False)) == "(ab)(cd"
    assert tokenizer.decode(model.tokens("ab", "cd", True)) == "abcd<eos>"


def test_a_language_model_is_refused(judge: Path, tmp_path: Path) -> None:
    from strop.config.model import NewModel
    from strop.models.create import create_model
    from strop.models.save import save_model

    save_model(*create_model(NewModel(**MODEL), seed=0), tmp_path / "policy")
    with pytest.raises(ModelError, match="gives no score"):
        RewardModel(RewardModelVerifier(kind="reward_model", path=str(tmp_path / "policy")))
    with pytest.raises(ModelError, match="no model folder"):
        RewardModel(RewardModelVerifier(kind="reward_model", path=str(tmp_path / "nothing")))


def test_loading_is_not_timed(judge: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A large model takes longer to read than a batch may take to score."""
    import asyncio
    import time

    from strop.config.rewards import RewardSettings
    from strop.rewards.build import build_scorer

    load = ScoringModel.load

    def slowly(*arguments: Any, **keywords: Any) -> ScoringModel:
        time.sleep(3)
        return load(*arguments, **keywords)

    monkeypatch.setattr(ScoringModel, "load", slowly)
    verifiers = [{"kind": "reward_model", "path": str(judge)}]
    scorer = build_scorer(RewardSettings.model_validate({"verifiers": verifiers, "timeout": 2.0, "retries": 0}))
    scorer.load()
    [reward] = asyncio.run(scorer.score([Completed("1=", "2")]))
    assert reward.status == "ok", reward.detail


def test_a_classifier_of_two_labels_is_refused(judge: Path, tmp_path: Path) -> None:
    """transformers leaves the names of the labels out when there are two."""
    import shutil

    copied = tmp_path / "classifier"
    shutil.copytree(judge / "checkpoints" / "step-000300" / "model", copied)
    config = json.loads((copied / "config.json").read_text())
    del config["id2label"], config["label2id"]
    (copied / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match="2 labels"):
        RewardModel(RewardModelVerifier(kind="reward_model", path=str(copied)))
