"""TRL's side of `against_trl.py`: GRPOTrainer with transformers' `generate`, timed.

Started by it with TRL on the path and the job as JSON. The timers wrap methods of TRL 1.16 without changing what they
do.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import measure


def main(job: dict[str, Any]) -> dict[str, Any]:
    """Seconds of each measured step, and the peak memory of this process."""
    measure.use_threads(job["threads"])
    from datasets import Dataset
    from texts import coin
    from trl import GRPOTrainer
    from trl import __version__ as trl_version

    rows = [json.loads(line) for line in Path(job["data"]).read_text().splitlines()]
    clock = Clock()
    with tempfile.TemporaryDirectory() as folder:
        trainer = GRPOTrainer(
            model=job["model"],
            reward_funcs=coin,
            args=arguments(job, folder),
            train_dataset=Dataset.from_list(rows),
            callbacks=[step_callback(clock)],
        )
        assert next(trainer.model.parameters()).dtype.itemsize == 4
        trainer._generate_single_turn = clock.sampling(trainer._generate_single_turn)
        trainer._generate_and_score_completions = clock.timed("rollout", trainer._generate_and_score_completions)
        trainer.train()
        assert not trainer.model.is_gradient_checkpointing
    versions = {"trl": trl_version}
    return {"steps": clock.steps[1:], "peak": measure.peak_bytes(), "versions": versions}


def arguments(job: dict[str, Any], folder: str, **others: Any) -> Any:
    """The job as TRL's settings: one optimizer step for each generation batch. others: in place of what is here."""
    from trl import GRPOConfig

    completions = job["prompts"] * job["group_size"]
    assert completions % job["batch_size"] == 0, "TRL needs a batch size that divides the step's completions"
    settings: dict[str, Any] = {
        "output_dir": folder,
        "use_cpu": True,
        "bf16": False,
        "model_init_kwargs": {"dtype": "float32"},
        "use_vllm": False,
        "per_device_train_batch_size": job["batch_size"],
        "gradient_accumulation_steps": completions // job["batch_size"],
        "num_generations": job["group_size"],
        "max_completion_length": job["new_tokens"],
        "num_iterations": 1,
        "beta": 0.0,
        "loss_type": "grpo",
        "temperature": 1.0,
        "learning_rate": job["learning_rate"],
        "lr_scheduler_type": "constant",
        "max_grad_norm": 1.0,
        "max_steps": job["steps"] + 1,
        "gradient_checkpointing": False,
        "shuffle_dataset": False,
        "logging_strategy": "no",
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
    }
    return GRPOConfig(**settings | others)


class Clock:
    """Adds up the seconds of wrapped methods, and closes a step when the optimizer has run."""

    def __init__(self) -> None:
        self.steps: list[dict[str, float]] = []
        self._parts: dict[str, float] = {}
        self._last = time.perf_counter()

    def add(self, name: str, value: float) -> None:
        self._parts[name] = self._parts.get(name, 0.0) + value

    def timed(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            started = time.perf_counter()
            result = method(*args, **kwargs)
            self.add(name, time.perf_counter() - started)
            return result

        return wrapped

    def sampling(self, method: Callable[..., Any]) -> Callable[..., Any]:
        """Also counts tokens: the method takes the ids of prompts and returns those of completions first."""
        inner = self.timed("sampling", method)

        def wrapped(prompt_ids: Any, *args: Any, **kwargs: Any) -> Any:
            result = inner(prompt_ids, *args, **kwargs)
            self.add("tokens", sum(len(ids) for ids in result[0]))
            self.add("prompt_tokens", sum(len(ids) for ids in prompt_ids))
            return result

        return wrapped

    def begin(self) -> None:
        self._last, self._parts = time.perf_counter(), {}

    def end_step(self) -> None:
        now = time.perf_counter()
        parts, total = self._parts, now - self._last
        self.steps.append(
            {
                "total": total,
                "sampling": parts["sampling"],
                "scoring": parts["rollout"] - parts["sampling"],
                "training": total - parts["rollout"],
                "tokens": parts["tokens"],
                "prompt_tokens": parts["prompt_tokens"],
            }
        )
        self._last, self._parts = now, {}


def step_callback(clock: Clock) -> Any:
    from transformers import TrainerCallback

    class Steps(TrainerCallback):  # type: ignore[misc]
        def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
            clock.begin()

        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            clock.end_step()

    return Steps()


if __name__ == "__main__":
    measure.tell(main(json.loads(sys.argv[1])))
