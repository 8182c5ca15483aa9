"""How long a loop waits for a checkpoint: written at once, and copied first and written by a thread.

A new model of the shape of SmolLM2 (with `--layers` of its 30 layers) is updated once, so that the optimizer has its
moments; then its checkpoint is written in both ways in turn. Nothing is trained meanwhile; what copying and writing
take together is measured too, and is what a next checkpoint would have to wait for.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import measure


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Measure; returns the numbers that were written."""
    parser = measure.arguments(__doc__, repeats=5)
    parser.add_argument("--layers", type=int, default=8, help="layers of the model")
    options = parser.parse_args(argv)
    if options.smoke:
        options.repeats, options.layers = 1, 1
    measure.use_threads(options.threads)

    from strop.config.model import NewModel
    from strop.config.training import OptimizerSettings
    from strop.models.create import create_model
    from strop.training.checkpoint import save_checkpoint
    from strop.training.single import SingleDeviceTrainer
    from strop.training.snapshot import Held

    shape: dict[str, Any] = {"hidden_size": 576, "heads": 9, "key_value_heads": 3, "context": 64}
    if options.smoke:
        shape = {"hidden_size": 64, "heads": 2}
    model, tokenizer = create_model(NewModel(characters="0123456789", layers=options.layers, **shape), seed=0)
    trainer = SingleDeviceTrainer(model, OptimizerSettings(), total_updates=10)
    for parameter in trainer.optimizer.masters.values():
        parameter.grad = parameter.detach().clone()
    trainer.optimizer.step()
    steps = iter(range(1, 1000))

    with tempfile.TemporaryDirectory(dir=Path.cwd()) as name:

        def write(held: Held) -> None:
            def files(folder: Path) -> dict[str, Any]:
                held.export(folder / "model")
                return held.save(folder / "state")

            save_checkpoint(Path(name), next(steps), files, keep=1)

        def at_once() -> dict[str, float]:
            started = time.perf_counter()
            write(Held(lambda folder: trainer.export(tokenizer, folder), trainer.save))
            return {"waited": time.perf_counter() - started}

        def behind() -> dict[str, float]:
            started = time.perf_counter()
            held = trainer.hold(tokenizer)
            waited = time.perf_counter() - started
            write(held)
            return {"waited": waited, "until_written": time.perf_counter() - started}

        found = measure.interleaved({"at once": at_once, "behind": behind}, options.repeats)
    waited = {side: measure.median([one["waited"] for one in ones]) for side, ones in found.items()}
    numbers = {
        "weights": sum(p.numel() for p in model.parameters()),
        "copied_bytes": trainer.held_bytes()[0],
        "seconds": found,
        "waited": waited,
        "share": waited["behind"] / waited["at once"],
    }
    measure.write("saving", numbers, options)
    return numbers


if __name__ == "__main__":
    main()
