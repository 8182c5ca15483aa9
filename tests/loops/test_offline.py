"""Reinforcement learning on completions that were sampled before: equal to the loop that samples where it can be,
ratios against what was recorded where it cannot, and nothing made up.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_rewards
import torch
from tiny_runs import HELD_OUT, episodes_of, recipe, steps_of, weights_of

from strop.algorithms.named import ALGORITHMS
from strop.config.loading import load_config
from strop.errors import ConfigError, DataError, UserError
from strop.loops.online import open_run
from strop.loops.rollout import rollout
from strop.loops.train import train


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("os.fsync", lambda _: None)
    tiny_rewards.STATE.clear()
    return tmp_path


def rollouts(path: str = "rollouts.jsonl", *, prompts: int = 12, **changes: Any) -> str:
    rollout(load_config(None, data=recipe(**changes)), path, prompts=prompts)
    return path


def offline(path: str = "rollouts.jsonl", **changes: Any) -> dict[str, Any]:
    """The tiny recipe, on a file."""
    found = recipe(**{"data": {"train": {"path": path}}, "offline": {}, "run.name": "offline"})
    del found["rewards"], found["rollout"]["group_size"]
    for key, value in changes.items():
        found = recipe_with(found, key, value)
    return found


def recipe_with(data: dict[str, Any], key: str, value: Any) -> dict[str, Any]:
    from tiny_runs import put

    if value is ...:
        data.pop(key)
    else:
        put(data, key, value)
    return data


def run(data: dict[str, Any]) -> Any:
    return train(load_config(None, data=data), fresh=True)


def rows_of(path: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


def rewritten(path: str, change: Any) -> None:
    """Each row of a file as a function of it makes it; None leaves it out."""
    rows = [changed for row in rows_of(path) if (changed := change(row)) is not None]
    Path(path).write_text("".join(json.dumps(row) + "\n" for row in rows))


def only(*names: str) -> None:
    """Leave only some columns in the file, and only rows with a text."""
    rewritten("rollouts.jsonl", lambda row: {name: row[name] for name in names} if row["completion"] else None)


# --- the same as sampling ------------------------------------------------------------------------------------------

OTHERS = {"tokens/sampled", "tokens/read", "staleness/max", "staleness/mean"}
"""What is counted otherwise where nothing is sampled. Alarms are for what a run samples itself."""


def compared(folder: Path) -> list[Any]:
    return [
        (kind, step, {name: v for name, v in line.items() if name not in OTHERS and not name.startswith("alarms/")})
        for kind, step, line in steps_of(folder)
    ]


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        pytest.param({}, "out.jsonl", id="grpo"),
        pytest.param({}, "out.parquet", id="grpo from parquet"),
        pytest.param(
            {"training.mini_batches": 2, "training.epochs": 2, "algorithm.kl_coef": 0.1, "rollout.temperature": 0.7},
            "out.jsonl",
            id="several updates and a reference",
        ),
        pytest.param({"algorithm.name": "rloo"}, "out.jsonl", id="rloo"),
        pytest.param(
            {"algorithm.name": "ppo", "critic.optimizer.learning_rate": 1e-2, "training.mini_batches": 2},
            "out.jsonl",
            id="ppo with a critic",
        ),
        pytest.param({"algorithm.name": "remax"}, "out.jsonl", id="remax"),
        pytest.param(
            {"algorithm.correction": {"kind": "truncate", "high": 2.0}, "training.epochs": 2},
            "out.jsonl",
            id="corrected",
        ),
        pytest.param({"model.lora": {"rank": 4}}, "out.jsonl", id="adapters"),
        pytest.param({"model.dtype": "bfloat16"}, "out.jsonl", id="bfloat16"),
    ],
)  # fmt: skip
def test_one_step_on_its_own_rollouts_is_the_step_that_sampled_them(changes: dict[str, Any], name: str) -> None:
    online = run(recipe(**{"run.steps": 1, **changes}))
    rollouts(name, prompts=4, **changes)
    again = run(offline(name, **{"run.steps": 1, "data.shuffle": False, **changes}))
    assert weights_of(online.folder) == weights_of(again.folder)
    assert compared(online.folder) == compared(again.folder)
    for one, other in zip(episodes_of(online.folder), episodes_of(again.folder), strict=True):
        assert one.tokens.tolist() == other.tokens.tolist()
        assert np.array_equal(one.advantages, other.advantages)
        assert np.array_equal(one.sampler_logprobs, other.sampler_logprobs, equal_nan=True)


def test_so_is_a_step_that_begins_at_a_checkpoint() -> None:
    """The weights of a folder, which a warm-up made."""
    warmup = {"steps": 3, "batch_size": 4, "optimizer": {"learning_rate": 1e-2}}
    online = run(recipe(**{"run.steps": 1, "run.name": "online", "warmup": warmup}))
    config = load_config(online.folder / "config.yaml")
    rollout(config, "out.jsonl", run=online.folder, checkpoint=0, prompts=4)
    start = str(online.folder / "checkpoints" / "step-000000")
    again = run(offline("out.jsonl", **{"model": {"path": start}, "run.steps": 1, "data.shuffle": False}))
    assert weights_of(online.folder) == weights_of(again.folder)


def test_while_a_critic_warms_up_the_weights_are_still_those_of_the_start() -> None:
    changes = {"algorithm.name": "ppo", "critic": {"optimizer": {"learning_rate": 1e-2}, "warmup_steps": 1}}
    rollouts(prompts=8, **changes)
    again = run(offline(**{**changes, "data.shuffle": False, "run.steps": 3}))
    _, second, third = [line for _, _, line in steps_of(again.folder)]
    # The first update of the policy is its first; by the third step the weights have moved.
    assert second["policy/ratio_max"] == 1.0
    assert third["policy/ratio_max"] > 1.0


# --- ratios and versions -------------------------------------------------------------------------------------------


async def batches(data: dict[str, Any], steps: int) -> list[Any]:
    """The batches of some steps, as they were before their updates."""
    found = []
    async with open_run(load_config(None, data=data), fresh=True) as opened:
        await opened.begin()
        for _ in range(steps):
            groups = await opened.collect()
            batch = await opened.build_batch(groups)
            found.append(batch)
            stats = await opened.update(batch)
            opened.step += 1
            await opened.publish()
            opened.record(groups, batch, stats)
    return found


async def test_ratios_are_against_what_was_recorded() -> None:
    rollouts()
    first, second = await batches(offline(), 2)
    assert first.old_logprobs is None
    inside = second.loss_mask
    assert torch.equal(second.old_logprobs[inside], second.sampler_logprobs[inside])
    assert not bool(second.old_logprobs[~inside].any())
    rows = {tuple(row["completion_ids"]): row["logprobs"] for row in rows_of("rollouts.jsonl")}
    for number in range(second.sequences):
        here = (second.seq_ids == number) & inside
        recorded = rows[tuple(second.input_ids[here].tolist())]
        assert second.old_logprobs[here].tolist() == pytest.approx(recorded)
    # By the metrics of the second step the policy has moved away from it.
    lines = [line for _, _, line in steps_of(Path("runs/offline"))]
    assert lines[0]["policy/ratio_max"] == 1.0
    assert lines[1]["policy/ratio_max"] > 1.0
    assert lines[1]["kl/sampler"] > 1e-6
    assert lines[1]["mismatch/abs_max"] == pytest.approx(lines[1]["mismatch/max"])
    assert not any("staleness/max" in line or "tokens/sampled" in line for line in lines)


@pytest.mark.parametrize("of", [{"model_fingerprint": "another"}, {"model_fingerprint": None}])
async def test_of_another_policy_from_the_first_step_on(of: dict[str, Any]) -> None:
    rollouts()
    rewritten(
        "rollouts.jsonl", lambda row: {**row, **of, "weight_version": 7, "logprobs": [-0.5] * len(row["logprobs"])}
    )
    [batch] = await batches(offline(), 1)
    assert batch.old_logprobs[batch.loss_mask].tolist() == [-0.5] * int(batch.loss_mask.sum())
    # A token keeps the version that it was recorded with.
    assert set(batch.versions[batch.loss_mask].tolist()) == {7}
    assert set(batch.versions[~batch.loss_mask].tolist()) == {-1}
    assert steps_of(Path("runs/offline"))[0][2]["policy/ratio_max"] != 1.0


async def test_after_a_warm_up_nothing_is_the_policys_own() -> None:
    rollouts()
    warmup = {"steps": 2, "batch_size": 4, "data": {"path": "rollouts.jsonl"}}
    [batch] = await batches(offline(warmup=warmup), 1)
    assert batch.old_logprobs is not None


async def test_a_correction_stands_between_the_policy_and_the_record() -> None:
    """Ratios are then the step's own, and the weights say how far the policy has come from whoever sampled."""
    rollouts()
    correction = {"kind": "truncate", "level": "sequence", "high": 1.5}
    _, second = await batches(offline(**{"algorithm.correction": correction}), 2)
    inside = second.loss_mask
    assert not torch.equal(second.old_logprobs[inside], second.sampler_logprobs[inside])
    torch.testing.assert_close(second.old_logprobs[inside], second.extra["logprobs"][inside])
    weights = second.extra["importance_weights"]
    for number in range(second.sequences):
        here = (second.seq_ids == number) & inside
        product = float((second.old_logprobs - second.sampler_logprobs)[here].sum().exp())
        assert weights[here].tolist() == pytest.approx([min(product, 1.5)] * int(here.sum()), rel=1e-5)


