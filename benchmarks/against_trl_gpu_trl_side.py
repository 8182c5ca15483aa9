"""TRL's side of `against_trl_gpu.py`: GRPOTrainer, timed, with vLLM in its process or with transformers' `generate`.

Started by it, with TRL on the path and the job as JSON.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import card
import measure
from trl_side import Clock, arguments, step_callback


def main(job: dict[str, Any]) -> dict[str, Any]:
    """What each step took, the first of which is the warm-up, and what the start took."""
    measure.use_threads(job["threads"])
    started = time.perf_counter()
    from datasets import Dataset
    from texts import coin
    from trl import GRPOTrainer

    rows = [json.loads(line) for line in Path(job["data"]).read_text().splitlines()]
    clock = CardClock(Path(job["progress"]))
    with tempfile.TemporaryDirectory() as folder:
        trainer = GRPOTrainer(
            model=job["model"],
            reward_funcs=coin,
            args=arguments(job, folder, **settings(job)),
            train_dataset=Dataset.from_list(rows),
            callbacks=[step_callback(clock), log_callback(clock)],
        )
        dtype = str(next(trainer.model.parameters()).dtype).removeprefix("torch.")
        clock.found = {"start_seconds": time.perf_counter() - started, "weights": dtype}
        if job["engine"] == "vllm":
            inside = trainer.vllm_generation
            inside.sync_weights = clock.timed("publishing", inside.sync_weights)
        trainer._generate_single_turn = clock.sampling(trainer._generate_single_turn)
        trainer._generate_and_score_completions = clock.timed("rollout", trainer._generate_and_score_completions)
        card.forget_peak()
        trainer.train()
        assert not trainer.model.is_gradient_checkpointing
    return {**clock.found, **card.about(), "steps": clock.steps}


def settings(job: dict[str, Any]) -> dict[str, Any]:
    """What differs from TRL's settings on a CPU. On a GPU: weights as TRL loads them, autocast to bfloat16."""
    found: dict[str, Any] = {"logging_strategy": "steps", "logging_steps": 1}
    if job["device"] != "cpu":
        found |= {"use_cpu": False, "bf16": True, "model_init_kwargs": None}
    if job["engine"] == "vllm":
        found |= {
            "use_vllm": True,
            "vllm_mode": "colocate",
            "vllm_gpu_memory_utilization": job["memory"],
            "vllm_max_model_length": job["context"],
        }
    return found


class CardClock(Clock):
    """Waits for the GPU at the end of each part, tells weights on their way to vLLM from sampling, and notes memory."""

    def __init__(self, progress: Path) -> None:
        super().__init__()
        self._progress = progress
        self.found: dict[str, Any] = {}

    def timed(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def waited(*args: Any, **kwargs: Any) -> Any:
            result = method(*args, **kwargs)
            card.wait()
            return result

        return super().timed(name, waited)

    def begin(self) -> None:
        card.wait()
        super().begin()

    def end_step(self) -> None:
        card.wait()
        publishing = self._parts.get("publishing", 0.0)
        super().end_step()
        step = self.steps[-1]
        step["sampling"] -= publishing
        step |= {"publishing": publishing, "other": 0.0, **card.memory()}
        # What is known so far, should a later step take too long.
        self._progress.write_text(json.dumps({**self.found, **card.about(), "steps": self.steps}))


MISMATCH = {
    "mismatch_mean": "sampling/sampling_logp_difference/mean",
    "mismatch_max": "sampling/sampling_logp_difference/max",
}


def log_callback(clock: Clock) -> Any:
    """Adds what TRL logs of a step: how far vLLM's log-probabilities are from its own."""
    from transformers import TrainerCallback

    class Logs(TrainerCallback):  # type: ignore[misc]
        def on_log(self, *args: Any, logs: dict[str, float], **kwargs: Any) -> None:
            if clock.steps:
                clock.steps[-1] |= {name: float(logs[key]) for name, key in MISMATCH.items() if key in logs}

    return Logs()


if __name__ == "__main__":
    measure.tell(main(json.loads(sys.argv[1])))
