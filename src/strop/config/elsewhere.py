"""Keys that other frameworks have and strop has not, each with what to do about it."""

from __future__ import annotations

_ONE_TEMPERATURE = (
    "remove it: strop samples training data at `rollout.temperature` only, because the trainer must score tokens under "
    "the same distribution that sampled them"
)
_BATCH = "set `rollout.groups_per_step` (prompts in a step) and `rollout.group_size` (completions of each prompt)"

MENDS: dict[str, str] = {
    # What samplers elsewhere take.
    "top_p": _ONE_TEMPERATURE,
    "top_k": _ONE_TEMPERATURE,
    "min_p": _ONE_TEMPERATURE,
    "repetition_penalty": _ONE_TEMPERATURE,
    "presence_penalty": _ONE_TEMPERATURE,
    "frequency_penalty": _ONE_TEMPERATURE,
    "n": "use `rollout.group_size`",
    "num_generations": "use `rollout.group_size`",
    "n_samples_per_prompt": "use `rollout.group_size`",
    "max_completion_length": "use `rollout.max_new_tokens`",
    "max_response_length": "use `rollout.max_new_tokens`",
    "max_tokens": "use `rollout.max_new_tokens`",
    "max_prompt_length": "use `data.max_prompt_tokens`",
    # Batches.
    "batch_size": f"{_BATCH}; memory is bounded by `training.tokens_per_micro_batch`",
    "train_batch_size": f"{_BATCH}; memory is bounded by `training.tokens_per_micro_batch`",
    "rollout_batch_size": "use `rollout.groups_per_step` (it counts prompts, not completions)",
    "per_device_train_batch_size": "use `training.tokens_per_micro_batch`; results do not depend on it",
    "micro_batch_size": "use `training.tokens_per_micro_batch`; results do not depend on it",
    "gradient_accumulation_steps": f"{_BATCH}; micro-batches follow from `training.tokens_per_micro_batch`",
    # Optimisation.
    "lr": "use `training.optimizer.learning_rate`",
    "learning_rate": "did you mean `training.optimizer.learning_rate`?",
    "optimizer.epsilon": "use `eps`",
    "lr_scheduler_type": "use `training.optimizer.schedule`",
    "clip_grad": "use `training.optimizer.max_grad_norm`",
    "gradient_checkpointing": "use `model.activation_checkpointing`",
    "max_steps": "use `run.steps`",
    "total_steps": "use `run.steps`",
    "num_train_epochs": "use `run.steps`: a run is as long as its steps, and the data is read again when it ends",
    "num_iterations": "use `training.epochs` (passes over a step's episodes)",
    "ppo_epochs": "use `training.epochs`",
    # Objective.
    "beta": "use `algorithm.kl_coef`",
    "kl_loss_coef": "use `algorithm.kl_coef`",
    "epsilon": "use `algorithm.clip_low` and `algorithm.clip_high`",
    "epsilon_high": "use `algorithm.clip_high`",
    "cliprange": "use `algorithm.clip_low` and `algorithm.clip_high`",
    "clip_ratio": "use `algorithm.clip_low` and `algorithm.clip_high`",
    "loss_type": "use `algorithm.name`, or `algorithm.loss` and `algorithm.aggregation`",
    "scale_rewards": "use `algorithm.scale`",
    "adv_estimator": "use `algorithm.name`",
    # Everything around it.
    "model_name_or_path": "use `model.path`",
    "torch_dtype": "use `model.dtype`",
    "bf16": "set `model.dtype` to bfloat16",
    "lora_r": "use `model.lora.rank`",
    "lora_rank": "use `model.lora.rank`",
    "lora_alpha": "use `model.lora.alpha`",
    "init_r": "use `model.lora.rank`",
    "target_r": "use `model.lora.adaptive.target_rank`",
    "deltaT": "use `model.lora.adaptive.delta_t`",
    "reward_funcs": "use `rewards.verifiers`, with `kind: python` for a Python function",
    "output_dir": "use `run.folder` and `run.name`",
    "report_to": "use `tracking.tensorboard`, `tracking.wandb_project` or `tracking.mlflow_uri`",
    "logging_steps": "remove it: every step is logged",
    "save_steps": "use `checkpoint.every`",
    "save_total_limit": "use `checkpoint.keep`",
    "eval_steps": "use `evaluation.every`",
    "metric_for_best_model": "use `checkpoint.best.metric`",
    "greater_is_better": "use `checkpoint.best.mode`",
    "load_best_model_at_end": "use `checkpoint.best`: `checkpoints/best` then names the best checkpoint",
    "early_stopping": "use `evaluation.early_stop`",
    "early_stopping_patience": "use `evaluation.early_stop.patience`",
    "early_stopping_threshold": "use `evaluation.early_stop.min_delta`",
    "stage": "`stages` at the top of a file chains several recipes: `strop config explain stages`",
    "defaults": "`defaults` is for pipelines, beside `stages`: `strop config explain stages`",
    "extends": "`extends` stands at the top of a recipe file and names other files",
}
"""What to do about keys that other frameworks have and strop has not; `section.name` wins over `name`."""


def mend_for(key: str) -> str:
    """What to do about a wrong key that has a name from elsewhere; empty when it has none."""
    parts = key.split(".")
    return MENDS.get(".".join(parts[-2:])) or MENDS.get(parts[-1], "")