# --- log-probabilities that nobody recorded ------------------------------------------------------------------------


@pytest.mark.parametrize("extra", [{}, {"model.lora": {"rank": 4}}, {"algorithm.kl_coef": 0.1}])
async def test_computed_ones_are_those_of_the_weights_of_the_start(extra: dict[str, Any]) -> None:
    rollouts(**{"rollout.temperature": 0.8})
    known = {(row["prompt"], *row["completion_ids"]): row["logprobs"] for row in rows_of("rollouts.jsonl")}
    rewritten("rollouts.jsonl", lambda row: {name: v for name, v in row.items() if name != "logprobs"})
    data = offline(**{"offline.logprobs": "compute", "rollout.temperature": 0.8, "run.steps": 3, **extra})
    found = await batches(data, 3)
    records = episodes_of(Path("runs/offline"))
    assert len(records) == 48
    for batch in found[1:]:
        assert torch.equal(batch.old_logprobs[batch.loss_mask], batch.sampler_logprobs[batch.loss_mask])
        assert torch.isnan(batch.sampler_logprobs[~batch.loss_mask]).all()
    moved = (found[2].extra["logprobs"] - found[2].sampler_logprobs)[found[2].loss_mask].abs().max()
    assert moved > 1e-3
    # What the sampler had said of them, to rounding, in every step.
    for batch in found:
        for number in range(batch.sequences):
            here = batch.seq_ids == number
            sampled = here & batch.loss_mask
            prompt = "".join("0123456789+="[token - 3] for token in batch.input_ids[here & ~sampled].tolist())
            recorded = known[(prompt, *batch.input_ids[sampled].tolist())]
            assert batch.sampler_logprobs[sampled].tolist() == pytest.approx(recorded, abs=1e-5)


