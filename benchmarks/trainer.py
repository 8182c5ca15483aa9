"""Tokens a second and peak memory of the trainer on one GPU, for models of the true shape with random weights.

An update is forward, backward and the optimizer over whole streams of one length, several of them in a step. MFU is
counted as others do for causal attention: 6 FLOPs for each weight and token (4 for a frozen one), and attention over
the pairs that see each other, 3 times (forward, and two products backward), by the card's dense bfloat16 peak. What is
recomputed is not counted. Each case is a process of its own.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import measure
from ranks import QWEN3_06B, TINY

QWEN3_4B = QWEN3_06B | {
    "hidden_size": 2560,
    "intermediate_size": 9728,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
}
SHAPES = {"tiny": TINY, "0.6B": QWEN3_06B, "4B": QWEN3_4B}
# Dense bfloat16 FLOP/s by the vendor's data sheets.
PEAKS = {"H100": 989e12, "H200": 989e12, "A100": 312e12, "B200": 2250e12}


@dataclass(frozen=True)
class Case:
    """What is trained. length: tokens of a stream. streams: of a step. rank: of adapters, 0 for all weights. chunk: see
    `training.logprob_chunk`. recompute: see `model.activation_checkpointing`."""

    shape: str = "0.6B"
    objective: str = "grpo"
    length: int = 16384
    streams: int = 8
    rank: int = 0
    recompute: bool | str = False
    compiled: bool = True
    chunk: int = 1024
    budget: int = 16384


CASES = {
    "RL, all weights": Case(recompute=True),
    "RL, all weights, plain blocks": Case(recompute=True, compiled=False),
    "RL, all weights, attention kept": Case(recompute="keep_attention"),
    "RL, all weights, nothing recomputed": Case(chunk=2048),
    "RL, LoRA": Case(rank=16, recompute=True),
    "RL, LoRA, attention kept": Case(rank=16, recompute="keep_attention"),
    "SFT, 8192": Case(objective="sft", length=8192, streams=16, budget=8192),
    "SFT, 8192, recomputed": Case(objective="sft", length=8192, streams=16, recompute="keep_attention"),
    "4B, LoRA": Case(shape="4B", rank=16, recompute="keep_attention", streams=4),
    "short, all weights": Case(length=400, streams=320),
}


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Measure; returns the numbers that were written."""
    parser = measure.arguments(__doc__, repeats=3)
    parser.add_argument("--only", nargs="*", help="names of cases")
    parser.add_argument("--limit", type=float, default=300, help="seconds that a case may take")
    options = parser.parse_args(argv)
    found: dict[str, Any] = {}
    for name, case in CASES.items():
        if options.only and name not in options.only:
            continue
        if options.smoke:
            case = replace(case, shape="tiny", length=32, streams=2, budget=64, compiled=False, rank=min(case.rank, 2))
        try:
            found[name] = asdict(case) | measure.fresh_process(
                Path(__file__),
                [json.dumps(asdict(case)), str(options.repeats)],
                threads=options.threads,
                python_path=[Path(part) for part in os.environ.get("PYTHONPATH", "").split(os.pathsep) if part],
                timeout=options.limit,
            )
        except Exception as error:
            found[name] = asdict(case) | {"failed": str(error)[-2000:]}
            print(f"{name}: failed: {str(error)[-600:]}", flush=True)
            continue
        one = found[name]
        print(
            f"{name}: {one['tokens_per_second']:.0f} tokens/s, MFU {one['mfu']:.1%}, {one['peak_gib']:.1f} GiB, "
            f"first update {one['first']:.0f} s",
            flush=True,
        )
    numbers = {"cases": found}
    measure.write("trainer_gpu", numbers, options)
    return numbers


def side(case: Case, repeats: int) -> dict[str, Any]:
    """Updates of one case."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from strop.algorithms.named import build_algorithm
    from strop.config.model import LoraConfig
    from strop.config.training import OptimizerSettings
    from strop.models.load import add_lora
    from strop.training.single import SingleDeviceTrainer

    cuda = torch.cuda.is_available()
    device = torch.device("cuda" if cuda else "cpu")
    settings = dict(SHAPES[case.shape])
    config = AutoConfig.for_model(settings.pop("model_type"), **settings)
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

    def update() -> float:
        one = batch(case, config.vocab_size)
        if cuda:
            torch.cuda.synchronize()
        started = time.perf_counter()
        trainer.update(one, objective)
        if cuda:
            torch.cuda.synchronize()
        return time.perf_counter() - started

    first = update()
    update()
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    seconds = [update() for _ in range(repeats)]
    tokens = case.streams * case.length
    speed = tokens / measure.median(seconds)
    name = torch.cuda.get_device_name() if cuda else "CPU"
    peak = next((rate for card, rate in PEAKS.items() if card in name), float("nan"))
    return {
        "card": name,
        "tokens_per_second": speed,
        "mfu": speed * flops(config, case) / peak,
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30 if cuda else 0.0,
        "reserved_gib": torch.cuda.max_memory_reserved() / 2**30 if cuda else 0.0,
        "first": first,
        "seconds": seconds,
        "versions": {"torch": torch.__version__},
    }


def flops(config: Any, case: Case) -> float:
    """Of one token, as the docstring of this file says."""
    hidden, inner, layers = config.hidden_size, config.intermediate_size, config.num_hidden_layers
    wide, shared = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
    block = hidden * (2 * wide + 2 * shared + 3 * inner)
    weights = layers * block + hidden * config.vocab_size
    pairs = 2 * 2 * wide * case.length / 2 * layers
    return (4 if case.rank else 6) * weights + 3 * pairs


def batch(case: Case, vocabulary: int) -> Any:
    """Streams of equal length in groups of four; all but a tenth of each is trained."""
    import torch

    from strop.algorithms.batch import TokenBatch

    random = torch.Generator().manual_seed(1)
    count, length = case.streams, case.length
    mask = (torch.arange(length) >= max(1, length // 10)).repeat(count)
    total = count * length
    return TokenBatch(
        input_ids=torch.randint(0, vocabulary, (total,), generator=random),
        position_ids=torch.arange(length).repeat(count),
        seq_ids=torch.arange(count).repeat_interleave(length),
        loss_mask=mask,
        sampler_logprobs=torch.where(mask, -torch.rand(total, generator=random) - 11, torch.nan),
        versions=torch.where(mask, 0, -1).int(),
        rewards=torch.rand(count, generator=random),
        group_ids=torch.arange(count) // 4,
        truncated=torch.zeros(count, dtype=torch.bool),
        advantages=torch.randn(count, generator=random).repeat_interleave(length),
        old_logprobs=None,
    )


if __name__ == "__main__":
    if len(sys.argv) > 2 and sys.argv[1].startswith("{"):
        measure.tell(side(Case(**json.loads(sys.argv[1])), int(sys.argv[2])))
    else:
        main()
