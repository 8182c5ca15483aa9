"""Settings that would have no effect beside the others: refused, because a setting is written to change something.

The choices of an algorithm are looked at in `algorithms/policy_gradient.py`; here is everything else.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from strop.config import Config
from strop.config.alarms import AlarmSettings
from strop.config.data import DataSource
from strop.config.environment import PythonTool
from strop.config.offline import RolloutColumns
from strop.config.rewards import CodeVerifier, EnvironmentVerifier, FormatVerifier, JudgeVerifier, RewardSettings
from strop.config.rollout import RolloutSettings
from strop.config.run import EvaluationSettings
from strop.config.sandbox import SandboxSettings
from strop.config.training import CriticSettings, OptimizerSettings
from strop.errors import ConfigError, MissingExtra, UserError
from strop.loops.ahead import idle_ahead
from strop.loops.engine_choices import idle_in_engine
from strop.loops.selection import metric_problems
from strop.loops.spread import idle_in_cluster
from strop.loops.window_choices import idle_in_window
from strop.paths import user_path
from strop.rewards.checks import is_isolated


def check_idle(config: Config) -> None:
    """Raise ConfigError with every setting that differs from its default and would change nothing.

    Values count, not what was written: a run goes on from a configuration in which every default is written out.
    """
    problems = list(_idle(config))
    if problems:
        raise ConfigError(problems)


def _idle(config: Config) -> Iterator[UserError]:
    if config.supervised is not None:
        yield from _idle_beside_examples(config)
    if config.offline is not None:
        yield from _idle_beside_rollouts(config)
    yield from idle_in_cluster(config)
    yield from idle_in_engine(config)
    yield from idle_ahead(config)
    yield from idle_in_window(config)
    yield from _idle_evaluation(config)
    yield from _idle_curriculum(config)
    yield from metric_problems(config)
    # Adapters are matrices, all of which Muon updates itself; a scalar head, DoRA's magnitudes and AdaLoRA's singular
    # values are left to AdamW.
    lora = config.model.lora
    scalar = config.critic.shared or (
        config.supervised is not None and config.supervised.method in ("reward_model", "process_reward")
    )
    matrices_only = lora is not None and not lora.dora and lora.adaptive is None and not scalar
    for key, optimizer in optimizers_of(config).items():
        # A critic is trained whole.
        yield from _idle_optimizer(key, optimizer, matrices_only and key != "critic.optimizer")
    yield from _idle_critic(config.critic)
    yield from _idle_offload(config)
    if config.model.create is not None and config.model.trust_remote_code:
        yield _problem("model.trust_remote_code", "with model.create, which runs no code of others")
    if config.rewards is not None:
        yield from _idle_rewards(config.rewards)
    yield from _idle_sandbox(config)
    yield from _idle_alarms(config)
    yield from _idle_environment(config)
    sources = {"data.train": config.data.train, "data.eval": config.data.eval}
    if config.warmup is not None:
        sources["warmup.data"] = config.warmup.data
    for key, source in sources.items():
        if source is not None:
            yield from _idle_source(key, source)


def _idle_evaluation(config: Config) -> Iterator[UserError]:
    settings, default = config.evaluation, EvaluationSettings()
    if config.data.eval is None:
        for name in EvaluationSettings.model_fields:
            if getattr(settings, name) != getattr(default, name):
                yield _problem(f"evaluation.{name}", "without held-out prompts", "add data.eval")
    elif config.supervised is None:
        if settings.samples > 1 and settings.temperature == 0:
            why = "at temperature 0, where every sample is the same"
            yield _problem("evaluation.samples", why, "set evaluation.temperature too")
        if settings.correct_at != default.correct_at and settings.verifiers is None:
            yield _problem("evaluation.correct_at", "without evaluation.verifiers", "set rewards.correct_at")


def _idle_curriculum(config: Config) -> Iterator[UserError]:
    settings = config.data.curriculum
    if settings is None or config.supervised is not None:
        return
    if config.offline is not None:
        yield _problem("data.curriculum", "with `offline`: the completions are there, and no prompt is tried")
        return
    most = settings.memory * config.rollout.group_size
    if settings.min_attempts != "auto" and settings.min_attempts > most:
        yield UserError(
            f"no prompt ever gets {settings.min_attempts} attempts: {settings.memory} tries of "
            f"{config.rollout.group_size} completions are remembered, so `data.curriculum` has no effect",
            where="data.curriculum.min_attempts",
            mend=f"set it to {most} or less, or raise data.curriculum.memory",
        )


def _idle_sandbox(config: Config) -> Iterator[UserError]:
    given, default = config.sandbox, SandboxSettings()
    changed = [name for name in SandboxSettings.model_fields if getattr(given, name) != getattr(default, name)]
    tools = getattr(config.environment, "tools", [])
    if not any(isinstance(one, CodeVerifier | PythonTool) for one in [*_judges(config), *tools]):
        for name in changed:
            yield _problem(f"sandbox.{name}", "without a verifier or a tool that runs programs")
        return
    remote = given.backend == "remote" or (given.backend == "auto" and given.url is not None)
    if given.url is not None and not remote:
        yield _problem("sandbox.url", f"with `sandbox.backend: {given.backend}`")
    for name in ("python", "packages", "warm", "allow_unsandboxed"):
        if remote and name in changed:
            yield _problem(f"sandbox.{name}", "with a sandbox service, which decides that itself")
    if given.token_variable is not None and not remote:
        yield _problem("sandbox.token_variable", "without a sandbox service", "set sandbox.url")
    if given.allow_unsandboxed and given.backend == "bubblewrap":
        yield _problem("sandbox.allow_unsandboxed", "with `sandbox.backend: bubblewrap`", "set sandbox.backend to auto")


def _judges(config: Config) -> list[Any]:
    """Verifiers of training, of evaluations and of the second opinion."""
    found = [*(config.rewards.verifiers if config.rewards is not None else []), *(config.evaluation.verifiers or [])]
    second = config.alarms.second_opinion
    return found + (second.verifiers if second is not None else [])


def _idle_environment(config: Config) -> Iterator[UserError]:
    if not getattr(config.environment, "malformed_penalty", 0.0):
        return
    if not any(isinstance(judge, EnvironmentVerifier) for judge in _judges(config)):
        why = "without a verifier of the kind `environment`, which counts what turns are given"
        yield _problem("environment.malformed_penalty", why, "add {kind: environment} to rewards.verifiers")


def _idle_alarms(config: Config) -> Iterator[UserError]:
    given, default = config.alarms, AlarmSettings()
    changed = [name for name in AlarmSettings.model_fields if getattr(given, name) != getattr(default, name)]
    if config.offline is not None:
        for name in changed:
            yield _problem(f"alarms.{name}", "with `offline`: no completion is the policy's own")
        return
    if config.supervised is not None or config.rewards is None:
        return
    for name in changed:
        if given.action == "off" and name != "action":
            yield _problem(f"alarms.{name}", "with `alarms.action: off`", "set alarms.action to warn")
    if given.action == "off":
        return
    if "held_out" in changed and not (config.data.eval is not None and config.evaluation.every):
        yield _problem("alarms.held_out", "without evaluations at intervals", "set data.eval and evaluation.every")
    if "dominance" in changed and len(config.rewards.verifiers) == 1:
        yield _problem("alarms.dominance", "with one verifier, which makes all differences")


# Sections and keys of reinforcement learning, with their defaults.
_OF_SAMPLING = {
    "": ("environment", "algorithm", "rollout", "warmup", "critic", "sandbox", "alarms"),
    "training": ("mini_batches", "epochs", "offload"),
    "evaluation": ("samples", "temperature", "max_new_tokens", "verifiers", "correct_at"),
    "tracking": ("episodes_every",),
    "data": ("max_prompt_tokens", "curriculum"),
}


def _idle_beside_examples(config: Config) -> Iterator[UserError]:
    for section, names in _OF_SAMPLING.items():
        given: Any = getattr(config, section) if section else config
        for name in names:
            default = type(given).model_fields[name].get_default()
            if getattr(given, name) != default:
                key = f"{section}.{name}" if section else name
                mend = "set supervised.max_tokens" if key == "data.max_prompt_tokens" else ""
                yield _problem(key, "with `supervised`: nothing is sampled", mend)


def _idle_beside_rollouts(config: Config) -> Iterator[UserError]:
    """Settings of sampling, where only held-out prompts are sampled, if any."""
    assert config.offline is not None
    names = {"group_size": "with `offline`: a group is as large as it is in the data"}
    if config.data.eval is None:
        without = "with `offline` and no held-out prompts: nothing is sampled"
        names |= {"stop": without, "engine": without}
    default = RolloutSettings()
    for name, why in names.items():
        if getattr(config.rollout, name) != getattr(default, name):
            usual = f" (set it to {default.group_size}, where another recipe sets it)" if name == "group_size" else ""
            yield UserError(f"`rollout.{name}` has no effect {why}", where=f"rollout.{name}", mend="remove it" + usual)
    verified = config.offline.rewards == "verify"
    if config.rewards is not None and not verified and config.data.eval is None:
        yield _problem(
            "rewards", "with recorded rewards and no held-out prompts", "set offline.rewards: verify, or add data.eval"
        )
    if config.rewards is None and config.data.eval is not None:
        yield UserError(
            "held-out prompts are sampled and scored, and there is no `rewards` to score them",
            where="data.eval",
            mend="add `rewards`, or remove data.eval",
        )
    columns, usual_columns = config.offline.columns, RolloutColumns()
    if columns.reward != usual_columns.reward and verified:
        yield _problem("offline.columns.reward", "with offline.rewards: verify")
    if columns.logprobs != usual_columns.logprobs and config.offline.logprobs != "recorded":
        yield _problem("offline.columns.logprobs", f"with offline.logprobs: {config.offline.logprobs}")


def optimizers_of(config: Config) -> dict[str, OptimizerSettings]:
    """Each optimizer's settings by their key."""
    found = {"training.optimizer": config.training.optimizer}
    if config.warmup is not None:
        found["warmup.optimizer"] = config.warmup.optimizer
    if not config.critic.shared:
        found["critic.optimizer"] = config.critic.optimizer
    return found


