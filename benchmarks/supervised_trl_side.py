"""TRL's side of `supervised_against_trl.py`: SFTTrainer and DPOTrainer, timed.

Started by it with TRL on the path and the job as JSON. The timers and digests wrap methods of TRL 1.16 without changing
what they do. Everything that TRL can leave out is left out: gradient checkpointing, saving, progress bars.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import measure

Example = tuple[list[int], list[bool]]


def main(job: dict[str, Any]) -> dict[str, Any]:
    """Seconds and loss of each step, the first of which is the warm-up, and the peak memory of this process."""
    measure.use_threads(job["threads"])
    from datasets import Dataset
    from trl import DPOTrainer, SFTTrainer
    from trl import __version__ as trl_version

    rows = [json.loads(line) for line in Path(job["data"]).read_text().splitlines()]
    clock = Clock()
    with tempfile.TemporaryDirectory() as folder:
        kind = SFTTrainer if job["method"] == "sft" else DPOTrainer
        trainer = kind(
            model=job["model"],
            args=arguments(job, folder),
            train_dataset=Dataset.from_list(rows),
            callbacks=[clock.callback()],
        )
        assert next(trainer.model.parameters()).dtype.itemsize == 4
        trainer.compute_loss = clock.watching(trainer.compute_loss)
        trainer._get_train_sampler = in_order(trainer._get_train_sampler)
        trainer.train()
        assert not trainer.model.is_gradient_checkpointing
    return {"steps": clock.steps, "peak": measure.peak_bytes(), "versions": {"trl": trl_version}}


def arguments(job: dict[str, Any], folder: str) -> Any:
    """The job as TRL's settings, with the way to cut a step into passes that `option` names."""
    from trl import DPOConfig, SFTConfig

    size, padding_free, rebalanced = job["option"]["size"], job["option"]["padding_free"], job["option"]["rebalanced"]
    assert job["rows"] % size == 0, "TRL needs a batch size that divides the rows of a step"
    settings: dict[str, Any] = {
        "output_dir": folder,
        "use_cpu": True,
        "bf16": False,
        "model_init_kwargs": {"dtype": "float32"},
        "per_device_train_batch_size": size,
        "gradient_accumulation_steps": job["rows"] // size,
        "train_sampling_strategy": "batch_rebalance" if rebalanced else "sequential",
        "max_length": None,
        "learning_rate": job["learning_rate"],
        "lr_scheduler_type": "constant",
        "max_grad_norm": 1.0,
        "max_steps": job["steps"] + 1,
        "gradient_checkpointing": False,
        "logging_strategy": "steps",
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
    }
    if job["method"] == "dpo":
        return DPOConfig(**settings, beta=job["beta"])
    return SFTConfig(**settings, padding_free=padding_free, packing=False, completion_only_loss=True)


def in_order(sampler_of: Any) -> Any:
    """Let the sampler that rebalances a step's passes take the steps' rows in the order of the file."""

    def made(*args: Any, **kwargs: Any) -> Any:
        sampler = sampler_of(*args, **kwargs)
        sampler.shuffle = False
        return sampler

    return made


def examples_of(inputs: dict[str, Any]) -> Iterator[Example]:
    """The (tokens, which of them are trained) in the tensors that TRL hands to the model."""
    trained = inputs["labels"] != -100 if "labels" in inputs else inputs["completion_mask"].bool()
    for row, ids in enumerate(inputs["input_ids"]):
        mask = trained[row]
        if "attention_mask" in inputs:
            inside = inputs["attention_mask"][row].bool()
            yield ids[inside].tolist(), mask[inside].tolist()
            continue
        starts = [*(inputs["position_ids"][row] == 0).nonzero()[:, 0].tolist(), len(ids)]
        for a, b in pairwise(starts):
            yield ids[a:b].tolist(), mask[a:b].tolist()


class Clock:
    """One entry for each optimizer step: seconds, loss, and what was trained on."""

    def __init__(self) -> None:
        self.steps: list[dict[str, float]] = []
        self._seen: list[Example] = []
        self._last = self._last_cpu = 0.0

    def watching(self, compute_loss: Any) -> Any:
        def wrapped(model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            started, started_cpu = time.perf_counter(), time.process_time()
            self._seen += examples_of(inputs)
            # Looking is not TRL's work.
            self._last += time.perf_counter() - started
            self._last_cpu += time.process_time() - started_cpu
            return compute_loss(model, inputs, *args, **kwargs)

        return wrapped

    def end_step(self) -> None:
        from rows import digest

        now, cpu = time.perf_counter(), time.process_time()
        self.steps.append({"total": now - self._last, "cpu": cpu - self._last_cpu, "digest": digest(self._seen)})
        self._seen = []
        self.begin()

    def begin(self) -> None:
        self._last, self._last_cpu = time.perf_counter(), time.process_time()

    def callback(self) -> Any:
        from transformers import TrainerCallback

        clock = self

        class Steps(TrainerCallback):  # type: ignore[misc]
            def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
                clock.begin()

            def on_step_end(self, *args: Any, **kwargs: Any) -> None:
                clock.end_step()

            def on_log(self, *args: Any, logs: dict[str, float], **kwargs: Any) -> None:
                if "loss" in logs:
                    clock.steps[-1]["loss"] = float(logs["loss"])

        return Steps()


if __name__ == "__main__":
    measure.tell(main(json.loads(sys.argv[1])))