async def test_without_any_the_completions_are_taken_as_the_policys_own() -> None:
    rollouts()
    rewritten("rollouts.jsonl", lambda row: {name: v for name, v in row.items() if name != "logprobs"})
    found = await batches(offline(**{"offline.logprobs": "none", "training.mini_batches": 2}), 2)
    for batch in found:
        assert torch.isnan(batch.sampler_logprobs).all()
        # The policy before the step, which the trainer asks for where there are several updates.
        assert torch.isfinite(batch.old_logprobs[batch.loss_mask]).all()
    for _, _, line in steps_of(Path("runs/offline")):
        # What is not known is not logged, least of all as 0.
        assert not any(name.startswith(("mismatch/", "kl/sampler")) for name in line)
        assert all(value is not None for value in line.values())
    assert all(record.sampler_logprobs is None or np.isnan(record.sampler_logprobs).all()
               for record in episodes_of(Path("runs/offline")))  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"algorithm.correction": {"kind": "truncate", "high": 2.0}}, "algorithm.correction.kind"),
        ({"algorithm.correction": {"veto": 0.1}}, "algorithm.correction.veto"),
        ({"algorithm.correction": {"off_policy": 0.1}}, "algorithm.correction.off_policy"),
        ({"algorithm.kl_coef": 0.1, "algorithm.kl_in": "reward"}, "algorithm.kl_in"),
        ({"algorithm.name": "topr"}, "algorithm.name"),
    ],
)
def test_what_needs_them_is_refused(place: Path, changes: dict[str, Any], key: str) -> None:
    rollouts()
    with pytest.raises(ConfigError, match=f"`{key}` needs the log-probabilities of whoever sampled") as caught:
        run(offline(**{"offline.logprobs": "none", **changes}))
    assert "set offline.logprobs to compute" in str(caught.value)
    assert sorted(path.name for path in place.iterdir()) == ["rollouts.jsonl"]
    run(offline(**{"offline.logprobs": "compute", **changes}))