def check_optimizers(config: Config, device: str) -> None:
    """Raise UserError for an optimizer whose package is missing, or that is to leave a device it is not on.

    Args:
        device: the kind that was chosen, "cpu", "cuda" or "mps".
    """
    for key, settings in optimizers_of(config).items():
        if settings.name == "adamw_8bit" and importlib.util.find_spec("bitsandbytes") is None:
            raise MissingExtra("bitsandbytes", extra="bnb", needed_for=f"`{key}.name: adamw_8bit`")
        if settings.offload and device == "cpu":
            raise ConfigError([_problem(f"{key}.offload", "on a CPU, in whose memory everything is")])
    if config.training.offload and device == "cpu":
        raise ConfigError([_problem("training.offload", "on a CPU, in whose memory everything is")])


def _idle_optimizer(key: str, settings: OptimizerSettings, matrices_only: bool) -> Iterator[UserError]:
    why = {
        "adafactor": "with adafactor, which has no such number",
        "muon": "with muon and adapters, of which none is left to AdamW" if matrices_only else "",
    }.get(settings.name)
    if why:
        for name in ("beta1", "beta2", "eps"):
            if getattr(settings, name) != OptimizerSettings.model_fields[name].default:
                yield _problem(f"{key}.{name}", why, f"set {key}.name to adamw")
    if settings.schedule == "constant" and settings.final_share:
        yield _problem(f"{key}.final_share", "with a constant learning rate", f"set {key}.schedule to linear or cosine")


