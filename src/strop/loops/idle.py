"""Settings that would have no effect beside the others: refused, because a setting is written to change something.

The choices of an algorithm are looked at in `algorithms/policy_gradient.py`; here is everything else.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from strop.config import Config
from strop.config.data import DataSource
from strop.config.rewards import CodeVerifier, FormatVerifier, JudgeVerifier, RewardSettings
from strop.config.run import EvaluationSettings
from strop.config.sandbox import SandboxSettings
from strop.config.training import OptimizerSettings
from strop.errors import ConfigError, MissingExtra, UserError
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
    if config.data.eval is None:
        default = EvaluationSettings()
        for name in EvaluationSettings.model_fields:
            if getattr(config.evaluation, name) != getattr(default, name):
                yield _problem(f"evaluation.{name}", "without held-out prompts", "add data.eval")
    elif config.evaluation.samples > 1 and config.evaluation.temperature == 0:
        yield _problem(
            "evaluation.samples", "at temperature 0, where every sample is the same", "set evaluation.temperature too"
        )
    # Adapters are matrices, all of which Muon updates itself; a scalar head and DoRA's magnitudes are left to AdamW.
    lora = config.model.lora
    scalar = config.supervised is not None and config.supervised.method in ("reward_model", "process_reward")
    matrices_only = lora is not None and not lora.dora and not scalar
    for key, optimizer in optimizers_of(config).items():
        # A critic is trained whole.
        yield from _idle_optimizer(key, optimizer, matrices_only and key != "critic.optimizer")
    if config.model.create is not None and config.model.trust_remote_code:
        yield _problem("model.trust_remote_code", "with model.create, which runs no code of others")
    if config.rewards is not None:
        yield from _idle_rewards(config.rewards)
    yield from _idle_sandbox(config)
    sources = {"data.train": config.data.train, "data.eval": config.data.eval}
    if config.warmup is not None:
        sources["warmup.data"] = config.warmup.data
    for key, source in sources.items():
        if source is not None:
            yield from _idle_source(key, source)


def _idle_sandbox(config: Config) -> Iterator[UserError]:
    given, default = config.sandbox, SandboxSettings()
    changed = [name for name in SandboxSettings.model_fields if getattr(given, name) != getattr(default, name)]
    if config.rewards is not None and not any(isinstance(one, CodeVerifier) for one in config.rewards.verifiers):
        for name in changed:
            yield _problem(f"sandbox.{name}", "without a verifier that runs programs")
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


# Sections and keys of reinforcement learning, with their defaults.
_OF_SAMPLING = {
    "": ("algorithm", "rollout", "warmup", "critic", "sandbox"),
    "training": ("mini_batches", "epochs"),
    "evaluation": ("samples", "temperature", "max_new_tokens"),
    "tracking": ("episodes_every",),
    "data": ("max_prompt_tokens",),
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


def optimizers_of(config: Config) -> dict[str, OptimizerSettings]:
    """Each optimizer's settings by their key."""
    found = {"training.optimizer": config.training.optimizer}
    if config.warmup is not None:
        found["warmup.optimizer"] = config.warmup.optimizer
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
        found = names.get(kind, "a Hugging Face dataset")
        folder = Path(settings.path).expanduser()
        if settings.arguments and kind != "python":
            yield _problem(f"{key}.arguments", f"on {found}; they are those of a Python function")
        if settings.subset is not None and (kind != "huggingface" or (folder.is_dir() and _is_saved(folder))):
            yield _problem(f"{key}.subset", f"on {found}" if kind != "huggingface" else "on a saved dataset")
        if settings.split != "train" and (kind != "huggingface" or (folder / "state.json").exists()):
            what = f"on {found}" if kind != "huggingface" else "on a saved dataset of one split"
            arguments = f"; for a split of its own, set {key}.arguments" if kind == "python" else ""
            yield _problem(f"{key}.split", what + arguments)


def _is_saved(folder: Path) -> bool:
    return any((folder / name).exists() for name in ("dataset_dict.json", "state.json"))


def _problem(key: str, why: str, otherwise: str = "") -> UserError:
    mend = "remove it" + (f", or {otherwise}" if otherwise else "")
    return UserError(f"`{key}` has no effect {why}", where=key, mend=mend)