# --- rewards -------------------------------------------------------------------------------------------------------


def test_verifiers_may_score_the_completions_now() -> None:
    rollouts()
    again = run(offline(**{"run.steps": 3, "run.name": "recorded"}))
    rewritten("rollouts.jsonl", lambda row: {name: v for name, v in row.items() if name not in ("reward", "correct")})
    verify = {"offline.rewards": "verify", "rewards": recipe()["rewards"]}
    scored = run(offline(**{"run.steps": 3, **verify}))
    assert weights_of(again.folder) == weights_of(scored.folder)
    assert compared(again.folder) == compared(scored.folder)
    other = {"offline.rewards": "verify", "rewards": {"verifiers": [{"kind": "regex", "pattern": "1"}]}}
    assert weights_of(run(offline(**{"run.steps": 3, **other})).folder) != weights_of(again.folder)


def hinted(completions: list[str], hint: list[str], level: list[int], **_: Any) -> list[float]:
    assert all(text == "none" for text in hint)
    return [number / 10 for number in level]


def test_columns_of_each_row_reach_the_verifiers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiny_rewards, "hinted", hinted, raising=False)
    rollouts()
    numbers = iter(range(1000))
    rewritten("rollouts.jsonl", lambda row: {**row, "hint": "none", "level": next(numbers) % 7})
    rewards = {"verifiers": [{"kind": "python", "function": "tiny_rewards:hinted"}]}
    again = run(offline(**{"offline.rewards": "verify", "rewards": rewards}))
    for record in episodes_of(again.folder):
        assert record.reward == record.row["level"] / 10


def test_what_could_not_be_scored_then_is_left_out_and_counted() -> None:
    """Nobody can mend a verifier that failed elsewhere, so it stops nothing, not even in the first step."""
    rollouts(prompts=4)
    failed = {"reward": None, "status": "verifier_error", "correct": None, "components": {}}
    rewritten("rollouts.jsonl", lambda row: {**row, **(failed if row["sample"] == 1 else {})})
    again = run(offline(**{"run.steps": 1}))
    [(_, _, line)] = steps_of(again.folder)
    assert line["errors/share"] == 0.25
    records = episodes_of(again.folder)
    assert Counter(record.status == "verifier_error" for record in records) == {True: 4, False: 12}
    assert all((record.advantages is None) == (record.sample == 1) for record in records)


def test_held_out_prompts_are_sampled_by_the_engine() -> None:
    rollouts()
    data = offline(**{"data.eval": HELD_OUT, "evaluation.every": 1, "rewards": recipe()["rewards"]})
    again = run(data)
    evaluations = [(step, line) for kind, step, line in steps_of(again.folder) if kind == "eval"]
    assert [step for step, _ in evaluations] == [0, 1, 2]
    assert again.before.keys() == {"accuracy", "reward", "completion_length"}
    # Sampling in between changes nothing of what is trained.
    assert weights_of(again.folder) == weights_of(run(offline()).folder)