def _idle_offload(config: Config) -> Iterator[UserError]:
    if not config.training.offload or config.supervised is not None:
        return
    if config.offline is not None and config.data.eval is None:
        yield _problem("training.offload", "with `offline` and no held-out prompts: nothing is sampled")
    for key, there in {
        "training.optimizer.offload": config.training.optimizer.offload,
        "cluster.trainer.offload": config.cluster.trainer.offload,
    }.items():
        if there:
            yield _problem("training.offload", f"with {key}, which keeps the state in the CPU's memory for good")


def _idle_critic(critic: CriticSettings) -> Iterator[UserError]:
    default = CriticSettings()
    if not critic.shared:
        if critic.value_coef != default.value_coef:
            yield _problem("critic.value_coef", "beside a critic with a backbone of its own", "set critic.shared: true")
        return
    if critic.path is not None:
        yield _problem("critic.path", "with critic.shared, whose backbone is the policy's", "set critic.shared: false")
    for name in OptimizerSettings.model_fields:
        if name != "learning_rate" and getattr(critic.optimizer, name) != getattr(default.optimizer, name):
            where = f"critic.optimizer.{name}"
            yield _problem(where, "with critic.shared, which has one optimizer", f"set training.optimizer.{name}")


def _idle_rewards(rewards: RewardSettings) -> Iterator[UserError]:
    required = {verifier.requires for verifier in rewards.verifiers}
    for index, verifier in enumerate(rewards.verifiers):
        key = f"rewards.verifiers.{index}"
        if verifier.gate and len(rewards.verifiers) == 1:
            yield _problem(f"{key}.gate", "without another verifier")
        if verifier.passes_at != 1.0 and not verifier.gate and (verifier.name or verifier.kind) not in required:
            yield _problem(f"{key}.passes_at", "on a verifier that no other waits for", f"set {key}.gate")
        if isinstance(verifier, FormatVerifier) and verifier.json_tag is not None and verifier.json_schema is None:
            yield _problem(f"{key}.json_tag", "without a schema", f"set {key}.json_schema")
        if isinstance(verifier, JudgeVerifier):
            yield from _idle_judge(key, verifier)
    if rewards.worker_memory != RewardSettings.model_fields["worker_memory"].default and not any(
        is_isolated(verifier) for verifier in rewards.verifiers
    ):
        yield _problem("rewards.worker_memory", "with verifiers of which none runs in a worker process")


