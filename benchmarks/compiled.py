"""An update of the trainer with its blocks compiled and without, side by side in one process.

All weights of SmolLM2-135M, on groups of sequences that share a prompt; the gradients of both are compared first. A
trainer is updated until nothing is compiled any more, which is measured apart, then both are in turn.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import measure
from random_batches import batch


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Measure; returns the numbers that were written."""
    parser = measure.arguments(__doc__, repeats=5)
    parser.add_argument("--groups", type=int, default=2, help="groups of four sequences in an update")
    parser.add_argument("--length", type=int, default=128, help="tokens of a sequence, half of them a shared prompt")
    options = parser.parse_args(argv)
    if options.smoke:
        options.repeats, options.groups, options.length = 1, 1, 16
    measure.use_threads(options.threads)

    import torch
    from torch._dynamo.utils import counters
    from transformers import AutoModelForCausalLM

    from strop.algorithms.named import build_algorithm
    from strop.config.model import NewModel
    from strop.config.training import OptimizerSettings
    from strop.models.create import create_model
    from strop.models.find import resolve_model
    from strop.training.single import SingleDeviceTrainer

    def trainer(compiled: bool) -> SingleDeviceTrainer:
        if options.smoke:
            model, _ = create_model(NewModel(characters="0123456789", hidden_size=64, layers=1, heads=2), seed=0)
        else:
            model = AutoModelForCausalLM.from_pretrained(resolve_model("smollm2-135m"), dtype=torch.float32)
        settings = OptimizerSettings(learning_rate=1e-9, max_grad_norm=None)
        return SingleDeviceTrainer(model, settings, total_updates=1000, budget=512, compiled=compiled)

    sides = {"plain": trainer(False), "compiled": trainer(True)}
    objective = build_algorithm("grpo", group_size=4, max_new_tokens=options.length)
    vocabulary = sides["plain"].model.get_input_embeddings().weight.shape[0]

    def update(side: str, seed: int = 0) -> float:
        half = options.length // 2
        one = batch(4 * options.groups, options.length, vocabulary, prompt=half, seed=seed, shared=True)
        started = time.perf_counter()
        sides[side].update(one, objective)
        return time.perf_counter() - started

    gradients: dict[str, dict[str, Any]] = {}
    first = {}
    for side, one in sides.items():
        step = one.optimizer.step
        masters = one.optimizer.masters

        def kept(side: str = side, step: Any = step, masters: Any = masters) -> Any:
            gradients[side] = {name: p.grad.clone() for name, p in masters.items()}
            return step()

        one.optimizer.step = kept  # type: ignore[method-assign]
        first[side] = update(side)
        one.optimizer.step = step  # type: ignore[method-assign]
    gap = max(
        float((grad - gradients["plain"][name]).norm() / grad.norm()) for name, grad in gradients["compiled"].items()
    )
    for seed in range(1, 3):
        update("compiled", seed)
    counters.clear()
    found = measure.interleaved({side: lambda side=side: update(side) for side in sides}, options.repeats)
    medians = {side: measure.median(seconds) for side, seconds in found.items()}
    numbers = {
        "first_update": first,
        "seconds": found,
        "medians": medians,
        "speed_up": medians["plain"] / medians["compiled"],
        "gradient_difference": gap,
        "graphs_compiled_while_measured": counters["stats"]["unique_graphs"],
    }
    measure.write("compiled", numbers, options)
    return numbers


if __name__ == "__main__":
    main()