# --- algorithms ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(set(ALGORITHMS) - {"opd", "gkd"}))
def test_every_algorithm_learns_from_a_file(name: str) -> None:
    rollouts(**{"algorithm.name": name})
    critic = {"critic.optimizer.learning_rate": 1e-2} if name == "ppo" else {}
    again = run(offline(**{"algorithm.name": name, "run.steps": 3, **critic}))
    lines = [line for _, _, line in steps_of(again.folder)]
    assert all(line["grad_norm"] > 0 for line in lines)
    start = (again.folder / "checkpoints" / "step-000000" / "model" / "model.safetensors").read_bytes()
    assert start != weights_of(again.folder)


def test_a_teacher_scores_what_somebody_else_sampled() -> None:
    teacher = str(run(recipe(**{"run.name": "teacher"})).model)
    rollouts()
    again = run(offline(model={"path": teacher}, **{"algorithm.name": "opd", "algorithm.teacher": teacher}))
    # The policy is the teacher, so all there is to learn is how it differs from whoever sampled.
    assert abs(steps_of(again.folder)[0][2]["kl/teacher"]) > 1e-4


def test_dynamic_sampling_takes_the_next_groups_of_the_file() -> None:
    rollouts(prompts=12)
    rewritten("rollouts.jsonl", lambda row: {**row, "reward": 1.0 if row["group"] in (1, 2, 5) else row["reward"]})
    data = {"algorithm.name": "dapo", "algorithm.overlong.penalty": 0.0, "run.steps": 1, "data.shuffle": False}
    again = run(offline(**data))
    [(_, _, line)] = steps_of(again.folder)
    assert (line["groups/discarded"], line["groups/refills"]) == (3, 2)
    # Places 1 and 2 are taken by groups 4 and 5 of the file, and then place 2 by group 6.
    assert list(dict.fromkeys(r.row["group"] for r in episodes_of(again.folder))) == [0, 4, 6, 3]


def test_what_an_algorithm_lacks_is_refused() -> None:
    rollouts()
    with pytest.raises(DataError, match="compares with the most likely completion"):
        run(offline(**{"algorithm.name": "remax"}))
    rewritten("rollouts.jsonl", lambda row: row if row["sample"] == 0 else None)
    with pytest.raises(DataError, match="every group has one only") as caught:
        run(offline())
    assert "offline.columns.group" in caught.value.mend
    run(offline(**{"algorithm.name": "reinforce"}))


def test_groups_of_other_sizes_and_of_one_prompt_stay_apart() -> None:
    rollouts(prompts=4, **{"data.train.arguments.count": 1})
    # Four groups of one prompt: 4, 3, 2 and 1 completions.
    rewritten("rollouts.jsonl", lambda row: row if row["sample"] < 4 - row["group"] else None)
    again = run(offline(**{"run.steps": 1, "algorithm.scale": "none"}))
    found = episodes_of(again.folder)
    assert sorted(Counter(record.row["group"] for record in found).values()) == [1, 2, 3, 4]
    for number in range(4):
        of_group = [record for record in found if record.row["group"] == number]
        mean = sum(record.reward for record in of_group) / len(of_group)
        for record in of_group:
            [advantage] = set(record.advantages[record.loss_mask].tolist())
            assert advantage == pytest.approx(record.reward - mean, abs=1e-6)


# --- order, resume, texts ------------------------------------------------------------------------------------------


def test_each_group_comes_once_an_epoch_and_a_stopped_run_goes_on_in_the_same_order() -> None:
    rollouts(prompts=10)
    whole = run(offline(**{"run.steps": 7, "run.name": "whole"}))
    order = list(dict.fromkeys((r.group, r.row["group"]) for r in episodes_of(whole.folder)))
    assert [number for number, _ in order] == list(range(28))
    epochs = [[group for _, group in order[at : at + 10]] for at in (0, 10)]
    assert [sorted(epoch) for epoch in epochs] == [list(range(10))] * 2
    assert epochs[0] != epochs[1]
    for steps in (3, 7):
        parts = train(load_config(None, data=offline(**{"run.steps": steps, "run.name": "parts"})))
    assert weights_of(whole.folder) == weights_of(parts.folder)
    assert steps_of(whole.folder) == steps_of(parts.folder)
    # A run whose file has changed is not gone on with.
    rewritten("rollouts.jsonl", lambda row: {**row, "reward": 0.0})
    with pytest.raises(UserError, match="the data has changed"):
        train(load_config(None, data=offline(**{"run.steps": 8, "run.name": "parts"})))