def _idle_judge(key: str, judge: JudgeVerifier) -> Iterator[UserError]:
    if judge.votes > 1 and judge.temperature == 0:
        yield _problem(f"{key}.votes", "at temperature 0, where all votes are the same", f"set {key}.temperature")
    if judge.votes == 1 and judge.combine != "mean":
        yield _problem(f"{key}.combine", "on a single vote", f"set {key}.votes")
    if judge.read != "json" and judge.score_key != "score":
        yield _problem(f"{key}.score_key", "when the score is not read from JSON", f"set {key}.read to json")
    if judge.read != "pattern" and judge.pattern is not None:
        yield _problem(f"{key}.pattern", f"with `read: {judge.read}`", f"set {key}.read to pattern")


def _idle_source(key: str, settings: DataSource) -> Iterator[UserError]:
    from strop.data.sources import detect

    if settings.arguments or settings.subset is not None or settings.split != "train":
        # Only now: it looks at the disk.
        kind = settings.format if settings.format != "auto" else detect(settings.path)
        names = {"jsonl": "a JSON lines file", "parquet": "a Parquet file", "python": "a Python function"}
        names |= {"reasoning_gym": "a task of Reasoning Gym", "verifiers": "a taskset"}
        found = names.get(kind, "a Hugging Face dataset")
        folder = user_path(settings.path)
        if settings.arguments and kind not in ("python", "reasoning_gym", "verifiers"):
            yield _problem(f"{key}.arguments", f"on {found}; they are those of a Python function")
        if settings.subset is not None and (kind != "huggingface" or (folder.is_dir() and _is_saved(folder))):
            yield _problem(f"{key}.subset", f"on {found}" if kind != "huggingface" else "on a saved dataset")
        if settings.split != "train" and (kind != "huggingface" or (folder / "state.json").exists()):
            what = f"on {found}" if kind != "huggingface" else "on a saved dataset of one split"
            arguments = (
                f"; for a split of its own, set {key}.arguments"
                if kind in ("python", "reasoning_gym", "verifiers")
                else ""
            )
            yield _problem(f"{key}.split", what + arguments)


def _is_saved(folder: Path) -> bool:
    return any((folder / name).exists() for name in ("dataset_dict.json", "state.json"))


def _problem(key: str, why: str, otherwise: str = "") -> UserError:
    mend = "remove it" + (f", or {otherwise}" if otherwise else "")
    return UserError(f"`{key}` has no effect {why}", where=key, mend=mend)
