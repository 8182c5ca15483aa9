"""Tokens a second and peak memory of the trainer on one GPU, for models of the true shape with random weights.

An update is forward, backward and the optimizer over whole streams of one length, several of them in a step. MFU is
that of a run's metrics (`planning/flops.py`), with causal attention and without what is recomputed. Each case is a
process of its own.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import card
import measure
import numpy as np
import random_models
from random_batches import batch


@dataclass(frozen=True)
class Case:
    """What is trained. length: tokens of a stream. streams: of a step. rank: of adapters, 0 for all weights. chunk: see
    `training.logprob_chunk`. recompute: see `model.activation_checkpointing`."""

    shape: str = "qwen3-0.6b"
    objective: str = "grpo"
    length: int = 16384
    streams: int = 8
    rank: int = 0
    recompute: bool | str = False
    compiled: bool = True
    chunk: int = 4096
    budget: int = 16384


CASES = {
    "RL, all weights": Case(recompute=True, chunk=2048),
    "RL, all weights, plain blocks": Case(recompute=True, compiled=False),
    "RL, all weights, attention kept": Case(recompute="keep_attention"),
    "RL, all weights, nothing recomputed": Case(),
    "RL, LoRA": Case(rank=16, recompute=True),
    "RL, LoRA, attention kept": Case(rank=16, recompute="keep_attention", chunk=2048),
    "SFT, 8192": Case(objective="sft", length=8192, streams=16, budget=8192),
    "SFT, 8192, recomputed": Case(objective="sft", length=8192, streams=16, recompute="keep_attention"),
    "4B, LoRA": Case(shape="qwen3-4b", rank=16, recompute="keep_attention", streams=4),
    "short, all weights": Case(length=400, streams=320),
}


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Measure; returns the numbers that were written."""
    parser = measure.arguments(__doc__, repeats=3)
    parser.add_argument("--only", nargs="+", choices=list(CASES), default=list(CASES), metavar="CASE", help="in order")
    parser.add_argument("--limit", type=float, default=300, help="seconds that a case may take")
    parser.add_argument("--add", action="store_true", help="keep the cases that the file of results already has")
    options = parser.parse_args(argv)
    found = _earlier(options)
    numbers: dict[str, Any] = {"cases": found}
    for name in options.only:
        case = CASES[name]
        if options.smoke:
            case = replace(case, shape="tiny", length=32, streams=2, budget=64, compiled=False, rank=min(case.rank, 2))
        asked, script = [json.dumps(asdict(case)), str(options.repeats)], Path(__file__)
        try:
            found[name] = asdict(case) | measure.fresh_process(
                script, asked, threads=options.threads, timeout=options.limit
            )
        except RuntimeError as error:
            found[name] = asdict(case) | {"failed": str(error)[-2000:]}
        shown = ("tokens_per_second", "mfu", "allocated_gib", "first", "failed")
        # Each case at once: whoever ends this early keeps what there is.
        measure.write("trainer_gpu", numbers, options, script="trainer")
        print(name, {key: found[name][key] for key in shown if key in found[name]}, flush=True)
    return numbers


def _earlier(options: argparse.Namespace) -> dict[str, Any]:
    """Cases that the file of results has already, where they are wanted."""
    file = options.out or measure.RESULTS / "trainer_gpu.json"
    if not options.add or not file.exists():
        return {}
    cases: dict[str, Any] = json.loads(file.read_text())["numbers"]["cases"]
    return cases


def side(case: Case, repeats: int) -> dict[str, Any]:
    """Updates of one case."""
    import torch
    from transformers import AutoModelForCausalLM

    from strop.algorithms.named import build_algorithm
    from strop.config.model import LoraConfig
    from strop.config.training import OptimizerSettings
    from strop.models.load import add_lora
    from strop.planning.cards import peak_rate
    from strop.planning.flops import work_of
    from strop.training.single import SingleDeviceTrainer

    cuda = torch.cuda.is_available()
    device = torch.device("cuda" if cuda else "cpu")
    config = random_models.config(case.shape, context=32768)
    torch.manual_seed(0)
    with device:
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16 if cuda else torch.float32)
    if case.rank:
        model = add_lora(model, LoraConfig(rank=case.rank), 0, updates=100)
    trainer = SingleDeviceTrainer(
        model,
        OptimizerSettings(learning_rate=1e-6),
        total_updates=100,
        budget=case.budget,
        chunk=case.chunk,
        recompute=case.recompute,
        compiled=case.compiled,
    )
    objective: Any = build_algorithm("grpo", group_size=4, max_new_tokens=case.length)
    if case.objective == "sft":
        from strop.algorithms.supervised import CrossEntropy

        objective = CrossEntropy()

    work, lengths = work_of(model), np.full(case.streams, case.length)
    prompt = max(1, case.length // 10)
    stats: dict[str, float] = {}

    def update() -> float:
        one = batch(case.streams, case.length, config.vocab_size, prompt=prompt)
        card.wait()
        started = time.perf_counter()
        stats.update(trainer.update(one, objective))
        card.wait()
        return time.perf_counter() - started

    first = update()
    update()
    card.forget_peak()
    seconds = [update() for _ in range(repeats)]
    middle = measure.median(seconds)
    packed, pairs = (int(stats[f"throughput/{name}"]) for name in ("packed_tokens", "attention_pairs"))
    assert work is not None
    rate = work.computed(packed, pairs, case.streams * (case.length - prompt), lengths) / middle
    peak = peak_rate(card.name(), "bfloat16")
    return {
        **card.about(),
        **card.memory(),
        "tokens_per_second": case.streams * case.length / middle,
        "tflops": rate / 1e12,
        "mfu": None if peak is None else rate / peak,
        "first": first,
        "seconds": seconds,
    }


if __name__ == "__main__":
    if len(sys.argv) > 2 and sys.argv[1].startswith("{"):
        measure.tell(side(Case(**json.loads(sys.argv[1])), int(sys.argv[2])))
    else:
        main()
