"""What the loop does for an algorithm: groups without spread, baselines, filters, roles, forks, own classes."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_runs import episodes_of, recipe, steps_of, weights_of

from strop.algorithms.base import Algorithm
from strop.algorithms.named import build_algorithm
from strop.config.loading import load_config
from strop.errors import ConfigError, ModelError, StropError, UserError
from strop.loops import step_batch
from strop.loops.algorithm import _lacking, demands_of, make_algorithm
from strop.loops.train import train
from strop.rollout.episode import Episode, Group, Status

RARE = [{"kind": "regex", "pattern": "^[0-4]"}]
PAGE = Path(__file__).parents[2] / "docs" / "algorithms.md"


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def run(fresh: bool = True, **changes: Any) -> tuple[Path, list[dict[str, Any]]]:
    summary = train(load_config(None, data=recipe(**changes)), fresh=fresh)
    return summary.folder, [metrics for kind, _, metrics in steps_of(summary.folder) if kind == "train"]


def algorithm(**changes: Any) -> Any:
    return make_algorithm(load_config(None, data=recipe(**changes)))


def group(number: int, rewards: list[float], *, lengths: list[int] | None = None) -> Group:
    episodes = []
    for sample, reward in enumerate(rewards):
        episode = Episode(number, sample)
        turn = episode.append_prompt([1, 2])
        size = lengths[sample] if lengths else 2
        episode.append_sampled([3] * size, [-1.0] * size, [0] * size, parent=turn, finish="stop")
        episode.status, episode.reward = Status.STOP, reward
        episodes.append(episode)
    return Group(number, f"row-{number}", episodes)


# --- groups without spread -----------------------------------------------------------------------------------------


def test_spread_is_decided_by_max_and_min_as_the_batch_has_them() -> None:
    assert not step_batch.has_spread(group(0, [0.7] * 16))
    assert step_batch.has_spread(group(0, [0.0, 0.0, 0.0, 1.0]))
    # Another float64, the same float32: the advantages would be exactly 0.
    assert not step_batch.has_spread(group(0, [0.1 + 0.2, 0.3]))
    assert not step_batch.has_spread(group(0, [1.0, float("nan")]))


def test_dropping_leaves_out_flat_groups_and_a_step_of_nothing_else_trains_nothing() -> None:
    demands = demands_of(algorithm(**{"algorithm.without_spread": "drop"}))
    chosen = step_batch.choose([group(0, [1.0, 1.0]), group(1, [0.0, 1.0])], demands, {})
    assert [e.group for e in chosen.trained] == [1, 1]
    assert [e.group for e in chosen.left_out] == [0, 0]
    chosen = step_batch.choose([group(0, [1.0, 1.0])], demands, {})
    batch, _ = step_batch.lay_out(chosen, demands, {})
    assert chosen.silent
    assert not bool(batch.loss_mask.any())


def test_a_run_whose_rewards_never_differ_drops_everything_and_changes_no_weight() -> None:
    still = [{"kind": "regex", "pattern": "^"}]
    changes = {"algorithm.without_spread": "drop", "rewards.verifiers": still, "checkpoint.every": 1}
    folder, steps = run(**changes)
    assert [m["groups/trained"] for m in steps] == [0, 0]
    assert all(m["tokens/trained"] == 0 and "grad_norm" not in m for m in steps)
    saved = [(folder / "checkpoints" / f"step-{n:06d}" / "model" / "model.safetensors").read_bytes() for n in (1, 2)]
    assert saved[0] == saved[1]


def test_dynamic_sampling_is_bounded_and_accounts_for_everything() -> None:
    changes = {"algorithm.name": "dapo", "rewards.verifiers": RARE, "algorithm.max_refills": 2}
    folder, steps = run(**changes)
    for metrics in steps:
        assert metrics["groups/kept"] == 4
        assert metrics["groups/sampled"] == 4 + metrics["groups/discarded"]
        assert metrics["groups/refills"] <= 2
    assert sum(m["groups/discarded"] for m in steps) > 0, "the test needs groups without spread"
    _, plain = run(**{**changes, "algorithm.without_spread": "keep", "algorithm.max_refills": None})
    assert steps[0]["tokens/sampled"] > plain[0]["tokens/sampled"], "what was discarded was sampled too"
    trained = [r for r in episodes_of(folder) if r.advantages is not None]
    spread = {(r.group): {q.reward for q in trained if q.group == r.group} for r in trained}
    assert sum(len(rewards) > 1 for rewards in spread.values()) > 4, "refills found groups with a signal"


def test_a_task_that_is_solved_ends_after_the_bound() -> None:
    changes = {"algorithm.name": "dapo", "rewards.verifiers": [{"kind": "regex", "pattern": "^"}]}
    changes |= {"algorithm.overlong.penalty": 0.0}
    _, steps = run(**changes)
    assert [m["groups/discarded"] for m in steps] == [12, 12]
    assert [m["groups/refills"] for m in steps] == [3, 3]


def test_dynamic_sampling_resumes_bit_for_bit() -> None:
    changes: dict[str, Any] = {"algorithm.name": "dapo", "rewards.verifiers": RARE, "checkpoint.every": 1}
    whole, steps = run(**{**changes, "run.steps": 4, "run.name": "whole"})
    run(**{**changes, "run.steps": 2, "run.name": "parts"})
    parts, again = run(fresh=False, **{**changes, "run.steps": 4, "run.name": "parts"})
    assert sum(m["groups/discarded"] for m in steps[:2]) > 0, "the test needs discarded groups before the break"
    assert weights_of(whole) == weights_of(parts)
    assert again == steps
    names = [[r.prompt_id for r in episodes_of(folder)] for folder in (whole, parts)]
    assert names[0] == names[1]


# --- baselines, filters, corrections -------------------------------------------------------------------------------


def test_remax_samples_one_greedy_completion_for_each_prompt_and_does_not_train_it() -> None:
    folder, steps = run(**{"algorithm.name": "remax", "rollout.group_size": 2})
    assert all(m["groups/trained"] == 4 for m in steps)
    records = episodes_of(folder)
    assert {record.sample for record in records} == {0, 1}
    assert len(records) == 2 * 4 * 2
    # The advantage is the reward less one number for each prompt.
    for number in {r.group for r in records}:
        of_group = [r for r in records if r.group == number]
        baselines = [r.reward - float(r.advantages[r.loss_mask][0]) for r in of_group]
        assert baselines == pytest.approx([baselines[0]] * len(baselines), abs=1e-6)


def test_remax_leaves_out_a_group_whose_baseline_could_not_be_verified() -> None:
    demands = demands_of(build_algorithm("remax", group_size=2, max_new_tokens=4))
    groups = [group(0, [1.0, 0.0]), group(1, [1.0, 0.0])]
    baselines = {0: group(0, [0.5]).episodes[0], 1: group(1, [float("nan")]).episodes[0]}
    chosen = step_batch.choose(groups, demands, baselines)
    assert [e.group for e in chosen.trained] == [0, 0]
    assert [e.group for e in chosen.left_out] == [1, 1]
    batch, _ = step_batch.lay_out(chosen, demands, baselines)
    assert batch.greedy_rewards is not None
    assert batch.greedy_rewards.tolist() == [0.5, 0.5]


def test_truncated_completions_are_filtered_but_stay_in_the_baseline() -> None:
    demands = demands_of(algorithm(**{"algorithm.overlong.filter": True}))
    one = group(0, [0.0, 1.0])
    one.episodes[1].status = Status.LENGTH
    batch, _ = step_batch.lay_out(step_batch.choose([one], demands, {}), demands, {})
    assert batch.loss_mask.tolist() == [False, False, True, True, False, False, False, False]
    plain = build_algorithm("dr_grpo", group_size=2, max_new_tokens=4)
    assert plain.advantages(batch)[batch.loss_mask].tolist() == [-0.5, -0.5]


def test_the_soft_penalty_counts_sampled_tokens_also_where_they_are_filtered() -> None:
    made = build_algorithm(
        "dr_grpo", group_size=2, max_new_tokens=4, overlong_penalty=1.0, overlong_buffer=2, overlong_filter=True
    )
    one = group(0, [1.0, 1.0], lengths=[2, 4])
    one.episodes[1].status = Status.LENGTH
    demands = demands_of(made)
    batch, _ = step_batch.lay_out(step_batch.choose([one], demands, {}), demands, {})
    assert made.rewards(batch).tolist() == [1.0, 0.0]


def test_a_correction_asks_for_one_more_pass_and_the_mismatch_is_always_logged() -> None:
    _, plain = run()
    _, corrected = run(**{"algorithm.correction": {"kind": "truncate", "high": 2.0, "veto": 1e-4}})
    for metrics in (*plain, *corrected):
        assert {"kl/sampler", "mismatch/abs_max", "mismatch/effective_share", "mismatch/clipped_share"} <= set(metrics)
    assert "mismatch/veto_share" in corrected[0]
    assert corrected[0]["grad_norm"] == pytest.approx(plain[0]["grad_norm"], rel=1e-4), "w is 1 on-policy"


def test_branches_of_an_episode_count_once() -> None:
    forked = group(0, [1.0, 0.0, 0.0])
    episode = Episode(0, 3, status=None, reward=1.0)
    turn = episode.append_prompt([1, 2])
    first = episode.append_sampled([3], [-1.0], [0], parent=turn, finish="stop")
    for token in (4, 5):
        episode.append_sampled([token], [-1.0], [0], parent=first, finish="stop")
    episode.status = Status.STOP
    forked.episodes[0] = episode
    made = build_algorithm("grpo", group_size=3, max_new_tokens=4, kl_coef=0.5, kl_in="reward", kl_kind="k1")
    demands = demands_of(made)
    batch, streams = step_batch.lay_out(step_batch.choose([forked], demands, {}), demands, {})
    assert len(streams) == 4
    first_of, member = batch.episodes()
    assert first_of.tolist() == [0, 2, 3]
    assert member.tolist() == [0, 0, 1, 2]
    batch.old_logprobs = batch.sampler_logprobs
    batch.ref_logprobs = torch.full_like(batch.sampler_logprobs, -2.0)
    # Three sampled tokens in the forked episode, two in the others, one nat each.
    assert made.rewards(batch).tolist() == pytest.approx([1 - 1.5, -1.0, -1.0])
    plain = build_algorithm("dr_grpo", group_size=3, max_new_tokens=4)
    advantages = plain.advantages(batch)
    assert advantages[batch.loss_mask].tolist() == pytest.approx([2 / 3] * 3 + [-1 / 3] * 4)
    # The order of sequences within a batch does not matter.
    swapped = batch.select(torch.tensor([1, 2, 3]))
    assert swapped.episodes()[1].tolist() == [0, 1, 2]


# --- a teacher -----------------------------------------------------------------------------------------------------


def test_a_teacher_scores_as_the_trainer_does() -> None:
    """A teacher that is the policy itself has no advice: advantages are 0."""
    model = train(load_config(None, data=recipe(**{"run.name": "self"})), fresh=True).model
    changes = {"model": {"path": str(model)}, "algorithm.name": "opd", "algorithm.teacher": str(model)}
    folder, steps = run(**{**changes, "rollout.temperature": 0.7, "run.steps": 1})
    assert steps[0]["kl/teacher"] == pytest.approx(0, abs=1e-5)
    for record in episodes_of(folder):
        assert abs(record.advantages).max() < 1e-4


def test_a_teacher_must_be_there_and_read_the_same_tokens() -> None:
    with pytest.raises(ConfigError, match="learns from a teacher"):
        algorithm(**{"algorithm.name": "opd"})
    with pytest.raises(ConfigError, match="teacher has no effect with grpo"):
        algorithm(**{"algorithm.teacher": "somewhere"})
    with pytest.raises(ModelError, match="nowhere"):
        run(**{"algorithm.name": "opd", "algorithm.teacher": "nowhere"})
    other = recipe(**{"model.create.characters": "0123456789+= ", "run.name": "other", "run.steps": 1})
    model = train(load_config(None, data=other), fresh=True).model
    before = set(Path.cwd().glob("runs/*"))
    with pytest.raises(ModelError, match="another tokenizer"):
        run(**{"algorithm.name": "opd", "algorithm.teacher": str(model)})
    assert set(Path.cwd().glob("runs/*")) == before, "nothing may be written"


TAUGHT = {"algorithm.name": "gkd", "algorithm.teacher": "teacher", "rollout.temperature": 0.7}


def teachers_of(*seeds: int) -> None:
    """Folders `teacher`, `teacher-1`, ... with models that know nothing, each of its own kind."""
    from strop.config.model import NewModel
    from strop.models.create import create_model
    from strop.models.save import save_model

    for number, seed in enumerate(seeds):
        shape = {"hidden_size": 32 + 16 * number, "layers": 1, "heads": 2, "context": 32}
        model, tokenizer = create_model(NewModel(characters="0123456789+=", **shape), seed=seed)
        with torch.no_grad():
            # Sharper than a new model, so that it matters whom one learns from.
            model.get_output_embeddings().weight.mul_(20.0)
        save_model(model, tokenizer, Path(f"teacher-{number}" if number else "teacher"))


def test_gkd_learns_the_teachers_whole_distribution() -> None:
    """The loss of the first step, by hand over every token of the vocabulary, and its fall."""
    from transformers import AutoModelForCausalLM

    teachers_of(5)
    changes = {**TAUGHT, "algorithm.divergence": "reverse_kl", "algorithm.aggregation": "token_mean", "run.steps": 25}
    folder, steps = run(**{**changes, "algorithm.top_k": 100, "checkpoint.every": 1, "checkpoint.keep": 100})
    student = folder / "checkpoints" / "step-000000" / "model"
    models = [AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64) for path in (student, "teacher")]
    total, count, gap = 0.0, 0, 0.0
    for record in episodes_of(folder)[:16]:
        ids = torch.tensor(record.tokens.tolist())
        with torch.no_grad():
            p, q = ((model(input_ids=ids[None]).logits[0, :-1] / 0.7).log_softmax(-1) for model in models)
        inside = torch.from_numpy(record.loss_mask[1:])
        total += float((p.exp() * (p - q)).sum(-1)[inside].sum())
        gap += float((p - q).gather(1, ids[1:, None])[:, 0][inside].sum())
        count += int(inside.sum())
    for name in ("loss/policy", "distillation/divergence"):
        assert steps[0][name] == pytest.approx(total / count, rel=1e-4)
    assert steps[0]["kl/teacher"] == pytest.approx(gap / count, rel=1e-4)
    assert steps[0]["distillation/coverage"] == pytest.approx(1.0)
    assert steps[-1]["distillation/divergence"] < steps[0]["distillation/divergence"] / 4
    assert steps[-1]["distillation/agreement"] > max(0.97, steps[0]["distillation/agreement"])
    assert all(not record.advantages.any() for record in episodes_of(folder))


def test_gkd_without_a_difference_has_no_gradient() -> None:
    model = train(load_config(None, data=recipe(**{"run.name": "self"})), fresh=True).model
    changes = {**TAUGHT, "model": {"path": str(model)}, "algorithm.teacher": str(model), "run.steps": 1}
    for kind in ("forward_kl", "reverse_kl", "jensen_shannon"):
        _, steps = run(**{**changes, "algorithm.divergence": kind, "algorithm.top_k": 4})
        assert steps[0]["distillation/divergence"] == pytest.approx(0, abs=1e-5)
        assert steps[0]["grad_norm"] < 1e-4
        assert 0 < steps[0]["distillation/coverage"] < 1


@pytest.mark.parametrize("name", ["opd", "gkd"])
def test_several_teachers_are_their_mixture(name: str) -> None:
    teachers_of(5, 6)
    both = [{"path": "teacher", "weight": 3.0}, {"path": "teacher-1"}]
    changes: dict[str, Any] = {"algorithm.name": name, "run.steps": 1}
    found = {}
    for label, named in (("both", both), ("first", both[:1]), ("second", both[1:])):
        named = [{**teacher, "weight": 1.0} for teacher in named] if len(named) == 1 else named
        _, [metrics] = run(**{**changes, "algorithm.teachers": named, "run.name": label})
        found[label] = episodes_of(Path("runs") / label), metrics
    _, [single] = run(**{**changes, "algorithm.teacher": "teacher", "run.name": "single"})
    assert single == found["first"][1], "a list of one is that one"
    if name == "opd":
        # Log of the weighted mean of probabilities, token by token.
        for mixed, first, second in zip(*(records for records, _ in found.values()), strict=True):
            inside = mixed.loss_mask
            own = mixed.sampler_logprobs[inside]
            a, b, c = (record.advantages[inside] + own for record in (mixed, first, second))
            expected = torch.log(0.75 * torch.from_numpy(b).exp() + 0.25 * torch.from_numpy(c).exp())
            torch.testing.assert_close(torch.from_numpy(a), expected, atol=1e-5, rtol=1e-4)
    else:
        values = [metrics["distillation/divergence"] for _, metrics in found.values()]
        # Divergences are convex in the teacher.
        assert values[0] < 0.75 * values[1] + 0.25 * values[2]


def test_gkd_resumes_bit_for_bit_and_does_not_depend_on_the_cut() -> None:
    teachers_of(5, 6)
    changes: dict[str, Any] = {
        "algorithm.name": "gkd",
        "algorithm.teachers": [{"path": "teacher"}, {"path": "teacher-1"}],
        "algorithm.top_k": 5,
        "algorithm.kl_coef": 0.1,
        "training.mini_batches": 2,
        "checkpoint.every": 1,
    }
    whole, steps = run(**{**changes, "run.steps": 4, "run.name": "whole"})
    run(**{**changes, "run.steps": 2, "run.name": "parts"})
    parts, again = run(fresh=False, **{**changes, "run.steps": 4, "run.name": "parts"})
    assert weights_of(whole) == weights_of(parts)
    assert again == steps
    teachers_of(5, 7)
    with pytest.raises(UserError, match=r"is another one now .*teacher-1"):
        run(fresh=False, **{**changes, "run.steps": 5, "run.name": "parts"})
    teachers_of(5, 6)
    _, cut = run(**{**changes, "run.steps": 1, "training.tokens_per_micro_batch": 1, "training.logprob_chunk": 3})
    for name in ("loss", "grad_norm", "distillation/divergence"):
        assert cut[0][name] == pytest.approx(steps[0][name], rel=1e-3)


# --- refusals ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"critic": {"warmup_steps": 2}}, "critic has no effect with grpo"),
        ({"algorithm.lam": 0.9}, "lam is not a choice of the algorithm 'grpo'"),
        ({"algorithm.correction": {"high": 2.0}}, "correction.high has no effect without correction.kind"),
        ({"algorithm.correction": {"kind": "truncate"}}, "needs high"),
        ({"algorithm.overlong": {"buffer": 2}}, "overlong.buffer has no effect while overlong.penalty is 0"),
        ({"algorithm.overlong": {"penalty": 1.0, "buffer": 9}}, "buffer must lie in 1..max_tokens"),
        ({"algorithm.top_k": 3}, "top_k is not a choice of the algorithm 'grpo'"),
        ({"algorithm.teachers": [{"path": "a"}]}, "teachers has no effect with grpo"),
        ({"algorithm.name": "opd", "algorithm.teachers": [{"path": "a", "weight": 2.0}]}, "with a single teacher"),
        ({"algorithm.name": "opd", "algorithm.divergence": "reverse_kl"}, "divergence is not a choice"),
        ({"algorithm.name": "gkd", "algorithm.teacher": "a", "algorithm.clip_low": 0.1}, "clip_low has no effect"),
        ({"algorithm.name": "gkd"}, "learns from a teacher, and none is named"),
        ({"algorithm.max_refills": 2}, "max_refills has no effect unless without_spread is 'resample'"),
        ({"algorithm.name": "remax", "algorithm.without_spread": "drop"}, "without_spread has no effect"),
        ({"algorithm.dual_clip": 0.5}, "dual_clip must be above 1"),
        ({"algorithm.name": "grpo", "rollout.group_size": 1}, "compares the completions of a group"),
        ({"algorithm.name": "nowhere:Class"}, "the module 'nowhere'"),
        ({"algorithm.name": "strop.algorithms.kl:kl_estimate"}, "an algorithm is a class"),
        ({"algorithm.name": "collections:Counter"}, "lacks advantages"),
        ({"algorithm.name": "collections:Counter", "algorithm.clip_low": 0.1}, "clip_low would have no effect"),
    ],
)
def test_refusals(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(UserError, match=re.escape(says)):
        algorithm(**changes)


def test_the_configuration_knows_the_names() -> None:
    with pytest.raises(StropError, match="did you mean"):
        load_config(None, data=recipe(**{"algorithm.name": "gpro"}))
    with pytest.raises(StropError, match="teacher and teachers exclude each other"):
        load_config(None, data=recipe(**{"algorithm.teacher": "a", "algorithm.teachers": [{"path": "b"}]}))
    with pytest.raises(StropError, match="arguments has no effect"):
        load_config(None, data=recipe(**{"algorithm.arguments": {"a": 1}}))


# --- dialects ------------------------------------------------------------------------------------------------------


def test_a_dialect_fills_in_what_is_open_and_nothing_else() -> None:
    trl = algorithm(**{"algorithm.dialect": "trl", "algorithm.kl_coef": 0.1})
    assert (trl.scale_eps, trl.aggregation, trl.kl_importance_weighted) == (1e-4, "token_mean", True)
    verl = algorithm(**{"algorithm.dialect": "verl"})
    assert verl.dual_clip == 3.0
    assert verl.kl_clamp is None, "without a penalty its clamp would have no effect"
    assert (
        algorithm(**{"algorithm.dialect": "verl", "algorithm.aggregation": "sequence_mean"}).aggregation
        == "sequence_mean"
    )
    dr_grpo = algorithm(**{"algorithm.name": "dr_grpo", "algorithm.dialect": "verl"})
    assert (dr_grpo.scale, dr_grpo.aggregation) == ("none", "constant")
    assert algorithm(**{"algorithm.dialect": "prime_rl"}).scale == "none"
    openrlhf = algorithm(**{"algorithm.dialect": "openrlhf", "algorithm.kl_coef": 0.1})
    assert (openrlhf.kl_in, openrlhf.kl_kind, openrlhf.scale_eps) == ("reward", "k1", 1e-9)
    kept = algorithm(**{"algorithm.dialect": "openrlhf", "algorithm.kl_coef": 0.1, "algorithm.kl_kind": "k3"})
    assert kept.kl_kind == "k3"


# --- classes of one's own ------------------------------------------------------------------------------------------

PLAIN = '''
import torch

class Plain:
    """REINFORCE from nothing: no base class, no dataclass."""
    name, needs_entropy, needs_reference, needs_group = "plain", False, False, False
    def __init__(self, power=1.0):
        self.power = power
    def advantages(self, batch):
        return torch.where(batch.loss_mask, batch.rewards[batch.seq_ids] ** self.power, 0.0)
    def loss(self, batch, logprobs, entropy):
        from strop.algorithms.base import LossTerms
        return LossTerms({"policy": -batch.advantages * logprobs})
    def denominators(self, batch):
        return {"": float(batch.loss_mask.sum())}
    def reduce(self, per_token, batch, denominator):
        return per_token.masked_fill(~batch.loss_mask, 0.0).sum() / denominator
'''


def own_module(name: str, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    Path(f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(str(Path.cwd()))


def test_the_example_of_the_page_trains(monkeypatch: pytest.MonkeyPatch) -> None:
    page = PAGE.read_text(encoding="utf-8")
    [code] = re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    lines = [line for line in code.splitlines() if line.strip() and "import" not in line]
    assert len(lines) <= 15
    own_module("my_algorithms", code, monkeypatch)
    changes = {"algorithm": {"name": "my_algorithms:BestOfGroup", "arguments": {"strength": 0.5}}}
    folder, steps = run(**changes)
    assert steps[0]["grad_norm"] > 0
    assert json.loads((folder / "run.json").read_text())
    for number in {r.group for r in episodes_of(folder)}:
        of_group = [r for r in episodes_of(folder) if r.group == number]
        best = max(r.reward for r in of_group)
        for record in of_group:
            assert set(record.advantages[record.loss_mask].tolist()) == {0.5 if record.reward == best else 0.0}
    made = algorithm(algorithm={**changes["algorithm"], "clip_low": 0.1})
    assert (made.name, made.clip_low) == ("BestOfGroup", 0.1)


def test_a_class_without_a_base_trains_with_its_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    own_module("plain_algorithms", PLAIN, monkeypatch)
    _, plain = run(**{"algorithm": {"name": "plain_algorithms:Plain"}})
    _, squared = run(**{"algorithm": {"name": "plain_algorithms:Plain", "arguments": {"power": 2.0}}})
    assert plain[0]["grad_norm"] > 0
    assert plain[0]["grad_norm"] != squared[0]["grad_norm"]
    with pytest.raises(ConfigError, match="unexpected keyword"):
        algorithm(algorithm={"name": "plain_algorithms:Plain", "arguments": {"wibble": 1}})


def test_an_algorithm_may_derive_from_the_protocol() -> None:
    """What it needs is its own to set, and is missed where it does not."""

    class Derived(Algorithm):
        def __init__(self, entropy_coef: float) -> None:
            self.needs_entropy = entropy_coef != 0

    class Lacking(Algorithm):
        pass

    derived, lacking = (_lacking(made, ["needs_entropy"]) for made in (Derived(0.1), Lacking()))  # type: ignore[abstract]
    assert not derived
    assert list(lacking) == ["needs_entropy"]
    assert Derived(0.1).needs_entropy  # type: ignore[abstract]