@pytest.mark.parametrize("logprobs", ["compute", "none"])
def test_texts_alone_are_enough(logprobs: str) -> None:
    rollouts()
    only("prompt", "completion", "reward", "status", "group")
    again = run(offline(**{"offline.logprobs": logprobs, "model.create.characters": "0123456789+=<>unkpad"}))
    for record in episodes_of(again.folder):
        ended = record.tokens[-1] == 1
        assert ended == (record.status == "stop")
        assert record.completion_text


def test_the_run_says_what_it_learns_from(capsys: pytest.CaptureFixture[str]) -> None:
    rollouts(prompts=4)
    run(offline(**{"tracking.display": "plain", "run.steps": 1}))
    said = capsys.readouterr().out
    assert "16 completions in 4 groups (by 'group'), log-probabilities as recorded, rewards as recorded" in said
    only("prompt", "completion", "reward")
    run(offline(**{
        "tracking.display": "plain", "run.steps": 1, "offline.logprobs": "none", "algorithm.name": "reinforce",
        "model.create.characters": "0123456789+=<>unkpad", "rollout.max_new_tokens": 5,
    }))  # fmt: skip
    said = capsys.readouterr().out
    assert "(every row alone)" in said
    assert "tokens made anew from the texts, no log-probabilities: taken as the policy's own" in said
    assert "tokens sampled" not in said


# --- settings without effect ---------------------------------------------------------------------------------------

REWARDS = recipe()["rewards"]


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"rollout.group_size": 4}, "`rollout.group_size` has no effect with `offline`"),
        ({"rollout.stop": ["1"]}, "`rollout.stop` has no effect with `offline` and no held-out prompts"),
        ({"rollout.engine.max_sequences": 3}, "`rollout.engine` has no effect with `offline` and no held-out prompts"),
        ({"rewards": REWARDS}, "`rewards` has no effect with recorded rewards and no held-out prompts"),
        ({"data.eval": HELD_OUT}, "held-out prompts are sampled and scored, and there is no `rewards`"),
        ({"offline.columns.logprobs": "group", "offline.logprobs": "none"}, "`offline.columns.logprobs` has no effect"),
        (
            {"offline.columns.reward": "group", "offline.rewards": "verify", "rewards": REWARDS},
            "`offline.columns.reward` has no effect",
        ),
        ({"data.system_prompt": "1"}, "`data.system_prompt` has no effect with prompts that are token ids"),
        ({"data.render": "text"}, "`data.render` has no effect with prompts that are token ids"),
        ({"data.prompt_template": "{prompt}"}, "`data.prompt_template` has no effect with prompts that are token ids"),
        ({"offline.rewards": "verify"}, "offline.rewards is `verify`, and there is no `rewards`"),
        ({"supervised": {}}, "`offline` and `supervised` exclude each other"),
        (
            {"warmup": {"steps": 1}, "model.lora": {"rank": 2}, "offline.logprobs": "compute"},
            "with adapters the reference is the model without them",
        ),
        ({"model.create.context": 6}, "leave no room|do not fit|at most"),
    ],
)  # fmt: skip
def test_a_setting_that_would_change_nothing_is_refused(place: Path, changes: dict[str, Any], what: str) -> None:
    rollouts()
    with pytest.raises(UserError, match=what):
        run(offline(**changes))
    assert sorted(path.name for path in place.iterdir()) == ["rollouts.jsonl"]


def test_the_recipe_that_results_is_printed() -> None:
    from strop.config.loading import resolved_yaml

    rollouts()
    config = load_config(None, data=offline())
    Path("resolved.yaml").write_text(resolved_yaml(config))
    assert load_config("resolved.yaml") == config
    assert math.isfinite(train(load_config("resolved.yaml")).steps)
